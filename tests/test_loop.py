"""The training loop: whatever stops a run, the same command goes on, and the losses stay the same, bit for bit."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from glm5_jax.errors import UserError
from glm5_jax.train import loop
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import batches, load_corpus
from glm5_jax.train.loop import Stopped, train
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.step import LossConfig
from helpers_train import compile_cache, load_run_config, recorded, write_corpus, write_run_config

ROOT = pathlib.Path(__file__).parents[1]
STEPS = list(range(1, 13))

# Runs the command line with a fault: `driver.py WHEN ARGUMENTS...`.
DRIVER = '''
import os, signal, sys
from glm5_jax import cli
from glm5_jax.train import checkpoint, loop

when, at = sys.argv.pop(1).split(":")
kill = lambda number: os.kill(os.getpid(), number)
next_batch, write_sums, final_score = loop.Run._next_batch, checkpoint._write_sums, loop.Run._final_score

def at_step(self, step):
    if when in ("SIGKILL", "SIGTERM", "SIGINT") and step == int(at):
        kill(getattr(signal, when))
    return next_batch(self, step)

def in_save(directory):
    if when == "saving" and directory.name == at + ".saving":
        kill(signal.SIGKILL)
    write_sums(directory)

def at_end(self, state, start):
    if when == "end":
        self.checkpoints.wait()
        kill(signal.SIGKILL)
    return final_score(self, state, start)

loop.Run._next_batch, checkpoint._write_sums, loop.Run._final_score = at_step, in_save, at_end
cli.main(sys.argv[1:])
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpus/, mine.py, driver.py and a cache of compiled programs for all processes of this file."""
    place = tmp_path_factory.mktemp("loop")
    write_run_config(place / "mine.py", write_corpus(place / "corpus"))
    (place / "driver.py").write_text(DRIVER)
    with compile_cache(place / "compiled"):
        yield place


@pytest.fixture(scope="module")
def config(place):
    return load_run_config(place / "mine.py")


@pytest.fixture(scope="module")
def undisturbed(place, config):
    """A run from start to end; also traces steps 1 and 2."""
    result = train(dataclasses.replace(config, profile=(1, 3)), place / "undisturbed")
    return place / "undisturbed", result


@pytest.fixture
def copy(undisturbed, tmp_path):
    """A copy of the finished run, to spoil."""
    shutil.copytree(undisturbed[0], tmp_path / "copy")
    return tmp_path / "copy"


def command(place, *arguments) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )


def on_disk(run: pathlib.Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("*")}


def stop_at(monkeypatch, step: int, number=signal.SIGTERM):
    """Sends this process a signal when `step` begins."""
    original = loop.Run._next_batch

    def next_batch(self, now):
        if now == step:
            os.kill(os.getpid(), number)
        return original(self, now)

    monkeypatch.setattr(loop.Run, "_next_batch", next_batch)


# Kills


@pytest.mark.e2e
def test_killed_and_stopped_at_every_kind_of_moment_the_losses_are_those_of_an_undisturbed_run(place):
    """One run directory, six processes, the real command line."""
    run, steady = place / "killed", place / "steady"
    arguments = ("train", "mine.py", "--run-dir")
    whole = command(place, "-m", "glm5_jax", *arguments, steady)
    assert whole.returncode == 0, whole.stderr
    assert "held-out bits per byte" in whole.stdout and str(steady / "checkpoints") in whole.stdout

    def go(fault: str) -> subprocess.CompletedProcess:
        return command(place, "driver.py", fault, *arguments, run)

    assert go("SIGKILL:2").returncode == -signal.SIGKILL  # before the first checkpoint
    assert on_disk(run) == set()
    stopped = go("SIGINT:2")  # saves the step in hand
    assert stopped.returncode == 130 and "stopped; saved" in stopped.stdout, stopped.stderr
    assert on_disk(run) == {"3"} and recorded(run)[-1][0] == 3
    assert go("SIGKILL:6").returncode == -signal.SIGKILL  # between two checkpoints, in the larger batches
    assert on_disk(run) == {"3", "4"} and recorded(run)[-1][0] > 4
    assert go("saving:8").returncode == -signal.SIGKILL
    assert on_disk(run) == {"3", "4", "8.saving"}
    assert go("end:0").returncode == -signal.SIGKILL  # after the last save, before the last evaluation
    assert on_disk(run) == {"8", "12"}
    last = go("none:0")
    assert last.returncode == 0, last.stderr
    assert [step for step, _ in recorded(run)] == STEPS
    assert recorded(run) == recorded(steady)
    assert recorded(run, "bits_per_byte") == recorded(steady, "bits_per_byte")


