"""Experiments that train in blocks until a measurement says stop: stopped and started again, they go on where they were."""

import importlib.util
import pathlib
import shutil
import sys

import pytest

EXPERIMENTS = pathlib.Path(__file__).parent.parent / "experiments"
KEPT = 2  # checkpoints that a run keeps


@pytest.fixture
def script(request, monkeypatch):
    """The run.py of an experiment, as a module under a name of its own."""
    name = f"experiment_{request.param}"
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / request.param / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def pretend_to_train(calls):
    """Keeps the last checkpoints as a run does, and refuses, as a run does, to end before where it stands."""

    def train(config, run):
        folder = run / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        steps = sorted(int(path.name) for path in folder.iterdir())
        assert config.steps >= max(steps, default=0), "a run cannot go back"
        calls.append(config.steps)
        (folder / str(config.steps)).mkdir(exist_ok=True)
        for old in sorted({*steps, config.steps})[:-KEPT]:
            shutil.rmtree(folder / str(old))

    return train


@pytest.mark.parametrize("stood", [90, 93])  # at a block's end, or within the next one, as after a signal
@pytest.mark.parametrize("script", ["reasoning_gym"], indirect=True)
def test_the_warm_start_goes_on(script, stood, monkeypatch, tmp_path):
    calls, p = [], script.Protocol()
    monkeypatch.setattr(script, "train", pretend_to_train(calls))
    monkeypatch.setattr(script, "right", lambda p, run: float(calls[-1] >= 120))
    assert script.until_it_answers(p, 0, "chats.jsonl", tmp_path / "whole") == 120
    assert calls == [60, 70, 80, 90, 100, 110, 120]
    calls.clear()
    (tmp_path / "stopped" / "checkpoints" / str(stood)).mkdir(parents=True)
    assert script.until_it_answers(p, 0, "chats.jsonl", tmp_path / "stopped") == 120
    assert calls == [steps for steps in (90, 100, 110, 120) if steps >= stood]
    assert script.until_it_answers(p, 0, "chats.jsonl", tmp_path / "stopped") == 120


@pytest.mark.parametrize("script", ["distillation"], indirect=True)
def test_rl_on_the_second_skill_goes_on(script, monkeypatch, tmp_path):
    calls, p = [], script.Protocol()

    def accuracy(p, run):
        done = calls[-1] >= 50
        return {script.A: {"sampled": {"right": 0.1 if done else 0.9}}, script.B: {"sampled": {"right": 1.0}}}

    monkeypatch.setattr(script, "reinforce", pretend_to_train(calls))
    monkeypatch.setattr(script, "accuracy", accuracy)
    for _ in range(2):
        script.until_a_has_dropped(p, 0, tmp_path / "a", tmp_path / "b")
    assert calls == [10, 20, 30, 40, 50, 50]
