"""Context parallelism: the tokens of a row are shared out over the axis "context" (paper section 2.4).

A row of T tokens is cut into 2c pieces for c devices; device i holds pieces i and 2c-1-i, so that under causal attention all
have the same work. Queries stay where they are. Keys, R + P + J numbers a token, are gathered in the order of the row, and
positions of keys count from the start of the row on every device. What belongs to a token but is small (ids, documents,
positions, targets) is whole on every device and `own` cuts it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.sharding import mesh


def own(x: jax.Array) -> jax.Array:
    """This device's tokens [B,t,...] of rows [B,T,...]; T a multiple of 2c."""
    c = mesh.size("context")
    if c == 1:
        return x
    half, i = x.shape[1] // (2 * c), lax.axis_index("context")
    pieces = (lax.dynamic_slice_in_dim(x, at * half, half, axis=1) for at in (i, 2 * c - 1 - i))
    return jnp.concatenate(list(pieces), axis=1)


def slots(rows: int, t: int) -> jax.Array:
    """Places in the row of this device's tokens, int32 [rows,t/c], ascending."""
    return own(jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (rows, t)))


def gather_row(x: jax.Array) -> jax.Array:
    """Rows [B,T,...] of all devices' tokens [B,t,...], in the order of the row. Gradients add up in float32."""
    return x if mesh.size("context") == 1 else _gather_row(x)


@jax.custom_vjp
def _gather_row(x):
    b, t, *rest = x.shape
    pieces = lax.all_gather(x.reshape(b, 2, t // 2, *rest), "context", axis=1)  # [B,c,2,t/2,...]
    pieces = jnp.concatenate([pieces[:, :, 0], pieces[:, ::-1, 1]], axis=1)
    return pieces.reshape(b, -1, *rest)


def _forward(x):
    return _gather_row(x), jnp.zeros((), x.dtype)


def _backward(like, g):
    b, t, *rest = g.shape
    c = mesh.size("context")
    pieces = g.reshape(b, 2, c, t // (2 * c), *rest)
    pieces = jnp.stack([pieces[:, 0], pieces[:, 1, ::-1]], axis=2)  # [B,c,2,t/2c,...], by device
    mine = lax.psum_scatter(pieces.astype(jnp.promote_types(g.dtype, jnp.float32)), "context", scatter_dimension=1)
    return (mine.reshape(b, t // c, *rest).astype(like.dtype),)


_gather_row.defvjp(_forward, _backward)
