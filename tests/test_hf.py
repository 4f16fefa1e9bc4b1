"""Checkpoints in and out: exact round trips, strict loading, FP8, the published tensor list without allocating it."""

import dataclasses
import json
import math
import re
import shutil
import tracemalloc
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import reference
from conftest import GOLDENS
from glm5_jax.config import glm5, glm5_2, small
from glm5_jax.convert.hf import load_hf, save_hf
from glm5_jax.convert.published import from_published, stored, tensor_list, tensor_table, to_published
from glm5_jax.convert.safetensors_dir import TensorDirectory, dequantise
from glm5_jax.errors import UserError
from glm5_jax.model import split

NAMES = ["glm5_tiny", "glm52_tiny", "glm5_fp8_tiny", "glm5_eps_tiny"]
PLAIN = [n for n in NAMES if n != "glm5_fp8_tiny"]


def tensors(path):
    """Every tensor of a directory, by the safetensors library."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bits(a):
    return np.asarray(a).view(np.uint8)


def same_model(a, b):
    for x, y in zip(jax.tree.leaves(split(a)[1]), jax.tree.leaves(split(b)[1]), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits(x), bits(y))


# Round trips


@pytest.mark.parametrize("name", PLAIN)
def test_saving_a_loaded_checkpoint_gives_the_file_back(golden, tmp_path, name):
    g = golden(name)
    save_hf(g.model(), tmp_path / "out")
    expected, got = load_file(g.path / "model.safetensors"), tensors(tmp_path / "out")
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype and got[key].shape == tensor.shape
        np.testing.assert_array_equal(bits(got[key]), bits(tensor), err_msg=key)
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_save_load_is_bit_equal(golden, tmp_path, name, dtype):
    model = load_hf(golden(name).path, dtype=dtype)
    save_hf(model, tmp_path / "out")
    again = load_hf(tmp_path / "out", dtype=dtype)
    same_model(again, model)
    kinds = tuple("full" if full else "shared" for _, full in model.cfg.layer_kinds)
    assert again.cfg == dataclasses.replace(model.cfg, indexer_types=kinds)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == dtype and "quantization_config" not in config
    kinds = {key: t.dtype for key, t in tensors(tmp_path / "out").items()}
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    assert {d for key, d in kinds.items() if not key.endswith("e_score_correction_bias")} == {narrow}
    assert {d for key, d in kinds.items() if key.endswith("e_score_correction_bias")} == {np.dtype(np.float32)}


def test_shards_with_an_index(golden, tmp_path):
    g = golden("glm52_tiny")
    limit = 100_000
    save_hf(g.model(), tmp_path / "out", shard_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 10 and not (tmp_path / "out" / "model.safetensors").exists()
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    held, total = {}, 0
    for file in files:
        content = load_file(file)
        size = sum(t.nbytes for t in content.values())
        assert size <= limit or len(content) == 1
        held |= dict.fromkeys(content, file.name)
        total += size
    assert index["weight_map"] == held and index["metadata"]["total_size"] == total
    same_model(load_hf(tmp_path / "out", latent_norm_eps=1e-6), g.model())
    with safe_open(files[0], "np") as f:
        assert f.metadata() == {"format": "pt"}


def test_random_models_survive_a_round_trip(tmp_path):
    types = ("full", "shared", "full")
    cfg = reference.micro_config(latent_norm_eps=None, indexer_types=types, n_group=3, topk_group=2)
    model = reference.random_model(cfg)
    save_hf(model, tmp_path / "out")
    again = load_hf(tmp_path / "out")
    same_model(again, model)
    assert again.cfg == cfg


def test_every_parameter_is_published_exactly_once():
    types = ("full", "full", "shared", "shared", "full", "shared", "shared")
    cfg = reference.micro_config(num_hidden_layers=7, indexer_types=types)
    model = reference.random_model(cfg)
    total = sum(x.size for x in jax.tree.leaves(split(model)[1]))
    assert sum(math.prod(shape) for shape in tensor_list(cfg).values()) == total
    assert sum(t.size for t in reference.published(model).values()) == total


def test_published_layout_is_out_by_in_with_heads_outermost():
    table = tensor_table(reference.micro_config())
    pieces = table["model.layers.0.self_attn.q_b_proj.weight"]
    tensor = np.arange(2 * 10 * 14).reshape(20, 14)
    (ours,) = from_published(tensor, pieces)
    for q, n, h in np.ndindex(14, 2, 10):
        assert ours[q, n, h] == tensor[n * 10 + h, q]
    np.testing.assert_array_equal(to_published([ours], pieces), tensor)
    pieces = table["model.layers.0.self_attn.o_proj.weight"]
    tensor = np.arange(24 * 10).reshape(24, 10)
    (ours,) = from_published(tensor, pieces)
    for n, v, d in np.ndindex(2, 5, 24):
        assert ours[n, v, d] == tensor[d, n * 5 + v]


def test_saving_onto_existing_files_is_refused(golden, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not empty"):
        save_hf(golden("glm5_eps_tiny").model(), tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    save_hf(golden("glm5_eps_tiny").model(), tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_save_that_fails_leaves_nothing(golden, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(UserError, match="No space left"):
        save_hf(golden("glm5_eps_tiny").model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Strict loading


@pytest.fixture
def broken(tmp_path):
    """broken(name, tensors=edit, config=edit) -> a copy of a golden checkpoint, edited."""

    def make(name, edit=lambda t: None, config=lambda c: None):
        path = tmp_path / "broken"
        shutil.copytree(GOLDENS / name, path, ignore=shutil.ignore_patterns("cases*", "meta*"))
        content = load_file(path / "model.safetensors") if name != "glm5_fp8_tiny" else raw_tensors(path)
        edit(content)
        write_raw(path / "model.safetensors", content)
        settings = json.loads((path / "config.json").read_text())
        config(settings)
        (path / "config.json").write_text(json.dumps(settings))
        return path

    return make


CODES = {
    "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float16": "F16", "float64": "F64", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def raw_tensors(path):
    """Like `tensors`, float8 included: read by hand from the file's header."""
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    kinds = {code: np.dtype(getattr(ml_dtypes, name, None) or name) for name, code in CODES.items()}
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def write_raw(file, content):
    header, blobs, at = {}, [], 0
    for name, tensor in content.items():
        blob = np.ascontiguousarray(tensor).tobytes()
        header[name] = {"dtype": CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def refused(path, *words, **overrides):
    with pytest.raises(UserError) as error:
        load_hf(path, **overrides)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_missing_tensor_is_named(broken):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    refused(broken("glm5_tiny", lambda t: t.pop(name)), "1 missing", name)


def test_an_unexpected_tensor_is_named(broken):
    refused(broken("glm5_tiny", lambda t: t.update(extra=np.zeros(3, np.float32))), "1 unexpected", "extra")


def test_a_misshapen_tensor_is_named_with_both_shapes(broken):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    path = broken("glm5_tiny", lambda t: t.update({name: t[name].T.copy()}))
    refused(path, "1 misshapen", name, "(16, 224)", "(224, 16)")


def test_indexer_tensors_on_a_shared_layer_are_refused(broken):
    def add(t):
        t.update({k.replace("layers.2.", "layers.3."): v for k, v in t.items() if "layers.2.self_attn.indexer" in k})

    refused(broken("glm52_tiny", add), "5 unexpected", "model.layers.3.self_attn.indexer.wk.weight")


def test_missing_indexer_tensors_on_a_full_layer_are_refused(broken):
    def drop(t):
        for key in [k for k in t if "layers.6.self_attn.indexer" in k]:
            del t[key]

    refused(broken("glm52_tiny", drop), "5 missing", "model.layers.6.self_attn.indexer.wk.weight")


def test_5_2_weights_do_not_load_as_a_model_with_every_layer_full(broken):
    def forget(c):
        for key in ("indexer_types", "index_topk_freq", "index_skip_topk_offset"):
            del c[key]

    refused(broken("glm52_tiny", config=forget), "15 missing", "model.layers.3.self_attn.indexer")


def test_too_many_names_are_counted_not_listed(broken):
    path = broken("glm5_tiny", lambda t: [t.pop(k) for k in list(t) if "experts." in k and "shared" not in k])
    refused(path, f"{4 * 8 * 3} missing", " ...")


def test_an_absent_mtp_layer_warns_and_gives_a_model_without_it(broken, golden):
    path = broken("glm5_tiny", lambda t: [t.pop(k) for k in list(t) if k.startswith("model.layers.4.")])
    with pytest.warns(UserWarning, match="MTP layer is absent"):
        model = load_hf(path, latent_norm_eps=1e-6)
    assert model.mtp is None and model.cfg.num_nextn_predict_layers == 0
    g = golden("glm5_tiny")
    logits = model(g.cases["plus1/input_ids"]).logits
    np.testing.assert_allclose(logits, g.cases["plus1/logits"], rtol=0, atol=5e-4)


def test_half_an_mtp_layer_is_refused(broken):
    refused(broken("glm5_tiny", lambda t: t.pop("model.layers.4.eh_proj.weight")), "1 missing", "eh_proj")


@pytest.mark.parametrize("value", [None, 0])
def test_without_an_mtp_count_the_mtp_tensors_are_unexpected(broken, value):
    path = broken("glm5_tiny", config=lambda c: c.update(num_nextn_predict_layers=value))
    refused(path, "unexpected", "model.layers.4.")


def test_a_complete_checkpoint_loads_without_a_warning(golden):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_hf(golden("glm5_tiny").path)


def test_another_architecture_is_refused(broken):
    refused(broken("glm5_tiny", config=lambda c: c.update(model_type="glm5_next")), "glm5_next", "glm_moe_dsa")


def test_an_absent_rope_theta_is_refused(broken):
    refused(broken("glm5_tiny", config=lambda c: c.pop("rope_parameters")), "rope_theta")


def test_rope_parameters_that_are_no_object_are_refused(broken):
    refused(broken("glm5_tiny", config=lambda c: c.update(rope_parameters="x")), "rope_parameters='x': must be an object")


def test_rope_theta_at_the_top_level_gives_the_same_outputs(broken, golden):
    path = broken("glm5_tiny", config=lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"]))
    assert load_hf(path, latent_norm_eps=1e-6).cfg == golden("glm5_tiny").model().cfg


def test_an_absent_scoring_func_means_sigmoid(broken, golden):
    path = broken("glm5_tiny", config=lambda c: c.pop("scoring_func"))
    assert load_hf(path, latent_norm_eps=1e-6).cfg == golden("glm5_tiny").model().cfg


def test_unknown_overrides_and_dtypes_are_refused(golden):
    refused(golden("glm5_eps_tiny").path, "latent_eps_norm", latent_eps_norm=1e-6)
    refused(golden("glm5_eps_tiny").path, "float16", dtype="float16")


@pytest.mark.parametrize("name", ["glm5_eps_tiny", "glm5_fp8_tiny"])
def test_a_file_truncated_at_any_byte_is_refused(broken, name):
    path = broken(name)
    file = path / "model.safetensors"
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    places = [0, 1, 7, 8, 9, header, 7 + header, 8 + header, 9 + header, len(data) - 1]
    places += np.linspace(10, len(data) - 2, 25).astype(int).tolist()
    for n in places:
        file.write_bytes(data[:n])
        refused(path, "model.safetensors")


@pytest.mark.parametrize("content", [b"\xff" * 64, b"\2" + bytes(7) + b"[]", b"\7" + bytes(7) + b'{"a":1}'])
def test_a_file_that_is_no_safetensors_is_refused(broken, content):
    path = broken("glm5_eps_tiny")
    (path / "model.safetensors").write_bytes(content)
    refused(path, "model.safetensors")


def test_a_header_that_lies_about_sizes_is_refused(broken):
    path = broken("glm5_eps_tiny")
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    lies = {"data_offsets": [0, 4]}, {"dtype": "F4"}, {"shape": None}, {"data_offsets": [-8, 4096]}, {"shape": [1.0]}
    for edit in lies:
        wrong = header | {"lm_head.weight": header["lm_head.weight"] | edit}
        text = json.dumps(wrong).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(path, "model.safetensors")


@pytest.mark.parametrize("kind", ["int64", "int32", "int16", "int8", "uint8", "bool", ml_dtypes.float8_e5m2])
def test_weights_that_are_no_floats_with_a_known_value_are_refused(broken, kind):
    """They would be cast: values of another quantisation without its scales."""
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    path = broken("glm5_tiny", lambda t: t.update({name: t[name].astype(kind)}))
    code = CODES[np.dtype(kind).name]
    refused(path, f"model.safetensors: {name} is {code}; weights are read from F64, F32, F16, BF16, F8_E4M3")


@pytest.mark.parametrize("kind", ["float64", "float16", ml_dtypes.bfloat16])
def test_weights_of_other_float_dtypes_are_read(broken, golden, kind):
    name = "model.norm.weight"
    expected = load_file(golden("glm5_tiny").path / "model.safetensors")[name].astype(kind).astype(np.float32)
    path = broken("glm5_tiny", lambda t: t.update({name: t[name].astype(kind)}))
    assert np.array_equal(TensorDirectory(path).read(name, np.float32), expected)


def test_tensors_in_the_same_bytes_are_refused(broken):
    path = broken("glm5_eps_tiny")
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    norms = [name for name in header if name.endswith("input_layernorm.weight")]
    header[norms[0]] = header[norms[1]]
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    refused(path, "lie in the same bytes")


def test_missing_files_and_broken_json_are_refused(broken, tmp_path):
    refused(tmp_path / "nowhere", "config.json")
    path = broken("glm5_eps_tiny")
    (path / "model.safetensors").unlink()
    refused(path, "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    refused(path, "gone.safetensors")
    for text in ("{", "[]", '{"weight_map": 3}'):
        (path / "model.safetensors.index.json").write_text(text)
        refused(path, "index")
    for text in ("{", "[]"):
        (path / "config.json").write_text(text)
        refused(path, "config.json")


def test_a_tensor_in_two_shards_is_refused(golden, tmp_path):
    save_hf(golden("glm5_eps_tiny").model(), tmp_path / "out", shard_bytes=30_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    double = load_file(files[0]) | load_file(files[1])
    save_file(double, files[1])
    refused(tmp_path / "out", "is in")


def test_a_missing_shard_is_refused(golden, tmp_path):
    save_hf(golden("glm5_eps_tiny").model(), tmp_path / "out", shard_bytes=30_000)
    (tmp_path / "out" / "model-00002-of-00004.safetensors").unlink(missing_ok=False)
    refused(tmp_path / "out", "model-00002-of-")


# FP8

SCALED = "model.layers.1.self_attn.kv_b_proj.weight"


def test_dequantised_values_are_the_weight_times_the_scale_of_its_block(golden):
    g = golden("glm5_fp8_tiny")
    files, raw = TensorDirectory(g.path), raw_tensors(g.path)
    scaled = [name for name in raw if name + "_scale_inv" in raw]
    assert len(scaled) > 20
    for name in scaled:
        weight, scale = raw[name].astype(np.float64), raw[name + "_scale_inv"].astype(np.float64)
        expected = np.empty_like(weight)
        for i, j in np.ndindex(scale.shape):
            block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            expected[block] = weight[block] * scale[i, j]
        np.testing.assert_array_equal(files.read(name), expected.astype(np.float32))
    assert any(raw[name].shape[0] > 128 and raw[name].shape[0] % 128 for name in scaled)


def test_heads_straddle_blocks_so_kv_b_is_dequantised_before_it_is_cut(golden):
    """56 rows a head against blocks of 128: the scale of a head's rows changes in its middle."""
    g = golden("glm5_fp8_tiny")
    scale = raw_tensors(g.path)[SCALED + "_scale_inv"]
    assert scale.shape == (2, 2) and scale[0, 0] != scale[1, 0]
    kv_b = TensorDirectory(g.path).read(SCALED).reshape(4, 24 + 32, 136)
    layer = split(g.model())[1]["groups"][1]["layers"]["attention"]
    np.testing.assert_array_equal(np.asarray(layer["k_up"])[0].transpose(1, 2, 0), kv_b[:, :24])
    np.testing.assert_array_equal(np.asarray(layer["v_up"])[0].transpose(1, 2, 0), kv_b[:, 24:])


def test_scales_need_not_be_powers_of_two():
    weight = np.array([[1.0, -448.0], [0.5, 2**-9]]).astype(ml_dtypes.float8_e4m3fn)
    got = dequantise(weight, np.array([[0.003]], np.float32))
    np.testing.assert_array_equal(got, np.array([[1.0, -448.0], [0.5, 2**-9]], np.float32) * np.float32(0.003))


def test_rows_permuted_across_a_block_are_read_with_the_scales_of_their_new_place():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5], [3.0]], np.float32)
    order = rng.permutation(256)
    first, after = dequantise(weight, scale)[order], dequantise(weight[order], scale)
    assert (first != after).mean() > 0.3  # dequantise, then permute


def test_an_fp8_tensor_without_its_scale_is_refused(broken):
    refused(broken("glm5_fp8_tiny", lambda t: t.pop(SCALED + "_scale_inv")), SCALED, "FP8")


def test_a_renamed_scale_is_refused(broken):
    def rename(t):
        t[SCALED + "_scale"] = t.pop(SCALED + "_scale_inv")

    refused(broken("glm5_fp8_tiny", rename), SCALED)


def test_a_misshapen_scale_is_refused(broken):
    refused(broken("glm5_fp8_tiny", lambda t: t.update({SCALED + "_scale_inv": np.ones((1, 2), np.float32)})), "(1, 2)")


def test_a_scale_of_nothing_is_refused(broken):
    scale = {"a.weight_scale_inv": np.ones((1, 1), np.float32)}
    refused(broken("glm5_fp8_tiny", lambda t: t.update(scale)), "a.weight")


def test_a_scale_on_a_plain_tensor_is_refused(broken):
    path = broken("glm5_fp8_tiny", lambda t: t.update({SCALED: t[SCALED].astype(np.float32)}))
    refused(path, SCALED, "not FP8")


# The published tensor list


def published_tensors(full_layers):
    """Name -> shape of GLM-5's checkpoint, spelled out from the released headers."""
    table = {
        "model.embed_tokens.weight": (154880, 6144),
        "model.norm.weight": (6144,),
        "lm_head.weight": (154880, 6144),
    }
    for i in range(79):
        layer = {
            "input_layernorm.weight": (6144,),
            "post_attention_layernorm.weight": (6144,),
            "self_attn.q_a_proj.weight": (2048, 6144),
            "self_attn.q_a_layernorm.weight": (2048,),
            "self_attn.q_b_proj.weight": (16384, 2048),
            "self_attn.kv_a_proj_with_mqa.weight": (576, 6144),
            "self_attn.kv_a_layernorm.weight": (512,),
            "self_attn.kv_b_proj.weight": (28672, 512),
            "self_attn.o_proj.weight": (6144, 16384),
        }
        if i in full_layers or i == 78:
            layer |= {
                "self_attn.indexer.wq_b.weight": (4096, 2048),
                "self_attn.indexer.wk.weight": (128, 6144),
                "self_attn.indexer.k_norm.weight": (128,),
                "self_attn.indexer.k_norm.bias": (128,),
                "self_attn.indexer.weights_proj.weight": (32, 6144),
            }
        widths = {"mlp": 12288}
        if i >= 3:
            widths = {f"mlp.experts.{e}": 2048 for e in range(256)} | {"mlp.shared_experts": 2048}
        for name, width in widths.items():
            layer |= {f"{name}.{part}_proj.weight": (width, 6144) for part in ("gate", "up")}
            layer[f"{name}.down_proj.weight"] = (6144, width)
        if i >= 3:
            layer |= {"mlp.gate.weight": (256, 6144), "mlp.gate.e_score_correction_bias": (256,)}
        if i == 78:
            layer |= {"eh_proj.weight": (6144, 12288)}
            layer |= {f"{name}.weight": (6144,) for name in ("enorm", "hnorm", "shared_head.norm")}
        table |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return table


def elements(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


# The scales of the released FP8 files: not of embeddings, head, router, indexer head weights, eh_proj; partial blocks count.
UNSCALED = r"embed_tokens|lm_head|mlp\.gate\.|weights_proj|eh_proj"
SCALES = {
    "self_attn.q_a_proj": (16, 48), "self_attn.q_b_proj": (128, 16), "self_attn.kv_a_proj_with_mqa": (5, 48),
    "self_attn.kv_b_proj": (224, 4), "self_attn.o_proj": (48, 128), "self_attn.indexer.wq_b": (32, 16),
    "self_attn.indexer.wk": (1, 48), "mlp.experts.255.up_proj": (16, 48), "mlp.experts.0.down_proj": (48, 16),
}  # fmt: skip


@pytest.mark.parametrize("cfg, full_layers, count, total, without_mtp, in_fp8", [
    (glm5(), range(78), 59_870, 753_864_139_008, 743.911e9, 59_870 + 79 * 7 + 9 + 76 * 771),
    (glm5_2(), [0, 1, 2, *range(6, 78, 4)], 59_585, 753_329_940_480, 743.377e9, 118_629),
], ids=["GLM-5", "GLM-5.2"])  # fmt: skip
def test_the_tensor_list_is_the_published_one_and_nothing_is_allocated(cfg, full_layers, count, total, without_mtp, in_fp8):
    tracemalloc.start()
    got = tensor_list(cfg)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got == published_tensors(full_layers)
    assert len(got) == count and elements(got) == total
    assert peak < 500e6 and sum(a.nbytes for a in jax.live_arrays()) < 500e6
    fp8 = {name: tensor for group in stored(cfg, "fp8") for name, tensor in group.items()}
    scaled = {name for name, shape in got.items() if len(shape) == 2 and not re.search(UNSCALED, name)}
    assert fp8.keys() == got.keys() | {f"{name}_scale_inv" for name in scaled}
    assert len(fp8) == in_fp8
    if cfg == glm5_2():
        assert sum(t.nbytes for t in fp8.values()) == 755_617_140_416
    for name, shape in SCALES.items():
        assert fp8[f"model.layers.6.{name}.weight_scale_inv"] == (np.float32, shape)
    trunk = {name: shape for name, shape in got.items() if not name.startswith("model.layers.78.")}
    assert elements(trunk) == pytest.approx(without_mtp, abs=5e5)


def test_the_small_preset_has_27_3_million_parameters():
    assert elements(tensor_list(small())) == pytest.approx(27.3e6, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_tensor_list_of_a_golden_is_its_file(golden, name):
    g = golden(name)
    raw = {k: t.shape for k, t in raw_tensors(g.path).items() if not k.endswith("_scale_inv")}
    assert tensor_list(g.model().cfg) == raw
