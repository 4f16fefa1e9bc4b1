"""The indexer's loss: KL from the attention it serves to the softmax of its scores (paper section 2.1.2).

L_I = KL(p || softmax(I)) per query, with p the attention probabilities summed over heads and L1-normalised. Dense warm-up
takes it over all visible keys, the sparse stage over the selected ones. p is a constant: only the indexer learns from it.
"""

import jax
import jax.numpy as jnp

from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.masks import softmax_weights


def index_kl(target: jax.Array, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """KL(target || softmax(scores)) over the keys where mask holds.

    Args:
      target: float [...,S], sums to 1 over the mask. scores: float [...,S]. mask: bool [...,S].
    Returns:
      float32 or wider [...]; 0 where the mask is empty.
    """
    wide = at_least_float32(scores.dtype)
    scores = jnp.where(mask, scores, 0).astype(wide)
    target = jnp.where(mask, jax.lax.stop_gradient(target), 0).astype(wide)
    _, total, _ = softmax_weights(scores, mask)
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True, initial=-1e30)
    log_q = scores - jax.lax.stop_gradient(top) - jnp.log(total)
    log_p = jnp.log(jnp.where(target > 0, target, 1))
    return jnp.sum(jnp.where(mask, target * (log_p - log_q), 0), axis=-1)
