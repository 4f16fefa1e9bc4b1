"""The command line: every mistake is one line and status 2, every setting is in the help, the verbs agree."""

import dataclasses
import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

import glm5_jax
from glm5_jax import cli
from glm5_jax.train import loop
from glm5_jax.train.report import next_trainings
from glm5_jax.train.stages import RECIPES, TrainConfig
from helpers_train import compile_cache, log_softmax, write_corpus, write_run_config

ROOT = pathlib.Path(__file__).parents[1]
TEXT = "def f(x):\n    return x  # größer\n" * 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpus/, mine.py, run/ (a run of 2 steps) and hf/ (the run converted)."""
    place = tmp_path_factory.mktemp("cli")
    write_run_config(place / "mine.py", write_corpus(place / "corpus"))
    (place / "text.txt").write_text(TEXT)
    with compile_cache(place / "compiled"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["train", str(place / "mine.py"), "--run-dir", str(place / "run"), "--steps", "2", "--seed", "7"])
        assert stop.value.code == 0
        with pytest.raises(SystemExit) as stop:
            cli.main(["convert", str(place / "run"), str(place / "hf")])
        assert stop.value.code == 0
        yield place


@pytest.fixture
def glm5(capsys, monkeypatch):
    """glm5(*arguments) -> (status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")  # one column of settings

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return run


def refused(result) -> str:
    """The one line of an error; a note on how a directory was read may precede it."""
    status, out, err = result
    err = re.sub(r"^note: [^\n]*text is taken as bytes\n", "", err)
    assert status == 2 and out == "" and err.startswith("glm5: ") and err.count("\n") == 1, result
    return err[len("glm5: ") : -1]


# Help


def settings(kind, prefix="") -> list:
    fields = []
    for field in dataclasses.fields(kind):
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(value):
            fields += settings(type(value), f"{prefix}{field.name}.")
        else:
            fields.append(prefix + field.name)
    return fields


@pytest.mark.smoke
def test_help_of_train_shows_every_setting_with_default_and_meaning(glm5):
    status, out, err = glm5("train", "tiny", "--help")
    text = re.sub(r"[\s│╭╮╰╯─|]+", " ", out)
    assert status == 0 and err == ""
    names = settings(TrainConfig)
    assert len(names) > 80
    shown = set(re.findall(r"--[a-z0-9.-]+", text))
    assert {f"--{name.replace('_', '-')}" for name in [*names, "run_dir", "resume"]} <= shown
    for words in (
        "--lr.peak FLOAT highest learning rate (default: 0.01)",
        "--model.kv-lora-rank INT R, width of the key/value latent, which is what the cache holds (default: 64)",
        "--optimizer.name {muon_split,muon,adamw}",
        "--run-dir STR where config, metrics and checkpoints go (default: runs/tiny)",
        "--nonfinite {stop,skip} when a loss or gradient is not finite: end the run, or skip the update",
        "--init.run STR run or Hugging Face directory to start from, its tokenizer included; empty = fresh weights",
        "--init.optimizer {reset,keep}",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "verb, kind",
    [("generate", cli.GenerateOptions), ("eval", cli.EvalOptions), ("convert", cli.ConvertOptions)],
)
def test_help_of_the_other_verbs_shows_their_settings(glm5, verb, kind):
    status, out, _ = glm5(verb, "--help")
    assert status == 0
    for field in dataclasses.fields(kind):
        assert f"--{field.name.replace('_', '-')}" in out
    assert out.count("(default:") >= len(dataclasses.fields(kind))


def test_usage_lists_the_verbs(glm5):
    for arguments, status in ((["--help"], 0), (["-h"], 0), ([], 2)):
        result = glm5(*arguments)
        assert result[0] == status
        assert all(f"\n  {verb} " in result[1] for verb in ("train", "sft", "generate", "eval", "convert", "bench"))
        assert all(name in result[1] for name in RECIPES)


# Bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], r"unknown verb 'trian': one of train, .*"),
        (["train"], r"usage: glm5 train CONFIG .*"),
        (["train", "--steps", "3"], r"usage: glm5 train CONFIG .*"),
        (["train", "tinny"], r"unknown config 'tinny': one of tiny, small, .*"),
        (["train", "glm5"], r"unknown config 'glm5' \(glm5 is a model without a training recipe\): .*"),
        (["train", "tiny", "--stpes", "3"], r"unknown setting --stpes; did you mean --steps\?"),
        (["train", "tiny", "--lr.paek", "3"], r"unknown setting --lr\.paek; did you mean --lr\.peak\?"),
        (["train", "tiny", "--steps", "three"], r"[^-]*--steps[^-]*three[^-]*"),
        (
            ["train", "tiny", "--optimizer.name", "sgd"],
            r"invalid choice 'sgd' for argument '--optimizer\.name'\. Expected one of \('muon_split', 'muon', .*",
        ),
        (["train", "tiny", "--steps"], r"Missing value for argument '--steps'\. Expected 1 values\."),
        (["train", "tiny", "surplus"], r"[^-]*surplus[^-]*"),
        (["train", "tiny", "--steps", "0"], r"steps=0: must be at least 1"),
        (["train", "tiny", "--model.hidden-size", "0"], r"model: hidden_size=0: must be at least 1"),
        (["train", "tiny", "--model.qk-rope-head-dim", "5"], r"model: qk_rope_head_dim=5: rotary pairs need .*"),
        (["train", "tiny", "--model.num-experts-per-tok", "9"], r"model: num_experts_per_tok=9: at most .*experts=8"),
        (["train", "tiny", "--model.index-head-dim", "8"], r"model: index_head_dim=8: must be .* qk_rope_head_dim=16"),
        (["train", "tiny", "--model.dtype", "int8"], r"model: dtype=int8: float32, bfloat16 or float64"),
        (
            ["train", "tiny", "--data.seq-len", "5000"],
            r"data\.seq_len=5000: the position limit is model\.max_position_embeddings=4096",
        ),
        (["train", "tiny", "--batch-rows", "0", "7"], r"batch_rows=7: must be a positive multiple of micro_rows=8"),
        (["train", "tiny", "--data.tokenizer", "bpe:10"], r"data: tokenizer=bpe:10: .* at least 276"),
        (["train", "tiny", "--data.sources", "no/such/folder"], r"sources=no/such/folder: no such file or folder"),
        (["train", "tiny", "--data.sources", "empty"], r"sources=empty: no file in this folder ends in any of .*"),
        (
            ["train", "tiny", "--data.sources", "short", "--data.tokenizer", "bytes"],
            r"sources=short: .*fewer than one row of seq_len=256",
        ),
        (["train", "tiny", "--data.sources", "broken.jsonl"], r".*broken\.jsonl.*"),
        (
            ["train", "tiny", "--data.sources", "short", "--data.tokenizer", "bytes", "--data.seq-len", "2",
             "--model.vocab-size", "200"],
            r"data\.tokenizer=bytes: has 260 ids, model\.vocab_size=200",
        ),
        (["train", "none.py"], r"none\.py: no such file"),
        (["train", "syntax.py"], r"syntax\.py: SyntaxError: .*"),
        (["train", "other.py"], r"other\.py: AttributeError: .*"),
        (["train", "number.py"], r"number\.py: returns int, not TrainConfig"),
        (["train", "unknown.py"], r"unknown\.py, line 4: TypeError: .*unexpected keyword argument 'stepz'"),
        (["train", "undefined.py"], r"undefined\.py, line 1: NameError: name 'nothing' is not defined"),
        (["train", "constant.py"], r"constant\.py:config: is not a function"),
        (["train", "json.py"], r"json\.py: returns int, not TrainConfig"),
        (["train", "tiny", "--run-dir", "syntax.py"], r"syntax\.py: cannot be used as a run directory \(.*\)"),
        (["train", "tiny", "--seed", "-1"], r"seed=-1: must not be negative"),
        (["train", "tiny", "--model.rope-theta", "0"], r"model: rope_theta=0\.0: must be positive and finite"),
        (["train", "midtrain"], r"init\.run=runs/tiny: no such directory"),
        (["train", "tiny", "--init.run", "empty"], r"init\.run=empty: neither a run nor a Hugging Face directory .*"),
        (["train", "tiny", "--init.step", "3"], r"init: init\.step=3, .*: init\.run names no run .*"),
        (["train", "dsa_sparse", "--freeze", "indexer"], r"loss\.index_weight=1\.0: the indexer is frozen .*"),
        (["train", "tiny", "--lengths", "0", "96", "9", "256"], r"lengths=96: must be an integer .* that divides .*"),
        (["train", "tiny", "--lengths", "0", "512"], r"lengths=.*: must rise, the last one to data\.seq_len=256"),
        (["generate", "nowhere"], r"nowhere: no such directory"),
        (["generate"], r"usage: glm5 generate DIR .*"),
        (["generate", "empty"], r".*empty.*config\.json.*"),
        (["eval", "nowhere"], r"nowhere: no such directory"),
        (["convert", "nowhere", "out"], r"nowhere: no such directory"),
        (["convert", "nowhere"], r"usage: glm5 convert DIR OUT .*"),
        (["bench", "nothing"], r"unknown benchmark 'nothing': one of .*"),
        (["bench", "train-step", "huge"], r"unknown shape 'huge': one of yardstick, long, small"),
        (["bench", "attention", "--lengths", "128"], r"lengths: each must exceed index_topk=256"),
        (["train", "tiny", "--model.sparse-implementation", "pallas"], r"sparse_implementation=pallas: .*TPUs, this is cpu.*"),
        (["train", "tiny", "--model.index-topk", "5000"], r"model: index_topk=5000: more than the position limit .*=4096"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(glm5, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.py").write_text("x = 1\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "good"}\n{"text": \n')
    (tmp_path / "syntax.py").write_text("def config(:\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "number.py").write_text("def config():\n    return 3\n")
    (tmp_path / "json.py").write_text("def config():\n    return 3\n")
    (tmp_path / "constant.py").write_text("config = 3\n")
    (tmp_path / "undefined.py").write_text("x = nothing\n")
    (tmp_path / "unknown.py").write_text(
        "import dataclasses\nfrom glm5_jax.train import stages\ndef config():\n"
        "    return dataclasses.replace(stages.tiny(), stepz=3)\n"
    )
    before = {p.name for p in tmp_path.iterdir()}
    line = refused(glm5(*arguments))
    assert re.fullmatch(message, line), line
    assert not list(tmp_path.rglob("config.json")) and not list(tmp_path.rglob("checkpoints"))
    assert {p.name for p in tmp_path.iterdir()} - {"runs", "__pycache__"} == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "run", "--max-new-tokens", "61"], r"prompt of 4 \+ max_new_tokens=61: the position limit is 64"),
        (["generate", "run", "--prompt", ""], r"prompt: is empty, there is nothing to continue"),
        (["generate", "run", "--temperature", "-1"], r"temperature=-1\.0: must not be negative"),
        (["generate", "run", "--top-p", "0"], r"top_p=0\.0: must lie in \(0, 1\]"),
        (["generate", "run", "--dtype", "half"], r"dtype=half: float32, bfloat16 or float64"),
        (["eval", "hf"], r"sources: name what to evaluate on .*"),
        (["eval", "hf", "--sources", "text.txt", "--seq-len", "65"], r"seq_len=65: the position limit is 64"),
        (["eval", "hf", "--sources", "text.txt"], r"seq_len=512: the position limit is 64"),
        (["eval", "run", "--sources", "no.txt"], r"sources=no\.txt: no such file or folder"),
        (["eval", "run", "--batch-rows", "0"], r"batch_rows=0: must be at least 1"),
        (["eval", "run", "--rows", "-1"], r"rows=-1: must not be negative"),
        (["eval", "run", "--lengths", "64"], r"--lengths: needs --retrieval"),
        (["eval", "run", "--samples=64"], r"--samples: needs --retrieval"),
        (["eval", "run", "--seed", "0"], r"--seed: needs --retrieval"),
        (["eval", "run", "--plot", "a.png"], r"--plot: needs --retrieval"),
        (["eval", "run", "--retrieval", "--plot", "no/a.png"], r"plot=no/a\.png: there is no folder no"),
        (["eval", "run", "--retrieval", "--rows", "3"], r"--rows: has no meaning with --retrieval"),
        (["eval", "run", "--retrieval", "recall", "--seq-len", "32"], r"--seq-len: has no meaning with --retrieval"),
        (["eval", "run", "--sources", "text.txt", "--retrieval", "all"], r"--sources: has no meaning with --retrieval"),
        (["convert", "run", "hf"], r"hf: exists and is not empty"),
        (["train", "mine.py", "--run-dir", "run", "--seed", "8"], r"run: holds a run with other settings: seed .*"),
    ],
)
def test_a_mistake_with_a_good_directory_is_one_line(glm5, place, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file() and "compiled" not in p.parts}
    line = refused(glm5(*arguments))
    assert re.fullmatch(message, line), line
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_checkpoint_of_another_shape_says_which_tensors_differ(glm5, place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["q_lora_rank"] = 12
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    line = refused(glm5("generate", tmp_path / "run"))
    assert "tensors differ" in line and "attention.q_down stored float32[1, 32, 16], wanted float32[1, 32, 12]" in line


def test_a_run_without_a_good_checkpoint_is_refused(glm5, place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").rglob("manifest.ocdbt"):
        path.unlink()
    assert "every checkpoint is damaged" in refused(glm5("eval", tmp_path / "run"))


# What the verbs do


OWN_TEXT = "glm5 train tiny --run-dir runs/mine --data.sources path/to/your/code"


@pytest.mark.parametrize(
    "recipe, run, commands",
    [
        ("tiny", "runs/tiny", ["glm5 train midtrain", OWN_TEXT]),
        ("tiny", "runs/mine", ["glm5 train midtrain --init.run runs/mine", OWN_TEXT]),
        ("midtrain", "runs/midtrain", ["glm5 train dsa_warmup"]),
        ("dsa_warmup", "runs/dsa_warmup", ["glm5 train dsa_sparse"]),
        ("dsa_sparse", "runs/dsa_sparse", ["glm5 sft"]),
        ("sft", "runs/sft", []),
        ("small", "runs/small", [OWN_TEXT]),
    ],
)
def test_a_finished_stage_names_the_next(recipe, run, commands):
    assert next_trainings(RECIPES[recipe](), pathlib.Path(run), recipe) == commands


def test_what_is_no_stage_as_it_stands_names_no_next_one():
    tiny = RECIPES["tiny"]()
    other = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, intermediate_size=64))
    for config, recipe in ((other, "tiny"), (tiny, "path/to/mine.py")):
        assert next_trainings(config, pathlib.Path("runs/x"), recipe) == [OWN_TEXT]


