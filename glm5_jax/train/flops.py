"""Model FLOPs of a training token, and the peak of the chips whose peak is published."""

import math

import jax

from glm5_jax.config import ModelConfig
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, specs, split

# Dense bf16 FLOP/s per JAX device, by `device_kind`.
PEAK = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 920e12,
    "TPU v6e": 920e12, "TPU7x": 1155e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


def flops_per_token(model: Glm5, seq_len: int, mtp_steps: int) -> float:
    """Forward and backward FLOPs of one token: 6 per active weight and 6 x N (C + P + V) per visible key on average.

    Experts count by X of E, the MTP layer and the head once per MTP step, the embedding and a frozen indexer not at all;
    recomputation does not count.
    """
    cfg, total = model.cfg, 0.0
    is_spec = lambda x: isinstance(x, Spec)  # noqa: E731
    leaves = jax.tree.leaves(split(model)[1])
    for spec, array in zip(jax.tree.leaves(specs(model), is_leaf=is_spec), leaves):
        if spec.kind not in ("matrix", "router", "head") or spec.part == "indexer":
            continue
        active = math.prod(array.shape)
        if "expert_mlp" in spec.axes:
            active *= cfg.num_experts_per_tok / cfg.n_routed_experts
        times = {"mtp": mtp_steps}.get(spec.part, 1 + mtp_steps if spec.kind == "head" else 1)
        total += 6.0 * active * times
    layers = cfg.num_hidden_layers + mtp_steps
    return total + layers * attention_flops(cfg, seq_len)


def attention_flops(cfg: ModelConfig, seq_len: int) -> float:
    """Forward and backward FLOPs of one token's attention scores and values in one layer."""
    visible = (seq_len + 1) / 2
    if cfg.attention == "sparse" and seq_len > cfg.index_topk:
        k = cfg.index_topk
        visible = (k * (k + 1) / 2 + (seq_len - k) * k) / seq_len
    return 6.0 * visible * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim)


def peak_flops() -> float | None:
    """Peak bf16 FLOP/s of all devices together, None where it is not published (CPUs)."""
    peak = PEAK.get(jax.devices()[0].device_kind)
    return None if peak is None else peak * jax.device_count()
