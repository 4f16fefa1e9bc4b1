"""Attention over all visible keys, in blocks of queries.

`dense` takes expanded heads (training), `dense_latent` the absorbed form, in which all heads read one latent key of width
R + P per token (model.md section 3; serving).
"""

import jax
import jax.numpy as jnp

from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.masks import Rows, in_query_blocks, softmax_weights, visible


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
