"""DeepSeek Sparse Attention written down: selection, attention over it, and the indexer's loss (paper sections 2.1.1, 2.1.2).

This is the definition that every other implementation is compared with, in float32 or float64. It stores whole score
matrices, so it is for small inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.indexer import Index, index_scores
from glm5_jax.sparse.loss import index_kl
from glm5_jax.sparse.masks import Rows, softmax_weights, visible
from glm5_jax.sparse.topk import select_top_k


class Attended(NamedTuple):
    """Attention over selected keys.

    Attributes:
      out: [B,T,N,R] in the dtype of the queries, zeros where nothing is selected.
      max_logit: largest attention logit, a scalar without gradient.
      kl: the indexer's loss of each query, float32 [B,T], or None if not asked for.
    """

    out: jax.Array
    max_logit: jax.Array
    kl: jax.Array | None


def select(index: Index, rows: Rows, key_segment: jax.Array, k: int) -> jax.Array:
    """The k best visible keys of each query, int32 [B,T,min(k,S)], ascending, -1 for none; no gradient."""
    index = jax.lax.stop_gradient(index)
    return select_top_k(index_scores(*index, visible(rows, key_segment)), k)


def attend(q, latent, selected, rank: int, scale: float, index: Index | None = None) -> Attended:
    """Attention of absorbed queries to the selected latents.

    Args:
      q: [B,T,N,R+P]. latent: [B,S,R+P]. selected: int32 [B,T,K], -1 for none. rank: R. scale: factor on q.k.
      index: what the selection's scores are made from; asks for the indexer's loss.
    """
    keep = selected >= 0
    batch = jnp.arange(latent.shape[0])[:, None, None]
    # An empty place reads row 0, whose content must not matter even if it is not finite.
    keys = jnp.where(keep[..., None], latent[batch, jnp.maximum(selected, 0)], 0)
    scores = jnp.einsum("btnr,btkr->btnk", q, keys, preferred_element_type=at_least_float32(q.dtype)) * scale
    weights, total, top = softmax_weights(scores, keep[:, :, None])
    out = jnp.einsum("btnk,btkr->btnr", (weights / total).astype(q.dtype), keys[..., :rank])
    kl = None
    if index is not None:
        index_keys = jnp.where(keep[..., None], index.k[batch, jnp.maximum(selected, 0)], 0)
        dots = jnp.einsum("btij,btkj->btik", index.q, index_keys, preferred_element_type=scores.dtype)
        chosen = jnp.einsum("btik,bti->btk", jax.nn.relu(dots * index.q.shape[-1] ** -0.5), index.w, precision="highest")
        kl = index_kl(jnp.mean(weights / total, axis=2), chosen, keep)
    return Attended(out, top, kl)


def dense_kl(q, k, index: Index, rows: Rows, key_segment, scale: float) -> jax.Array:
    """The indexer's loss over all visible keys (dense warm-up).

    Args:
      q, k: expanded queries and keys [B,T,N,C+P], [B,S,N,C+P]; constants.
    Returns:
      float32 or wider [B,T]; 0 for padding. Gradients reach `index` only.
    """
    q, k = jax.lax.stop_gradient((q, k))
    mask = visible(rows, key_segment)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=at_least_float32(q.dtype)) * scale
    weights, total, _ = softmax_weights(scores, mask[:, None])
    return index_kl(jnp.mean(weights / total, axis=1), index_scores(*index, mask), mask)
