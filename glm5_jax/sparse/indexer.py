"""The lightning indexer of DeepSeek Sparse Attention (paper section 2.1.1).

I_{t,s} = sum_h w_{t,h} * ReLU(q_{t,h} . k_s * J^-0.5), float32. It reads the layer's input and the normalised query
latent, both detached: the LM loss never trains it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from glm5_jax.config import ModelConfig
from glm5_jax.layers.norm import at_least_float32, layer_norm
from glm5_jax.layers.param import declare
from glm5_jax.layers.rope import rotate
from glm5_jax.sparse.topk import MASKED


class Index(NamedTuple):
    """What index scores are made from.

    Attributes:
      q: index queries [B,T,I,J]. k: index keys [B,S,J]. w: head weights float32 [B,T,I], with the factor I^-0.5.
    """

    q: jax.Array
    k: jax.Array
    w: jax.Array


def index_scores(q: jax.Array, k: jax.Array, w: jax.Array, visible: jax.Array) -> jax.Array:
    """Scores of all keys for each query.

    Args:
      q: index queries [B,T,I,J]. k: index keys [B,S,J]. w: head weights float32 [B,T,I], with the factor I^-0.5.
      visible: bool [B,T,S].
    Returns:
      float32 [B,T,S], `MASKED` where not visible.
    """
    wide = at_least_float32(q.dtype)
    dots = jnp.einsum("btij,bsj->btis", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
    scores = jnp.einsum("btis,bti->bts", jax.nn.relu(dots), w, precision="highest")
    return jnp.where(visible, scores, MASKED)


class Indexer(nnx.Module):
    """Parameters of the lightning indexer and the projections it scores with."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, stack=(), hf="self_attn.indexer"):
        d, q, i, j = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
        self.cfg = cfg
        matrix = dict(kind="matrix", std=cfg.initializer_range, part="indexer")
        self.q_up = declare(
            rngs, stack, (q, i, j), ("q_rank", "index_heads", "index_dim"),
            inputs=(-3,), outputs=(-2, -1), hf=f"{hf}.wq_b.weight", **matrix,
        )  # fmt: skip
        narrow = dict(inputs=(-2,), outputs=(-1,), **matrix)
        self.k = declare(rngs, stack, (d, j), ("embed", "index_dim"), hf=f"{hf}.wk.weight", **narrow)
        self.k_norm = declare(rngs, stack, (j,), ("index_dim",), "norm", part="indexer", hf=f"{hf}.k_norm.weight")
        self.k_bias = declare(rngs, stack, (j,), ("index_dim",), "bias", part="indexer", hf=f"{hf}.k_norm.bias")
        self.head_weights = declare(
            rngs, stack, (d, i), ("embed", "index_heads"), wide=True, hf=f"{hf}.weights_proj.weight", **narrow
        )

    def keys(self, a: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Index keys [B,T,J] of the layer inputs a [B,T,D] (after input_layernorm)."""
        a = jax.lax.stop_gradient(a)
        k = layer_norm(a @ self.k[...].astype(a.dtype), self.k_norm[...], self.k_bias[...])
        return self._rotate(k, cos, sin)

    def queries(self, cq: jax.Array, a: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Index queries [B,T,I,J] of the normalised query latent cq [B,T,Q], and float32 head weights [B,T,I]."""
        cq, a = jax.lax.stop_gradient((cq, a))
        q = jnp.einsum("btq,qij->btij", cq, self.q_up[...].astype(cq.dtype))
        wide = at_least_float32(a.dtype)
        w = jnp.einsum("btd,di->bti", a.astype(wide), self.head_weights[...].astype(wide), precision="highest")
        return self._rotate(q, cos, sin), w * self.cfg.index_n_heads**-0.5

    def _rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """RoPE on the first P of J dimensions (the main attention rotates the last P of C + P)."""
        p = self.cfg.qk_rope_head_dim
        turned = rotate(x[..., :p], cos, sin, self.cfg.indexer_rope_interleave)
        return jnp.concatenate([turned, x[..., p:]], axis=-1)
