"""The record of a run: exact numbers, valid JSON whatever the value, and a resume that leaves no step twice."""

import io
import json
import math
import struct
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from glm5_jax.errors import UserError
from glm5_jax.train import metrics
from glm5_jax.train.metrics import Metrics, Progress, plot, read


def record(run_dir, steps, start=0, factor=1.0):
    with_metrics = Metrics(run_dir, start)
    for step in steps:
        with_metrics.write(step, {"loss": factor * step})
    with_metrics.close()


def test_floats_keep_every_bit(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**32, 300, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    log = Metrics(tmp_path)
    for step, value in enumerate(values):
        log.write(step, {"f32": value, "f64": math.sqrt(step), "jax": jnp.float32(value), "array": values[:3]})
    log.close()
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(values)))
    for step, (line, value) in enumerate(zip(lines, values, strict=True)):
        assert np.float32(line["f32"]).tobytes() == value.tobytes() == np.float32(line["jax"]).tobytes()
        assert struct.pack("d", line["f64"]) == struct.pack("d", math.sqrt(step))
        assert line["array"] == values[:3].tolist()


def test_nan_and_infinity_are_valid_json(tmp_path):
    log = Metrics(tmp_path)
    log.write(1, {"loss": float("nan"), "norm": jnp.inf, "array": np.array([[1.0, -np.inf]]), "count": 3})
    log.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    stored = json.loads(text, parse_constant=refuse)
    assert stored == {"step": 1, "loss": "nan", "norm": "inf", "array": [[1.0, "-inf"]], "count": 3}
    (line,) = read(tmp_path)
    assert math.isnan(line["loss"]) and line["norm"] == math.inf and line["array"] == [[1.0, -math.inf]]


def test_each_line_is_on_disk_at_once(tmp_path):
    log = Metrics(tmp_path)
    log.write(1, {"loss": 1.5})
    assert read(tmp_path) == [{"step": 1, "loss": 1.5}]
    log.close()


