"""Rotary position embedding, interleaved or half-split (paper section 2.1; layouts as in the released checkpoints).

The main attention rotates pairs (0,1), (2,3), ...; the indexer does so when `indexer_rope_interleave` is set (GLM), else
it rotates (j, j + P/2) (DeepSeek-V3.2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.layers.norm import at_least_float32


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2j/width) for j < width/2, float32.

    Computed on the host as a correctly rounded float32 power followed by a float32 reciprocal, as the reference does:
    near position 2^20 one ulp here moves an angle by 0.06 rad.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power


def rotary_tables(positions: jax.Array, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every angle.

    Args:
      positions: int32 [B,T].
      width: P, rotary width.
      theta: rotary base.
    Returns:
      (cos, sin), float32 [B,T,P/2].
    """
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(width, theta)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleave: bool = True) -> jax.Array:
    """Rotates the last axis of x by position.

    Args:
      x: [B,T,P] or [B,T,heads,P].
      cos, sin: [B,T,P/2] from `rotary_tables`.
      interleave: pairs (0,1),(2,3).. if true, else (j, j+P/2). The layout of the result is that of the input.
    """
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    y = x.astype(at_least_float32(x.dtype))
    half = x.shape[-1] // 2
    if interleave:
        pairs = y.reshape(*y.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(y.shape)
    else:
        a, b = y[..., :half], y[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
