"""How a token is drawn from its logits: temperature, top-k, top-p, and one stream of random numbers for each request.

The number drawn for a position depends on the request's seed and on the position alone: not on the row that the request
stands in, not on its neighbours, and not on whether tokens ahead were guessed (`serve/engine.py`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Draw(NamedTuple):
    """Settings of each row, arrays [B].

    temperature: float32, 0 = the likeliest token. top_p: float32 in (0, 1], the smallest set of tokens with at least this
    probability. top_k: int32, that many likeliest tokens, 0 = all. seed: uint32.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array


def log_probs(logits: jax.Array, draw: Draw) -> jax.Array:
    """Log-probabilities float32 [B,T,W] of the distribution that tokens are drawn from.

    Logits are divided by the temperature, cut to the top-k, of these to the top-p, and normalised over what is left; what
    is cut has -inf. Of equal logits the lowest ids are kept. At temperature 0 the likeliest token has probability 1.

    Args:
      logits: float32 [B,T,W].
    """
    greedy = draw.temperature == 0
    scaled = logits / jnp.where(greedy, 1, draw.temperature)[:, None, None]
    top_k = jnp.where(greedy, 1, draw.top_k)
    cuts = (top_k > 0) | (draw.top_p < 1)
    only_best = jnp.all(greedy | ~cuts)

    def best(scaled):
        first = first_largest(scaled)[..., None] == jnp.arange(scaled.shape[-1])
        return jnp.where(greedy[:, None, None] & ~first, -jnp.inf, scaled)

    cut = jax.lax.cond(only_best, best, lambda scaled: _cut(scaled, top_k, draw.top_p), scaled)
    return jax.nn.log_softmax(cut, axis=-1)


def _cut(scaled, top_k, top_p):
    """scaled [B,T,W] with -inf outside of the top-k and top-p of each row."""
    order = jnp.argsort(scaled, axis=-1, descending=True)  # stable: of equal logits the lowest id comes first
    p = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
    rank = jnp.arange(scaled.shape[-1])
    p = jnp.where((rank < top_k[:, None, None]) | (top_k == 0)[:, None, None], p, 0)
    before = jnp.cumsum(p, axis=-1) - p  # the token that crosses the border still belongs
    inside = (p > 0) & (before < top_p[:, None, None] * jnp.sum(p, axis=-1, keepdims=True)) | (rank == 0)
    kept = jnp.take_along_axis(inside, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, scaled, -jnp.inf)


def choose(log_p: jax.Array, draw: Draw, positions: jax.Array) -> jax.Array:
    """Tokens int32 [B,T] drawn from log-probabilities [B,T,W] for the given positions, int32 [B,T].

    By the Gumbel-max trick: the same noise decides every draw for a position, so a guess that was drawn from a similar
    distribution is likely to be the same token.
    """
    key = jax.vmap(jax.random.key)(draw.seed)

    def noise(key, positions):
        keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)
        return jax.vmap(lambda key: jax.random.gumbel(key, log_p.shape[-1:], log_p.dtype))(keys)

    def drawn(log_p):
        return first_largest(log_p + jax.vmap(noise)(key, positions))

    return jax.lax.cond(jnp.all(draw.temperature == 0), first_largest, drawn, log_p)


def first_largest(x: jax.Array) -> jax.Array:
    """argmax over the last axis, int32; ties to the first. As two plain reductions, several times as fast on CPU."""
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32)
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == largest, ids, x.shape[-1] - 1), axis=-1)
