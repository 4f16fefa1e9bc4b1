"""Reinforcement learning end to end: the loop, its batches and gradients, resuming, and what a user sees of a run."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from flax import nnx, traverse_util

import glm5_jax
import helpers_rewards
from glm5_jax import cli
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, flat, merge, specs, split
from glm5_jax.rl import loop
from glm5_jax.rl.config import RolloutConfig, RowConfig
from glm5_jax.rl.inspect import InspectOptions, show_samples
from glm5_jax.rl.loop import reinforce
from glm5_jax.rl.objectives import IcePop
from glm5_jax.rl.policy import policy_loss
from glm5_jax.rl.positions import PlacedGlm5
from glm5_jax.rl.rewards import Score, Scorer
from glm5_jax.rl.rollout import Rollouts, Sample, assemble, encode, summary
from glm5_jax.rl.tasks import Prompt, is_held_out, mixture
from glm5_jax.rl.teachers import reverse_kl
from glm5_jax.serve.engine import Completion, Engine, Request
from glm5_jax.train import report
from glm5_jax.train.inherit import bring_tokenizer, first_state, open_source
from glm5_jax.train.run_dir import fresh_model
from glm5_jax.train.session import Stopped
from glm5_jax.train.stages import InitConfig, TrainConfig
from glm5_jax.train.step import LossConfig, Rates, TrainState, make_step
from helpers_train import compile_cache, lively_model, log_softmax, step_config

ROOT = pathlib.Path(__file__).parents[1]
ROWS, LENGTH, TEMPERATURE = 8, 10, 0.7  # of a step of the run below

# 4 keys are selected of rows of up to 10 tokens; dynamic filtering, guesses of the MTP layer and a temperature are all on.
CONFIG = """
from glm5_jax.rl.config import RlConfig, RolloutConfig, RowConfig
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from helpers_train import step_config


def config():
    return RlConfig(
        model=step_config(vocab_size=16, num_hidden_layers=1, first_k_dense_replace=0, attention="sparse"),
        data=RowConfig(tokenizer="chars:0123456789=+", seq_len=10),
        rollout=RolloutConfig(
            tasks=("reverse:2@2", "reverse:3"), prompts=2, group=4, max_new_tokens=5, temperature=0.7, slots=6, draft_steps=1,
            filter=True, rounds=6,
        ),
        optimizer=OptimizerConfig(name="adamw"),
        lr=LearningRate("constant", peak=0.01, warmup_steps=0),
        checkpoint=CheckpointConfig(every=2),
        steps=4,
        micro_rows=4,
        eval_every=2,
        eval_prompts=6,
    )
"""


def load_config():
    scope: dict = {}
    exec(CONFIG, scope)
    return scope["config"]()


def command(arguments) -> tuple[int, str]:
    """(status, stdout) of the command line, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in arguments])
    return stop.value.code, out.getvalue()


