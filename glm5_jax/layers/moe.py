"""Sigmoid-routed mixture of experts with a shared expert (paper section 2.1, Table 10).

The router runs in float32. Its bias only steers the selection; it is moved by the sign of the load error after each step
(`train/step.py`), never by a gradient. No token is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.layers.experts import experts
from glm5_jax.layers.mlp import Mlp
from glm5_jax.layers.norm import at_least_float32
from glm5_jax.layers.param import declare
from glm5_jax.sharding.expert import exchange
from glm5_jax.sharding.mesh import total


class Routing(NamedTuple):
    """What the router decided for each token.

    experts: int32 [..., X], ascending. weights: float32 [..., X], in the same order, after normalisation and scaling.
    """

    experts: jax.Array
    weights: jax.Array


def route(scores: jax.Array, bias: jax.Array, cfg: ModelConfig) -> Routing:
    """Chooses experts by biased score and weighs them by the unbiased one.

    Args:
      scores: sigmoid router outputs, float32 [..., E].
      bias: float32 [E], added for the selection only.
      cfg: num_experts_per_tok, n_group, topk_group, norm_topk_prob, routed_scaling_factor.
    """
    choice = jax.lax.stop_gradient(scores) + bias
    if cfg.n_group > 1:
        choice = jnp.where(_allowed_groups(choice, cfg), choice, -jnp.inf)
    ids = jnp.sort(jax.lax.top_k(choice, cfg.num_experts_per_tok)[1], axis=-1)
    ids = checkpoint_name(ids, "expert_ids")
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * cfg.routed_scaling_factor)


def _allowed_groups(choice: jax.Array, cfg: ModelConfig) -> jax.Array:
    """bool [..., E]: experts in the topk_group groups whose two best experts score highest."""
    size = cfg.n_routed_experts // cfg.n_group
    grouped = choice.reshape(*choice.shape[:-1], cfg.n_group, size)
    group_score = jnp.sum(jax.lax.top_k(grouped, min(2, size))[0], axis=-1)
    best = jax.lax.top_k(group_score, cfg.topk_group)[1]
    allowed = jnp.any(best[..., None] == jnp.arange(cfg.n_group), axis=-2)
    return jnp.repeat(allowed, size, axis=-1)


def balance_loss(scores: jax.Array, ids: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sequence-level balance loss (DeepSeek-V3; weight 1e-4 in the GLM recipe) and the load of each expert.

    For one row: sum_e f_e P_e with f_e = E/(X T) * (tokens that chose e) and P_e = mean over tokens of
    score_e / sum(scores). A perfectly balanced row gives 1. T counts real tokens; a row of only padding gives 0.

    Args:
      scores: [B,T,E] float32. ids: int32 [B,T,X]. real: bool [B,T], False for padding.
    Returns:
      (sum over rows of the loss, float32 scalar; tokens per expert, float32 [E]). Where devices share out the tokens of a
      row, their parts of the sum, and tokens of their own.
    """
    n_experts, per_token = scores.shape[-1], ids.shape[-1]
    real = real.astype(scores.dtype)
    tokens = jnp.maximum(total(jnp.sum(real, axis=1), "context"), 1.0)
    rows = jnp.arange(ids.shape[0])[:, None, None]
    counts = jnp.zeros((ids.shape[0], n_experts), scores.dtype).at[rows, ids].add(real[..., None])
    share = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    mean_share = jnp.sum(share * real[..., None], axis=1) / tokens[:, None]
    fraction = total(counts, "context") * (n_experts / per_token) / tokens[:, None]
    return jnp.sum(fraction * mean_share), jnp.sum(counts, axis=0)


class Moe(nnx.Module):
    """E routed experts, X per token, and a shared expert that is neither gated nor scaled."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, stack=(), part="trunk"):
        d, e, f = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size
        std = cfg.initializer_range
        self.cfg = cfg
        self.router = declare(
            rngs, stack, (d, e), ("embed", "router"), "router", std,
            inputs=(-2,), outputs=(-1,), part=part, wide=True, hf="mlp.gate.weight",
        )  # fmt: skip
        self.router_bias = declare(
            rngs, stack, (e,), ("router",), "router_bias", part=part, hf="mlp.gate.e_score_correction_bias"
        )
        matrix = dict(kind="matrix", std=std, inputs=(-2,), outputs=(-1,), part=part)
        name = "mlp.experts.{e}."
        into, back = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
        self.gate = declare(rngs, stack, (e, d, f), into, hf=name + "gate_proj.weight", **matrix)
        self.up = declare(rngs, stack, (e, d, f), into, hf=name + "up_proj.weight", **matrix)
        self.down = declare(rngs, stack, (e, f, d), back, hf=name + "down_proj.weight", **matrix)
        self.shared = Mlp(d, f * cfg.n_shared_experts, std, rngs, stack, part, hf="mlp.shared_experts")

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, Routing, dict]:
        """Mixes experts for x [B,T,D]; real is bool [B,T], False for padding.

        Returns:
          (y [B,T,D], Routing over [B,T], {"balance": sum over rows of `balance_loss`, "load": float32 [E]}).
        """
        wide = at_least_float32(x.dtype)
        logits = jnp.einsum("btd,de->bte", x.astype(wide), self.router[...].astype(wide), precision="highest")
        scores = jax.nn.sigmoid(logits)
        routing = route(scores, jax.lax.stop_gradient(self.router_bias[...]), self.cfg)
        b, t, d = x.shape
        weights = [w.astype(x.dtype) for w in (self.gate[...], self.up[...], self.down[...])]
        flat = (a.reshape(b * t, a.shape[-1]) for a in (x, routing.experts, routing.weights))
        routed = exchange(experts, *flat, *weights).reshape(b, t, d)
        balance, load = balance_loss(scores, routing.experts, real)
        return routed + self.shared(x), routing, {"balance": balance, "load": load}