def test_settings_of_the_command_line_reach_the_run(place):
    stored = json.loads((place / "run" / "config.json").read_text())
    assert stored["steps"] == 2 and stored["seed"] == 7 and stored["data"]["sources"] == [str(place / "corpus")]
    assert sorted(p.name for p in (place / "run" / "checkpoints").iterdir()) == ["2"]


@pytest.mark.parametrize(
    "saved, options, words",
    [
        (True, [], "stopped; saved in here. The same command goes on from here."),
        (False, [], "stopped; not saved. The same command goes on from the last checkpoint."),
        (True, ["--no-resume"], "stopped; saved in here. The same command without --no-resume goes on from here."),
    ],
)
def test_a_stopped_run_says_which_command_goes_on_and_from_where(monkeypatch, capsys, saved, options, words):
    def train(*args):
        raise loop.Stopped(signal.SIGTERM, saved)

    monkeypatch.setattr(loop, "train", train)
    assert cli.train(["tiny", "--run-dir", "here", *options]) == 0
    assert capsys.readouterr().out == words + "\n"


def test_generate_prints_prompt_and_greedy_continuation_from_both_directories(glm5, place):
    model = glm5_jax.load(place / "run")
    prompt = np.frombuffer(b"alpha beta", np.uint8).astype(np.int32)[None] + 1  # byte b is id b + 1
    new = glm5_jax.generate(model, prompt, 12)[0]
    end = np.flatnonzero(new == 0)
    new = new[: end[0]] if len(end) else new
    text = bytes(int(t) - 1 for t in new if 1 <= t <= 256).decode(errors="replace")
    outs = [glm5("generate", place / d, "--prompt", "alpha beta", "--max-new-tokens", 12) for d in ("run", "hf")]
    assert [out[0] for out in outs] == [0, 0]
    assert outs[0][1] == outs[1][1] == f"alpha beta{text}\n"
    assert "no tokenizer.json; text is taken as bytes" in outs[1][2]