class Steady(NamedTuple):
    """A run of 4 steps. compiled: (step, programs compiled so far) when a line was recorded. asked: prompts, by their group."""

    path: pathlib.Path
    said: str
    compiled: list
    asked: dict


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with mine.py and the compiled programs of all processes of this file."""
    place = tmp_path_factory.mktemp("rl")
    (place / "mine.py").write_text(CONFIG)
    make, made = loop.make_step, []

    def make_once(*arguments, **more):  # all runs in this process have one config: their step is traced once
        made.append(made[0] if made else make(*arguments, **more))
        return made[0]

    with compile_cache(place / "compiled"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", make_once)
        yield place


@pytest.fixture(scope="module")
def steady(place):
    """The run that all others are compared with: `glm5 rl mine.py`."""
    count, compiled, asked = [0], [], {1: [], 4: []}

    def listen(name, seconds, **_):
        count[0] += "backend_compile" in name

    write, answer = loop.Metrics.write, Rollouts.answer

    def noted_write(self, step, values):
        compiled.append((step, count[0]))
        write(self, step, values)

    def noted_answer(self, prompts, group, *arguments):
        asked[group] += prompts
        return answer(self, prompts, group, *arguments)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Metrics, "write", noted_write)
        patch.setattr(Rollouts, "answer", noted_answer)
        status, said = command(["rl", place / "mine.py", "--run-dir", place / "steady"])
    assert status == 0
    return Steady(place / "steady", said, compiled, asked)


@pytest.fixture
def copy(steady, tmp_path):
    """A copy of the finished run, to spoil."""
    shutil.copytree(steady.path, tmp_path / "copy")
    return tmp_path / "copy"


def lines(run: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run: pathlib.Path) -> list[dict]:
    return [{name: value for name, value in line.items() if not name.endswith("seconds")} for line in lines(run)]


def samples_of(run: pathlib.Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"{step}.jsonl").read_text().splitlines()]


def files(folder: pathlib.Path) -> dict:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def params_of(run: pathlib.Path) -> dict:
    return {path: np.asarray(x) for path, x in flat(split(glm5_jax.load(run))[1]).items()}


# A run


def test_a_run_records_its_steps_and_evaluations_and_says_where_they_lie(steady):
    run = steady.path
    steps = [line["step"] for line in lines(run) if "reward" in line]
    evaluated = [line["step"] for line in lines(run) if "eval_greedy" in line]
    assert steps == [1, 2, 3, 4] and evaluated == [0, 2, 4]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"2", "4"}
    last = [line for line in lines(run) if "eval_greedy" in line][-1]
    words = steady.said.split("\nheld-out prompts: ")[-1]
    assert words.startswith(f"greedy reward {last['eval_greedy']:.3f}, right {last['eval_greedy_exact']:.1%}; sampled reward")
    assert all(str(run / name) in words for name in ("config.json", "metrics.jsonl", "samples", "checkpoints", "rl.png"))
    png = (run / "rl.png").read_bytes()
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == 4 * 825  # four panels of 5.5 inches


def test_nothing_compiles_after_the_first_step(steady):
    counts = [count for step, count in steady.compiled if step >= 1]
    assert counts[0] > 20 and set(counts) == {counts[0]}


def test_the_router_bias_and_the_indexer_do_not_change_and_the_rest_does(steady):
    config = load_config()
    model = fresh_model(config)
    before, after = flat(split(model)[1]), params_of(steady.path)
    fixed = {p for p, spec in flat(specs(model)).items() if spec.part == "indexer" or spec.kind == "router_bias"}
    assert {p[-1] for p in fixed} >= {"router_bias"} and len(fixed) > 4
    for path, x in before.items():
        assert (np.asarray(x).tobytes() == after[path].tobytes()) == (path in fixed), path


def test_the_policy_trains_on_what_the_engine_drew_from(steady):
    for line in lines(steady.path):
        if "reward" in line:
            assert line["tokens"] > 0
            assert line["max_abs_log_ratio"] < 1e-5 and line["rollout_k3"] < 1e-9 and line["popped"] == 0
            np.testing.assert_allclose(line["rollout_ratio"], 1, atol=1e-5)


def test_held_out_prompts_are_evaluated_and_never_trained_on(steady):
    trained, evaluated = ({prompt.text for prompt in steady.asked[group]} for group in (4, 1))
    assert trained and evaluated and not trained & evaluated
    assert all(map(is_held_out, evaluated)) and not any(map(is_held_out, trained))
    assert {s["prompt"] for step in range(1, 5) for s in samples_of(steady.path, step)} <= trained


def test_every_ordinal_is_asked_once_and_filtered_groups_are_counted(steady):
    assert [p.ordinal for p in steady.asked[4]] == list(range(len(steady.asked[4])))
    start, filtered = 0, 0
    for line in lines(steady.path):
        if "reward" not in line:
            continue
        samples = samples_of(steady.path, line["step"])
        rewards = {}
        for s in samples:
            rewards.setdefault(s["ordinal"], []).append(s["reward"])
        assert all(len(group) == 4 and max(group) > min(group) for group in rewards.values())
        assert all(start <= ordinal < start + line["prompts"] for ordinal in rewards)
        assert line["filtered"] == line["prompts"] - len(rewards)
        start, filtered = start + line["prompts"], filtered + line["filtered"]
    assert start == len(steady.asked[4]) and filtered > 0


def test_the_numbers_of_a_step_are_those_of_its_samples(steady):
    for line in lines(steady.path):
        if "reward" not in line:
            continue
        samples, wanted = samples_of(steady.path, line["step"]), {}
        for ordinal in {s["ordinal"] for s in samples}:
            group = [s for s in samples if s["ordinal"] == ordinal]
            rewards = np.array([s["reward"] for s in group])
            expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            np.testing.assert_allclose([s["advantage"] for s in group], expected, rtol=1e-9)
            for s in group:
                digits, answer = s["prompt"][-2::-1], s["answer"]
                right = sum(a == b for a, b in zip(answer, digits))
                np.testing.assert_allclose(s["reward"], right / max(len(answer), len(digits)), rtol=1e-12)
        sizes = np.array([len(s["tokens"]) for s in samples])
        advantages = np.array([s["advantage"] for s in samples])
        wanted["reward"] = np.mean([s["reward"] for s in samples])
        wanted["exact"] = np.mean([s["reward"] == 1 for s in samples])
        wanted["truncated"] = np.mean([s["tokens"][-1] != 0 for s in samples])
        wanted["tokens"] = sizes.sum()
        wanted["positive"], wanted["negative"] = sizes[advantages > 0].sum(), sizes[advantages < 0].sum()
        wanted["answer_tokens"] = wanted["tokens"] / len(samples)
        wanted |= {"missing": 0, "zero_variance": 0, "lr": 0.01}
        np.testing.assert_allclose([line[name] for name in wanted], list(wanted.values()), rtol=1e-6, err_msg=str(wanted))


# Stopping and going on


@pytest.mark.e2e
def test_killed_stopped_and_resumed_a_run_is_the_undisturbed_one_to_the_bit(place, steady, monkeypatch):
    """First as if killed before the first checkpoint, then stopped in step 1, then as if killed between the record of step 3
    and its checkpoint. The end is made by the real command line in a process of its own."""
    run, whole = place / "stopped", timeless(steady.path)
    collect = Rollouts.collect

    def collect_and_stop(self, first, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return collect(self, first, *arguments)

    shutil.copytree(steady.path, run, ignore=shutil.ignore_patterns("checkpoints", "samples"))
    leave_record(run, steady.path, 1)
    monkeypatch.setattr(Rollouts, "collect", collect_and_stop)
    with pytest.raises(Stopped) as stopped:
        reinforce(load_config(), run)
    assert stopped.value.saved and {p.name for p in (run / "checkpoints").iterdir()} == {"1"}
    assert timeless(run) == [line for line in whole if line["step"] <= 1]
    leave_record(run, steady.path, 3)
    (run / "samples" / "2.jsonl").write_text("")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    last = subprocess.run(
        [sys.executable, "-m", "glm5_jax", "rl", "mine.py", "--run-dir", "stopped"],
        cwd=place, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert last.returncode == 0, last.stderr
    assert "resuming at step 1" in last.stdout and "\nheld-out prompts: greedy reward" in last.stdout
    assert timeless(run) == whole
    for step in range(1, 5):
        assert samples_of(run, step) == samples_of(steady.path, step)
    mine, theirs = params_of(run), params_of(steady.path)
    assert mine.keys() == theirs.keys() and all(mine[p].tobytes() == theirs[p].tobytes() for p in mine)


def leave_record(run: pathlib.Path, other: pathlib.Path, step: int) -> None:
    """The record of another run up to `step`, the beginning of a line behind it."""
    text = "".join(json.dumps(line) + "\n" for line in lines(other) if line["step"] <= step)
    (run / "metrics.jsonl").write_text(text + '{"step": ')


def test_a_finished_run_is_left_as_it_is(steady, copy):
    before = files(copy)
    result = reinforce(load_config(), copy)
    assert result.already_done and result.evaluation["eval_greedy"] == lines(copy)[-1]["eval_greedy"]
    assert {p: x for p, x in files(copy).items() if p in before and p.parts[0] != "events"} == before


def rollout_with(**changes):
    return dict(rollout=dataclasses.replace(load_config().rollout, **changes))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(seed=5), r"seed \(0 then, 5 now\)"),
        (dict(objective="grpo"), r"objective \(icepop then, grpo now\)"),
        (rollout_with(temperature=1.0), r"rollout\.temperature \(0\.7 then, 1\.0 now\)"),
        (rollout_with(filter=False), r"rollout\.filter \(True then, False now\)"),
    ],
)
def test_other_settings_are_refused_by_name(steady, change, words):
    before = files(steady.path)
    with pytest.raises(UserError, match=rf"^\S+: holds a run with other settings: {words}; choose [^\n]+$"):
        reinforce(dataclasses.replace(load_config(), **change), steady.path)
    assert files(steady.path) == before


def test_a_run_of_training_is_not_taken_for_one_of_rl(steady, copy):
    settings = json.loads((copy / "config.json").read_text())
    assert settings["kind"] == "glm5_jax.rl.config:RlConfig"
    (copy / "config.json").write_text(json.dumps(dataclasses.asdict(TrainConfig())))
    with pytest.raises(UserError, match="holds a run of another kind, TrainConfig and not RlConfig"):
        reinforce(load_config(), copy)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rl"], r"usage: glm5 rl CONFIG .*"),
        (["rl", "revers"], r"unknown config 'revers': one of reverse, .*"),
        (["rl", "reverse", "--rollout.gruop", "3"], r"unknown setting --rollout\.gruop; did you mean --rollout\.group\?"),
        (["rl", "reverse", "--rollout.group", "1", "--micro-rows", "1"], r"rollout\.group=1: an answer alone has .*"),
        (["rl", "reverse", "--micro-rows", "7"], r"micro_rows=7: must divide .* = 256"),
        (["rl", "reverse", "--rollout.tasks", "revers:4"], r"revers:4: no such task; .*"),
        (["rl", "reverse", "--rollout.temperature", "0"], r"rollout: rollout\.temperature=0\.0: must be positive"),
        (["rl", "reverse", "--freeze", "mtp"], r"freeze=\('mtp',\): RL freezes the indexer .*"),
        (["rl", "reverse", "--mtp-weight", "nan"], r"mtp_weight=nan: must be finite and not negative"),
        (["rl", "reverse", "--data.seq-len", "5"], r"reverse:4: prompt 0 has 5 tokens, which with an answer .*seq_len=5"),
        (["rl", "reverse", "--data.tokenizer", "chars:0123456789"], r"tokenizer=chars:0123456789: has no '=', .*"),
        (["rl", "reverse", "--data.tokenizer", "bytes"], r"data\.tokenizer=bytes: has 260 ids, model\.vocab_size=16"),
        (["rl", "reverse", "--model.eos-token-id", "3"], r"data\.tokenizer=chars:.*: ends in id 0, not in model\.eos_token_id"),
        (["rl", "reverse", "--init.run", "nowhere"], r"init\.run=nowhere: no such directory"),
        (["distill", "nothing"], r"unknown config 'nothing': one of .*"),
        (["rl", "--inspect", "nowhere"], r"nowhere: has no samples; is it the directory of a run of glm5 rl\?"),
        (["rl", "--inspect", "STEADY", "--step", "9"], r".*steady: has no samples of step 9; there are 4 steps, 1 to 4"),
        (["rl", "--inspect", "STEADY", "--task", "code"], r"task=code: step 4 asked reverse:.*"),
        (["rl", "--inspect", "STEADY", "--worst", "--best"], r"--worst, --best: only one of them"),
        (["rl", "--inspect", "STEADY", "--row", "3"], r"unknown setting --row; did you mean --rows\?"),
        (["rl", "STEADY/mine.py"], r".*mine\.py: no such file"),
        (["eval", "STEADY"], r"sources: name what to evaluate on .*"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(steady, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main([a.replace("STEADY", str(steady.path)) for a in arguments])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.startswith("glm5: ") and err.count("\n") == 1, (out, err)
    assert re.fullmatch(message, err[len("glm5: ") : -1]), err
    assert not list(tmp_path.rglob("*.json")) and {p.name for p in tmp_path.iterdir()} <= {"runs"}


def test_starting_over_with_a_mistake_keeps_the_old_run(copy):
    before = files(copy)
    config = dataclasses.replace(load_config(), data=RowConfig("chars:0123456789", 10))
    with pytest.raises(UserError, match="has no '='"):
        reinforce(config, copy, resume=False)
    assert files(copy) == before


# Batches


PIECES = "0123456789=+"
TOKENIZER = load_tokenizer(f"chars:{PIECES}")


def sample(ordinal: int, answer: str, reward, stop: bool = True, logprobs=None, prompt: str = "12=") -> Sample:
    """A sample with an answer of these characters, and the end of a document behind them if `stop`."""
    tokens = np.array([PIECES.index(c) + 1 for c in answer] + [0] * stop, np.int32)
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) if logprobs is None else logprobs
    made = Completion(tokens, logprobs, np.zeros(len(tokens), np.int32), "stop" if stop else "length")
    ids = np.array([PIECES.index(c) + 1 for c in prompt], np.int32)
    return Sample(Prompt("reverse:2", prompt, ordinal, {}), ids, made, answer, Score(reward), reward)


def test_a_batch_holds_each_answer_behind_its_prompt_with_its_own_numbers():
    samples = [
        sample(7, "21", 1.0),
        sample(7, "", 0.0),  # one token: the end
        sample(7, "2222222", 0.25, stop=False),  # fills the row
        sample(7, "+", None),
        sample(9, "1", 0.5, stop=False, prompt="9"),
        sample(9, "2", 0.5, prompt="9"),
    ]
    batch, advantages = assemble(samples, rows=8, seq_len=10, scale="std")
    rewards = np.array([1.0, 0.0, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantages.values, [*expected, 0, 0, 0], rtol=1e-12)
    assert advantages.missing.tolist() == [False] * 3 + [True] + [False] * 2
    assert advantages.zero_variance.tolist() == [False] * 4 + [True] * 2
    rows = [  # tokens, of which the last `made` were sampled; 5 answers count
        ([2, 3, 11, 3, 2, 0], 3, expected[0], 1 / 3 / 5),
        ([2, 3, 11, 0], 1, expected[1], 1 / 5),
        ([2, 3, 11] + [3] * 7, 7, expected[2], 1 / 7 / 5),
        ([2, 3, 11, 12, 0], 2, 0, 0),
        ([10, 2], 1, 0, 1 / 5),
        ([10, 3, 0], 2, 0, 1 / 2 / 5),
        ([], 0, 0, 0),
        ([], 0, 0, 0),
    ]
    assert all(x.shape == (8, 10) for x in batch.values())
    for r, (tokens, made, advantage, weight) in enumerate(rows):
        n, first = len(tokens), len(tokens) - made
        sampled = [first <= t < n for t in range(10)]
        trained = np.array(sampled) & (r != 3)
        assert batch["tokens"][r].tolist() == tokens + [0] * (10 - n)
        assert batch["segment_ids"][r].tolist() == [1] * n + [0] * (10 - n)
        assert batch["positions"][r].tolist() == list(range(n)) + [0] * (10 - n)
        assert batch["loss_mask"][r].tolist() == trained.tolist()
        np.testing.assert_array_equal(batch["rollout"][r], [-(t - first + 1) if sampled[t] else 0 for t in range(10)])
        np.testing.assert_allclose(batch["advantage"][r], np.where(trained, advantage, 0), rtol=1e-6)
        np.testing.assert_allclose(batch["weight"][r], np.where(trained, weight, 0), rtol=1e-6)
    np.testing.assert_allclose(batch["weight"].sum(), 1, rtol=1e-6)


class Script:
    """An engine and a scorer that do as they are told. answers: tokens of one answer after the other, over and over."""

    def __init__(self, answers, reward=lambda prompt, place: 1.0):
        self.answers, self.reward, self.requests, self.prompts = answers, reward, [], []

    def generate(self, requests, progress=None):
        self.requests += requests
        made = [np.array(self.answers[i % len(self.answers)], np.int32) for i in range(len(requests))]
        return [Completion(t, np.full(len(t), -1, np.float32), 0 * t, "stop" if t[-1] == 0 else "length") for t in made]

    def score(self, prompts, texts):
        self.prompts += prompts
        return [Score(self.reward(prompt, i)) for i, prompt in enumerate(prompts)]


def scripted(script: Script, **settings) -> Rollouts:
    settings = dict(tasks=("reverse:2",), prompts=3, group=2, max_new_tokens=4, slots=4) | settings
    config = dataclasses.replace(load_config(), rollout=RolloutConfig(**settings), micro_rows=1)
    return Rollouts(config, TOKENIZER, script, script, mixture(config.rollout.tasks, config.seed))


@pytest.mark.parametrize("rule, expected", [("score", [0.75, 0.75]), ("zero", [0.75, 0.0]), ("drop", [0.75, None])])
def test_the_rule_for_truncated_answers(rule, expected):
    samples, _, _ = scripted(Script([[3, 2, 0], [3, 2, 2, 2]], lambda *_: 0.75), truncated=rule, prompts=1).collect(0)
    assert [s.reward for s in samples] == expected and [s.text for s in samples] == ["21", "2111"]
    batch, advantages = assemble(samples, 2, 10, "std")
    assert advantages.missing.tolist() == [False, rule == "drop"]
    assert batch["loss_mask"].sum(1).tolist() == [3, 0 if rule == "drop" else 4]
    line = summary(samples, advantages)
    assert line["truncated"] == 0.5 and line["missing"] == (0.5 if rule == "drop" else 0)
    np.testing.assert_allclose(line["reward"], np.mean([r for r in expected if r is not None]))


def test_a_missing_score_stays_missing_whatever_the_rule():
    for rule in ("score", "zero", "drop"):
        samples, _, _ = scripted(Script([[3, 2, 2, 2]], lambda *_: None), truncated=rule, prompts=1).collect(0)
        assert [s.reward for s in samples] == [None, None]


def test_dynamic_filtering_replaces_constant_groups_and_passes_no_ordinal_twice():
    useless = {0: [0.5, 0.5], 2: [1.0, None], 6: [None, None]}

    def reward(prompt, place):
        return useless.get(prompt.ordinal, [0.0, 1.0])[place % 2]

    script = Script([[3, 0]], reward)
    rollouts = scripted(script, filter=True, rounds=3)
    samples, ordinal, counts = rollouts.collect(0)  # 0, 1 and 2, then 3 and 4 in place of two
    assert [s.prompt.ordinal for s in samples] == [1, 1, 3, 3, 4, 4] and ordinal == 5
    assert counts == {"prompts": 5, "filtered": 2}
    more, ordinal, counts = rollouts.collect(ordinal)
    assert [s.prompt.ordinal for s in more] == [5, 5, 7, 7, 8, 8] and ordinal == 9 and counts == {"prompts": 4, "filtered": 1}
    assert [p.ordinal for p in script.prompts[::2]] == list(range(9))
    assert len({request.seed for request in script.requests}) == 18  # every answer is drawn by itself


def test_a_step_without_any_informative_group_is_empty_and_finite():
    samples, ordinal, counts = scripted(Script([[3, 0]]), filter=True, rounds=2).collect(4)
    assert samples == [] and ordinal == 10 and counts == {"prompts": 6, "filtered": 6}
    batch, advantages = assemble(samples, 4, 10, "std")
    assert not any(x.any() for x in batch.values())
    assert np.isnan(summary(samples, advantages)["reward"])


def test_without_filtering_constant_groups_stay():
    samples, ordinal, counts = scripted(Script([[3, 0]])).collect(4)
    assert len(samples) == 6 and ordinal == 7 and counts == {"prompts": 3, "filtered": 0}
    assert assemble(samples, 6, 10, "std")[1].zero_variance.all()


def test_in_a_chat_template_the_model_thinks_and_what_follows_is_scored():
    tokenizer, heard = load_tokenizer("bytes:chat"), []
    end_of_thought, digits = 267, [ord("2") + 1, ord("1") + 1]
    script = Script([[*digits, end_of_thought, *digits, 0], [*digits, 0]])
    script.score = lambda prompts, texts: heard.extend(texts) or [Score(0.0)] * len(texts)
    config = dataclasses.replace(
        load_config(), data=RowConfig("bytes:chat", 64, template="5"), rollout=RolloutConfig(prompts=1, group=2), micro_rows=1
    )
    samples, _, _ = Rollouts(config, tokenizer, script, script, mixture(("reverse:2",))).collect(0)
    question = [byte + 1 for byte in samples[0].prompt.text.encode()]
    assert samples[0].ids.tolist() == [260, 261, 263, *question, 264, 266]  # [gMASK]<sop><|user|>..<|assistant|><think>
    assert heard == ["21", ""]  # who never ends a thought has not answered
    assert [s.text for s in samples] == ["21</think>21", "21"]
    spelled = dataclasses.replace(samples[0].prompt, text="<think>")
    assert (encode(spelled, tokenizer, config.data) == 266).sum() == 1  # the template's own
    with pytest.raises(UserError, match="data.tokenizer=bytes: lacks tokens of the chat template"):
        encode(samples[0].prompt, load_tokenizer("bytes"), RowConfig("bytes", 64, template="5.1"))


def test_scorers_that_hang_raise_or_lose_the_network_are_counted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    tokenizer = load_tokenizer("bytes")
    texts = ["hang", "raise", "network", "1.0"]
    script = Script([[*tokenizer.encode(text), 0] for text in texts])
    config = dataclasses.replace(
        load_config(), data=RowConfig("bytes", 64), rollout=RolloutConfig(prompts=1, group=4), micro_rows=1
    )
    with Scorer([helpers_rewards.Odd()], seconds=0.5) as scorer:
        rollouts = Rollouts(config, tokenizer, script, scorer, mixture([helpers_rewards.Odd()]))
        samples, _, _ = rollouts.collect(0)
    batch, advantages = assemble(samples, 4, 64, "std")
    line = summary(samples, advantages)
    assert {name: n for name, n in line.items() if name.startswith("scores_")} == {
        "scores_timeout": 1, "scores_raised": 1, "scores_infrastructure": 1
    }  # fmt: skip
    assert line["missing"] == 1 / 4 and [s.reward for s in samples] == [0, 0, None, 1]
    np.testing.assert_allclose(line["reward"], 1 / 3)
    assert batch["loss_mask"].any(axis=1).tolist() == [True, True, False, True]


def test_a_disk_that_is_full_loses_samples_and_not_the_run(monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    said = []
    run = loop.Run.__new__(loop.Run)
    run.run_dir, run.say = pathlib.Path("run"), said.append
    monkeypatch.setattr(loop, "write_samples", full)
    run._write_samples(3, [], None)
    assert said == ["samples of step 3 cannot be written (No space left on device); the run goes on"]


# Gradients


@pytest.fixture(scope="module")
def lively():
    """The run's network with weights at which every part matters."""
    return lively_model(load_config().model, seed=3)


