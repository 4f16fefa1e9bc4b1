"""What a run reports while it trains: `metrics.jsonl`, TensorBoard events, a live line, and a plot afterwards.

`metrics.jsonl` is the record: one JSON object per line, `{"step": 12, "loss": 2.302585092994046, ...}`, floats with all
their digits, so that two runs can be compared bit for bit. NaN and infinity are the strings "nan", "inf", "-inf".
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from glm5_jax.config import check
from glm5_jax.errors import UserError

LOSS = "loss"  # training loss, nats per token
HELD_OUT = "bits_per_byte"  # held-out loss, bits per byte of text
INDEX_KL = "index_kl"  # loss of the indexer, nats per query; recorded where it has a weight

_FILE = "metrics.jsonl"
_PLAIN_EVERY_S = 10.0  # between two lines of progress when nobody watches a terminal


class Metrics:
    """The record of one run, open for appending. On a pod only process 0 makes one."""

    def __init__(self, run_dir: str | Path, step: int = 0, say: Callable[[str], None] = print):
        """Opens the record of a run that stands at `step`.

        A disk that refuses (full, over quota) never stops the run: `say` receives one line, and what could not be written
        is tried again with the next step.

        Lines of later steps, written after the checkpoint the run resumes from, are dropped: these steps are run again.
        So is a last line torn by a kill.
        """
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / _FILE
        if path.exists():
            _rewrite(path, [line for line in _parse(path) if line["step"] <= step])
        self._file = path.open("a", encoding="utf-8")
        self._say, self._refused = say, False
        # NaN is a value like others here; the writer's warning about each one would tear the live line.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        # Not SummaryWriter: its thread would print a traceback of its own when the disk is full.
        self._events = EventsWriter(str(run_dir / "events"), f".{step}")
        restart = SessionLog(status=SessionLog.START)  # TensorBoard then drops what an earlier start wrote from here on
        self._events.write_event(Event(wall_time=time.time(), step=step + 1, session_log=restart))

    def write(self, step: int, values: dict[str, float | np.ndarray]) -> None:
        """Appends one line, flushed on return. An array goes to TensorBoard as one curve per index, `name/3`."""
        line = {"step": int(step)} | {name: _plain(value) for name, value in values.items()}
        with self._tolerant():
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        with self._tolerant():
            for name, value in values.items():
                for curve, scalar in _curves(name, np.asarray(value)):
                    event = Event(wall_time=time.time(), step=int(step), summary=summary.scalar(curve, scalar))
                    self._events.write_event(event)
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes both files."""
        for file in (self._file, self._events):
            with self._tolerant():
                file.close()

    @contextlib.contextmanager
    def _tolerant(self):
        """Lets a refusing disk pass, with one line; the files keep what they could not write in their buffers."""
        try:
            yield
        except OSError as error:
            if not self._refused:
                self._say(f"metrics cannot be written ({error.strerror or error}); the run goes on")
            self._refused = True