def test_generate_reads_standard_input_and_its_seed_decides(glm5, place, monkeypatch):
    outs = []
    for seed in (0, 0, 1):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"gamma")))
        arguments = ("--prompt", "-", "--temperature", "1.5", "--top-p", "0.95", "--seed", seed, "--max-new-tokens", 20)
        outs.append(glm5("generate", place / "run", *arguments)[1])
    assert outs[0] == outs[1] != outs[2] and all(out.startswith("gamma") for out in outs)


def bits_of_rows(model, limit=None) -> tuple[float, int]:
    """TEXT as bytes and its end, cut every 16 tokens: bits per byte of the first `limit` rows by numpy, and their number.

    Every token but a row's first is a target.
    """
    tokens = np.append(np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32) + 1, 0)
    rows = [tokens[start : start + 16] for start in range(0, len(tokens), 16)][:limit]
    nats, size = 0.0, 0
    for row in rows:
        logp = log_softmax(model(row[None]).logits[0])
        nats -= sum(logp[t - 1, row[t]] for t in range(1, len(row)))
        size += sum(token != 0 for token in row[1:])
    return nats / (math.log(2) * size), len(rows)


def test_eval_of_run_and_converted_directory_equals_log_softmax_in_numpy(glm5, place):
    expected, rows = bits_of_rows(glm5_jax.load(place / "run"))
    scores = []
    for directory in ("run", "hf"):
        arguments = ("--sources", place / "text.txt", "--seq-len", "16", "--batch-rows", "3", "--json")
        status, out, _ = glm5("eval", place / directory, *arguments)
        assert status == 0 and f"bits per byte: {expected:.4f} ({rows} rows of 16 tokens)" in out
        scores.append(json.loads(out.splitlines()[-1])["bits_per_byte"])
    assert scores[0] == scores[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("limit", [1, 4])
def test_rows_are_as_many_as_asked_for_whatever_the_batch(glm5, place, limit):
    expected, rows = bits_of_rows(glm5_jax.load(place / "run"), limit)
    arguments = ("--sources", place / "text.txt", "--seq-len", "16", "--batch-rows", "3", "--rows", limit, "--json")
    line = json.loads(glm5("eval", place / "run", *arguments)[1].splitlines()[-1])
    assert line["rows"] == rows == limit and line["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def test_a_model_trained_with_dense_attention_is_the_same_function_when_converted(place):
    """It has learnt nothing about selecting: rows longer than index_topk (16 here) must still see all keys."""
    tokens = np.random.default_rng(0).integers(1, 257, (1, 40))
    run, converted = (np.asarray(glm5_jax.load(place / d)(tokens).logits) for d in ("run", "hf"))
    np.testing.assert_allclose(converted, run, atol=1e-5)


def test_eval_of_a_run_defaults_to_its_own_held_out_part(glm5, place):
    recorded = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    (score,) = [line["bits_per_byte"] for line in recorded if "bits_per_byte" in line]
    status, out, _ = glm5("eval", place / "run", "--json")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["bits_per_byte"] == pytest.approx(score, rel=1e-6)
    few = glm5("eval", place / "run", "--rows", "2", "--json")[1]
    assert json.loads(few.splitlines()[-1])["bits_per_byte"] != pytest.approx(score, rel=1e-6)


def test_converting_again_changes_no_bit(glm5, place, tmp_path):
    assert glm5("convert", place / "hf", tmp_path / "again")[0] == 0
    first, again = (safetensors.numpy.load_file(d / "model.safetensors") for d in (place / "hf", tmp_path / "again"))
    assert first.keys() == again.keys() and len(first) > 30
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert (place / "hf" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize("source", ["run", "hf"])
def test_bfloat16_is_written_as_bfloat16_except_the_router_bias(glm5, place, tmp_path, source):
    assert glm5("convert", place / source, tmp_path / "half", "--dtype", "bfloat16")[0] == 0
    full = safetensors.numpy.load_file(place / "hf" / "model.safetensors")
    half = safetensors.numpy.load_file(tmp_path / "half" / "model.safetensors")
    assert full.keys() == half.keys()
    for name, value in half.items():
        assert (value.dtype == np.float32) == name.endswith("e_score_correction_bias"), name
        np.testing.assert_array_equal(value.astype(np.float32), full[name].astype(value.dtype).astype(np.float32))


def test_convert_takes_the_tokenizer_along(glm5, place, tmp_path):
    shutil.copytree(place / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("the tokenizer")
    assert glm5("convert", tmp_path / "hf", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "the tokenizer"


@pytest.mark.e2e
def test_the_real_command_refuses_and_helps_in_a_process_of_its_own(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def run(*arguments):
        command = [sys.executable, "-m", "glm5_jax", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    bad = run("train", "tiny", "--model.qk-rope-head-dim", "7")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "glm5: model: qk_rope_head_dim=7: rotary pairs need an even width\n"
    usage = run("--help")
    assert usage.returncode == 0 and usage.stdout.startswith("usage: glm5 VERB") and usage.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_text_is_refused(glm5, place, tmp_path, monkeypatch):
    prompt = b"\xff\xfe".decode("utf-8", "surrogateescape")  # how Python hands over such an argument
    assert refused(glm5("generate", place / "run", "--prompt", prompt)) == "prompt: is not UTF-8"
    (tmp_path / "one.txt").write_text("x")
    line = refused(glm5("eval", place / "run", "--sources", tmp_path / "one.txt"))
    assert re.fullmatch(r"sources: .*", line)


def test_eval_reads_other_fields_and_endings(glm5, place, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": TEXT}) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.weird").write_text(TEXT)
    outs = [
        glm5("eval", place / "run", "--sources", place / "text.txt", "--json"),
        glm5("eval", place / "run", "--sources", tmp_path / "a.jsonl", "--text-field", "content", "--json"),
        glm5("eval", place / "run", "--sources", tmp_path / "folder", "--extensions", ".weird", "--json"),
    ]
    assert [status for status, _, _ in outs] == [0, 0, 0]
    assert len({out.splitlines()[-1] for _, out, _ in outs}) == 1


def test_a_first_start_that_fails_leaves_nothing_and_can_be_corrected(glm5, place, tmp_path):
    start = ["train", place / "mine.py", "--run-dir", tmp_path / "r", "--steps", "1", "--model.vocab-size", "296"]
    start += ["--data.tokenizer"]
    line = refused(glm5(*start, "bpe:306"))
    assert line == "data.tokenizer=bpe:306: has 306 ids, model.vocab_size=296"
    assert not (tmp_path / "r").exists()
    assert glm5(*start, "bpe:286")[0] == 0


def test_a_second_process_in_a_run_directory_is_refused(glm5, place, tmp_path):
    import fcntl
    import os

    (tmp_path / "r").mkdir()
    handle = os.open(tmp_path / "r", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    line = refused(glm5("train", place / "mine.py", "--run-dir", tmp_path / "r"))
    os.close(handle)
    assert line.endswith("/r: another process is training here")
    assert list((tmp_path / "r").iterdir()) == []