@pytest.fixture(scope="module")
def drawn(place, lively):
    """temperature -> 8 samples, two groups of prompts of different lengths, drawn by the engine; rewards made up."""
    engine = Engine(lively, 6, LENGTH, 1)
    rewards = [0.0, 1.0, 0.5, 0.25, 1.0, 1.0, 0.0, None]

    def draw(temperature):
        samples = [sample(i // 4, "1", r, prompt=("12=", "4711=")[i // 4]) for i, r in enumerate(rewards)]
        made = engine.generate([Request(s.ids, 5, temperature, seed=i) for i, s in enumerate(samples)])
        return [dataclasses.replace(s, completion=c) for s, c in zip(samples, made)]

    return draw


def test_an_engine_forgets_only_when_it_is_idle(lively):
    engine = Engine(lively, 6, LENGTH, 1)
    running = engine.submit(Request(np.array([1])))
    with pytest.raises(UserError, match="forget: requests are running or waiting"):
        engine.forget()
    engine.abort(running)
    engine.generate([Request(np.array([1, 2, 3]), 2)])
    assert engine.counts["read"] == 2
    engine.forget()
    assert not engine.counts
    engine.generate([Request(np.array([1, 2, 3]), 2)])
    assert engine.counts["read"] == 2


class Spy:
    """An objective that reports what it is given."""

    def loss(self, logp, tokens, entropy=None):
        return jnp.float32(0), {"logp": logp, "entropy": entropy, **tokens._asdict()}


@pytest.fixture(scope="module")
def seen(place, lively):
    """(temperature, batch) -> what an objective is given of it."""
    graphdef, params = split(lively)

    @jax.jit
    def run(params, temperature, batch):
        model = merge(graphdef, params)
        hidden, _, _ = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])
        return policy_loss(Spy(), temperature, 1024)(model, hidden, batch)[1] | {"logits": model.logits(hidden)}

    return lambda temperature, batch: jax.device_get(run(params, temperature, batch))


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_the_trainers_log_probabilities_are_the_engines(drawn, seen, temperature):
    samples = drawn(temperature)
    batch, _ = assemble(samples, ROWS, LENGTH, "std")
    got = seen(temperature, batch)
    log_p = log_softmax(got["logits"].astype(np.float64) / temperature)
    lengths, checked = [], 0
    for r, s in enumerate(samples):
        start, made = len(s.ids), s.completion
        lengths.append(start + len(made.tokens))
        for t, (token, logprob) in enumerate(zip(made.tokens, made.logprobs), start):
            np.testing.assert_allclose(logprob, log_p[r, t - 1, token], rtol=0, atol=1e-5)
            np.testing.assert_allclose(got["logp"][r, t - 1], logprob, rtol=0, atol=1e-5)
            assert got["mask"][r, t - 1] == (s.reward is not None) and got["rollout"][r, t - 1] == logprob
            checked += 1
    assert max(lengths) > load_config().model.index_topk + 3 and checked > 20
    assert got["mask"].sum() == sum(len(s.completion.tokens) for s in samples if s.reward is not None)
    np.testing.assert_allclose(got["entropy"], -(np.exp(log_p) * log_p).sum(-1), atol=1e-5)
    other = seen(1.7 - temperature, batch)
    assert np.abs(other["logp"] - got["rollout"])[got["mask"]].max() > 0.1  # the wrong temperature is noticed


