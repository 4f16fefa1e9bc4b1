"""Attention over all visible keys or over a selected few, in blocks of queries.

`dense` takes expanded heads (training), `dense_latent` and `selected_latent` the absorbed form, in which all heads read one
latent key of width R + P per token (model.md section 3). Memory is bounded by block x S: no [T,S] buffer exists beyond a
block of queries, forward or backward.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.topk import MASKED


class Rows(NamedTuple):
    """Where the queries of a call stand: slot int32 [B,T] in the row of keys, segment int32 [B,T] (0 = padding)."""

    slot: jax.Array
    segment: jax.Array


def visible(rows: Rows, key_segment: jax.Array) -> jax.Array:
    """bool [B,T,S]: keys at or before the query's slot, in the same document, not padding."""
    slots = jnp.arange(key_segment.shape[1], dtype=jnp.int32)
    causal = slots <= rows.slot[..., None]
    same = (rows.segment[..., None] == key_segment[:, None]) & (rows.segment[..., None] != 0)
    return causal & same


def softmax_weights(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax over the last axis where mask holds, its division left to be done after the product with the values.

    Args:
      scores: float32 [...,S]. mask: bool, broadcastable.
    Returns:
      (weights float32 [...,S], their sums [...,1], largest visible score, a scalar without gradient). A row without any
      visible key has weights 0 and sum 1.
    """
    scores = jnp.where(mask, scores, MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), MASKED / 2))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, jnp.where(total == 0, 1.0, total), jnp.max(top, initial=MASKED / 2)


def dense(q, k, v, rows: Rows, key_segment, scale: float, block: int):
    """Attention to all visible keys, expanded heads; queries and keys are those of the same tokens.

    Args:
      q: [B,T,N,C+P]. k: [B,T,N,C+P]. v: [B,T,N,V]. key_segment: int32 [B,T].
      scale: factor on q.k. block: queries handled at once.
    Returns:
      ([B,T,N,V] in v.dtype, largest attention logit).
    """
    t = q.shape[1]
    if t > _UNROLLED * block:
        attend = _attend_heads(k, v, key_segment, scale)
        return in_query_blocks(attend, block, q, rows)
    # Few blocks are written out, each with the keys up to its end: half of the scores are never computed.
    block = min(block, max(-(-t // 2), _SMALLEST))
    out, top = [], []
    for start in range(0, t, block):
        end = min(start + block, t)
        attend = jax.checkpoint(_attend_heads(k[:, :end], v[:, :end], key_segment[:, :end], scale), prevent_cse=False)
        o, largest = attend(q[:, start:end], Rows(*(r[:, start:end] for r in rows)))
        out.append(o)
        top.append(largest)
    return jnp.concatenate(out, axis=1), jnp.max(jnp.stack(top))


_UNROLLED = 4  # at most so many blocks of queries are written out
_SMALLEST = 128  # rows below which a block is not cut


def _attend_heads(k, v, key_segment, scale: float):
    def attend(q, rows):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=at_least_float32(q.dtype)) * scale
        weights, total, top = softmax_weights(scores, visible(rows, key_segment)[:, None])
        o = jnp.einsum("bnts,bsnv->bntv", weights.astype(v.dtype), v) / total.astype(v.dtype)
        return jnp.swapaxes(o, 1, 2), top

    return attend


def dense_latent(q, latent, rows: Rows, key_segment, rank: int, scale: float, block: int):
    """Attention to all visible keys, absorbed.

    Args:
      q: absorbed queries [B,T,N,R+P]. latent: [B,S,R+P]. rank: R, the part of a latent that is also the value.
    Returns:
      ([B,T,N,R], largest attention logit).
    """
    # Slots of the cache that hold no token have weight 0, but 0 * NaN would still leak out of them.
    latent = jnp.where(key_segment[..., None] != 0, latent, 0)

    def attend(q, rows):
        scores = jnp.einsum("btnr,bsr->bnts", q, latent, preferred_element_type=at_least_float32(q.dtype)) * scale
        weights, total, top = softmax_weights(scores, visible(rows, key_segment)[:, None])
        o = jnp.einsum("bnts,bsr->bntr", weights.astype(q.dtype), latent[..., :rank]) / total.astype(q.dtype)
        return jnp.swapaxes(o, 1, 2), top

    return in_query_blocks(attend, block, q, rows)


def selected_latent(q, latent, selected, rank: int, scale: float, block: int):
    """Attention to the selected keys only, absorbed: cost T x K whatever S is.

    Args:
      q: [B,T,N,R+P]. latent: [B,S,R+P]. selected: int32 [B,T,K], -1 for none.
    Returns:
      ([B,T,N,R], largest attention logit). A query with nothing selected gives zeros.
    """

    def attend(q, selected):
        batch = jnp.arange(latent.shape[0])[:, None, None]
        keys = latent[batch, jnp.maximum(selected, 0)]
        keep = selected >= 0
        # An unselected slot reads row 0, whose content must not matter even if it is not finite.
        keys = jnp.where(keep[..., None], keys, 0)
        scores = jnp.einsum("btnr,btkr->btnk", q, keys, preferred_element_type=at_least_float32(q.dtype)) * scale
        weights, total, top = softmax_weights(scores, keep[:, :, None])
        return jnp.einsum("btnk,btkr->btnr", weights.astype(q.dtype), keys[..., :rank]) / total.astype(q.dtype), top

    return in_query_blocks(attend, block, q, selected)


def in_query_blocks(fn, block: int, *args):
    """Runs fn over blocks of queries and recomputes each block in the backward pass.

    Args:
      fn: maps arrays with leading [B,block] to (pytree of arrays with leading [B,block], scalar).
      block: queries at once. args: pytrees of arrays with leading [B,T].
    Returns:
      (results with leading [B,T], largest scalar).
    """
    fn = jax.checkpoint(fn, prevent_cse=False)
    t = jax.tree.leaves(args)[0].shape[1]
    if t <= block:
        return fn(*args)
    n = math.ceil(t / block)

    def split(x):  # [B,T,...] -> [n,B,block,...]; the padding repeats the last query, so it adds nothing new, and is cut off
        x = jnp.pad(x, [(0, 0), (0, n * block - t)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], n, block, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], n * block, *x.shape[3:])[:, :t]

    out, top = jax.lax.map(lambda a: fn(*a), jax.tree.map(split, args))
    return jax.tree.map(join, out), jnp.max(top)
