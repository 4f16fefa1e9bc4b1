"""Multi-token prediction with shared parameters (paper section 2.1).

One layer, unrolled for any number of steps. At step d, row i joins the embedding of token i + d with the hidden state of
step d - 1 (step 0 = the trunk after its final norm) and predicts token i + d + 1. What is recycled is the state after
`shared_head.norm`. Embedding and output head are the trunk's.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.layers.block import NOTHING, Block, Memory, make_context, recompute
from glm5_jax.layers.mla import Selection
from glm5_jax.layers.norm import rms_norm
from glm5_jax.layers.param import declare
from glm5_jax.sharding.context import own, slots
from glm5_jax.sparse.masks import Rows


class MtpStep(NamedTuple):
    """Result of one MTP step.

    hidden: [B,T,D] after `shared_head.norm`; the head turns it into logits, the next step recycles it.
    selected: int32 [B,T,min(K,S)] or None. aux: what the layer reports (see `Block`).
    """

    hidden: jax.Array
    selected: jax.Array | None
    aux: dict


def shift(x: jax.Array, d: int) -> jax.Array:
    """x[:, i + d] at position i of [B,T], zeros past the end."""
    return jnp.pad(x[:, d:], ((0, 0), (0, min(d, x.shape[1]))))


def same_document(segment_ids: jax.Array, d: int) -> jax.Array:
    """bool [B,T]: token i + d exists and belongs to the document of token i."""
    return (shift(segment_ids, d) == segment_ids) & (segment_ids != 0)


class Mtp(nnx.Module):
    """The MTP layer: two norms, a projection of [embedding; hidden], a full MoE layer, a norm."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, block: type[Block] = Block):
        d = cfg.hidden_size
        self.cfg = cfg
        self.embed_norm = declare(rngs, (), (d,), ("embed",), "norm", part="mtp", hf="enorm.weight")
        self.hidden_norm = declare(rngs, (), (d,), ("embed",), "norm", part="mtp", hf="hnorm.weight")
        self.project = declare(
            rngs, (), (2 * d, d), ("embed_pair", "embed"), "matrix", cfg.initializer_range,
            inputs=(-2,), outputs=(-1,), part="mtp", fp8=False, hf="eh_proj.weight",
        )  # fmt: skip
        self.block = block(cfg, "moe", (), rngs, (), part="mtp")
        self.norm = declare(rngs, (), (d,), ("embed",), "norm", part="mtp", hf="shared_head.norm.weight")

    def join(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        """What the layer reads [B,T,D]: the embedding of the token ahead and the hidden state, the embedding's half first."""
        eps = self.cfg.rms_norm_eps
        pair = [rms_norm(embedded, self.embed_norm[...], eps), rms_norm(hidden, self.hidden_norm[...], eps)]
        x = jnp.concatenate(pair, axis=-1)
        return x @ self.project[...].astype(x.dtype)

    def extend(self, hidden, embedded, slot, live, memory: Memory, selection: Selection = NOTHING, reuse: bool = False):
        """One step of decoding, with cached keys of the rows before.

        Args:
          hidden, embedded: [B,T,D], what the rows join. slot: int32 [B,T], where they stand; their position as well.
          live: bool [B], rows of the batch that count. memory: see `Block`; slots behind a row's last one are not read.
          selection, reuse: see `Block`.
        Returns:
          (hidden [B,T,D] after `shared_head.norm`, selection, keys).
        """
        segment = jnp.broadcast_to(live[:, None], slot.shape).astype(jnp.int32)
        filled = jnp.arange(memory.keys.latent.shape[1]) <= slot[:, -1:]
        ctx = make_context(Rows(slot, segment), filled.astype(jnp.int32), slot, self.cfg)
        x = self.join(embedded, hidden)
        x, selection, keys, _ = self.block(x, ctx, selection, memory, reuse=reuse)
        return rms_norm(x, self.norm[...], self.cfg.rms_norm_eps), selection, keys

    def unroll(
        self, hidden, tokens, embed: Callable, positions, segment_ids, steps: int, collect: frozenset = frozenset()
    ) -> list[MtpStep]:
        """Unrolls the layer.

        Args:
          hidden: trunk state after its final norm [B,T,D].
          tokens, positions, segment_ids: int32 [B,T].
          embed: maps tokens [B,T] to their embeddings [B,T,D].
          steps: how many tokens beyond the next one to predict, at least 1.
          collect: see `Block`.
        Returns:
          One `MtpStep` per step. Row i of step d has a meaning only where `same_document(segment_ids, d)`.
        """
        cfg, b = self.cfg, tokens.shape[0]
        ahead = range(1, steps + 1)
        embedded = embed(jnp.concatenate([own(shift(tokens, d)) for d in ahead])).reshape(steps, b, -1, cfg.hidden_size)
        segments = jnp.stack([jnp.where(same_document(segment_ids, d), segment_ids, 0) for d in ahead])
        positions = own(positions)

        def step(selection, keys, reuse, hidden, inputs):
            embedded, segment = inputs
            hidden = checkpoint_name(hidden, "layer_input")
            x = self.join(embedded, hidden)
            ctx = make_context(Rows(slots(*segment.shape), own(segment)), segment, positions, cfg)
            x, chosen, used, aux = self.block(x, ctx, selection, keys=keys, collect=collect, reuse=reuse)
            hidden = rms_norm(x, self.norm[...], cfg.rms_norm_eps)
            return MtpStep(hidden, chosen.positions, aux), chosen, used

        recomputed = functools.partial(recompute, remat=cfg.remat)
        results, selection, keys, shared = [], NOTHING, None, False
        if cfg.index_share_for_mtp_iteration or cfg.mtp_share_kv:  # step 1 chooses for all
            first = recomputed(functools.partial(step, NOTHING, None, False))
            result, selection, used = first(hidden, (embedded[0], segments[0]))
            results, hidden, shared = [result], result.hidden, True
            keys = used if cfg.mtp_share_kv else None

        def body(hidden, inputs):
            result = step(selection, keys, shared, hidden, inputs)[0]
            return result.hidden, result

        left = steps - len(results)
        if left:
            _, stacked = jax.lax.scan(recomputed(body), hidden, (embedded[-left:], segments[-left:]))
            results += [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(left)]
        return results