def kept_gradients() -> optax.GradientTransformation:
    """Steps of -0.1 times the gradients, which its state holds."""
    return optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p), lambda g, s, p: (jax.tree.map(lambda x: -0.1 * x, g), g)
    )


@pytest.fixture(scope="module")
def stepped(place, lively):
    """(batch of arrays [rows,T], weight of the MTP loss) -> (state after, metrics, gradients) of a step of 4 micro-batches."""
    loss, freeze = LossConfig(mtp_steps=1, balance_weight=0.0, detach_mtp=True), ("indexer",)
    rates = Rates(lambda step: step.astype(jnp.float32), lambda _: jnp.float32(0))
    run = jax.jit(make_step(lively, kept_gradients(), rates, loss, freeze, policy=policy_loss(IcePop(), TEMPERATURE, 1024)))
    params = split(lively)[1]
    zeros = {p: jnp.zeros_like(x) for p, x in flat(params).items() if p in trainable(lively)}

    def step(batch, mtp=1):
        cut = {name: x.reshape(4, ROWS // 4, -1) for name, x in batch.items()}
        state, metrics = run(TrainState(jnp.int32(mtp), params, zeros), cut)
        return state, jax.device_get(metrics), jax.device_get(state.opt_state)

    return step


def trainable(model) -> set:
    return {p for p, spec in flat(specs(model)).items() if spec.part != "indexer" and spec.kind != "router_bias"}


def test_the_gradient_of_a_step_in_micro_batches_is_reinforce_with_normalised_advantages(lively, drawn, stepped):
    """Of the whole batch at once, by a loop over its tokens."""
    samples = drawn(TEMPERATURE)
    batch, _ = assemble(samples, ROWS, LENGTH, "std")
    groups = [np.array([0.0, 1.0, 0.5, 0.25]), np.array([1.0, 1.0, 0.0])]
    advantages = np.concatenate([(g - g.mean()) / (g.std(ddof=1) + 1e-6) for g in groups])
    graphdef, params = split(lively)

    @jax.jit
    @jax.grad
    def expected(params):
        model = merge(graphdef, params)
        hidden, _, _ = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])
        log_p = jax.nn.log_softmax(model.logits(hidden) / TEMPERATURE)
        total = 0.0
        for r, (s, advantage) in enumerate(zip(samples, advantages)):  # the 8th has no reward
            of_answer = [log_p[r, len(s.ids) + i - 1, token] for i, token in enumerate(s.completion.tokens)]
            total += advantage * sum(of_answer) / len(of_answer) / 7
        return -total

    expected = flat(jax.device_get(expected(params)))
    _, metrics, grads = stepped(batch)
    policy = {p for p in grads if p[0] != "mtp"}
    assert len(policy) > 15 and metrics["popped"] == 0 and metrics["tokens"] == batch["loss_mask"].sum()
    sizes = [len(s.completion.tokens) for s in samples[:7]]
    assert metrics["positive"] == sum(n for n, a in zip(sizes, advantages) if a > 0)
    assert metrics["negative"] == sum(n for n, a in zip(sizes, advantages) if a < 0)
    for path in policy:
        scale = np.abs(expected[path]).max()
        assert scale > 0, path
        np.testing.assert_allclose(grads[path], expected[path], rtol=1e-3, atol=1e-4 * scale, err_msg=str(path))


