"""Pipelines: how stages chain, stop and go on, what is refused, the report, the measurements, and the shipped recipe."""

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest

from glm5_jax import cli
from glm5_jax.config import override, tiny
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, split
from glm5_jax.pipeline import measure, report, run
from glm5_jax.pipeline.run import Pipeline, Stage, run_stages
from glm5_jax.rl.config import RlConfig, RolloutConfig, RowConfig
from glm5_jax.rl.tasks import is_held_out
from glm5_jax.rl.teachers import assign
from glm5_jax.serve.engine import Completion
from glm5_jax.train import run_dir as folders
from glm5_jax.train.checkpoint import CheckpointConfig, restore_params
from glm5_jax.train.data import held_out_batches, load_corpus, targets_of
from glm5_jax.train.inherit import STAGE_SETTINGS
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.session import Stopped
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import flat
from helpers_train import compile_cache, load_run_config, log_softmax, write_corpus, write_run_config

ROOT = pathlib.Path(__file__).parents[1]
SIZE = "size, <of> all & weights"  # a name that HTML has to escape


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    """A few steps of a small network."""
    place = tmp_path_factory.mktemp("recipe")
    config = load_run_config(write_run_config(place / "config.py", write_corpus(place / "corpus")))
    return dataclasses.replace(
        config, model=override(config.model, first_k_dense_replace=1), optimizer=OptimizerConfig("adamw"), steps=6,
        eval_every=2, batch_rows=((0, 2),), checkpoint=CheckpointConfig(every=4, keep_last=3),
    )  # fmt: skip


