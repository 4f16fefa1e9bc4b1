"""Multi-head latent attention with DeepSeek Sparse Attention (paper sections 2.1 and 2.1.1).

One parameter set, two forms. Expanded: keys and values of every head are made from the latent; used in training over all
keys. Absorbed: the key up-projection moves into the query, so that every head reads the same latent of R + P numbers per
token; used with a cache and for sparse attention. Both compute the same function.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from glm5_jax.config import ModelConfig
from glm5_jax.layers.norm import at_least_float32, rms_norm
from glm5_jax.layers.param import declare
from glm5_jax.layers.rope import rotate
from glm5_jax.sparse import attention
from glm5_jax.sparse.dense import dense, dense_kl, dense_latent
from glm5_jax.sparse.indexer import Index, Indexer
from glm5_jax.sparse.masks import Rows, in_query_blocks


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


class Selection(NamedTuple):
    """What a layer that owns an indexer hands to the layers it serves.

    positions: int32 [B,T,min(K,S)], or None for all visible keys. index: what it was chosen by, kept only while the
    indexer's loss is wanted, because the target of the loss is the attention of every layer served.
    """

    positions: jax.Array | None = None
    index: Index | None = None


class Attention(NamedTuple):
    """out: [B,T,D]. max_logit: largest attention logit. index_kl: float32 [B,T], the indexer's loss of each query, or None."""

    out: jax.Array
    max_logit: jax.Array
    index_kl: jax.Array | None