@pytest.mark.parametrize("step, number", [(0, signal.SIGTERM), (7, signal.SIGINT)])
def test_a_signal_saves_the_step_in_hand_and_the_run_goes_on(monkeypatch, config, undisturbed, tmp_path, step, number):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, step, number)
        before = signal.getsignal(number)
        with pytest.raises(Stopped) as stopped:
            train(config, run)
        assert stopped.value.signal == number and signal.getsignal(number) == before
    assert str(step + 1) in on_disk(run)
    assert [s for s, _ in recorded(run)] == STEPS[: step + 1]
    train(config, run)
    assert recorded(run) == recorded(undisturbed[0])


def test_a_damaged_newest_checkpoint_is_passed_over(monkeypatch, config, undisturbed, tmp_path, capsys):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Stopped):
            train(config, run)
    assert on_disk(run) == {"4", "6"}
    files = [path for path in (run / "checkpoints" / "6" / "arrays").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    train(config, run)
    said = capsys.readouterr().out
    assert "checkpoint of step 6 is damaged" in said and "using step 4" in said and "resuming at step 4" in said
    assert recorded(run) == recorded(undisturbed[0])


# Same settings, other settings


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(config, undisturbed, tmp_path):
    train(config, tmp_path / "same")
    assert recorded(tmp_path / "same") == recorded(undisturbed[0])
    assert recorded(tmp_path / "same", "grad_norm") == recorded(undisturbed[0], "grad_norm")
    short = dataclasses.replace(config, steps=1)
    train(dataclasses.replace(short, seed=1), tmp_path / "weights")
    train(dataclasses.replace(short, data=dataclasses.replace(config.data, seed=1)), tmp_path / "order")
    firsts = {recorded(run)[0][1] for run in (tmp_path / "same", tmp_path / "weights", tmp_path / "order")}
    assert len(firsts) == 3


def test_a_finished_run_is_left_as_it_is(config, undisturbed, copy):
    before = (copy / "metrics.jsonl").read_bytes()
    result = train(config, copy)
    assert result.already_done and (copy / "metrics.jsonl").read_bytes() == before
    assert result.bits_per_byte == undisturbed[1].bits_per_byte == recorded(copy, "bits_per_byte")[-1][1]


def test_more_steps_go_on_from_the_end(config, copy):
    before = recorded(copy)
    train(dataclasses.replace(config, steps=14), copy)
    assert recorded(copy)[:12] == before and [step for step, _ in recorded(copy)] == list(range(1, 15))
    assert json.loads((copy / "config.json").read_text())["steps"] == 14


def test_fewer_steps_than_are_done_are_refused_and_nothing_changes(config, copy):
    before = (copy / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"^\S+: stands at step 12, past steps=6$"):
        train(dataclasses.replace(config, steps=6), copy)
    assert (copy / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "change, names",
    [
        (dict(seed=5), r"seed \(0 then, 5 now\)"),
        (dict(micro_rows=1), r"micro_rows \(2 then, 1 now\)"),
        (dict(bias_rate=((0, 0.5),)), r"bias_rate \(.*0\.5.* now\)"),
        ("lr.peak", r"lr\.peak \(0\.01 then, 0\.5 now\)"),
    ],
)
def test_other_settings_are_refused_by_name_in_one_line(config, copy, change, names):
    before = (copy / "config.json").read_bytes()
    change = dict(lr=dataclasses.replace(config.lr, peak=0.5)) if change == "lr.peak" else change
    with pytest.raises(UserError, match=rf"^\S+: holds a run with other settings: {names}; choose [^\n]+$"):
        train(dataclasses.replace(config, **change), copy)
    assert (copy / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "change", [dict(eval_every=5), dict(eval_rows=2), dict(nonfinite="skip"), dict(profile=(1, 2))]
)
def test_settings_that_no_finished_step_depends_on_may_change(config, copy, change):
    assert train(dataclasses.replace(config, **change), copy).already_done


def test_starting_over_forgets_the_old_run(config, copy):
    train(dataclasses.replace(config, steps=2, seed=3), copy, resume=False)
    assert [step for step, _ in recorded(copy)] == [1, 2] and on_disk(copy) == {"2"}
    assert json.loads((copy / "config.json").read_text())["seed"] == 3
    assert len(list(copy.glob("events.out.tfevents.*"))) == 1


def test_starting_over_with_a_mistake_keeps_the_old_run(config, copy):
    before = {p.relative_to(copy): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    missing = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=("/nowhere/at/all",)))
    with pytest.raises(UserError, match="/nowhere/at/all"):
        train(missing, copy, resume=False)
    with pytest.raises(UserError, match="no.such.module"):
        train(dataclasses.replace(config, network="no.such.module:Net"), copy, resume=False)
    assert {p.relative_to(copy): p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_a_first_start_with_a_mistake_leaves_nothing_that_hinders_the_second(config, tmp_path):
    missing = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=(str(tmp_path / "no"),)))
    with pytest.raises(UserError):
        train(missing, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_starting_over_on_other_text_trains_the_tokenizer_again(config, place, tmp_path):
    def bpe(folder):
        data = dataclasses.replace(config.data, tokenizer="bpe:286", sources=(str(folder),))
        return dataclasses.replace(config, data=data, steps=1)

    other = tmp_path / "other"
    other.mkdir()
    for i in range(8):
        (other / f"{i}.txt").write_text("zqzqzq zqzq xkxkxk zqxk xkzq " * 12)
    run = tmp_path / "run"
    train(bpe(place / "corpus"), run)
    first = (run / "data" / "tokenizer.json").read_text()
    train(bpe(other), run, resume=False)
    assert (run / "data" / "tokenizer.json").read_text() != first
    assert sorted(p.name for p in (run / "data").glob("tokenizer*")) == ["tokenizer.json"]


# What a run records


def test_every_step_records_its_numbers(config, undisturbed):
    run, _ = undisturbed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    names = "loss ce mtp balance max_logit grad_norm update_norm mtp_weight max_violation lr train_bits_per_byte "
    names += "tokens step_seconds tokens_per_s model_tflops_per_s"
    assert all(set(names.split()) <= set(line) for line in steps)
    # the batch doubles once 256 tokens are seen: 4 steps of 2 rows, then 4 rows of 32 tokens
    assert [line["tokens"] for line in steps] == [64, 128, 192, 256] + [256 + 128 * i for i in range(1, 9)]
    for line in steps[:4]:
        np.testing.assert_allclose(line["loss"], line["ce"] + 1e-4 * line["balance"], rtol=1e-6)
        np.testing.assert_allclose(line["lr"], 0.01 * min(line["step"] / 3, 1), rtol=1e-5)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    loads = {line["step"]: line["load"] for line in steps if "load" in line}
    assert set(loads) == {6, 12} and all(sum(load) == 2 * 4 * 32 for layers in loads.values() for load in layers)
    for line in (steps[5], steps[11]):
        load = np.array(line["load"])
        np.testing.assert_allclose(line["max_violation"], load.max(1) / load.mean(1) - 1, rtol=1e-6)
    assert [step for step, _ in recorded(run, "bits_per_byte")] == [6, 12]
    assert list(run.glob("events.out.tfevents.*"))


def test_train_bits_per_byte_charges_the_targets_loss_to_their_bytes(config, undisturbed):
    run, result = undisturbed
    data, ends = batches(result.corpus, config.data, config.micro_rows), 0
    for (step, ce), (_, found) in zip(recorded(run, "ce"), recorded(run, "train_bits_per_byte"), strict=True):
        targets = []
        for _ in range(1 if step <= 4 else 2):  # micro-batches of 2 rows
            batch = next(data)
            tokens, seg = batch["tokens"], batch["segment_ids"]
            targets += [tokens[r, t] for r in range(2) for t in range(1, 32) if seg[r, t] == seg[r, t - 1] > 0]
        size = sum(token != result.corpus.tokenizer.eos_id for token in targets)  # a byte a token, none for an end
        ends += len(targets) - size
        np.testing.assert_allclose(found, ce * len(targets) / (math.log(2) * size), rtol=1e-6, err_msg=str(step))
    assert ends > 0


def test_evaluation_takes_as_many_rows_as_it_says(monkeypatch, config, tmp_path, capsys):
    """Batches hold 2 rows (micro_rows), so the second of three rows has one of padding beside it."""
    seen = []

    def count(loss_sum, params, batches, progress):
        seen.append([int(batch["segment_ids"].any(axis=1).sum()) for batch in batches])
        progress(sum(seen[-1]))
        return 1.0

    monkeypatch.setattr(loop, "bits_per_byte", count)
    result = train(dataclasses.replace(config, steps=2, eval_every=1, eval_rows=3), tmp_path / "run")
    tokens = sum(len(source[d]) + 1 for source in result.corpus.held_out for d in range(len(source)))
    whole = -(-tokens // 32)
    assert seen[0] == [2, 1] and sum(seen[1]) == whole > 3
    said = capsys.readouterr().out
    assert "step 1: held-out bits per byte 1.0000 (first 3 rows)" in said
    assert f"step 2: held-out bits per byte 1.0000 (all {whole} rows)" in said


def test_the_profiler_traces_its_steps(undisturbed):
    traces = list((undisturbed[0] / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 1000


@pytest.mark.parametrize("profile", [(0, 12), (10, 40), (3, 4)])
def test_no_range_of_traced_steps_breaks_a_resumed_run(monkeypatch, config, undisturbed, tmp_path, profile):
    started = []
    monkeypatch.setattr(loop.jax.profiler, "start_trace", lambda path: started.append("start"))
    monkeypatch.setattr(loop.jax.profiler, "stop_trace", lambda: started.append("stop"))
    config = dataclasses.replace(config, profile=profile)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stopped):
            train(config, tmp_path / "run")
    train(config, tmp_path / "run")
    train(config, tmp_path / "run")
    expected = {(0, 12): 2, (10, 40): 1, (3, 4): 1}[profile]
    assert started == ["start", "stop"] * expected
    assert recorded(tmp_path / "run") == recorded(undisturbed[0])


def test_one_program_per_batch_size(config, tmp_path):
    run = loop.Run(config, tmp_path / "run", load_corpus(config.data, tmp_path / "run" / "data"))
    run.train()
    shapes = {run._next_batch(step)[1]["tokens"].shape for step in range(12)}
    assert shapes == {(1, 2, 32), (2, 2, 32)} == set(run.programs)


# What a run says


def header_of(config, place, tmp_path, **changes):
    """The last line of the header but for notes: what trains, and how."""
    changed = dataclasses.replace(config, **changes)
    run = loop.Run(changed, tmp_path / "run", load_corpus(config.data, place / "undisturbed" / "data"))
    return [line for line in run.header().splitlines() if line.startswith("trains: ")]


def test_the_header_says_what_trains_under_which_attention_at_which_rate(config, undisturbed, place, tmp_path):
    said = header_of(config, place, tmp_path)  # no MTP layer
    assert said == ["trains: trunk; dense attention; learning rate 0.01 to 0.001, cosine after 3 steps of warm-up"]
    linear = LearningRate("linear", peak=0.005, final=0.0002, warmup_steps=0)
    mtp, loss = dataclasses.replace(config.model, num_nextn_predict_layers=1), LossConfig(mtp_steps=1, index_weight=1.0)
    stage = dict(model=mtp, loss=loss, freeze=("trunk", "mtp"), lr=linear)
    assert header_of(config, place, tmp_path, **stage) == [
        "trains: indexer; dense attention; learning rate 0.005 to 0.0002, linear"
    ]
    stage |= dict(
        model=dataclasses.replace(mtp, attention="sparse"), freeze=(), lr=dataclasses.replace(linear, kind="constant"),
        optimizer=dataclasses.replace(config.optimizer, indexer_rate=10.0),
    )  # fmt: skip
    assert header_of(config, place, tmp_path, **stage) == [
        "trains: trunk, indexer, MTP layer; sparse attention, 16 keys a query, implementation xla; "
        "learning rate 0.005, constant, 10 times that for the indexer"
    ]


def test_the_loss_of_the_indexer_is_in_the_line_of_progress(config, tmp_path, capsys):
    loss = LossConfig(mtp_steps=0, index_weight=1.0)
    train(dataclasses.replace(config, steps=1, loss=loss, freeze=("trunk",)), tmp_path / "run")
    ((_, kl),) = recorded(tmp_path / "run", "index_kl")
    assert f"  index KL {kl:.4g}  " in capsys.readouterr().out and kl > 0


def test_compiling_is_said_once_per_program_and_belongs_to_no_step(monkeypatch, config, tmp_path, capsys):
    """A compiler that takes 1,000 s by the clock, before step 1 and, when the batch grows, after step 4 has been recorded."""
    late, left_out, recorded_then = [0.0], [], []
    clock = time.perf_counter
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(loop.Progress, "leave_out", lambda self, seconds: left_out.append(seconds))
    run = loop.Run(config, tmp_path / "run", load_corpus(config.data, tmp_path / "run" / "data"))
    step = run.step_fn

    class Slow:
        def lower(self, *arguments):
            recorded_then.append(len(recorded(tmp_path / "run")))
            late[0] += 1000
            return step.lower(*arguments)

    run.step_fn = Slow()
    run.train()
    said = [line for line in capsys.readouterr().out.splitlines() if "compiling" in line]
    assert said == ["compiling the step for 2 x 32 tokens", "compiling the step for 4 x 32 tokens"]
    assert recorded_then == [0, 4]
    assert len(left_out) == 2 and all(1000 < seconds < 1500 for seconds in left_out)
    steps = recorded(tmp_path / "run", "step_seconds")
    assert [step for step, _ in steps] == STEPS and all(0 < seconds < 500 for _, seconds in steps)


# Losses that are not finite


def test_a_non_finite_first_step_stops_the_run_and_names_step_and_documents(config, tmp_path):
    bad = dataclasses.replace(config, model=dataclasses.replace(config.model, initializer_range=1e30))
    message = r"^step 1: loss \S+, gradient norm nan, update norm nan; documents: \S+doc\d\d\.txt[^\n]*; no checkpoint yet$"
    with pytest.raises(UserError, match=message):
        train(bad, tmp_path / "run")
    assert on_disk(tmp_path / "run") == set()


def blows_up(config, **changes):
    """The first update throws the weights far out; the second gradient is not a number."""
    return dataclasses.replace(
        config, lr=dataclasses.replace(config.lr, kind="constant", peak=1e15, warmup_steps=0),
        checkpoint=CheckpointConfig(every=1), **changes,
    )  # fmt: skip


def test_a_non_finite_later_step_names_the_last_good_checkpoint_and_does_not_replace_it(config, tmp_path):
    run = tmp_path / "run"
    message = rf"^step 2: loss \S+, gradient norm nan, update norm nan; .*; last good checkpoint: {run}/checkpoints/1$"
    with pytest.raises(UserError, match=message):
        train(blows_up(config), run)
    assert on_disk(run) == {"1"}
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 2 and line["grad_norm"] == "nan"


def test_an_update_that_overflows_is_named_where_loss_and_gradient_are_finite(config, tmp_path):
    far = dataclasses.replace(config, lr=LearningRate("constant", peak=1e30, warmup_steps=0))
    with pytest.raises(UserError, match=r"^step 1: loss \d+\.\d+, gradient norm \d+\.\d+, update norm inf; documents: "):
        train(far, tmp_path / "run")


def test_skipping_non_finite_updates_goes_on_and_says_so(config, tmp_path, capsys):
    train(blows_up(config, nonfinite="skip", steps=4), tmp_path / "run")
    said = capsys.readouterr().out
    assert [f"step {s}: loss" in said for s in (1, 2, 3, 4)] == [False, True, True, True]
    assert said.count("; the update is skipped") == 3
    assert [step for step, _ in recorded(tmp_path / "run")] == [1, 2, 3, 4]


# Data


def test_fill_in_the_middle_and_best_fit_packing_train_and_resume(monkeypatch, config, tmp_path):
    data = dataclasses.replace(config.data, packing="best_fit", fim_rate=0.5)
    mixed = dataclasses.replace(config, data=data, steps=6, batch_rows=((0, 2),))
    train(mixed, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(Stopped):
            train(mixed, tmp_path / "run")
    train(mixed, tmp_path / "run")
    assert recorded(tmp_path / "run") == recorded(tmp_path / "whole")
    assert recorded(tmp_path / "whole")[-1][1] < recorded(tmp_path / "whole")[0][1]


def test_nothing_held_out_means_no_evaluation_and_not_the_end_of_the_run(config, tmp_path, capsys):
    everything = dataclasses.replace(config, data=dataclasses.replace(config.data, held_out=0.0), steps=2)
    assert math.isnan(train(everything, tmp_path / "run").bits_per_byte)
    assert "nothing to evaluate on" in capsys.readouterr().out
    assert recorded(tmp_path / "run", "bits_per_byte") == []


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers(config, tmp_path):
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=64))
    with pytest.raises(UserError, match=r"^data\.tokenizer=bytes: has \d+ ids, model\.vocab_size=64$"):
        train(small, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
