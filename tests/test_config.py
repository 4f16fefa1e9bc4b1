"""ModelConfig: which layers own an indexer, presets, and every refusal; config.json read without guessing."""

import dataclasses
import json

import pytest

import reference
from conftest import GOLDENS
from glm5_jax.config import PRESETS, ModelConfig, glm5, glm5_2, glm47_flash, override, small, tiny
from glm5_jax.convert.hf_config import config_from_hf, config_to_hf
from glm5_jax.errors import UserError


def letters(cfg):
    return "".join("F" if full else "S" for _, full in cfg.layer_kinds)


def one_line(error, *words):
    message = str(error.value)
    assert "\n" not in message and all(str(word) in message for word in words), message


# Which layers own an indexer


def test_frequency_rule():
    rule = dict(index_topk_freq=4, index_skip_topk_offset=3)
    assert letters(reference.micro_config(num_hidden_layers=7, **rule)) == "FFFSSSF"
    assert letters(reference.micro_config(num_hidden_layers=7, index_topk_freq=4)) == "FFSSSFS"  # offset 2 when absent
    assert letters(reference.micro_config(num_hidden_layers=6, index_topk_freq=2, index_skip_topk_offset=1)) == "FSFSFS"


def test_list_wins_over_pattern_and_pattern_over_frequency():
    types = ("full", "shared", "full", "full", "shared")
    given = dict(num_hidden_layers=5, index_topk_freq=4, index_skip_topk_offset=3)
    assert letters(reference.micro_config(**given)) == "FFFSS"
    assert letters(reference.micro_config(**given, index_topk_pattern="FSFSS")) == "FSFSS"
    assert letters(reference.micro_config(**given, index_topk_pattern="FSFSS", indexer_types=types)) == "FSFFS"


def test_pattern_without_a_list():
    assert letters(reference.micro_config(num_hidden_layers=6, index_topk_pattern="FSFSSF")) == "FSFSSF"


def test_glm5_owns_an_indexer_everywhere_and_glm5_2_on_21_layers():
    assert letters(glm5()) == "F" * 78
    full = [i for i, (_, full) in enumerate(glm5_2().layer_kinds) if full]
    assert full == [0, 1, 2, *range(6, 78, 4)] and len(full) == 21


def test_absent_fields_mean_every_layer_is_full():
    raw = json.loads((GOLDENS / "glm5_tiny" / "config.json").read_text())
    assert not any(name.startswith("index_topk_") or name == "indexer_types" for name in raw)
    cfg = config_from_hf(raw)
    assert letters(cfg) == "FFFF" and not cfg.index_share_for_mtp_iteration


# Presets


def test_glm5_is_table_10():
    cfg = glm5()
    expected = dict(
        vocab_size=154880, hidden_size=6144, num_hidden_layers=78, first_k_dense_replace=3, num_nextn_predict_layers=1,
        intermediate_size=12288, moe_intermediate_size=2048, num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, index_n_heads=32,
        index_head_dim=128, index_topk=2048, indexer_rope_interleave=True, rope_theta=1e6, rms_norm_eps=1e-5,
        max_position_embeddings=202752, eos_token_id=(154820, 154827, 154829), pad_token_id=154820,
        index_share_for_mtp_iteration=False,
    )  # fmt: skip
    assert {name: getattr(cfg, name) for name in expected} == expected
    assert cfg.qk_head_dim == 256 and cfg.latent_eps == 1e-5
    assert [kind for kind, _ in cfg.layer_kinds] == ["dense"] * 3 + ["moe"] * 75


def test_glm5_2_differs_in_sharing_and_positions_only():
    changed = {f.name for f in dataclasses.fields(ModelConfig) if getattr(glm5(), f.name) != getattr(glm5_2(), f.name)}
    assert changed == {
        "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration", "rope_theta",
        "max_position_embeddings",
    }  # fmt: skip
    assert (glm5_2().rope_theta, glm5_2().max_position_embeddings) == (8e6, 1048576)


