"""Generation with a latent cache: R + P numbers a token and layer, plus index keys."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.compiling import jit
from glm5_jax.config import check
from glm5_jax.model import Cache, Glm5, check_tokens, empty_cache


class Step(NamedTuple):
    """One generated token of each row.

    tokens: int32 [B], pad_token_id in rows that ended earlier. logits: float32 [B,W] it was drawn from.
    live: bool [B], False in rows that ended earlier.
    """

    tokens: np.ndarray
    logits: jax.Array
    live: np.ndarray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits."""

    temperature: float = 0.0  # 0 = the most likely token
    top_p: float = 1.0  # draw from the smallest set of tokens with at least this probability

    def __post_init__(self):
        check(self.temperature >= 0, f"temperature={self.temperature}: must not be negative")
        check(0 < self.top_p <= 1, f"top_p={self.top_p}: must lie in (0, 1]")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids int32 [B] drawn from float32 logits [B,W]; at temperature 0 the largest, ties to the lowest id."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p < 1:
        order = jnp.argsort(logits, axis=-1, descending=True)  # stable: of equal tokens the lowest id comes first
        logits = jnp.take_along_axis(logits, order, axis=-1)
        p = jax.nn.softmax(logits, axis=-1)
        inside = jnp.cumsum(p, axis=-1) - p < sampling.top_p  # the token that crosses the border still belongs
        drawn = jax.random.categorical(key, jnp.where(inside, logits, -jnp.inf))
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def stream(
    model: Glm5, tokens, max_new_tokens: int = 64, sampling: Sampling = Sampling(), segment_ids=None, seed: int = 0
) -> Iterator[Step]:
    """Generates one token a row at a time, until all rows have ended or max_new_tokens are made.

    Args:
      model: the model.
      tokens: prompts, int [B,T]; shorter rows are padded on the left.
      max_new_tokens: at least 1.
      segment_ids: int [B,T], 0 = padding, 1 = prompt; default: all 1.
      seed: of the draws at temperature > 0.
    Raises:
      UserError: ids outside the vocabulary, prompt and continuation longer than the position limit, an empty prompt,
        padding on the right.
    """
    cfg = model.cfg
    tokens = np.asarray(tokens, np.int32)
    check_tokens(tokens, cfg)
    b, t = tokens.shape
    segment = np.ones((b, t), np.int32) if segment_ids is None else np.asarray(segment_ids, np.int32)
    check(t > 0 and bool((segment[:, -1] != 0).all()), "tokens: every row must end in a real token (pad on the left)")
    check(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}: must be at least 1")
    total = t + max_new_tokens
    limit = cfg.max_position_embeddings
    check(total <= limit, f"prompt of {t} + max_new_tokens={max_new_tokens}: the position limit is {limit}")
    graphdef, params = nnx.split(model)
    last = jnp.asarray(segment[:, -1:])
    key, live = jax.random.key(seed), np.ones(b, bool)
    feed, feed_segment, cache = jnp.asarray(tokens), jnp.asarray(segment), empty_cache(cfg, b, total)
    for i in range(max_new_tokens):
        drawn, logits, cache = _extend(
            graphdef, params, feed, feed_segment, cache, jax.random.fold_in(key, i), sampling
        )
        new = np.where(live, np.asarray(drawn), cfg.pad_token_id).astype(np.int32)
        yield Step(new, logits, live.copy())
        live &= ~np.isin(new, cfg.eos_token_id)
        if not live.any():
            return
        feed, feed_segment = jnp.asarray(new)[:, None], last


def generate(
    model: Glm5,
    tokens,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    segment_ids=None,
    seed: int = 0,
) -> np.ndarray:
    """New tokens int32 [B,max_new_tokens]; pad_token_id after a row's end. Arguments as for `stream` and `Sampling`."""
    steps = list(stream(model, tokens, max_new_tokens, Sampling(temperature, top_p), segment_ids, seed))
    new = np.stack([step.tokens for step in steps], axis=1)
    return np.pad(new, ((0, 0), (0, max_new_tokens - new.shape[1])), constant_values=model.cfg.pad_token_id)


@functools.partial(jit, static_argnums=(0, 6), donate_argnums=4)
def _extend(graphdef, params, tokens, segment, cache: Cache, key, sampling: Sampling):
    """Feeds tokens [B,t] and draws the next one: (tokens [B], logits [B,W], cache)."""
    model = nnx.merge(graphdef, params)
    hidden, _, cache = model.trunk(tokens, None, segment, cache)
    logits = model.logits(hidden[:, -1:])[:, 0]
    return sample(logits, key, sampling), logits, cache
