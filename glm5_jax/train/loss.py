"""Cross entropy with the head applied in chunks of the sequence (paper section 2.4: projection, loss, forward and backward
per chunk, then free). Logits [B,T,W] never exist at once, and the backward pass computes none a second time.
"""

import functools
import math

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(hidden, head, targets, weights, chunk: int) -> jax.Array:
    """Weighted sum of -log softmax(hidden head)[target], float32.

    Args:
      hidden: [B,T,D]. head: [D,W]. targets: int32 [B,T]. weights: float32 [B,T], no gradient; 0 leaves a row out.
      chunk: tokens of each row whose logits exist at the same time.
    Returns:
      float32 scalar, a sum, not a mean.
    """
    return _scan(hidden, head, targets, weights, chunk, with_grads=False)[0]


def _forward(hidden, head, targets, weights, chunk):
    total, d_hidden, d_head = _scan(hidden, head, targets, weights, chunk, with_grads=True)
    return total, (d_hidden, d_head)


def _backward(chunk, grads, g):
    d_hidden, d_head = grads
    return (g * d_hidden).astype(d_hidden.dtype), (g * d_head).astype(d_head.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _chunk(hidden, head, targets, weights, with_grads: bool):
    """(loss, d loss/d hidden, d loss/d head) of hidden [B,t,D]."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("btd,dw->btw", hidden, head.astype(hidden.dtype), preferred_element_type=wide)
    top = jnp.max(logits, axis=-1, keepdims=True)
    exp = jnp.exp(logits - top)
    total = jnp.sum(exp, axis=-1, keepdims=True)
    target = targets[..., None] == jnp.arange(head.shape[1])
    correct = jnp.sum(jnp.where(target, logits, 0), axis=-1)
    loss = jnp.sum((jnp.log(total[..., 0]) + top[..., 0] - correct) * weights)
    if not with_grads:
        return loss, None, None
    d_logits = ((exp / total - target) * weights[..., None]).astype(hidden.dtype)
    d_hidden = jnp.einsum("btw,dw->btd", d_logits, head.astype(hidden.dtype))
    d_head = jnp.einsum("btd,btw->dw", hidden, d_logits, preferred_element_type=wide)
    return loss, d_hidden, d_head


def _scan(hidden, head, targets, weights, chunk: int, with_grads: bool):
    b, t, d = hidden.shape
    if t <= chunk:
        loss, d_hidden, d_head = _chunk(hidden, head, targets, weights, with_grads)
        return loss, d_hidden, None if d_head is None else d_head.astype(head.dtype)
    n = math.ceil(t / chunk)

    def split(x):  # [B,T,...] -> [n,B,chunk,...]; the padding has weight 0
        x = jnp.pad(x, [(0, 0), (0, n * chunk - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, n, chunk, *x.shape[2:]), 1, 0)

    def body(carry, x):
        loss, d_hidden, d_head = _chunk(x[0], head, x[1], x[2], with_grads)
        return jax.tree.map(jnp.add, carry, (loss, d_head)), d_hidden

    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    zeros = (jnp.zeros((), wide), jnp.zeros(head.shape, wide) if with_grads else None)
    (loss, d_head), d_hidden = jax.lax.scan(body, zeros, (split(hidden), split(targets), split(weights)))
    if not with_grads:
        return loss, None, None
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(b, n * chunk, d)[:, :t]
    return loss, d_hidden, d_head.astype(head.dtype)