def size_of(params) -> float:
    return float(sum(np.abs(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(params)))


def measure_size(model, tokenizer) -> dict:
    assert tokenizer.vocab_size == 260
    size = size_of(split(model)[1])
    return {"numbers": {SIZE: size}, "samples": {"a <b>sample</b>": f"weights of {size:.4f} <script>"}}


def two(config: TrainConfig, measure=measure_size, **second) -> Pipeline:
    stages = [Stage(name, f"{name} & title", "about <it>", "2.2", config, (SIZE,)) for name in ("first", "second")]
    stages[1] = dataclasses.replace(stages[1], config=dataclasses.replace(config, seed=1, **second))
    return Pipeline("Two <stages>", tuple(stages), measure)


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    """The folder of a finished pipeline of two stages; programs stay compiled."""
    place = tmp_path_factory.mktemp("pipeline")
    with compile_cache(place / "cache"):
        run_stages(two(config), place / "runs")
        yield place / "runs"


@pytest.fixture
def copy(done, tmp_path):
    """The finished pipeline at another place, under the names it was started with."""
    shutil.copytree(done, tmp_path / "runs")
    path = tmp_path / "runs/second/config.json"
    path.write_text(path.read_text().replace(str(done), str(tmp_path / "runs")))
    return tmp_path / "runs"


def weights(run_dir: pathlib.Path, step: int) -> dict:
    wanted = split(abstract(folders.read_config(run_dir).model))[1]
    return flat(restore_params(run_dir, wanted, step=step)[1])


def measured(runs: pathlib.Path, name: str) -> dict:
    return json.loads((runs / name / "measured.json").read_text())


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Stages


def test_each_stage_starts_from_the_last_one_and_is_measured_before_and_after(done, config):
    first, second = weights(done / "first", 6), weights(done / "second", 0)
    assert all((np.asarray(first[path]) == second[path]).all() for path in first)
    fresh = size_of(split(folders.fresh_model(config))[1])
    sizes = [fresh, size_of(first), size_of(weights(done / "second", 6))]
    assert len(set(sizes)) == 3
    for name, (before, after) in zip(("first", "second"), itertools.pairwise(sizes)):
        found = measured(done, name)
        assert found["step"] == 6
        np.testing.assert_allclose([found[when]["numbers"][SIZE] for when in ("before", "after")], [before, after], rtol=1e-12)
        times = json.loads((done / name / "times.json").read_text())
        assert times["starts"] == 1 and 0 < times["wall_seconds"] < 600 and times["cpu_seconds"] > 0


def test_a_finished_pipeline_does_nothing_again(copy, config, monkeypatch):
    monkeypatch.setattr(run, "train", None)
    before, said = files(copy), []
    run_stages(two(config, measure=None), copy, say=said.append)
    after = files(copy)
    before.pop(str(copy / "report.html")), after.pop(str(copy / "report.html"))
    assert before == after
    assert [f"{copy / name}: already done, 6 steps." in said for name in ("first", "second")] == [True, True]


def test_a_kill_in_a_stage_goes_on_in_that_stage_to_the_bit(copy, done, config, capsys, monkeypatch):
    """Killed after step 4 of 6 of the second stage, before its times were written; then between its last step and measuring."""
    shutil.rmtree(copy / "second/checkpoints/6")
    for name in ("measured.json", "times.json"):
        (copy / "second" / name).unlink()
    before = files(copy / "first")
    run_stages(two(config), copy)
    said = capsys.readouterr().out
    assert "stage 1 of 2, first: first & title" in said and "stage 2 of 2" in said and "resuming at step 4" in said
    assert files(copy / "first") == before and measured(copy, "second") == measured(done, "second")
    (copy / "second/measured.json").unlink()
    monkeypatch.setattr(run, "train", lambda config, run_dir: None)  # which finds that there is nothing to do
    run_stages(two(config), copy)
    assert measured(copy, "second") == measured(done, "second")
    assert json.loads((copy / "second/times.json").read_text())["starts"] == 2
    assert "All 2 stages are done" in (copy / "report.html").read_text()


def test_a_signal_ends_the_pipeline_with_a_report_of_what_there_is(copy, config, monkeypatch, capsys):
    def stopped(config, run_dir):
        raise Stopped(15, saved=True)

    for name in ("measured.json", "times.json"):
        (copy / "second" / name).unlink()
    monkeypatch.setattr(run, "train", stopped)
    monkeypatch.setattr(run, "load", lambda folder, runs: two(config))
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", "anywhere", "--run-dir", str(copy)])
        assert stop.value.code == 0
    assert f"stopped; saved in {copy}. The same command goes on from here." in capsys.readouterr().out
    assert "1 of 2 stages are done" in (copy / "report.html").read_text()
    assert json.loads((copy / "second/times.json").read_text())["starts"] == 2


def test_starting_over_begins_with_the_first_stage(copy, config, monkeypatch):
    ran = []
    monkeypatch.setattr(run, "train", lambda config, run_dir: ran.append(run_dir.name))
    monkeypatch.setattr(run, "_measure", lambda m, stage, run_dir, before: run.write(run_dir / "measured.json", dict(
        step=6, before=dict(numbers={SIZE: 0.0}, samples={}), after=dict(numbers={SIZE: 1.0}, samples={})
    )))  # fmt: skip
    run_stages(two(config), copy, resume=False)
    assert ran == ["first", "second"]
    assert not list(copy.rglob("checkpoints")) and not list(copy.rglob("times.json"))


def test_the_loop_follows_from_the_config(monkeypatch, tmp_path):
    ran = []
    for loop in ("train", "reinforce", "distill"):
        monkeypatch.setattr(run, loop, lambda config, run_dir, loop=loop: ran.append(loop))
    rl = RlConfig()
    taught = dataclasses.replace(
        rl, teachers=("reverse:4=a",), rollout=RolloutConfig(prompts=32, group=1), data=RowConfig("bytes")
    )
    for config in (TrainConfig(), rl, taught):
        run._train(Stage("s", "t", "a", "2", config), tmp_path / "s")
    assert ran == ["train", "reinforce", "distill"] and not (tmp_path / "s").exists()


# What is refused


def test_other_settings_of_a_finished_stage_are_refused(copy, config):
    before = files(copy)
    pipeline = two(config)
    for i, name in enumerate(("first", "second")):
        stages = list(pipeline.stages)
        stages[i] = dataclasses.replace(stages[i], config=dataclasses.replace(stages[i].config, micro_rows=1))
        with pytest.raises(UserError, match=f"{name}: holds a run with other settings: micro_rows .2 then, 1 now"):
            run_stages(dataclasses.replace(pipeline, stages=tuple(stages)), copy)
    more = dataclasses.replace(pipeline.stages[0], config=dataclasses.replace(config, steps=8))
    with pytest.raises(UserError, match="first: is to run up to step 8, but second has started from it"):
        run_stages(dataclasses.replace(pipeline, stages=(more, pipeline.stages[1])), copy)
    after = files(copy)
    before.pop(str(copy / "report.html")), after.pop(str(copy / "report.html"))
    assert before == after


MAKE = """
import dataclasses
from glm5_jax.pipeline.run import Pipeline, Stage
from glm5_jax.train.stages import InitConfig, tiny

def stage(name="one", config=tiny()):
    return Stage(name, "", "", "2", config)

def pipeline(runs):
    {}
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return Pipeline('', (), None)", "stages: at least one"),
        ("return Pipeline('', (stage(), stage()), None)", "stage one: one name twice"),
        ("return Pipeline('', (stage('../one'),), None)", "stage '../one': a name of letters"),
        ("return Pipeline('', (stage(config=3),), None)", "stage one: int is no TrainConfig or RlConfig"),
        (
            "return Pipeline('', (stage(config=dataclasses.replace(tiny(), init=InitConfig('runs/a'))),), None)",
            "stage one: init.run=runs/a: is the stage before it",
        ),
        ("return 3", "returns int, not Pipeline"),
        ("return 1 / 0", "line 10: ZeroDivisionError: division by zero"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line_and_leaves_nothing(tmp_path, capsys, body, message):
    (tmp_path / "recipe.py").write_text(MAKE.format(body))
    assert message in refused(capsys, "run", tmp_path, "--run-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_mistakes_on_the_command_line(tmp_path, capsys):
    assert "recipe.py: no such file" in refused(capsys, "run", tmp_path / "nowhere")
    (tmp_path / "recipe.py").write_text("")
    assert "has no attribute 'pipeline'" in refused(capsys, "run", tmp_path)
    assert "usage: glm5 run FOLDER" in refused(capsys, "run")
    assert "did you mean --run-dir" in refused(capsys, "run", tmp_path, "--run-dri", "x")


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.startswith("glm5: ") and err.count("\n") == 1, (out, err)
    return err


# The report


def test_the_report_holds_every_number_and_needs_nothing_else(done):
    page = (done / "report.html").read_text()
    assert not re.findall(r"https?:|<script|<link|<img|<iframe|@import|url\(|srcset|\bsrc=", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {"#first", "#second"}
    assert set(re.findall(r'<h2 id="([^"]*)"', page)) == {"first", "second"}
    for name in ("first", "second"):
        for when in ("before", "after"):
            size = measured(done, name)[when]["numbers"][SIZE]
            assert page.count(f"{size:,.0f}" if size >= 1000 else f"{size:.1f}") >= 2
            assert f"weights of {size:.4f} &lt;script&gt;" in page
    weights_of_both = sum(np.size(leaf) for leaf in weights(done / "first", 6).values()) / 1e6
    assert page.count(f"{weights_of_both:.2f}M parameters") == 2
    assert "Two &lt;stages&gt;" in page and "about &lt;it&gt;" in page and "size, &lt;of&gt; all &amp; weights" in page
    assert page.count('aria-label="held-out bits per byte, by step"') == 2
    assert "prefers-color-scheme: dark" in page
    changed = page[page.index('id="second"') :]
    assert re.search(r"<div class=changed><dt>init.run</dt><dd>[^<]*first</dd>", changed)
    assert "<div><dt>steps</dt><dd>6</dd></div>" in changed


def test_before_the_first_stage_the_report_says_so(config, tmp_path):
    page = report.write_report("t", two(config).stages, tmp_path).read_text()
    assert "0 of 2 stages are done" in page and "<svg" not in page
    with pytest.raises(UserError, match="report.html: cannot be written"):
        report.write_report("t", two(config).stages, tmp_path / "missing")


def test_a_curve_is_drawn_where_its_points_are():
    page = report.svg([([(0, 1.0), (5, 3.0), (10, 2.0)], "a"), ([(10, 1.0)], "b")], "loss & more")
    points = [[float(v) for v in pair.split(",")] for pair in re.search(r'polyline points="([^"]*)"', page)[1].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 > y2 > y1  # larger values stand higher
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2)
    labels = {float(text): float(y) - 4 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', page)}
    assert labels[2.0] == pytest.approx(y2, abs=0.2) and labels[3.0] == pytest.approx(y1, abs=0.2)
    assert 'stroke="var(--b)"' in page and "loss &amp; more" in page
    assert all(0 <= x <= report.WIDTH and 0 <= y <= report.HEIGHT for x, y in points)
    flat_line = report.svg([([(3, 0.0)], "a")], "one point")
    assert "nan" not in flat_line and "inf" not in flat_line
    lines = [{"step": 1, "ce": float("nan")}, {"step": 2, "ce": 1.0}]
    lines += [{"step": i, "bits_per_byte": float(i), "held_out_rows": rows} for i, rows in ((1, 4), (2, 4), (3, 0))]
    (figure,) = report._curves(lines)  # one step is no curve, nor is another part of the text a third point of one
    assert "<figcaption>held-out bits per byte<" in figure and figure.count("<circle") == 2
    (figure,) = report._curves([line | {"held_out_rows": 0} for line in lines[2:]])
    assert figure.count("<circle") == 3


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.93, 2.1, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]),
        (-1, 350, [0, 100, 200, 300]),
        (0.0, 0.003, [0, 0.001, 0.002, 0.003]),
        (-3.1, 3.1, [-2, 0, 2]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert report.ticks(low, high) == pytest.approx(expected)


def test_numbers_keep_the_digits_that_matter():
    shown = {1.23456: "1.235", 62.5: "62.5", 12345.6: "12,346", -0.5: "-0.500", float("nan"): "nan"}
    assert all(report._number("loss", x) == text for x, text in shown.items())
    assert [report._number("a, % right", x) for x in (0.0, 7.8125, 100.0)] == ["0.0", "7.8", "100.0"]


# Measurements


def test_held_out_loss_is_that_of_the_logits(done, config, tmp_path):
    model, tokenizer = folders.load_run(done / "second", "float32"), folders.run_tokenizer(done / "second")
    data = dataclasses.replace(config.data, held_out=0.3)
    corpus = measure.corpus_of(data, tmp_path / "cache", tokenizer)
    nats = size = 0.0
    for batch in held_out_batches(load_corpus(data, tmp_path / "other"), data, 1, 5):
        logits = np.asarray(model(batch["tokens"], batch["positions"], batch["segment_ids"]).logits)
        log_p = np.take_along_axis(log_softmax(logits)[:, :-1], batch["tokens"][:, 1:, None], axis=-1)[..., 0]
        nats -= log_p[targets_of(batch)].sum()
        size += batch["bytes"]
    found = measure.held_out(model, corpus, data, 5, 4)
    np.testing.assert_allclose(found, nats / size / np.log(2), rtol=1e-5)
    narrow = measure.held_out(model, corpus, data, 5, 4, attention="sparse", index_topk=1)
    assert abs(narrow - found) > 1e-3


class Parrot:
    """An engine that answers questions of reverse:2: greedily always right, otherwise every second one."""

    def __init__(self, model, slots, context, **_):
        self.model = model

    def generate(self, requests, progress=None):
        made = []
        for i, request in enumerate(requests):
            digits = request.tokens[:2][::-1] if request.temperature == 0 or i % 2 else [1, 1, 1]
            made.append(Completion(np.array([*digits, 0]), np.zeros(3), np.zeros(3, int), "stop"))
        return made


def test_answers_are_counted_by_task_and_way_of_drawing(monkeypatch):
    monkeypatch.setattr(measure, "Engine", Parrot)
    config = RlConfig(
        data=RowConfig("chars:0123456789=+", 16), rollout=RolloutConfig(("reverse:2",), prompts=2, group=2), micro_rows=1
    )
    found = measure.answers(None, load_tokenizer("chars:0123456789=+"), config, ("reverse:2", "copy:2"), 10, shown=2)
    assert (found["reverse:2"].greedy, found["reverse:2"].sampled) == (100, 50)
    assert found["copy:2"].greedy < 50 and len(found["copy:2"].samples) == 2
    for text in found["reverse:2"].samples:
        question, answer = re.fullmatch(r"(\d\d)=▌(\d\d)  reward 1", text).groups()
        assert answer == question[::-1] and is_held_out(f"{question}=")


def test_a_continuation_ends_without_ids_that_are_no_text(monkeypatch):
    class Engine(Parrot):
        def generate(self, requests):
            assert requests[0].temperature == 0.7 and requests[0].max_new_tokens == 4
            return [Completion(np.array([98, 270, 99, 0]), np.zeros(4), np.zeros(4, int), "stop")]

    monkeypatch.setattr(measure, "Engine", Engine)
    model = types.SimpleNamespace(cfg=tiny(vocab_size=300))
    assert measure.continued(model, load_tokenizer("bytes"), "x = ", 4) == "x = ▌ab"


# The recipe


@pytest.fixture(scope="module")
def recipe():
    path = ROOT / "experiments/recipe/recipe.py"
    spec = importlib.util.spec_from_file_location("shipped_recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stages_of_the_recipe_fit_each_other(recipe, tmp_path):
    pipeline = recipe.pipeline(tmp_path)
    stages = run._chained(pipeline.stages, tmp_path)
    assert [s.name for s in stages] == ["pretrain", "midtrain", "dsa_warmup", "dsa_sparse", "sft", "rl", "distill"]
    assert [s.config.init.run for s in stages] == ["", *(str(tmp_path / s.name) for s in stages[:-1])]
    for before, stage in itertools.pairwise(stages):
        models = [dataclasses.asdict(s.config.model) for s in (before, stage)]
        assert {n for n in models[0] if models[0][n] != models[1][n]} <= set(STAGE_SETTINGS)
        assert before.config.data.tokenizer == stage.config.data.tokenizer
    names = {recipe.PYTHON, recipe.LONGER, recipe.SPARSE, recipe.CHATS, *recipe.RIGHT.values()}
    assert all(stage.moves and set(stage.moves) <= names for stage in stages)
    *_, rl, last = (s.config for s in stages)
    assert not rl.teachers and rl.rollout.group > 1
    teachers = assign(last.teachers, last.rollout.tasks)
    assert {pathlib.Path(path).name for path in teachers.values()} == {"sft", "rl"}
    assert len(stages[1].config.lengths) > 1 and stages[2].config.freeze == ("trunk", "mtp")
    assert [s.config.model.attention for s in stages] == ["dense"] * 3 + ["sparse"] * 4


def test_the_conversations_of_the_recipe_are_right_and_hold_no_held_out_question(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "CONVERSATIONS", 300)
    path = pathlib.Path(recipe.write_conversations(tmp_path / "chats.jsonl"))
    lines = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert len(lines) == 600
    for question, answer in lines:
        text, thought, said = question["content"], answer["reasoning_content"], answer["content"]
        assert not is_held_out(text)
        if "+" in text:
            digits = text[:-1].split("+")
            assert int(said) == sum(map(int, digits))
            steps = [re.fullmatch(r"(\d+)\+(\d)=(\d+)", step).groups() for step in thought.split(";")]
            assert [d for _, d, _ in steps] == digits[1:] and steps[0][0] == digits[0] and steps[-1][2] == said
            assert all(int(a) + int(b) == int(c) for a, b, c in steps)
            assert all(before[2] == after[0] for before, after in itertools.pairwise(steps))
        else:
            assert said == text[:-1][::-1] and thought == f"{' '.join(text[:-1])};{' '.join(said)}"
    before = path.read_bytes()
    recipe.write_conversations(path)
    assert path.read_bytes() == before