def test_presets_take_overrides_and_are_listed():
    assert PRESETS == {f.__name__: f for f in (glm5, glm5_2, glm47_flash, small, tiny)}
    for preset in PRESETS.values():
        assert preset(index_topk=3).index_topk == 3


def test_latent_epsilon_is_rms_norm_eps_unless_given():
    assert tiny(rms_norm_eps=1e-4).latent_eps == 1e-4
    assert tiny(latent_norm_eps=1e-6).latent_eps == 1e-6


def test_configs_cannot_be_changed_and_lists_become_tuples():
    cfg = tiny(eos_token_id=[1, 2], indexer_types=["full"] * 4)
    assert cfg.eos_token_id == (1, 2) and cfg.indexer_types == ("full",) * 4 and hash(cfg) == hash(cfg)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.hidden_size = 1


# Refusals


POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
    "n_shared_experts n_group "
    "topk_group index_n_heads index_head_dim index_topk index_topk_freq max_position_embeddings query_chunk"
).split()


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_widths_and_counts_are_positive(name, value):
    with pytest.raises(UserError) as error:
        tiny(**{name: value})
    one_line(error, name, value)


@pytest.mark.parametrize("settings, words", [
    ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "even"]),
    ({"index_head_dim": 8}, ["index_head_dim=8", "qk_rope_head_dim=16"]),
    ({"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "n_routed_experts=8"]),
    ({"n_group": 3}, ["n_group=3", "n_routed_experts=8"]),
    ({"n_group": 2, "topk_group": 3}, ["topk_group=3"]),
    ({"n_group": 8, "topk_group": 1}, ["num_experts_per_tok=2", "topk_group=1"]),
    ({"first_k_dense_replace": 5}, ["first_k_dense_replace=5", "num_hidden_layers=4"]),
    ({"first_k_dense_replace": -1}, ["first_k_dense_replace=-1"]),
    ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers=2"]),
    ({"dtype": "float16"}, ["dtype=float16", "bfloat16"]),
    ({"indexer_types": ("full",) * 3}, ["indexer_types", "4", "3"]),
    ({"indexer_types": ("full", "full", "none", "full")}, ["indexer_types", "none"]),
    ({"indexer_types": ("shared", "full", "full", "full")}, ["layer 0"]),
    ({"index_topk_pattern": "FFF"}, ["index_topk_pattern", "FFF", "4"]),
    ({"index_topk_pattern": "FfFF"}, ["index_topk_pattern", "FfFF"]),
    ({"index_topk_pattern": "SFFF"}, ["layer 0"]),
    ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["layer 0"]),
], ids=str)  # fmt: skip
def test_invalid_combinations(settings, words):
    with pytest.raises(UserError) as error:
        tiny(**settings)
    one_line(error, *words)


def test_unknown_overrides_are_named():
    with pytest.raises(UserError) as error:
        override(tiny(), hidden=3, index_topk=4)
    one_line(error, "hidden")


# config.json


@pytest.fixture
def raw():
    return json.loads((GOLDENS / "glm52_tiny" / "config.json").read_text())


def refused(raw, *words):
    with pytest.raises(UserError) as error:
        config_from_hf(raw)
    one_line(error, *words)


def test_another_architecture_is_refused(raw):
    for kind in ("glm5_next", "deepseek_v32", None):
        refused(raw | {"model_type": kind}, "model_type", kind, "glm_moe_dsa")


REQUIRED = (
    "vocab_size hidden_size num_hidden_layers first_k_dense_replace num_attention_heads q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size num_experts_per_tok "
    "n_shared_experts norm_topk_prob routed_scaling_factor index_n_heads index_head_dim index_topk rms_norm_eps "
    "max_position_embeddings n_routed_experts"
).split()


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_not_guessed(raw, name):
    del raw[name]
    refused(raw, name)


