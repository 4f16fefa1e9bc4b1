"""`config.json` of the published checkpoints <-> ModelConfig.

What the file does not say is not guessed: a missing width or rotary base is an error. `head_dim` is ignored, the released
5.2 file holds a misleading value there.
"""

import dataclasses

from glm5_jax.config import ModelConfig, check

_SAME = (
    "vocab_size hidden_size num_hidden_layers first_k_dense_replace num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size num_experts_per_tok "
    "n_shared_experts norm_topk_prob routed_scaling_factor index_n_heads index_head_dim index_topk "
    "max_position_embeddings rms_norm_eps"
).split()
# Absent means: GLM-5 without IndexShare, no expert groups, interleaved rotary pairs, transformers' defaults elsewhere.
_OPTIONAL = dict(
    n_group=1, topk_group=1, indexer_rope_interleave=True, indexer_types=None, index_topk_pattern=None, index_topk_freq=1,
    index_skip_topk_offset=2, index_share_for_mtp_iteration=False, initializer_range=0.02, num_nextn_predict_layers=0,
)  # fmt: skip
_EXPERT_COUNT = ("n_routed_experts", "num_local_experts", "num_experts")
_FIXED = dict(
    scoring_func="sigmoid", topk_method="noaux_tc", hidden_act="silu", attention_bias=False, tie_word_embeddings=False,
    rope_interleave=True, moe_layer_freq=1,
)  # fmt: skip


def config_from_hf(raw: dict) -> ModelConfig:
    """The ModelConfig of a published config.json.

    Raises:
      UserError: another model_type, a missing field, or a value that this network does not have.
    """
    kind = raw.get("model_type")
    check(kind == "glm_moe_dsa", f"model_type={kind!r}: only glm_moe_dsa (GLM-5, 5.1, 5.2, 5.3) can be loaded")
    missing = [name for name in _SAME if raw.get(name) is None]
    check(not missing, f"config.json: missing {', '.join(missing)}")
    for name, value in _FIXED.items():
        check(raw.get(name, value) in (value, None), f"config.json: {name}={raw.get(name)!r}, this network has {value!r}")
    fields = {name: raw[name] for name in _SAME}
    for name, default in _OPTIONAL.items():
        fields[name] = default if raw.get(name) is None else raw[name]
    counts = {raw[name] for name in _EXPERT_COUNT if raw.get(name) is not None}
    check(len(counts) == 1, f"config.json: n_routed_experts is given as {sorted(counts) or 'nothing'}")
    eos, pad = raw.get("eos_token_id"), raw.get("pad_token_id")
    eos = (eos,) if isinstance(eos, int) else tuple(eos or ())
    cfg = ModelConfig(
        **fields, n_routed_experts=counts.pop(), rope_theta=_rope_theta(raw), eos_token_id=eos,
        pad_token_id=pad if pad is not None else (eos or (0,))[0],
    )  # fmt: skip
    _check_ffn_layers(raw, cfg)
    return cfg


def _rope_theta(raw: dict) -> float:
    """theta lives in rope_parameters, in older files at the top level; a silent default would be wrong."""
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        check(isinstance(value, dict), f"config.json: {name}={value!r}: must be an object")
    kind = nested.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    check(kind == "default", f"config.json: rope_type={kind!r}, this network has 'default'")
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    check(theta is not None, "config.json: no rope_theta, neither in rope_parameters nor at the top level")
    return float(theta)


def _check_ffn_layers(raw: dict, cfg: ModelConfig) -> None:
    types = raw.get("mlp_layer_types")
    if types is not None:
        derived = ["dense" if ffn == "dense" else "sparse" for ffn, _ in cfg.layer_kinds]
        check(
            list(types) == derived,
            f"config.json: mlp_layer_types does not match first_k_dense_replace={cfg.first_k_dense_replace}",
        )


def config_to_hf(cfg: ModelConfig, dtype: str) -> dict:
    """The published form of a ModelConfig, for tensors of `dtype`."""
    raw = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": dtype}
    given = dataclasses.asdict(cfg)
    raw |= {name: given[name] for name in (*_SAME, *_OPTIONAL)}
    raw |= _FIXED | {
        "n_routed_experts": cfg.n_routed_experts,
        "rope_parameters": {"rope_theta": cfg.rope_theta, "rope_type": "default"},
        "head_dim": cfg.qk_rope_head_dim,
        "qk_head_dim": cfg.qk_head_dim,
        "num_key_value_heads": cfg.num_attention_heads,
        "moe_router_dtype": "float32",
        "attention_dropout": 0.0,
        # A model that attends to all keys says so in the only way the published layout has: select all of them.
        "index_topk": cfg.index_topk if cfg.attention == "sparse" else cfg.max_position_embeddings,
        "eos_token_id": list(cfg.eos_token_id),
        "pad_token_id": cfg.pad_token_id,
        "mlp_layer_types": ["dense" if ffn == "dense" else "sparse" for ffn, _ in cfg.layer_kinds],
        "indexer_types": ["full" if full else "shared" for _, full in cfg.layer_kinds],
    }
    return raw
