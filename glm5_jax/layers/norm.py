"""RMSNorm and LayerNorm with float32 statistics, as in the released checkpoints; the paper does not spell them out."""

import jax
import jax.numpy as jnp


def at_least_float32(dtype) -> jnp.dtype:
    """float32, or float64 where the input already is: the dtype of statistics, softmax and scores."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis.

    Args:
      x: [..., D], any float dtype; statistics in float32, the result is cast back before the weight is applied.
      weight: [D].
      eps: added to the mean square.
    """
    y = x.astype(at_least_float32(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float = 1e-6) -> jax.Array:
    """LayerNorm over the last axis, mean subtracted; the indexer's key norm (eps 1e-6 in the released models).

    Args:
      x: [..., J]; statistics and affine part in float32, result in x.dtype.
      weight, bias: [J].
    """
    y = x.astype(at_least_float32(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(y.dtype) + bias.astype(y.dtype)).astype(x.dtype)
