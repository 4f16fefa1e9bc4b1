"""glm5 convert: runs and Hugging Face directories, in bounded memory, after a kill to the same bits, bad input in one line."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import glm5_jax
import reference
from conftest import GOLDENS
from glm5_jax import cli
from glm5_jax.bench.convert import STEPS, config_2gb, measure, same_tensors
from glm5_jax.convert import hf, published
from glm5_jax.convert.hf import load_hf, save_hf
from glm5_jax.convert.safetensors_dir import TensorDirectory, dequantise, quantise
from glm5_jax.convert.tokenizer import train_bpe
from glm5_jax.errors import UserError
from glm5_jax.model import flat, split
from glm5_jax.train import checkpoint
from glm5_jax.train.checkpoint import CheckpointConfig, Checkpoints
from glm5_jax.train.convert import convert
from glm5_jax.train.inherit import first_state
from glm5_jax.train.report import evaluate_directory
from glm5_jax.train.run_dir import read_config, run_tokenizer
from glm5_jax.train.stages import InitConfig

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
WIDE = dict(  # several blocks of 128 and a part of one in most matrices, heads that are no multiple of a block
    hidden_size=136, num_attention_heads=3, q_lora_rank=144, kv_lora_rank=130, qk_nope_head_dim=60, v_head_dim=50,
    intermediate_size=150, moe_intermediate_size=140, vocab_size=40, num_nextn_predict_layers=1,
)  # fmt: skip


def quiet(*args):
    return convert(*args, say=lambda line: None)


def arrays(model) -> dict:
    return {path: np.asarray(x) for path, x in flat(split(model)[1]).items()}


def same_bits(a: dict, b: dict):
    assert a.keys() == b.keys()
    for path, x in a.items():
        assert x.dtype == b[path].dtype and x.shape == b[path].shape, path
        np.testing.assert_array_equal(x.view(np.uint8), b[path].view(np.uint8), err_msg=str(path))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(model, directory) of a random model with many blocks."""
    model = reference.random_model(reference.micro_config(**WIDE))
    path = tmp_path_factory.mktemp("wide") / "hf"
    save_hf(model, path)
    return model, path


@pytest.fixture(params=["whole", "in bands"])
def pieces(request, monkeypatch):
    """Tensors as one piece of work each, and in bands of a few rows."""
    if request.param == "in bands":
        monkeypatch.setattr(published, "PIECE_BYTES", 20_000)


# Values


def test_a_run_made_of_a_checkpoint_holds_its_values(wide, tmp_path, pieces):
    model, path = wide
    quiet(path, tmp_path / "run", "run", "")
    expected = arrays(model)
    same_bits(arrays(glm5_jax.load(tmp_path / "run")), expected)
    narrow = {at: x if "router_bias" in at else x.astype(ml_dtypes.bfloat16) for at, x in expected.items()}
    same_bits(arrays(glm5_jax.load(tmp_path / "run", dtype="bfloat16")), narrow)
    quiet(path, tmp_path / "narrow", "run", "bfloat16")
    same_bits(arrays(glm5_jax.load(tmp_path / "narrow", dtype="bfloat16")), narrow)
    same_bits(arrays(glm5_jax.load(tmp_path / "narrow")), {at: x.astype(np.float32) for at, x in narrow.items()})
    for run in ("run", "narrow"):
        quiet(tmp_path / run, tmp_path / f"{run}-hf", "hf", "")
    assert same_tensors(path, tmp_path / "run-hf")
    same_bits(arrays(load_hf(tmp_path / "narrow-hf", dtype="bfloat16")), narrow)


def test_the_arrays_are_those_that_orbax_reads_by_itself(wide, tmp_path, pieces):
    model, path = wide
    quiet(path, tmp_path / "run", "run", "")
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "run" / "checkpoints" / "0" / "arrays" / "params")
    same_bits(found, {".".join(map(str, ("params", *at))): x for at, x in arrays(model).items()})


