"""Cross entropy with the head applied in chunks of the sequence (paper section 2.4: projection, loss, forward and backward
per chunk, then free). Logits [B,T,W] never exist at once, and the backward pass computes none a second time.
"""

import functools
import math

import jax
import jax.numpy as jnp


def cross_entropy(hidden, head, targets, weights, chunk: int) -> jax.Array:
    """Weighted sum of -log softmax(hidden head)[target], float32.

    Args:
      hidden: [B,T,D]. head: [D,W]. targets: int32 [B,T]. weights: float32 [B,T], no gradient; 0 leaves a row out.
      chunk: tokens of each row whose logits exist at the same time.
    Returns:
      float32 scalar, a sum, not a mean.
    """
    return cross_entropies(hidden[None], head, targets[None], weights[None], jnp.ones(1, weights.dtype), chunk)[0]


def cross_entropies(hidden, head, targets, weights, scales, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Several weighted sums of cross entropies of one head, for which its gradient exists once.

    Args:
      hidden: [G,B,T,D]. head: [D,W]. targets: int32 [G,B,T]. weights: float32 [G,B,T]. scales: float32 [G]. Neither of the
        last two has a gradient. chunk: tokens of each row whose logits exist at the same time.
    Returns:
      (sum of scales * sums, sums float32 [G] as in `cross_entropy`); only the first has a gradient.
    """
    total, sums = _cross_entropies(hidden, head, targets, weights, scales, chunk)
    return total, jax.lax.stop_gradient(sums)


def token_log_probs(hidden, head, targets, temperature: float, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every target under softmax(hidden head / temperature), and the entropy of that distribution.

    Args:
      hidden: [B,T,D]. head: [D,W]. targets: int32 [B,T]. temperature: positive.
      chunk: tokens of each row whose logits exist at the same time; in the backward pass they are computed again.
    Returns:
      float32 [B,T] twice; the entropy, in nats, has no gradient.
    """
    b, t = targets.shape
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def of_chunk(x):
        hidden, targets = x
        logits = jnp.einsum("btd,dw->btw", hidden, head.astype(hidden.dtype), preferred_element_type=wide) / temperature
        log_p = jax.nn.log_softmax(logits, axis=-1)
        target = targets[..., None] == jnp.arange(head.shape[1])
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.sum(jnp.where(target, log_p, 0), axis=-1), jax.lax.stop_gradient(entropy)

    if t <= chunk:
        return of_chunk((hidden, targets))
    n = math.ceil(t / chunk)

    def split(x):  # [B,T,...] -> [n,B,chunk,...]
        x = jnp.pad(x, [(0, 0), (0, n * chunk - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, n, chunk, *x.shape[2:]), 1, 0)

    results = jax.lax.map(jax.checkpoint(of_chunk, prevent_cse=False), (split(hidden), split(targets)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(b, n * chunk)[:, :t] for x in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropies(hidden, head, targets, weights, scales, chunk):
    sums = _scan(hidden, head, targets, weights, scales, chunk, with_grads=False)[0]
    return jnp.sum(scales * sums), sums


def _forward(hidden, head, targets, weights, scales, chunk):
    sums, d_hidden, d_head = _scan(hidden, head, targets, weights, scales, chunk, with_grads=True)
    return (jnp.sum(scales * sums), sums), (d_hidden, d_head)


def _backward(chunk, grads, cotangents):
    g, (d_hidden, d_head) = cotangents[0], grads
    return (g * d_hidden).astype(d_hidden.dtype), (g * d_head).astype(d_head.dtype), None, None, None


_cross_entropies.defvjp(_forward, _backward)


def _chunk(hidden, head, targets, weights, scale, with_grads: bool):
    """(sum, scale * gradients of it by hidden and head) of hidden [B,t,D]."""
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
    d_logits = ((exp / total - target) * (scale * weights)[..., None]).astype(hidden.dtype)
    d_hidden = jnp.einsum("btw,dw->btd", d_logits, head.astype(hidden.dtype))
    d_head = jnp.einsum("btd,btw->dw", hidden, d_logits, preferred_element_type=wide)
    return loss, d_hidden, d_head


def _scan(hidden, head, targets, weights, scales, chunk: int, with_grads: bool):
    """(sums [G], gradients of sum(scales * sums) by hidden and by head, or None twice)."""
    groups, b, t, d = hidden.shape
    if groups == 1 and t <= chunk:
        loss, d_hidden, d_head = _chunk(hidden[0], head, targets[0], weights[0], scales[0], with_grads)
        return loss[None], *((d_hidden[None], d_head.astype(head.dtype)) if with_grads else (None, None))
    chunk = min(chunk, t)
    n = math.ceil(t / chunk)

    def split(x):  # [G,B,T,...] -> [G*n,B,chunk,...]; the padding has weight 0
        x = jnp.pad(x, [(0, 0), (0, 0), (0, n * chunk - t)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(groups, b, n, chunk, *x.shape[3:]), 2, 1).reshape(-1, b, chunk, *x.shape[3:])

    def body(d_head, x):
        loss, d_hidden, more = _chunk(x[0], head, *x[1:], with_grads)
        return jax.tree.map(jnp.add, d_head, more), (loss, d_hidden)

    d_head = jnp.zeros(head.shape, jnp.promote_types(hidden.dtype, jnp.float32)) if with_grads else None
    chunks = (split(hidden), split(targets), split(weights), jnp.repeat(scales, n))
    d_head, (losses, d_hidden) = jax.lax.scan(body, d_head, chunks)
    sums = jnp.sum(losses.reshape(groups, n), axis=1)
    if not with_grads:
        return sums, None, None
    d_hidden = jnp.moveaxis(d_hidden.reshape(groups, n, b, chunk, d), 1, 2).reshape(groups, b, n * chunk, d)[:, :, :t]
    return sums, d_hidden, d_head.astype(head.dtype)