def test_the_mtp_loss_trains_the_mtp_layer_and_leaves_the_policys_gradient_as_it_is(drawn, stepped):
    batch, _ = assemble(drawn(TEMPERATURE), ROWS, LENGTH, "std")
    _, _, without = stepped(batch, mtp=0)
    _, _, heavy = stepped(batch, mtp=3)
    for path, x in heavy.items():
        if path[0] == "mtp":
            assert not without[path].any() and x.any(), path
        else:
            assert x.tobytes() == without[path].tobytes() and x.any(), path


def test_equal_rewards_change_nothing_and_others_change_all_that_trains(lively, drawn, stepped):
    before = flat(jax.device_get(split(lively)[1]))
    samples = drawn(TEMPERATURE)
    same, _ = assemble([dataclasses.replace(s, reward=0.9) for s in samples], ROWS, LENGTH, "std")
    state, metrics, _ = stepped(same, mtp=0)
    assert metrics["tokens"] > 20 and metrics["positive"] == metrics["negative"] == 0
    for path, x in flat(jax.device_get(state.params)).items():
        assert x.tobytes() == before[path].tobytes(), path
    state, _, _ = stepped(assemble(samples, ROWS, LENGTH, "std")[0], mtp=1)
    for path, x in flat(jax.device_get(state.params)).items():
        assert (x.tobytes() != before[path].tobytes()) == (path in trainable(lively)), path