def test_resume_drops_the_steps_that_are_run_again(tmp_path):
    record(tmp_path, range(1, 11))
    record(tmp_path, range(7, 9), start=6, factor=10.0)
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0, 80.0]
    assert read(tmp_path) == [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    assert sorted(path.suffix for path in tmp_path.glob("metrics*")) == [".jsonl"]


def test_a_line_torn_by_a_kill_at_any_byte(tmp_path):
    record(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert read(tmp_path) == [{"step": 1, "loss": 1.0}]
    Metrics(tmp_path, 5).close()
    assert path.read_bytes() == whole[:first]


def test_garbage_before_the_last_line_is_an_error(tmp_path):
    record(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{garbage\n" + path.read_bytes())
    with pytest.raises(UserError, match="line 1 is not JSON"):
        read(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "nowhere")


def test_tensorboard_reads_the_events(tmp_path):
    """Decoded by the framing of the TFRecord format and the protobuf classes, not by the writer."""
    from tensorboardX.proto.event_pb2 import Event

    log = Metrics(tmp_path)
    log.write(3, {"loss": 0.5, "load": np.array([0.25, 0.75])})
    log.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    assert found == {("loss", 3): 0.5, ("load/0", 3): 0.25, ("load/1", 3): 0.75}


def test_plot_is_a_png_with_both_curves(tmp_path):
    log = Metrics(tmp_path)
    for step in range(1, 30):
        log.write(step, {metrics.LOSS: 1 / step} | ({metrics.HELD_OUT: 2 / step} if step % 10 == 0 else {}))
    log.close()
    plot(tmp_path, tmp_path / "curves.png")
    png = (tmp_path / "curves.png").read_bytes()
    width, height = struct.unpack(">II", png[16:24])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and width > 2 * height


def test_plot_shows_the_loss_of_the_indexer_where_it_is_recorded(tmp_path):
    widths = {}
    for run, more in (("without", {}), ("with", {metrics.INDEX_KL: 0.5})):
        log = Metrics(tmp_path / run)
        for step in range(1, 4):
            log.write(step, {metrics.LOSS: 1 / step, metrics.HELD_OUT: 2.0} | more)
        log.close()
        plot(tmp_path / run, tmp_path / "curves.png")
        widths[run] = struct.unpack(">I", (tmp_path / "curves.png").read_bytes()[16:20])[0]
    assert widths["with"] == widths["without"] * 3 / 2


def test_plot_says_what_is_missing(tmp_path, monkeypatch):
    log = Metrics(tmp_path)
    log.write(1, {"other": 1.0})
    log.close()
    with pytest.raises(UserError, match="nothing to plot"):
        plot(tmp_path, tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot(tmp_path, tmp_path / "curves.png")


def test_plot_by_length_has_a_point_for_each_task_and_length(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, format: drawn.append((figure, path, format)))
    shares = {"recall": {512: 0.25, 256: 1.0}, "multi_key": {256: 0.5, 512: 0.0}}
    metrics.plot_by_length(shares, 64, tmp_path / "a.png")
    ((figure, path, kind),) = drawn
    (axes,) = figure.axes
    assert (path, kind) == (tmp_path / "a.png", "png") and "64 samples" in figure.get_suptitle()
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"recall": [[256, 100], [512, 25]], "multi_key": [[256, 50], [512, 0]]}
    assert [text.get_text() for text in axes.get_xticklabels()] == ["256", "512"] and axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["recall", "multi_key"]


def test_what_keeps_a_plot_from_being_written_is_known_beforehand(tmp_path, monkeypatch):
    metrics.check_plot(tmp_path / "a.png")
    metrics.check_plot("a.png")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="plot=.*/no/a.png: there is no folder .*/no$"):
        metrics.check_plot(tmp_path / "no" / "a.png")
    with pytest.raises(UserError, match="plot=.*: cannot be written"):
        metrics.check_plot(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        metrics.check_plot(tmp_path / "a.png")


def test_progress_without_a_terminal_prints_every_ten_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(50, start=10, console=rich.console.Console(file=out)) as progress:
        for step in range(11, 51):
            now[0] += 3.0
            progress.show(step, "loss 2.0000  12,346 tokens/s")
            if step == 12:
                progress.say("checkpoint [of step] 12 saved")
    # 3 s a step: 12 s have passed at steps 14, 18, 22, ..., 50.
    steps = range(14, 51, 4)
    left = {step: 3 * (50 - step) for step in steps}
    want = [f"step {s}/50  loss 2.0000  12,346 tokens/s  0:{left[s] // 60:02}:{left[s] % 60:02} left" for s in steps]
    assert out.getvalue().splitlines() == ["checkpoint [of step] 12 saved", *want]


def test_progress_on_a_terminal_is_a_live_line():
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=100, color_system=None)
    with Progress(4, console=console) as progress:
        progress.show(2, "loss 1.2500  1,000 tokens/s")
        progress.say("above")
    text = out.getvalue()
    assert "step 2/4" in text and "loss 1.2500  1,000 tokens/s" in text and "above" in text


def test_progress_shows_the_loss_of_the_indexer_where_there_is_one():
    out = io.StringIO()
    with Progress(2, console=rich.console.Console(file=out)) as progress:
        progress.show(2, "loss 1.2500  index KL 0.0625  1,000 tokens/s")
    assert out.getvalue().startswith("step 2/2  loss 1.2500  index KL 0.0625  1,000 tokens/s  ")


def test_time_that_does_not_recur_is_not_in_the_time_left(monkeypatch):
    now, out = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(4, console=rich.console.Console(file=out)) as progress:
        now[0] += 90.0
        progress.leave_out(88.0)
        progress.show(1, "loss 2.0000  1 tokens/s")
    assert out.getvalue().endswith("0:00:06 left\n")  # 2 s a step, 3 steps to go


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path):
    said = []
    metrics = Metrics(tmp_path, say=said.append)
    metrics.write(1, {"loss": 1.0})
    disk, full = metrics._file, open("/dev/full", "a")  # every write to it fails with ENOSPC
    metrics._file = full
    metrics.write(2, {"loss": 2.0})
    metrics.write(3, {"loss": 3.0})
    metrics._file = disk
    metrics.write(4, {"loss": 4.0})
    metrics.close()
    assert said == ["metrics cannot be written (No space left on device); the run goes on"]
    assert [line["step"] for line in read(tmp_path)] == [1, 4]
    metrics = Metrics(tmp_path, 4, say=said.append)
    metrics._file.close()
    metrics._file = full  # closing it flushes what it still holds, and is refused again
    metrics.close()
    assert len(said) == 2