def test_fp8_written_is_the_nearest_to_each_value_under_the_scale_of_its_block(wide, tmp_path, pieces):
    """Scales and values from float64 loops over blocks and all 256 values of the format."""
    _, path = wide
    quiet(path, tmp_path / "fp8", "hf", "fp8")
    source, files = TensorDirectory(path), TensorDirectory(tmp_path / "fp8")
    quantised = [name for name in source.names() if files.dtype(name) == ml_dtypes.float8_e4m3fn]
    partial = 0
    for name in quantised[:: max(1, len(quantised) // 12)] + ["model.layers.1.self_attn.kv_b_proj.weight"]:
        values = source.read(name).astype(np.float64)
        stored = files._rows(name, 0, None).astype(np.float64)
        scales = files._rows(name + "_scale_inv", 0, None)
        assert scales.shape == tuple(math.ceil(n / 128) for n in values.shape) and scales.dtype == np.float32
        for i, j in np.ndindex(scales.shape):
            block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert scales[i, j] == pytest.approx(np.abs(values[block]).max() / 448, rel=1e-6)
            exact = values[block] / np.float64(scales[i, j])
            least = np.nanmin(np.abs(exact[..., None] - E4M3), axis=-1)
            assert np.all(np.abs(stored[block] - exact) <= least * (1 + 1e-5) + 1e-7)
            partial += exact.shape != (128, 128)
        assert np.abs(stored).max() == 448
    assert partial > 10
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["fmt"], config["weight_block_size"]) == ("fp8", "e4m3", [128, 128])
    plain = {name for name in source.names() if name not in quantised}
    kinds = {re.sub(r"model\.layers\.\d+\.", "", name) for name in plain if len(source.shape(name)) == 2}
    unscaled = "embed_tokens lm_head mlp.gate self_attn.indexer.weights_proj eh_proj".split()
    assert kinds == {("model." if name == "embed_tokens" else "") + name + ".weight" for name in unscaled}
    assert set(config["modules_to_not_convert"]) == {n.removesuffix(".weight") for n in plain if len(source.shape(n)) == 2}
    assert {str(files.dtype(name)) for name in plain} == {"bfloat16", "float32"}


def test_fp8_is_dequantised_on_the_way_to_a_run(wide, tmp_path, pieces):
    _, path = wide
    quiet(path, tmp_path / "fp8", "hf", "fp8")
    quiet(tmp_path / "fp8", tmp_path / "run", "run", "float32")
    files = TensorDirectory(tmp_path / "fp8")
    quiet(tmp_path / "run", tmp_path / "out", "hf", "")
    out = TensorDirectory(tmp_path / "out")
    for name in files.names():
        expected = files._rows(name, 0, None).astype(np.float32)
        if files.dtype(name) == ml_dtypes.float8_e4m3fn:
            scales = files._rows(name + "_scale_inv", 0, None)
            for i, j in np.ndindex(scales.shape):
                expected[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scales[i, j]
        np.testing.assert_array_equal(out.read(name), expected, err_msg=name)


@pytest.mark.parametrize("rows, columns", [(1, 1), (128, 128), (129, 127), (576, 300), (130, 1030), (3, 2048)])
def test_quantised_values_come_back_to_half_a_step(rows, columns):
    rng = np.random.default_rng(rows)
    values = (rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)
    values[: rows // 3] = 0  # the first blocks of (576, 300) hold nothing else
    stored, scales = quantise(values)
    for i, j in np.ndindex(scales.shape):
        largest = np.abs(values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max()
        assert scales[i, j] == pytest.approx(largest / 448 if largest else 1, rel=1e-6)
    step = np.repeat(np.repeat(scales, 128, 0)[:rows], 128, 1)[:, :columns]
    error = np.abs(dequantise(stored, scales).astype(np.float64) - values)
    assert np.all(error <= np.maximum(np.abs(values) / 16, step / 1024) * (1 + 1e-6))
    assert np.all(np.isfinite(scales)) and np.all(scales > 0)


def test_blocks_of_zeros_and_of_the_smallest_numbers_are_no_nan():
    values = np.zeros((200, 130), np.float32)
    values[150, 129] = np.float32(1e-44)
    stored, scales = quantise(values)
    assert not np.isnan(stored.astype(np.float32)).any() and scales[0, 0] == 1
    np.testing.assert_allclose(dequantise(stored, scales), values, atol=1e-40)


def test_ties_go_to_even_and_what_is_next_to_a_tie_does_not():
    """Between all neighbours of the format: just below the middle, on it, just above."""
    codes = np.arange(0x7E, dtype=np.uint8)
    low, high = E4M3[codes], E4M3[codes + 1]
    middle = ((low + high) / 2).astype(np.float32)
    values = np.stack([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(448)), middle], 1)
    values[:, 3] = 448  # the scale of every row's block is 1
    stored = quantise(np.concatenate([values, -values]).reshape(-1, 4))[0].view(np.uint8)
    expected = np.stack([codes, codes + (codes & 1), codes + 1, np.full_like(codes, 0x7E)], 1)
    np.testing.assert_array_equal(stored, np.concatenate([expected, expected | 0x80]))


def test_a_band_of_fp8_rows_has_the_scales_of_its_place():
    rng = np.random.default_rng(0)
    stored, scales = quantise(rng.standard_normal((400, 200)).astype(np.float32))
    whole = dequantise(stored, scales)
    for start, stop in ((0, 400), (100, 300), (127, 129), (256, 400), (390, 400)):
        band = dequantise(stored[start:stop], scales[start // 128 : -(-stop // 128)], skip=start % 128)
        np.testing.assert_array_equal(band, whole[start:stop])


# What a run made of a checkpoint is good for


def test_training_starts_from_it_and_its_tokenizer_comes_along(tmp_path):
    path = tmp_path / "hf"
    shutil.copytree(GOLDENS / "glm5_tiny", path)
    quiet(path, tmp_path / "run", "run", "bfloat16")
    config = read_config(tmp_path / "run")
    assert config.data.tokenizer == "bytes" and config.model == load_hf(path).cfg
    tokenizer = train_bpe(["def f(x): return x"] * 50, 286)
    tokenizer.save(path / "tokenizer.json")
    quiet(path, tmp_path / "second", "run", "")
    assert run_tokenizer(tmp_path / "second").fingerprint == tokenizer.fingerprint
    config = dataclasses.replace(config, init=InitConfig(run=str(tmp_path / "run")))
    state = first_state(config, optax.sgd(1.0), lambda line: None)
    expected = arrays(load_hf(path, dtype="bfloat16"))
    same_bits({p: np.asarray(x) for p, x in flat(state.params).items()}, {p: x.astype(np.float32) for p, x in expected.items()})


def test_a_checkpoint_without_an_mtp_layer_becomes_a_run_without_one(tmp_path):
    model = reference.random_model(reference.micro_config(num_nextn_predict_layers=0))
    save_hf(model, tmp_path / "hf")
    quiet(tmp_path / "hf", tmp_path / "run", "run", "")
    same_bits(arrays(glm5_jax.load(tmp_path / "run")), arrays(model))


def test_what_training_saves_lets_one_expert_be_read_without_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_LARGE", 1000)
    params = {"w": jnp.arange(2 * 3 * 16 * 8, dtype=jnp.float32).reshape(2, 3, 16, 8), "b": jnp.ones(7)}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), stacked={"params.w": 2, "params.b": 0})
    checkpoints.save(1, {"params": params}, {}, wait=True)
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/checkpoints/1/arrays/params", "path": "params.w/"}
    assert ts.open({"driver": "zarr", "kvstore": kvstore}).result().chunk_layout.read_chunk.shape == (1, 1, 16, 8)
    restored = checkpoints.restore({"params": jax.eval_shape(lambda: params)})[1]
    jax.tree.map(np.testing.assert_array_equal, restored["params"], params)
    checkpoints.close()


# Memory


def test_memory_does_not_grow_with_the_model(tmp_path):
    """A model of 0.34 GB whose largest tensor has 8 MB, in fresh processes: all of it in memory would be too much."""
    cfg = config_2gb(vocab_size=4096, hidden_size=1024, moe_intermediate_size=512, n_routed_experts=21)
    for what, result in measure(tmp_path, cfg, STEPS[:2]):
        assert result["read_bytes"] > 0.33e9 and result["largest_tensor"] < 20e6
        assert result["peak_memory"] < 3 * result["largest_tensor"] + 500e6, what
        assert result["read_bytes"] + 200e6 > 3 * result["largest_tensor"] + 500e6  # 200 MB: what imports take
    assert same_tensors(tmp_path / "bfloat16", tmp_path / "again")


# Kills

KILLED = """
import os, pathlib, signal, sys
from glm5_jax.convert import hf, published
from glm5_jax.convert.safetensors_write import SafetensorsFile
from glm5_jax.train import convert
published.PIECE_BYTES, hf.SHARD_BYTES = 20_000, 100_000
convert.threads = lambda largest, fp8=False: 2
count = 0
def dying(write):
    def at_last(self, name, values, *rest):
        global count
        count += 1
        if count >= int(sys.argv[4]):  # half of it is written when the end comes
            half = [values[0][: len(values[0]) // 2]] if isinstance(values, list) else values[: len(values) // 2]
            convert._Sums._list = lambda *args: None
            write(self, name, half, *rest)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, name, values, *rest)
    return at_last
SafetensorsFile.write, convert._Sums.write = dying(SafetensorsFile.write), dying(convert._Sums.write)
convert.convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], "bfloat16")
"""


def content(folder):
    """Path -> bytes; digests in any order; without what orbax says of when and where it was written."""
    own = lambda text: not re.search("_CHECKPOINT_METADATA|commit_success", text)  # noqa: E731
    files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and own(f.name)}
    lines = lambda data: sorted(filter(own, data.decode().splitlines()))  # noqa: E731
    return {name: lines(data) if "SHA256SUMS" in name else data for name, data in files.items()}


@pytest.mark.parametrize("to", ["run", "hf"])
def test_killed_in_a_write_the_same_command_goes_on_to_the_same_bits(golden, tmp_path, monkeypatch, to):
    source, out, partial = golden("glm52_tiny").path, tmp_path / "out", tmp_path / "out.partial"
    monkeypatch.setattr(published, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(hf, "SHARD_BYTES", 100_000)
    quiet(source, tmp_path / "whole", to, "bfloat16")
    command = [sys.executable, "-c", KILLED, str(source), str(out), to, "300"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert not out.exists()
    done = "*/c/**/*" if to == "run" else "*.safetensors"
    listed = {line.split()[-1] for f in partial.rglob("SHA256SUMS.0") for line in f.read_text().splitlines()}
    before = {f.relative_to(partial): f.stat().st_mtime_ns for f in partial.rglob(done) if f.is_file()}
    kept = {f: at for f, at in before.items() if to == "hf" or str(f.relative_to("checkpoints/0")) in listed}
    assert len(kept) > (200 if to == "run" else 3)
    if to == "run":
        (sums,) = partial.rglob("SHA256SUMS.0")
        sums.write_text(sums.read_text() + "0123456789abcdef")  # a line cut short
    with pytest.raises(UserError, match="out.partial: holds a conversion begun with dtype=bfloat16; go on with that, or"):
        quiet(source, out, to, "float32")
    with pytest.raises(UserError, match="another source, or this one before it changed"):
        quiet(golden("glm5_tiny").path, out, to, "bfloat16")
    result = quiet(source, out, to, "bfloat16")
    assert result.read_bytes < sum(TensorDirectory(source).nbytes(n) for n in TensorDirectory(source).names())
    assert {f: (out / f).stat().st_mtime_ns for f in kept} == kept
    assert content(out) == content(tmp_path / "whole")
    assert not partial.exists()


# Bad input


def refused(words, *args):
    with pytest.raises(UserError, match=words) as error:
        quiet(*args)
    assert "\n" not in str(error.value)


@pytest.fixture
def hf_dir(tmp_path):
    path = tmp_path / "hf"
    save_hf(load_hf(GOLDENS / "glm5_eps_tiny"), path, shard_bytes=30_000)
    return path


def test_a_source_that_is_broken_is_refused_before_anything_is_written(hf_dir, tmp_path):
    shards = sorted(hf_dir.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    for data, words in ((whole[:-1], "truncated, tensor .* ends at byte"), (whole[:5], "truncated, its header ends at byte")):
        shards[1].write_bytes(data)
        refused(words, hf_dir, tmp_path / "out", "run", "")
    shards[1].unlink()
    refused("1 files are missing: model-00002", hf_dir, tmp_path / "out", "run", "")
    shards[1].write_bytes(whole)
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    refused("2 misshapen: lm_head.weight", hf_dir, tmp_path / "out", "run", "")
    (hf_dir / "config.json").write_text(json.dumps(config | {"n_routed_experts": config["n_routed_experts"] - 1}))
    refused("unexpected: model.layers", hf_dir, tmp_path / "out", "run", "")
    assert not list(tmp_path.glob("out*"))


def test_a_place_that_is_taken_is_refused(hf_dir, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("keep")
    refused("mine: exists and is not empty", hf_dir, tmp_path / "mine", "run", "")
    (tmp_path / "file").write_text("")
    refused("file/out.partial: cannot go on .Not a directory.", hf_dir, tmp_path / "file" / "out", "run", "")
    (tmp_path / "out.partial").mkdir()
    refused("out.partial: is in the way", hf_dir, tmp_path / "out", "run", "")
    for state in ("{}", '{"source": "abc", "to"', "[]"):
        (tmp_path / "out.partial" / "convert.json").write_text(state)
        refused("out.partial/convert.json: says nothing of a conversion", hf_dir, tmp_path / "out", "run", "")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    refused("link: is a link to nothing", hf_dir, tmp_path / "link", "run", "")
    refused("hf/inside: lies in .*hf, which is to be converted", hf_dir, hf_dir / "inside", "run", "")
    refused("dtype=fp8: with --to run it is float32 or bfloat16", hf_dir, tmp_path / "run", "run", "fp8")
    refused("dtype=int8: with --to hf it is float32, bfloat16 or fp8", hf_dir, tmp_path / "run", "hf", "int8")
    assert (tmp_path / "mine" / "text").read_text() == "keep" and not (tmp_path / "run.partial").exists()


def test_the_working_directory_may_be_the_place(hf_dir, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quiet(hf_dir, pathlib.Path("."), "run", "")
    assert (tmp_path / "here" / "checkpoints" / "0").is_dir() and not (tmp_path / "here" / "convert.json").exists()


def test_a_converted_run_has_no_text_of_its_own_to_be_evaluated_on(hf_dir, tmp_path):
    quiet(hf_dir, tmp_path / "run", "run", "")
    with pytest.raises(UserError, match="sources: name what to evaluate on"):
        evaluate_directory(tmp_path / "run", None, None, types.SimpleNamespace(batch_rows=1, rows=0, sources=()))


def test_a_full_disk_is_one_line_and_the_same_command_goes_on_later(hf_dir, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda path: usage)
        refused("out.partial: disk full: .* MB needed, 0 MB free", hf_dir, tmp_path / "out", "hf", "")
    with monkeypatch.context() as m:
        m.setattr("os.pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(SystemExit) as stop:
            cli.main(["convert", str(hf_dir), str(tmp_path / "out")])
        assert stop.value.code == 2
    words = "cannot go on (No space left on device); the same command does when there is space"
    assert capsys.readouterr().err == f"glm5: {tmp_path}/out.partial: {words}\n"
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", str(hf_dir), str(tmp_path / "out")])
    assert stop.value.code == 0 and same_tensors(hf_dir, tmp_path / "out")
    assert re.fullmatch(
        rf"{tmp_path}/out: written in float32; 0.00 GB in \d+.\d s, \d+ MB/s; the disk reads \d+ MB/s; "
        r"peak memory \d+ MB, largest tensor 0 MB\n", capsys.readouterr().out,
    )  # fmt: skip


def test_nothing_is_promised_where_the_same_command_would_fail_again(hf_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("os.pwrite", lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    refused(r"out.partial: cannot go on \(Permission denied\)$", hf_dir, tmp_path / "out", "hf", "")


def test_a_run_with_a_changed_byte_or_another_network_is_refused(hf_dir, tmp_path):
    quiet(hf_dir, tmp_path / "run", "run", "")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    network = config | {"network": "experiments.custom_attention:QueryNormGlm5"}
    wide = config | {"model": config["model"] | {"q_lora_rank": 99}}
    for settings, words in ((network, "network="), (wide, r"does not hold the parameters of its config: params\..*, not ")):
        (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
        refused(words, tmp_path / "run", tmp_path / "out", "hf", "")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    file = next(f for f in sorted((tmp_path / "run").rglob("c/*/*/*")) if f.is_file())
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    refused("every checkpoint is damaged .* has changed", tmp_path / "run", tmp_path / "out", "hf", "")


def test_values_that_fp8_cannot_hold_are_named(wide, tmp_path):
    model = load_hf(wide[1])
    weight = model.groups[0].layers.attention.q_down
    weight[...] = weight[...].at[0, 3, 5].set(jnp.inf)
    save_hf(model, tmp_path / "hf")
    words = "model.layers.0.self_attn.q_a_proj.weight: holds values that are not finite"
    refused(words, tmp_path / "hf", tmp_path / "out", "hf", "fp8")