# What a user sees


def write_step(run: pathlib.Path, samples: list[dict]) -> None:
    """A run with one step of these samples."""
    whole = dict(
        task="reverse:2", ordinal=0, prompt="12=", answer="21", reward=1.0, parts={}, error="", advantage=0.5, finish="stop",
        tokens=[3, 2, 0], logprobs=[-0.1, -4.0, -0.2], version=6,
    )  # fmt: skip
    (run / "samples").mkdir(parents=True)
    text = "".join(json.dumps(whole | s, ensure_ascii=False) + "\n" for s in samples)
    (run / "samples" / "7.jsonl").write_text(text, encoding="utf-8")


def shown(run: pathlib.Path, **options) -> str:
    out = io.StringIO()
    show_samples(InspectOptions(str(run), **options), rich.console.Console(file=out, width=80))
    return out.getvalue()


@pytest.fixture
def viewed(steady, tmp_path):
    """A run whose step 7 has three samples."""
    run = tmp_path / "run"
    write_step(
        run,
        [
            dict(ordinal=3, reward=0.5, advantage=-1.25, parts={"right": 1.0, "short": 0.0}),
            dict(ordinal=4, reward=None, error="infrastructure: OSError: lost", advantage=0.0, finish="length"),
            dict(ordinal=5, reward=0.25, answer="2\x1b[31m\u20281" * 30, tokens=[3, 15], logprobs=[-0.5, -0.25]),
            dict(ordinal=6, task="reverse:3"),
        ],
    )
    shutil.copy(steady.path / "config.json", run)
    (run / "data").mkdir()
    return run