@pytest.mark.parametrize("name, value", [
    ("scoring_func", "softmax"), ("topk_method", "greedy"), ("hidden_act", "gelu"), ("attention_bias", True),
    ("tie_word_embeddings", True), ("rope_interleave", False), ("moe_layer_freq", 2),
])  # fmt: skip
def test_another_network_is_refused_and_absence_means_this_one(raw, name, value):
    expected = config_from_hf(raw)
    refused(raw | {name: value}, name, value)
    assert config_from_hf({k: v for k, v in raw.items() if k != name}) == expected


def test_rope_theta_is_read_from_both_places_and_never_guessed(raw):
    assert config_from_hf(raw).rope_theta == 8e6
    nested = raw.pop("rope_parameters")
    refused(raw, "rope_theta")
    refused(raw | {"rope_parameters": {"rope_type": "default"}}, "rope_theta")
    refused(raw | {"rope_parameters": None}, "rope_theta")
    assert config_from_hf(raw | {"rope_theta": 5e5}).rope_theta == 5e5
    assert config_from_hf(raw | {"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert config_from_hf(raw | {"rope_theta": 5e5, "rope_parameters": nested}).rope_theta == 8e6


@pytest.mark.parametrize("field", [
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}},
    {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4}},
    {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4}},
])  # fmt: skip
def test_another_rope_is_refused(raw, field):
    refused(raw | field, "rope_type", "yarn")


def test_head_dim_is_ignored(raw):
    for width in (192, 24, 8):
        cfg = config_from_hf(raw | {"head_dim": width})
        assert cfg.qk_rope_head_dim == 8 and cfg.qk_head_dim == 32


def test_no_mtp_layer_when_the_count_is_null_zero_or_absent(raw):
    for value in (None, 0):
        assert config_from_hf(raw | {"num_nextn_predict_layers": value}).num_nextn_predict_layers == 0
    del raw["num_nextn_predict_layers"]
    assert config_from_hf(raw).num_nextn_predict_layers == 0


def test_aliases_of_the_expert_count(raw):
    count = raw.pop("n_routed_experts")
    for name in ("num_local_experts", "num_experts"):
        assert config_from_hf(raw | {name: count}).n_routed_experts == count
    refused(raw | {"n_routed_experts": count, "num_experts": 2 * count}, "n_routed_experts", count, 2 * count)


def test_list_pattern_and_frequency_of_the_file(raw):
    assert letters(config_from_hf(raw)) == "FFFSSSF"
    other = ["full", "shared", "full", "shared", "shared", "full", "shared"]
    assert letters(config_from_hf(raw | {"indexer_types": other})) == "FSFSSFS"
    del raw["indexer_types"]
    assert letters(config_from_hf(raw)) == "FFFSSSF"
    assert letters(config_from_hf(raw | {"index_topk_pattern": "FSSSFSS"})) == "FSSSFSS"


def test_ffn_kinds_must_fit_the_dense_count(raw):
    refused(raw | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5}, "mlp_layer_types", "first_k_dense_replace=1")


def test_one_end_of_text_id_or_several(raw):
    assert config_from_hf(raw).eos_token_id == (2, 3, 5)
    assert config_from_hf(raw | {"eos_token_id": 7}).eos_token_id == (7,)
    assert config_from_hf(raw | {"eos_token_id": 7, "pad_token_id": None}).pad_token_id == 7


@pytest.mark.parametrize("cfg", [
    tiny(), glm5(), glm5_2(), glm47_flash(), small(),
    reference.micro_config(latent_norm_eps=None, n_group=3, topk_group=2),
    reference.micro_config(latent_norm_eps=None, index_topk_pattern="FSF", indexer_rope_interleave=False),
], ids=lambda c: f"{c.hidden_size}-{letters(c)[:8]}")  # fmt: skip
def test_what_is_written_is_read_back(cfg):
    raw = json.loads(json.dumps(config_to_hf(cfg, "float32")))
    again = config_from_hf(raw)
    assert again.layer_kinds == cfg.layer_kinds
    assert dataclasses.replace(again, indexer_types=None) == dataclasses.replace(cfg, indexer_types=None)
    assert raw["head_dim"] == cfg.qk_rope_head_dim and raw["qk_head_dim"] == cfg.qk_head_dim
