"""Which keys a query may see, and what every form of attention shares."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def real(segment, x):
    """x [B,T,...], 0 for padding: that has weight 0, but 0 * NaN would still leak out of it."""
    return jnp.where((segment != 0).reshape(*segment.shape, *[1] * (x.ndim - 2)), x, 0)


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