def test_samples_are_shown_with_everything_they_have(viewed):
    text = shown(viewed)
    head, *cards = text.split("\n\n")
    assert head == f"{viewed}, step 7: 4 answers, reward 0.583 (0.250 to 1.000); 4 shown" and len(cards) == 4
    flat_card = " ".join(cards[0].split())
    for words in (
        "reverse:2, prompt 3: reward 0.500, advantage -1.250, finish stop, weights of step 6",
        "prompt 12= answer 21 parts right 1.000, short 0.000 tokens 2(-0.10) 1(-4.00) <|endoftext|>(-0.20)",
    ):
        assert words in flat_card, flat_card
    assert "reward none" in cards[1] and "error  infrastructure: OSError: lost" in cards[1] and "finish length" in cards[1]
    assert "\x1b" not in text and r"2\x1b[31m\u20281" in cards[2] and "<15>(-0.25)" in cards[2]
    assert all(len(line) <= 80 for line in text.splitlines()[1:])


def test_samples_are_ordered_and_chosen(viewed):
    ordinals = lambda **options: [int(n) for n in re.findall(r"prompt (\d+):", shown(viewed, **options))]  # noqa: E731
    assert ordinals(step=7) == [3, 4, 5, 6]
    assert ordinals(worst=True) == [5, 3, 6, 4] and ordinals(best=True) == [6, 3, 5, 4]
    assert ordinals(rows=2, worst=True) == [5, 3] and ordinals(rows=0) == [3, 4, 5, 6]
    assert ordinals(task="reverse:3") == [6]


def test_samples_that_are_torn_are_one_line(viewed):
    (viewed / "samples" / "7.jsonl").write_text('{"task": "rev')
    with pytest.raises(UserError, match=r"7\.jsonl: cannot be read \("):
        shown(viewed)


def test_the_viewer_shows_what_the_run_wrote(steady):
    status, text = command(["rl", "--inspect", steady.path, "--step", "2", "--rows", "0"])
    samples = samples_of(steady.path, 2)
    assert status == 0 and f"step 2: {len(samples)} answers" in text
    assert [float(x) for x in re.findall(r": reward ([0-9.]+),", text)] == [round(s["reward"], 3) for s in samples]
    for s in samples:
        assert all(0 <= token < 16 for token in s["tokens"]) and len(s["tokens"]) == len(s["logprobs"]) <= 5
        assert s["version"] == 1 and s["answer"] == "".join(PIECES[t - 1] for t in s["tokens"] if 0 < t <= 12)