class Mla(nnx.Module):
    """Multi-head latent attention; with an indexer of its own, or using the selection of an earlier layer.

    Args of the constructor:
      stack: leading dimensions of scanned layers. indexers: those of their indexers, () or (owners,); None = none owns one.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, stack=(), indexers: tuple | None = (), part="trunk"):
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
        self.indexer = None if indexers is None else Indexer(cfg, rngs, indexers)

    def query_latent(self, a: jax.Array) -> jax.Array:
        """Normalised query latent [B,T,Q] of layer inputs a [B,T,D]."""
        return rms_norm(a @ self.q_down[...].astype(a.dtype), self.q_norm[...], self.cfg.latent_eps)

    def queries(self, cq: jax.Array, ctx: Context) -> jax.Array:
        """Per-head queries [B,T,N,C+P] of the query latent, the last P dimensions rotated."""
        q = jnp.einsum("btq,qnh->btnh", cq, self.q_up[...].astype(cq.dtype))
        c = self.cfg.qk_nope_head_dim
        return jnp.concatenate([q[..., :c], rotate(q[..., c:], ctx.cos, ctx.sin)], axis=-1)

    def latent(self, a: jax.Array, ctx: Context) -> jax.Array:
        """Latents [B,T,R+P] of layer inputs a [B,T,D]: norm and RoPE applied."""
        r = self.cfg.kv_lora_rank
        kv = a @ self.kv_down[...].astype(a.dtype)
        latent = rms_norm(kv[..., :r], self.kv_norm[...], self.cfg.latent_eps)
        return jnp.concatenate([latent, rotate(kv[..., r:], ctx.cos, ctx.sin)], axis=-1)

    def index_keys(self, a: jax.Array, ctx: Context) -> jax.Array:
        """Index keys [B,T,J] of layer inputs a [B,T,D]."""
        return self.indexer.keys(a, ctx.cos, ctx.sin)

    def keys(self, a: jax.Array, ctx: Context) -> Keys:
        """What the cache holds for layer inputs a [B,T,D]."""
        return Keys(self.latent(a, ctx), self.index_keys(a, ctx) if self.indexer else None)

    def index(self, cq: jax.Array, a: jax.Array, keys: Keys, ctx: Context) -> Index:
        """What this layer's own index scores are made from."""
        q, w = self.indexer.queries(cq, a, ctx.cos, ctx.sin)
        return Index(q, keys.index, w)

    def select(self, index: Index, ctx: Context) -> jax.Array:
        """This layer's own selection, int32 [B,T,min(K,S)]."""
        cfg = self.cfg
        return attention.select(
            index, ctx.rows, ctx.key_segment, cfg.index_topk, cfg.query_chunk, cfg.sparse_implementation
        )

    def attend(self, cq, keys: Keys, selection: Selection, ctx: Context, absorbed: bool) -> Attention:
        """Attention to the selected keys, or to all visible ones where there is no selection."""
        if selection.positions is not None:
            return self._selected(cq, keys, selection, ctx)
        q = self.queries(cq, ctx)
        if not absorbed:
            return self._expanded(q, keys, selection.index, ctx)
        r, scale, chunk = self.cfg.kv_lora_rank, self.cfg.qk_head_dim**-0.5, self.cfg.query_chunk
        o, top = dense_latent(self._absorb(q), keys.latent, ctx.rows, ctx.key_segment, r, scale, chunk)
        return Attention(self._output(self._values(o)), top, None)

    def _expanded(self, q, keys: Keys, index: Index | None, ctx: Context) -> Attention:
        """All visible keys, keys and values of every head made from the latents."""
        cfg, r = self.cfg, self.cfg.kv_lora_rank
        c, k_rope = keys.latent[..., :r], keys.latent[..., r:]
        k = jnp.einsum("bsr,rnc->bsnc", c, self.k_up[...].astype(q.dtype))
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
        k, v = jnp.concatenate([k, k_rope], axis=-1), jnp.einsum("bsr,rnv->bsnv", c, self.v_up[...].astype(q.dtype))
        scale = cfg.qk_head_dim**-0.5
        o, lse, top = dense(q, k, v, ctx.rows, ctx.key_segment, scale, cfg.query_chunk)
        kl = None
        if index is not None:
            kl = dense_kl(q, k, lse, index, ctx.rows, ctx.key_segment, scale, cfg.query_chunk)
        return Attention(self._output(o), top, kl)

    def _selected(self, cq, keys: Keys, selection: Selection, ctx: Context) -> Attention:
        """The selected keys, all heads reading the latents."""
        cfg, index = self.cfg, selection.index
        # Pieces hand back gradients of the keys, which add up: in float32.
        wide = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), (keys.latent, index and index.k))

        def piece(cq, cos, sin, positions, index_q, w):
            latent, index_k = jax.tree.map(lambda x: x.astype(cq.dtype), wide)
            part = None if index is None else Index(index_q, index_k, w)
            q = self._absorb(self.queries(cq, ctx._replace(cos=cos, sin=sin)))
            scale = cfg.qk_head_dim**-0.5
            o, top, kl = attention.attend(
                q, latent, positions, cfg.kv_lora_rank, scale, cfg.query_chunk, part, cfg.sparse_implementation
            )
            return (self._output(self._values(o)), kl), top

        own = (None, None) if index is None else (index.q, index.w)
        inputs = (cq, ctx.cos, ctx.sin, selection.positions, *own)
        many, size = pieces(cfg, *cq.shape[:2])
        (out, kl), top = piece(*inputs) if many == 1 else in_query_blocks(piece, size, *inputs)
        return Attention(out, top, kl)

    def _absorb(self, q: jax.Array) -> jax.Array:
        """Queries [B,T,N,R+P] that read latents, of queries [B,T,N,C+P] that read keys."""
        c = self.cfg.qk_nope_head_dim
        return jnp.concatenate([jnp.einsum("rnc,btnc->btnr", self.k_up[...].astype(q.dtype), q[..., :c]), q[..., c:]], axis=-1)

    def _values(self, o: jax.Array) -> jax.Array:
        """Heads' outputs [B,T,N,V] of attention over latents [B,T,N,R]."""
        return jnp.einsum("rnv,btnr->btnv", self.v_up[...].astype(o.dtype), o)

    def _output(self, o: jax.Array) -> jax.Array:
        """Layer output [B,T,D] of heads' outputs [B,T,N,V]."""
        return jnp.einsum("btnv,nvd->btd", o, self.out[...].astype(o.dtype))


def _piece(t: int, most: int) -> int:
    """Size of the pieces that T rows are taken in: a multiple of 512, about `most` or less, down to half of it, so that as
    little as possible of the last one is filled up."""
    fewest = -(-t // max(most, 512))
    sizes = [-(-t // (512 * n)) * 512 for n in range(fewest, 2 * fewest + 1)]
    return min(sizes, key=lambda size: (-(-t // size) * size, -size))


def pieces(cfg: ModelConfig, rows: float, t: int) -> tuple[int, int]:
    """(how many pieces `Mla` takes T tokens of that many rows in under sparse attention, tokens of each)."""
    itemsize = jnp.dtype(cfg.dtype).itemsize
    most = int(_ABSORBED_BYTES / (rows * cfg.num_attention_heads * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * itemsize))
    if t <= most:
        return 1, t
    size = _piece(t, most)
    return -(-t // size), size


# Absorbed queries are R + P wide and as many as there are heads; more than this much of them at once and the row goes in
# pieces, each recomputed in the backward pass.
_ABSORBED_BYTES = 1 << 28
