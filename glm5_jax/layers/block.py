"""One decoder layer: attention and FFN, each behind a norm and added to the residual (paper section 2.1)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.layers.mla import Context, Keys, Mla, Selection
from glm5_jax.layers.mlp import Mlp
from glm5_jax.layers.moe import Moe
from glm5_jax.layers.norm import rms_norm
from glm5_jax.layers.param import declare
from glm5_jax.layers.rope import rotary_tables
from glm5_jax.sharding.context import gather_row
from glm5_jax.sparse.indexer import index_scores
from glm5_jax.sparse.masks import Rows, visible

NOTHING = Selection()


class Memory(NamedTuple):
    """Cached keys of earlier tokens and the slots, int32 [B], at which this call's tokens are written; None = nowhere."""

    keys: Keys
    start: jax.Array | None


def remember(old: jax.Array | None, new: jax.Array, start: jax.Array | None) -> jax.Array:
    """What attention sees: without a cache (`old` [B,S,...]) the keys of this call on all devices; with one, the cache with
    them written from `start` on, or, where that is None, as it is. What lies past its end is dropped."""
    if old is None:
        return gather_row(new)
    return old if start is None else write(old, new, start)


def write(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """old [B,S,...] with new [B,T,...] written into slots start..start+T of each row, start int32 [B]."""
    b, t = new.shape[:2]
    at = start[:, None] + jnp.arange(t, dtype=jnp.int32)
    return old.at[jnp.arange(b)[:, None], at].set(new.astype(old.dtype), mode="drop", unique_indices=True)


class Block(nnx.Module):
    """A decoder layer: MLA + DSA, then a dense FFN or a mixture of experts.

    Args of the constructor:
      ffn: "dense" or "moe". indexers, stack: see `Mla`. part: "trunk" or "mtp".
    """

    attention_class: type[Mla] = Mla

    def __init__(self, cfg: ModelConfig, ffn: str, indexers: tuple | None, rngs: nnx.Rngs, stack=(), part="trunk"):
        d = cfg.hidden_size
        self.cfg = cfg
        self.input_norm = declare(rngs, stack, (d,), ("embed",), "norm", part=part, hf="input_layernorm.weight")
        self.attention = self.attention_class(cfg, rngs, stack, indexers, part)
        self.ffn_norm = declare(rngs, stack, (d,), ("embed",), "norm", part=part, hf="post_attention_layernorm.weight")
        if ffn == "dense":
            self.ffn = Mlp(d, cfg.intermediate_size, cfg.initializer_range, rngs, stack, part)
        else:
            self.ffn = Moe(cfg, rngs, stack, part)

    def __call__(
        self,
        x: jax.Array,
        ctx: Context,
        selection: Selection = NOTHING,
        memory: Memory | None = None,
        keys: Keys | None = None,
        reuse: bool = False,
        owner: jax.Array | None = None,
        collect: frozenset = frozenset(),
    ):
        """Runs the layer.

        Args:
          x: [B,T,D]. selection: that of the nearest earlier layer with an indexer; used if this one has none.
          memory: cache to extend and to attend to; None = attend to this call's tokens only.
          keys: attend to these instead of this layer's own (MTP steps that share the KV of step 1).
          reuse: use `selection` although the layer owns an indexer (MTP steps that share the selection of step 1).
          owner: bool [], known only when the layer runs: whether the indexer that it holds is its own. None = it is.
          collect: names of intermediates to return.
        Returns:
          (x, selection, keys used, aux): the selection is empty while all visible keys are attended to and nobody asked.
          Keys without a cache hold no index keys if `owner` is told.
        """
        cfg = self.cfg
        a = rms_norm(x, self.input_norm[...], cfg.rms_norm_eps)
        cq = self.attention.query_latent(a)
        indexer = self.attention.indexer is not None
        old, start = (Keys(None, None), None) if memory is None else memory
        if keys is None:
            latent = remember(old.latent, self.attention.latent(a, ctx), start)
            owned = indexer and owner is None
            keys = Keys(latent, remember(old.index, self.attention.index_keys(a, ctx), start) if owned else old.index)
        sparse = cfg.attention == "sparse" and keys.latent.shape[1] > cfg.index_topk
        aux = {}
        if indexer and not reuse:
            choose = functools.partial(self._choose, cq, a, ctx, sparse, collect)
            if owner is None:
                selection, aux["index_scores"] = choose(keys)
            else:
                chosen = self._choose_if(owner, choose, selection, a, ctx, old.index, start)
                selection, aux["index_scores"], keys = *chosen[:2], keys._replace(index=chosen[2])
            selection = selection._replace(positions=checkpoint_name(selection.positions, "selected"))
        used = selection if sparse else selection._replace(positions=None)
        y, aux["max_logit"], aux["index_kl"] = self.attention.attend(cq, keys, used, ctx, absorbed=memory is not None)
        x = x + y
        m = rms_norm(x, self.ffn_norm[...], cfg.rms_norm_eps)
        if isinstance(self.ffn, Moe):
            y, routing, moe_aux = self.ffn(m, ctx.rows.segment != 0)
            aux |= moe_aux | {"router": routing}
        else:
            y = self.ffn(m)
        x = x + y
        aux |= {"hidden": x, "selected": selection.positions}
        kept = {"max_logit", "balance", "load"} | collect
        return x, selection, keys, {name: value for name, value in aux.items() if name in kept and value is not None}

    def _choose(self, cq, a, ctx: Context, sparse: bool, collect: frozenset, keys: Keys):
        """(this layer's own selection, index scores float32 [B,T,S] if asked for); only what is needed is computed."""
        positions = sparse or bool(collect & {"selected", "index_scores"})  # with S <= K nothing but a caller wants them
        if not positions and "index_kl" not in collect:
            return NOTHING, None
        index = self.attention.index(cq, a, keys, ctx)
        scores = None
        if "index_scores" in collect:
            scores = index_scores(*jax.lax.stop_gradient(index), visible(ctx.rows, ctx.key_segment))
        chosen = self.attention.select(index, ctx) if positions else None
        return Selection(chosen, index if "index_kl" in collect else None), scores

    def _choose_if(self, owner, choose: Callable, selection: Selection, a, ctx: Context, old, start):
        """(selection, index scores, index keys): its own with its keys in the cache if `owner`, else what there was."""

        def own():
            keys = remember(old, self.attention.index_keys(a, ctx), start)
            return *choose(Keys(None, keys)), None if old is None else keys

        def shared():
            scores = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(own)[1])
            return selection, scores, old

        with jax.named_scope("own_indexer"):
            return jax.lax.cond(owner, own, shared)


def recompute(fn: Callable, remat: str, prevent_cse: bool = True) -> Callable:
    """fn whose backward pass computes it again; it does not choose again: selections and expert choices are kept.

    Args:
      fn: names what is large of that it needs for this, `checkpoint_name(x, "layer_input")`. remat: see `ModelConfig`; under
        "offload" selections and what is so named wait in the host's memory.
    """
    if remat == "none":
        return fn
    policy = jax.checkpoint_policies.save_only_these_names("selected", "expert_ids")
    if remat == "offload":
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["expert_ids"],
            names_which_can_be_offloaded=["layer_input", "selected"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def make_context(rows: Rows, key_segment: jax.Array, positions: jax.Array, cfg: ModelConfig) -> Context:
    """Context of a call: positions int32 [B,T] become rotary tables, key_segment is int32 [B,S]."""
    cos, sin = rotary_tables(positions, cfg.qk_rope_head_dim, cfg.rope_theta)
    return Context(cos, sin, rows, key_segment)