@pytest.mark.parametrize("verb", ["rl", "distill"])
def test_help_shows_the_settings_and_the_viewer(capsys, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    text = re.sub(r"[\s│╭╮╰╯─|]+", " ", capsys.readouterr().out)
    assert stop.value.code == 0
    for words in ("--rollout.group INT answers to each prompt (default:", "--run-dir STR", "--resume", "--mtp-weight FLOAT"):
        assert words in text, words
    assert verb != "rl" or "glm5 rl --inspect RUN shows the answers" in text


def test_other_verbs_take_a_run_of_rl(steady, tmp_path):
    run = steady.path
    status, text = command(["generate", run, "--prompt", "12=", "--max-new-tokens", 1])
    assert status == 0 and text.startswith("12=")
    (tmp_path / "sums.jsonl").write_text('{"text": "12=21"}\n' * 4)
    status, text = command(["eval", run, "--sources", tmp_path / "sums.jsonl"])
    assert status == 0 and "bits per byte: " in text and "rows of 10 tokens" in text
    assert command(["convert", run, tmp_path / "hf"])[0] == 0
    mine, theirs = params_of(run), params_of(tmp_path / "hf")
    assert mine.keys() == theirs.keys() and all(mine[p].tobytes() == theirs[p].tobytes() for p in mine)


def test_training_and_rl_start_from_a_run_of_rl(steady, tmp_path):
    config, data = load_config(), tmp_path / "data"
    init = InitConfig(run=str(steady.path))
    text = TrainConfig(model=config.model, init=init, loss=LossConfig(mtp_steps=1), data=dataclasses.replace(
        TrainConfig().data, tokenizer=config.data.tokenizer, seq_len=10))  # fmt: skip
    for new in (text, dataclasses.replace(config, init=init)):
        bring_tokenizer(open_source(new, tmp_path), new.data.tokenizer, data)
    params, expected = flat(jax.device_get(first_state(text, kept_gradients()).params)), params_of(steady.path)
    assert params.keys() == expected.keys() and all(params[p].tobytes() == expected[p].tobytes() for p in params)
    other = dataclasses.replace(text, data=dataclasses.replace(text.data, tokenizer="bytes"))
    with pytest.raises(UserError, match="data.tokenizer=bytes: .*steady was trained with chars:0123456789=+"):
        bring_tokenizer(open_source(other, tmp_path), "bytes", data)


def test_final_words_of_training_need_no_function_in_the_text(monkeypatch):
    """A tokenizer of digits cannot encode the start of one."""
    monkeypatch.setattr(report, "_continued", lambda config, result, tokens, new, stops: tokens.tolist())
    document = TOKENIZER.encode("1234=4321")
    for held_out, train in (([document], [document[:1]]), ([], [document])):
        corpus = types.SimpleNamespace(tokenizer=TOKENIZER, held_out=(held_out,), train=(train,))
        result = types.SimpleNamespace(corpus=corpus)
        assert report.sample_held_out(load_config(), result) == document[:5].tolist()


def test_every_metric_is_in_the_one_table_of_the_docs(steady):
    text = (ROOT / "docs" / "rl.md").read_text()
    table = text.split("\n## Metrics")[1].split("\n## ")[0]
    named = [name for row in re.findall(r"^\| (`[^|]*`) \|", table, re.M) for name in re.findall("`([^`]+)`", row)]
    assert len(set(named)) == len(named)
    tasks = ["reverse:2", "reverse:3"]
    batch, advantages = assemble([sample(0, "1", 0.0), sample(0, "2", 1.0)], 2, 10, "std")
    failed = dataclasses.replace(sample(0, "1", 0.0), score=Score(0.0, error="raised: KeyError: x"))
    made = {name for line in lines(steady.path) for name in line} | set(summary([failed], advantages))
    made |= set(reverse_kl(tasks, batch | {"teacher": batch["rollout"]}))
    made |= {"reward/reverse:2"}
    pattern = lambda name: re.sub(r"^acceptance_\d$", "acceptance_N", re.sub("^scores_.*", "scores_KIND", name))  # noqa: E731
    assert {re.sub("/reverse:[23]$", "/TASK", pattern(name)) for name in made} - {"step"} == set(named)


# The network of the recipe `reverse`


def test_a_placed_network_knows_positions_and_is_glm5_without_its_map():
    """RoPE alone cannot tell a row from the same row further along; the map of positions can, and at 0 it is not there."""
    cfg = step_config(rope_theta=10.0)
    graphdef, params = split(PlacedGlm5(cfg, nnx.Rngs(0)))
    tokens, positions = np.arange(9)[None], np.arange(9)[None]
    run = jax.jit(lambda params, positions: merge(graphdef, params).trunk(tokens, positions)[0])
    here, there = run(params, positions), run(params, positions + 7)
    assert np.abs(here - there).max() > 1e-2
    blind = {path: leaf * (path[-1] != "place") for path, leaf in flat(params).items()}
    without = run(traverse_util.unflatten_dict(blind), positions)
    np.testing.assert_allclose(run(traverse_util.unflatten_dict(blind), positions + 7), without, rtol=0, atol=1e-5)
    plain = traverse_util.unflatten_dict({path: leaf for path, leaf in flat(params).items() if path[-1] != "place"})
    same = merge(split(abstract(cfg))[0], plain).trunk(tokens, positions)[0]
    np.testing.assert_allclose(without, same, rtol=0, atol=1e-5)
