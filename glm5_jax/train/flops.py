"""Model FLOPs of a training token, and the peak of the chips whose peak is published."""

import math

import jax

from glm5_jax.config import ModelConfig
from glm5_jax.layers.mla import pieces
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, flat, specs, split
from glm5_jax.train.step import LossConfig

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


def step_flops(
    model: Glm5, freeze: tuple[str, ...], sizes: dict[str, int], rows: int, micro_batches: int, seq_len: int, loss: LossConfig,
    keys: float,
) -> dict[str, float]:  # fmt: skip
    """What a step under remat=block multiplies on each device of a mesh: FLOPs of matrix products, by part of the network.

    A product runs forward, again in the backward pass, and twice for its gradients (once where its input has none). What only
    the output of a layer needs is not computed again. Under sparse attention long rows go in pieces
    (`layers.mla.pieces`), recomputed once more; the last piece is filled up, and so is the last chunk of the head. Attention is
    that of `sparse.dense`; for the Pallas kernels of sparse attention see `kernel_flops`.

    Args:
      model: abstract. freeze: nothing, or the indexer. sizes: devices along each mesh axis. rows: of a micro-batch, over all
        devices. seq_len: T. keys: that a query visits on average, those of blocks at the diagonal included.
    """
    cfg = model.cfg
    own_rows, own = rows / (sizes["data"] * sizes["expert"]), seq_len // sizes["context"]
    tokens = micro_batches * own_rows * own
    count, piece = pieces(cfg, own_rows, own) if cfg.attention == "sparse" else (1, own)
    chunk, shapes = min(loss.chunk, own), flat(split(model)[1])
    parts = dict.fromkeys(("attention", "experts", "other layers", "head", "indexer", "Muon"), 0.0)
    for path, spec in flat(specs(model)).items():
        flops = 2.0 * shapes[path].size * tokens * (loss.mtp_steps if path[0] == "mtp" else 1)
        trains, of_experts = spec.part not in freeze, "experts" in spec.axes
        if spec.kind == "head":
            parts["head"] += flops * math.ceil(own / chunk) * chunk / own * 3 * (1 + loss.mtp_steps)
        elif spec.part == "indexer" and spec.kind == "matrix":
            parts["indexer"] += flops * (3 if trains else cfg.attention == "sparse")
        elif of_experts and spec.kind == "matrix":
            room = 1.25 if sizes["expert"] > 1 else 1.0
            parts["experts"] += flops * cfg.num_experts_per_tok / cfg.n_routed_experts * room * 4
        elif spec.kind in ("matrix", "router"):
            times = 3 if path[-1] == "down" else 4
            if path[-1] in ("k_up", "v_up") and cfg.attention == "dense":
                times *= sizes["context"]  # every device makes the keys of the whole row
            if path[-1] in ("q_up", "k_up", "v_up", "out"):
                times = (times + (count > 1 and path[-1] != "out")) * count * piece / own
            parts["attention" if "attention" in path else "other layers"] += flops * times
        if trains and spec.kind == "matrix":
            parts["Muon"] += _muon_flops(spec, shapes[path].shape, sizes)
    if cfg.attention == "dense":
        layers = cfg.num_hidden_layers + loss.mtp_steps
        widths = 2 * (cfg.qk_head_dim + cfg.v_head_dim) + 3 * cfg.qk_head_dim + 2 * cfg.v_head_dim
        parts["attention"] += layers * tokens * keys * 2 * cfg.num_attention_heads * widths
    return parts


def kernel_flops(cfg: ModelConfig, freeze: tuple[str, ...], tokens: float, seq_len: int, mtp_steps: int, forward: int) -> float:
    """FLOPs of the kernels of sparse attention in a step: index scores of all visible keys, attention to the selected ones
    and with it the indexer's loss, `forward` times forward and once backward. What a tile of queries computes for the
    selections of its neighbours comes on top (experiments/kernels/roofline.py)."""
    if cfg.attention == "dense" or seq_len <= cfg.index_topk:
        return 0.0
    layers = cfg.num_hidden_layers + mtp_steps
    selecting = sum(full for _, full in cfg.layer_kinds) + (1 if cfg.index_share_for_mtp_iteration else mtp_steps)
    k = cfg.index_topk
    chosen = (k * (k + 1) / 2 + (seq_len - k) * k) / seq_len
    width, rank, heads = cfg.kv_lora_rank + cfg.qk_rope_head_dim, cfg.kv_lora_rank, 2 * cfg.num_attention_heads
    index = 2 * cfg.index_n_heads * cfg.index_head_dim
    attention = heads * (forward * (width + rank) + 3 * width + 2 * rank)
    if "indexer" not in freeze:
        attention += forward * (heads * width + index) + 3 * index
    return tokens * (selecting * index * (seq_len + 1) / 2 + layers * chosen * attention)


def decode_flops(model: Glm5, experts: int, rows: float, seq_len: int) -> tuple[dict[str, float], float, float]:
    """(FLOPs of matrix products by part of the network, those of the kernels of sparse attention, those of the model) of a step
    that makes one token for each of a device's rows, whose caches hold seq_len tokens.

    Args:
      experts: devices over which the experts are spread. Between each two of them travel at least 8 rows, and the kernels fill
        what arrives up to 128.
    """
    cfg, x, shapes = model.cfg, model.cfg.num_experts_per_tok, flat(split(model)[1])
    parts, useful = dict.fromkeys(("attention", "experts", "other layers", "head"), 0.0), 0.0
    picks = rows * x if experts == 1 else experts * 8 * math.ceil(rows * x / experts * 1.25 / 8)
    picks = 128 * math.ceil(picks / 128)
    for path, spec in flat(specs(model)).items():
        unused = spec.part == "mtp" or (spec.part == "indexer" and cfg.attention == "dense")
        if unused or spec.kind not in ("matrix", "router", "head"):
            continue
        size = 2.0 * shapes[path].size
        if "experts" in spec.axes and spec.kind == "matrix":
            parts["experts"] += size / cfg.n_routed_experts * picks
            useful += size / cfg.n_routed_experts * rows * x
        else:
            parts["head" if spec.kind == "head" else "attention" if "attention" in path else "other layers"] += size * rows
            useful += size * rows
    width, rank = cfg.kv_lora_rank + cfg.qk_rope_head_dim, cfg.kv_lora_rank
    attention = rows * 2 * cfg.num_attention_heads * (width + rank) * cfg.num_hidden_layers
    if cfg.attention == "dense":
        parts["attention"] += attention * seq_len
        return parts, 0.0, useful + attention * seq_len
    index = rows * 2 * cfg.index_n_heads * cfg.index_head_dim * seq_len * sum(full for _, full in cfg.layer_kinds)
    kernels = index + attention * min(cfg.index_topk, seq_len)
    return parts, kernels, useful + kernels


def _muon_flops(spec: Spec, shape: tuple[int, ...], sizes: dict[str, int]) -> float:
    """Newton-Schulz of the matrices of a parameter that one of the devices that share them takes."""
    outputs = tuple(at for at in spec.outputs if at != spec.heads)
    fan_in, fan_out = (math.prod(shape[at] for at in dims) for dims in (spec.inputs, outputs))
    apart = sizes["expert"] if "experts" in spec.axes else 1  # devices that hold other matrices
    count, devices = math.prod(shape) // (fan_in * fan_out) // apart, math.prod(sizes.values()) // apart
    m, n = sorted((fan_in, fan_out))
    return math.ceil(count / devices) * 5 * (4 * m * m * n + 2 * m**3)
