"""Exact, deterministic top-k over index scores (model.md section 4).

Ties go to the lowest position: ReLU makes exact 0.0 scores common, and a selection that differs between rollout and
trainer makes RL collapse (paper section 3.2).
"""

import jax
import jax.numpy as jnp

MASKED = -1e30  # score of a key the query may not see; finite, so that nothing turns into NaN


def select_top_k(scores: jax.Array, k: int) -> jax.Array:
    """The k best visible keys of each query.

    Args:
      scores: float [..., S]; invisible keys hold `MASKED`. NaN counts as invisible.
      k: K, at least 1.
    Returns:
      int32 [..., min(k, S)]: positions in ascending order, padded with -1 where fewer keys are visible.
    """
    n_keys = scores.shape[-1]
    scores = jnp.where(jnp.isnan(scores), MASKED, scores)
    scores = jnp.where(scores == 0, 0.0, scores)  # lax.top_k ranks +0.0 above -0.0, which are a tie
    values, positions = jax.lax.top_k(scores, min(k, n_keys))  # lax.top_k is stable: ties keep the lowest position
    ascending = jnp.sort(jnp.where(values > MASKED, positions, n_keys), axis=-1)
    return jnp.where(ascending < n_keys, ascending, -1).astype(jnp.int32)


def select_top_k_grouped(scores: jax.Array, k: int, group: int = 16) -> jax.Array:
    """Exactly `select_top_k`, with a cost that depends less on the order of the scores.

    Only the k groups of neighbouring keys with the largest maxima are searched, ties to the first. That loses nothing: each
    of these holds a key that precedes any key of another group, being larger, or as large and at a lower position.
    lax.top_k slows down where scores rise with the position, on CPU up to ninefold; here it sees a few keys of each row.
    """
    n_groups = -(-scores.shape[-1] // group)
    if n_groups <= k:
        return select_top_k(scores, k)
    scores = jnp.where(jnp.isnan(scores), MASKED, scores)
    scores = jnp.where(scores == 0, 0.0, scores)
    fill = [(0, 0)] * (scores.ndim - 1) + [(0, n_groups * group - scores.shape[-1])]
    groups = jnp.pad(scores, fill, constant_values=MASKED).reshape(*scores.shape[:-1], n_groups, group)
    kept = jnp.sort(jax.lax.top_k(jnp.max(groups, axis=-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(groups, kept[..., None], axis=-2).reshape(*scores.shape[:-1], k * group)
    best = select_top_k(candidates, k)  # of candidates; they stand in the order of their positions
    positions = jnp.take_along_axis(kept, best // group, axis=-1) * group + best % group
    return jnp.where(best < 0, -1, positions)
