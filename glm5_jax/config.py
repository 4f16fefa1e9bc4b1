"""Every setting of the project, as frozen dataclasses, and the model presets as functions.

Model fields carry the names of the published `config.json` (paper Table 10; values from the released files). The comment
behind each field is what `glm5 VERB --help` prints.
"""

import dataclasses
import math
from typing import Literal

from glm5_jax.errors import UserError


def check(condition: bool, message: str) -> None:
    """Raises UserError(message) unless `condition` holds."""
    if not condition:
        raise UserError(message)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The GLM-5 network (paper section 2.1, Table 10). Defaults are the released GLM-5 / 5.1."""

    vocab_size: int = 154_880  # W, rows of the embedding and of the head
    hidden_size: int = 6144  # D, width of the residual stream
    num_hidden_layers: int = 78  # L, decoder layers without the MTP layer
    first_k_dense_replace: int = 3  # the first layers that have a dense FFN instead of experts
    num_attention_heads: int = 64  # N
    q_lora_rank: int = 2048  # Q, width of the query latent
    kv_lora_rank: int = 512  # R, width of the key/value latent, which is what the cache holds
    qk_nope_head_dim: int = 192  # C, part of a head's query and key without rotary embedding
    qk_rope_head_dim: int = 64  # P, rotary part, one key shared by all heads
    v_head_dim: int = 256  # V
    intermediate_size: int = 12_288  # width of the dense FFN
    moe_intermediate_size: int = 2048  # F, width of one expert
    n_routed_experts: int = 256  # E
    num_experts_per_tok: int = 8  # X, routed experts per token
    n_shared_experts: int = 1  # shared expert width in units of moe_intermediate_size
    n_group: int = 1  # groups of experts for group-limited routing; 1 = no limit
    topk_group: int = 1  # groups a token may route into
    norm_topk_prob: bool = True  # divide the selected router scores by their sum
    routed_scaling_factor: float = 2.5  # factor on the routed experts' weights
    index_n_heads: int = 32  # I, heads of the lightning indexer
    index_head_dim: int = 128  # J, width of an indexer head; its first P dims are rotary
    index_topk: int = 2048  # K, keys each query attends to
    indexer_rope_interleave: bool = True  # rotate pairs (0,1),(2,3).. in the indexer; False = pairs (j, j+P/2)
    indexer_types: tuple[str, ...] | None = None  # per layer "full" or "shared"; wins over pattern and frequency
    index_topk_pattern: str | None = None  # the same as a string of F and S; wins over the frequency
    index_topk_freq: int = 1  # layer i owns an indexer iff max(i - offset + 1, 0) % freq == 0
    index_skip_topk_offset: int = 2  # the offset of that rule
    index_share_for_mtp_iteration: bool = False  # later MTP steps reuse the selection of step 1 (GLM-5.2)
    mtp_share_kv: bool = False  # later MTP steps also reuse the latent KV of step 1 (GLM-5.2's training form)
    num_nextn_predict_layers: int = 1  # MTP parameter sets: 0 or 1
    rope_theta: float = 1e6  # rotary base
    max_position_embeddings: int = 202_752  # longest sequence, tokens
    rms_norm_eps: float = 1e-5  # epsilon of the block norms and the final norm
    latent_norm_eps: float | None = None  # epsilon of the two latent norms; None = rms_norm_eps, transformers uses 1e-6
    initializer_range: float = 0.02  # standard deviation of fresh weights
    eos_token_id: tuple[int, ...] = (154_820, 154_827, 154_829)  # ids that end a generation
    pad_token_id: int = 154_820  # id that fills finished rows
    attention: Literal["sparse", "dense"] = "sparse"  # sparse = attend to the indexer's top-k; dense = to all visible keys
    sparse_implementation: Literal["auto", "reference", "xla", "pallas"] = "auto"  # of the sparse attention; see README
    query_chunk: int = 512  # queries handled at once by attention; bounds its memory to query_chunk x S
    # block = recompute each layer's activations in the backward pass, from its input; offload = the same, and what the layers
    # keep for it waits in the host's memory
    remat: Literal["none", "block", "offload"] = "none"
    dtype: str = "float32"  # dtype of the matrix products; parameters keep their own

    def __post_init__(self):
        for name in ("indexer_types", "eos_token_id"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_widths(self)
        _check_indexer_layers(self)

    @property
    def qk_head_dim(self) -> int:
        """C + P, width of a head's query and key; the softmax scale is its inverse square root."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_eps(self) -> float:
        """Epsilon of `q_a_layernorm` and `kv_a_layernorm`."""
        return self.rms_norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    @property
    def layer_kinds(self) -> tuple[tuple[str, bool], ...]:
        """Per layer ("dense" | "moe", owns an indexer). Indexer rule: list > pattern > frequency."""
        n = self.num_hidden_layers
        if self.indexer_types is not None:
            full = [kind == "full" for kind in self.indexer_types]
        elif self.index_topk_pattern is not None:
            full = [letter == "F" for letter in self.index_topk_pattern]
        else:
            full = [max(i - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0 for i in range(n)]
        return tuple(("dense" if i < self.first_k_dense_replace else "moe", full[i]) for i in range(n))


def _check_widths(c: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
        "n_shared_experts n_group topk_group index_n_heads index_head_dim index_topk index_topk_freq "
        "max_position_embeddings query_chunk"
    )
    for name in positive.split():
        value = getattr(c, name)
        check(isinstance(value, int), f"{name}={value!r}: must be an integer")
        check(value >= 1, f"{name}={value}: must be at least 1")
    for name in ("rms_norm_eps", "latent_eps", "rope_theta", "initializer_range", "routed_scaling_factor"):
        value = getattr(c, name)
        check(value > 0 and math.isfinite(value), f"{name}={value}: must be positive and finite")
    check(c.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={c.qk_rope_head_dim}: rotary pairs need an even width")
    check(
        c.index_head_dim >= c.qk_rope_head_dim,
        f"index_head_dim={c.index_head_dim}: must be at least qk_rope_head_dim={c.qk_rope_head_dim}",
    )
    check(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok={c.num_experts_per_tok}: at most n_routed_experts={c.n_routed_experts}",
    )
    check(
        c.n_routed_experts % c.n_group == 0 and c.topk_group <= c.n_group,
        f"n_group={c.n_group}, topk_group={c.topk_group}: n_group must divide n_routed_experts={c.n_routed_experts} "
        "and topk_group must not exceed n_group",
    )
    check(
        c.num_experts_per_tok <= c.topk_group * (c.n_routed_experts // c.n_group),
        f"num_experts_per_tok={c.num_experts_per_tok}: topk_group={c.topk_group} groups hold only "
        f"{c.topk_group * (c.n_routed_experts // c.n_group)} experts",
    )
    check(
        0 <= c.first_k_dense_replace <= c.num_hidden_layers,
        f"first_k_dense_replace={c.first_k_dense_replace}: must lie in 0..num_hidden_layers={c.num_hidden_layers}",
    )
    check(
        c.num_nextn_predict_layers in (0, 1),
        f"num_nextn_predict_layers={c.num_nextn_predict_layers}: one shared parameter set (1) or none (0)",
    )
    check(
        c.index_topk <= c.max_position_embeddings,
        f"index_topk={c.index_topk}: more than the position limit max_position_embeddings={c.max_position_embeddings}",
    )
    check(c.dtype in ("float32", "bfloat16", "float64"), f"dtype={c.dtype}: float32, bfloat16 or float64")


def _check_indexer_layers(c: ModelConfig) -> None:
    n = c.num_hidden_layers
    if c.indexer_types is not None:
        check(
            len(c.indexer_types) == n and set(c.indexer_types) <= {"full", "shared"},
            f"indexer_types: needs {n} entries, each full or shared; got {len(c.indexer_types)}: {set(c.indexer_types)}",
        )
    elif c.index_topk_pattern is not None:
        check(
            len(c.index_topk_pattern) == n and set(c.index_topk_pattern) <= set("FS"),
            f"index_topk_pattern={c.index_topk_pattern!r}: needs {n} letters F or S",
        )
    check(c.layer_kinds[0][1], "indexer_types: layer 0 must own an indexer (full), it has nothing to share")


def override(cfg: ModelConfig, **fields) -> ModelConfig:
    """`dataclasses.replace` that names unknown fields in a UserError."""
    unknown = set(fields) - {f.name for f in dataclasses.fields(cfg)}
    check(not unknown, f"unknown model setting: {', '.join(sorted(unknown))}")
    return dataclasses.replace(cfg, **fields)


def glm5(**overrides) -> ModelConfig:
    """GLM-5 and GLM-5.1, 743.9B parameters (paper Table 10)."""
    return dataclasses.replace(ModelConfig(), **overrides)


def glm5_2(**overrides) -> ModelConfig:
    """GLM-5.2 and 5.3: IndexShare (57 of 78 layers reuse a selection) and 1M positions."""
    return glm5(
        **{
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "index_share_for_mtp_iteration": True,
            "rope_theta": 8e6,
            "max_position_embeddings": 1_048_576,
        }
        | overrides
    )


def glm47_flash(**overrides) -> ModelConfig:
    """GLM-4.7-Flash with the indexer of paper section 2.1.2 (Table 6); indexer widths as in GLM-5 (our choice)."""
    return glm5(
        **dict(
            hidden_size=2048, num_hidden_layers=47, first_k_dense_replace=1, num_attention_heads=20, q_lora_rank=768,
            intermediate_size=10_240, moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4,
            routed_scaling_factor=1.8,
        )
        | overrides
    )  # fmt: skip


def small(**overrides) -> ModelConfig:
    """27.3M parameters, for benchmarks and ablations on one machine."""
    return glm5(
        **dict(
            vocab_size=4096, hidden_size=512, num_hidden_layers=6, first_k_dense_replace=1, num_attention_heads=8,
            q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64,
            intermediate_size=1024, moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=4,
            index_n_heads=8, index_head_dim=32, index_topk=256, num_nextn_predict_layers=0,
            max_position_embeddings=32_768, eos_token_id=(0,), pad_token_id=0,
        )
        | overrides
    )  # fmt: skip


def tiny(**overrides) -> ModelConfig:
    """About 4M parameters: every part of GLM-5, small enough to learn code on a laptop in minutes."""
    return glm5(
        **dict(
            vocab_size=2048, hidden_size=256, num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=4,
            q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
            intermediate_size=512, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2,
            index_n_heads=4, index_head_dim=32, index_topk=256, max_position_embeddings=4096,
            rope_theta=10_000.0, eos_token_id=(0,), pad_token_id=0,
        )
        | overrides
    )  # fmt: skip


PRESETS = {f.__name__: f for f in (glm5, glm5_2, glm47_flash, small, tiny)}
