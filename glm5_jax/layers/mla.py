"""Multi-head latent attention with DeepSeek Sparse Attention (paper sections 2.1 and 2.1.1; model.md sections 3 to 5).

One parameter set, two forms. Expanded: keys and values of every head are made from the latent; used in training over all
keys. Absorbed: the key up-projection moves into the query, so that every head reads the same latent of R + P numbers per
token; used with a cache and for sparse attention. Both compute the same function.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.layers.norm import rms_norm
from glm5_jax.layers.param import declare
from glm5_jax.layers.rope import rotate
from glm5_jax.sparse import attention
from glm5_jax.sparse.attention import Rows
from glm5_jax.sparse.indexer import Indexer, index_scores
from glm5_jax.sparse.topk import select_top_k


class Context(NamedTuple):
    """What all layers of a call share.

    cos, sin: float32 [B,T,P/2]. rows: where the queries stand. key_segment: int32 [B,S], documents of the keys.
    """

    cos: jax.Array
    sin: jax.Array
    rows: Rows
    key_segment: jax.Array


class Keys(NamedTuple):
    """What attention remembers of a token: latent [B,S,R+P] (norm and RoPE applied) and index key [B,S,J] or None."""

    latent: jax.Array
    index: jax.Array | None


class Mla(nnx.Module):
    """Multi-head latent attention; with an indexer of its own, or using the selection of an earlier layer."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, stack=(), indexer: bool = True, part="trunk"):
        d, n, q, r = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
        c, p, v = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.cfg = cfg
        matrix = dict(kind="matrix", std=cfg.initializer_range, part=part)
        narrow = dict(inputs=(-2,), outputs=(-1,), **matrix)
        per_head = dict(inputs=(-3,), outputs=(-2, -1), heads=-2, **matrix)
        hf = "self_attn."
        self.q_down = declare(rngs, stack, (d, q), ("embed", "q_rank"), hf=hf + "q_a_proj.weight", **narrow)
        self.q_norm = declare(rngs, stack, (q,), ("q_rank",), "norm", part=part, hf=hf + "q_a_layernorm.weight")
        self.q_up = declare(
            rngs, stack, (q, n, c + p), ("q_rank", "heads", "head_dim"), hf=hf + "q_b_proj.weight", **per_head
        )
        self.kv_down = declare(
            rngs, stack, (d, r + p), ("embed", "kv_rank"), hf=hf + "kv_a_proj_with_mqa.weight", **narrow
        )
        self.kv_norm = declare(rngs, stack, (r,), ("kv_rank",), "norm", part=part, hf=hf + "kv_a_layernorm.weight")
        # Two parameters, one published tensor: per head its key rows, then its value rows.
        self.k_up = declare(
            rngs, stack, (r, n, c), ("kv_rank", "heads", "head_dim"), hf=hf + "kv_b_proj.weight", **per_head
        )
        self.v_up = declare(
            rngs, stack, (r, n, v), ("kv_rank", "heads", "head_dim"), hf=hf + "kv_b_proj.weight", **per_head
        )
        self.out = declare(
            rngs, stack, (n, v, d), ("heads", "head_dim", "embed"),
            inputs=(-3, -2), outputs=(-1,), hf=hf + "o_proj.weight", **matrix,
        )  # fmt: skip
        self.indexer = Indexer(cfg, rngs, stack) if indexer else None

    def query_latent(self, a: jax.Array) -> jax.Array:
        """Normalised query latent [B,T,Q] of layer inputs a [B,T,D]."""
        return rms_norm(a @ self.q_down[...].astype(a.dtype), self.q_norm[...], self.cfg.latent_eps)

    def queries(self, cq: jax.Array, ctx: Context) -> jax.Array:
        """Per-head queries [B,T,N,C+P] of the query latent, the last P dimensions rotated."""
        q = jnp.einsum("btq,qnh->btnh", cq, self.q_up[...].astype(cq.dtype))
        c = self.cfg.qk_nope_head_dim
        return jnp.concatenate([q[..., :c], rotate(q[..., c:], ctx.cos, ctx.sin)], axis=-1)

    def keys(self, a: jax.Array, ctx: Context) -> Keys:
        """What the cache holds for layer inputs a [B,T,D]."""
        r = self.cfg.kv_lora_rank
        kv = a @ self.kv_down[...].astype(a.dtype)
        latent = rms_norm(kv[..., :r], self.kv_norm[...], self.cfg.latent_eps)
        latent = jnp.concatenate([latent, rotate(kv[..., r:], ctx.cos, ctx.sin)], axis=-1)
        return Keys(latent, self.indexer.keys(a, ctx.cos, ctx.sin) if self.indexer else None)

    def select(self, cq, a, keys: Keys, ctx: Context, with_scores: bool) -> tuple[jax.Array, jax.Array | None]:
        """This layer's own selection int32 [B,T,min(K,S)], and the scores float32 [B,T,S] if asked for."""
        q, w = self.indexer.queries(cq, a, ctx.cos, ctx.sin)

        def choose(q, w, rows):
            scores = index_scores(q, keys.index, w, attention.visible(rows, ctx.key_segment))
            chosen = select_top_k(scores, self.cfg.index_topk)
            return (chosen, scores if with_scores else None), jnp.float32(0)

        inputs = jax.lax.stop_gradient((q, w, ctx.rows))
        (selected, scores), _ = attention.in_query_blocks(choose, self.cfg.query_chunk, *inputs)
        return checkpoint_name(selected, "selected"), scores

    def attend(self, cq, keys: Keys, selected, ctx: Context, absorbed: bool) -> tuple[jax.Array, jax.Array]:
        """Attention output [B,T,D] and the largest attention logit; `selected` None = all visible keys."""
        cfg, r = self.cfg, self.cfg.kv_lora_rank
        scale = cfg.qk_head_dim**-0.5
        q = self.queries(cq, ctx)
        w_k, w_v, w_o = (w[...].astype(q.dtype) for w in (self.k_up, self.v_up, self.out))
        if selected is None and not absorbed:
            c, k_rope = keys.latent[..., :r], keys.latent[..., r:]
            k = jnp.einsum("bsr,rnc->bsnc", c, w_k)
            k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
            k, v = jnp.concatenate([k, k_rope], axis=-1), jnp.einsum("bsr,rnv->bsnv", c, w_v)
            o, top = attention.dense(q, k, v, ctx.rows, ctx.key_segment, scale, cfg.query_chunk)
        else:
            c = cfg.qk_nope_head_dim
            q = jnp.concatenate([jnp.einsum("btnc,rnc->btnr", q[..., :c], w_k), q[..., c:]], axis=-1)
            if selected is None:
                o, top = attention.dense_latent(q, keys.latent, ctx.rows, ctx.key_segment, r, scale, cfg.query_chunk)
            else:
                o, top = attention.selected_latent(q, keys.latent, selected, r, scale, cfg.query_chunk)
            o = jnp.einsum("btnr,rnv->btnv", o, w_v)
        return jnp.einsum("btnv,nvd->btd", o, w_o), top