def read(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run as written; arrays as lists, NaN and infinity as floats; a torn last line is left out.

    Raises:
      UserError: there is no record, or a line before the last is not JSON.
    """
    path = Path(run_dir) / _FILE
    if not path.exists():
        raise UserError(f"{path}: no such file; is {run_dir} a run directory?")
    return [{name: _number(value) for name, value in line.items()} for line in _parse(path)]


# What `plot` draws: label of each panel -> {name in the record: (words in the legend, colour)}.
LOSSES = {
    "total training loss (nats per token)": {LOSS: ("", "#1f4e9c")},
    "held-out text (bits per byte)": {HELD_OUT: ("", "#b3541e")},
    "index KL (nats per query)": {INDEX_KL: ("", "#2e7d4f")},
}


def plot(run_dir: str | Path, path: str | Path, panels: dict = LOSSES) -> None:
    """Writes a PNG of the panels of which the run has a record, against the step: by default its losses.

    Raises:
      UserError: matplotlib is not installed, or the run has recorded none of them.
    """
    figure_class = _figure_class()
    from matplotlib.ticker import MaxNLocator

    lines = read(run_dir)
    names = [name for curves in panels.values() for name in curves]
    known = {name: [(line["step"], line[name]) for line in lines if name in line] for name in names}
    drawn = {label: {n: style for n, style in curves.items() if known[n]} for label, curves in panels.items()}
    drawn = {label: curves for label, curves in drawn.items() if curves}
    if not drawn:
        raise UserError(f"{run_dir}: nothing to plot; the record has none of {', '.join(names)}")
    figure = figure_class(figsize=(5.5 * len(drawn), 3.8), dpi=150, layout="constrained")
    for axes, (label, curves) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for name, (words, color) in curves.items():
            steps, values = zip(*known[name], strict=True)
            few = len(steps) <= 50  # then the points themselves are worth seeing
            axes.plot(steps, values, color=color, linewidth=1.4, marker="." if few else "", label=words)
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"last: {values[-1]:.3f}", loc="right", fontsize="medium")
        if len(curves) > 1:
            axes.legend()
    figure.suptitle(Path(run_dir).resolve().name)
    figure.savefig(path, format="png")


def _figure_class():
    """matplotlib's Figure; imported late, since training and evaluation do without."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plot: needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure


def check_plot(path: str | Path) -> None:
    """Raises UserError if no plot can be written to `path`: to be known before the work whose result it shows."""
    _figure_class()
    folder = Path(path).parent
    check(folder.is_dir(), f"plot={path}: there is no folder {folder}")
    check(os.access(folder, os.W_OK) and not Path(path).is_dir(), f"plot={path}: cannot be written")


def plot_by_length(shares: dict[str, dict[int, float]], samples: int, path: str | Path) -> None:
    """Writes a PNG of the share of right answers of `samples` each, in percent, against length; one line for each task."""
    figure = _figure_class()(figsize=(6, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for task, by_length in shares.items():
        tokens = sorted(by_length)
        axes.plot(tokens, [100 * by_length[n] for n in tokens], "o-", label=task)
    lengths = sorted({n for by_length in shares.values() for n in by_length})
    axes.set(xscale="log", xlabel="tokens", ylabel="answers right, percent", ylim=(-4, 104))
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(f"Retrieval, {samples} samples a point")
    figure.savefig(path, format="png")


class Progress:
    """A live line on a terminal: step/total, bar, losses, tokens/s, time left. Elsewhere a plain line every ten seconds.

        with Progress(total_steps, start) as progress:
            progress.update(step, loss=2.31, tokens_per_s=18_000.0)
            progress.say("checkpoint of step 200 saved")
    """

    def __init__(self, total: int, start: int = 0, console: rich.console.Console | None = None):
        """Args: `total` steps of the run; `start` steps done before it was resumed; `console` default: stdout."""
        self._total, self._start = total, start
        self._console = console or rich.console.Console()
        self._began = self._printed = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            rich.progress.TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="", left="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def show(self, step: int, numbers: str) -> None:
        """Shows that `step` steps are done, and the numbers of the newest one."""
        left = self._time_left(step)
        self._bar.update(self._task, completed=step, numbers=numbers, left=left)
        now = time.monotonic()
        if self._bar.disable and (now - self._printed >= _PLAIN_EVERY_S or step >= self._total):
            self._printed = now
            self.say(f"step {step}/{self._total}  {numbers}  {left}")

    def leave_out(self, seconds: float) -> None:
        """Keeps `seconds` just spent on what does not recur, such as compiling, out of the time left."""
        self._began += seconds

    def say(self, text: str) -> None:
        """Prints a line above the live one; safe from any thread."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time_left(self, step: int) -> str:
        done = step - self._start
        if done <= 0:
            return ""
        seconds = round((time.monotonic() - self._began) / done * max(self._total - step, 0))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def _parse(path: Path) -> list[dict[str, Any]]:
    """The lines as they stand; a last one without its newline was torn by a kill."""
    *lines, _torn = path.read_bytes().split(b"\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON: {line[:60].decode(errors='replace')!r}") from error
    return parsed


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replaces the file in one move, so that a kill leaves the old one or the new one."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(new, path)


def _plain(value: Any) -> Any:
    """A scalar or array as what JSON holds, without loss."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return _plain(np.asarray(value).tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    """The inverse of `_plain`, with lists in place of arrays."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if isinstance(value, str) else value


def _curves(name: str, value: np.ndarray) -> list[tuple[str, float]]:
    if value.ndim == 0:
        return [(name, float(value))]
    return [(f"{name}/{'.'.join(map(str, index))}", float(value[index])) for index in np.ndindex(value.shape)]
