"""Held-out bits per byte: a loss that does not depend on the tokenizer."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from glm5_jax.compiling import jit
from glm5_jax.layers.mtp import shift
from glm5_jax.model import merge
from glm5_jax.train.loss import cross_entropy
from glm5_jax.train.step import target_weights


def make_loss_sum(graphdef, chunk: int) -> Callable[[dict, dict], jax.Array]:
    """Compiled function (params, batch [B,T]) -> sum over targets of the loss in nats, float32."""

    @jit
    def loss_sum(params, batch):
        model = merge(graphdef, params)
        hidden, _, _ = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])
        targets = shift(batch["tokens"], 1)
        return cross_entropy(hidden, model.head[...], targets, target_weights(batch, 1), chunk)

    return loss_sum


def bits_per_byte(loss_sum, params: dict, batches: Iterable[dict], progress: Callable[[int], None] | None = None) -> float:
    """Bits the model needs per byte of UTF-8 text.

    Args:
      loss_sum: from `make_loss_sum`.
      batches: from `data.held_out_batches`: tokens, segment_ids, positions [B,T], and "bytes" of text in the targets.
      progress: called with the number of batches done.
    Returns:
      Bits per byte, NaN if the targets stand for no byte at all.
    """
    nats, size = 0.0, 0
    for i, batch in enumerate(batches):
        arrays = {name: jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "positions")}
        nats += float(loss_sum(params, arrays))
        size += batch["bytes"]
        if progress:
            progress(i + 1)
    return nats / (math.log(2) * size) if size else math.nan
