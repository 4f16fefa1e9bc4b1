"""Several stages of one model, run by one command: each starts from the run of the one before it.

    pipeline = load("experiments/recipe", pathlib.Path("runs/recipe"))     # its recipe.py
    run_stages(pipeline, pathlib.Path("runs/recipe"))

A stage is a run as any other, in RUNS/NAME: the loops of training, reinforcement learning and distillation do the work and
resume it. After each stage the same measurements are made of its model as of all others, kept in RUNS/NAME/measured.json, and
RUNS/report.html is written. The same command goes on in the stage that was stopped, to the bit.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import time
from collections.abc import Callable

from glm5_jax.config import check
from glm5_jax.importing import call_object
from glm5_jax.model import Glm5
from glm5_jax.pipeline.report import write_report
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.distill import distill
from glm5_jax.rl.loop import reinforce
from glm5_jax.train import run_dir as folders
from glm5_jax.train.loop import train
from glm5_jax.train.session import only_one, start_over
from glm5_jax.train.stages import InitConfig, TrainConfig

MEASURED = "measured.json"  # {"step", "before", "after"}: of the model before the stage and at its last step
TIMES = "times.json"  # {"starts", "wall_seconds", "cpu_seconds"} of the stage, measuring included, all starts together


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage. The loop follows from its config: a TrainConfig trains, an RlConfig reinforces or, with teachers, distills."""

    name: str  # of its run directory
    title: str
    about: str  # what it does and what is to be seen of it
    section: str  # of the paper
    config: TrainConfig | RlConfig  # without `init`: the stage before is what it starts from
    moves: tuple[str, ...] = ()  # the measured numbers that it is to move


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """measure(model, tokenizer) -> {"numbers": {name: float}, "samples": {name: text}}, the same names for every model."""

    title: str
    stages: tuple[Stage, ...]
    measure: Callable[[Glm5, object], dict]

    def __post_init__(self):
        names = [stage.name for stage in self.stages]
        check(bool(names), "stages: at least one")
        for name in names:
            check(re.fullmatch("[A-Za-z0-9_-]+", name) is not None, f"stage {name!r}: a name of letters, digits, _ and -")
            check(names.count(name) == 1, f"stage {name}: one name twice")
        for stage in self.stages:
            kind = type(stage.config).__name__
            check(isinstance(stage.config, TrainConfig | RlConfig), f"stage {stage.name}: {kind} is no TrainConfig or RlConfig")
            check(not stage.config.init.run, f"stage {stage.name}: init.run={stage.config.init.run}: is the stage before it")


def load(folder: str, runs: pathlib.Path) -> Pipeline:
    """What the function `pipeline(runs)` of FOLDER/recipe.py returns. UserError: no such file or function, or it fails."""
    where = f"{pathlib.Path(folder) / 'recipe.py'}:pipeline"
    pipeline = call_object(where, runs)
    check(isinstance(pipeline, Pipeline), f"{where}: returns {type(pipeline).__name__}, not Pipeline")
    return pipeline


def run_stages(pipeline: Pipeline, runs: pathlib.Path, resume: bool = True, say: Callable[[str], None] = print) -> pathlib.Path:
    """Runs what is left of the stages; returns the path of the report.

    Args:
      runs: folder of the runs. resume: False = start over with the first stage.
    Raises:
      UserError: what the loops raise; a stage to be run of which a later one has already started.
      Stopped: after a signal. The same call goes on from there.
    """
    stages = _chained(pipeline.stages, runs)
    with only_one(runs):
        if not resume:
            for stage in stages:
                _forget(runs / stage.name)
        path = write_report(pipeline.title, stages, runs)  # one that cannot be written is known before the work
        for i, stage in enumerate(stages):
            say(f"\nstage {i + 1} of {len(stages)}, {stage.name}: {stage.title}")
            if _finished(stage, runs):
                say(f"{runs / stage.name}: already done, {stage.config.steps:,} steps.")
                continue
            _check_first(stage, stages[i + 1 :], runs)
            try:
                with _timed(runs / stage.name):
                    _train(stage, runs / stage.name)
                    say("measuring")
                    before = read(runs / stages[i - 1].name / MEASURED)["after"] if i else None
                    _measure(pipeline.measure, stage, runs / stage.name, before)
            finally:
                write_report(pipeline.title, stages, runs)
            say(_moved(stage, read(runs / stage.name / MEASURED)))
            say(f"report: {path}")
    return path


def _chained(stages: tuple[Stage, ...], runs: pathlib.Path) -> list[Stage]:
    """The stages, each but the first with the run of the one before as its source."""
    chained = [stages[0]]
    for before, stage in zip(stages, stages[1:]):
        config = dataclasses.replace(stage.config, init=InitConfig(run=str(runs / before.name)))
        chained.append(dataclasses.replace(stage, config=config))
    return chained


def _forget(run_dir: pathlib.Path) -> None:
    for name in (MEASURED, TIMES):
        (run_dir / name).unlink(missing_ok=True)
    start_over(run_dir)


def _finished(stage: Stage, runs: pathlib.Path) -> bool:
    """Whether the stage has been run to its last step and measured. UserError if it was under other settings."""
    run_dir = runs / stage.name
    done = read(run_dir / MEASURED).get("step") == stage.config.steps
    if done:
        folders.check_same(folders.read_config(run_dir), stage.config, run_dir)
    return done


def _check_first(stage: Stage, later: list[Stage], runs: pathlib.Path) -> None:
    """A later stage has a copy of this one's weights as they were; it would not notice that they change."""
    started = [other.name for other in later if (runs / other.name / "config.json").exists()]
    check(
        not started,
        f"{runs / stage.name}: is to run up to step {stage.config.steps}, but {', '.join(started[:1])} has started from it "
        "already; choose another --run-dir, or start over with --no-resume",
    )


def _train(stage: Stage, run_dir: pathlib.Path) -> None:
    loop = train
    if isinstance(stage.config, RlConfig):
        loop = distill if stage.config.teachers else reinforce
    loop(stage.config, run_dir)


@contextlib.contextmanager
def _timed(run_dir: pathlib.Path):
    """Adds what the block takes to the times of the stage, whether it ends or is stopped; a kill loses its own start's."""
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        if (run_dir / "config.json").exists():  # else the loop has refused to start, and left nothing
            old = read(run_dir / TIMES)
            spent = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "starts": 1}
            write(run_dir / TIMES, {name: value + old.get(name, 0) for name, value in spent.items()})


def _measure(measure: Callable, stage: Stage, run_dir: pathlib.Path, before: dict | None) -> None:
    """Keeps the measurements of the stage's model, and of the one before it: fresh weights if `before` is None."""
    tokenizer = folders.run_tokenizer(run_dir)
    if before is None:
        before = measure(folders.fresh_model(stage.config), tokenizer)
    after = measure(folders.load_run(run_dir, stage.config.model.dtype), tokenizer)
    write(run_dir / MEASURED, {"step": stage.config.steps, "before": before, "after": after})


def _moved(stage: Stage, measured: dict) -> str:
    """The numbers that the stage is to move, before and after it."""
    before, after = (measured[when]["numbers"] for when in ("before", "after"))
    width = max(map(len, stage.moves), default=0)
    return "\n".join(f"  {name:{width}}  {before[name]:8.3f} -> {after[name]:8.3f}" for name in stage.moves)


def read(path: pathlib.Path) -> dict:
    """The object in a JSON file, {} if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: pathlib.Path, values: dict) -> None:
    """In one move, so that a kill leaves the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(new, path)
