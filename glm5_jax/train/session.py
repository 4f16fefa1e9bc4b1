"""What every run that trains needs around its loop: its directory to itself, a start from nothing, an end by a signal."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal

import jax

from glm5_jax import processes
from glm5_jax.errors import UserError
from glm5_jax.train import run_dir as runs


class Stopped(Exception):
    """SIGTERM or Ctrl-C arrived. signal: the signal's number. saved: whether the disk took the state."""

    def __init__(self, number: int, saved: bool):
        self.signal, self.saved = number, saved


@contextlib.contextmanager
def only_one(run_dir: pathlib.Path):
    """Holds the run directory: a second process that trains in it would take this one's checkpoints for leftovers."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_dir, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be used as a run directory ({error.strerror})") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        try:
            if processes.is_first():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir}: another process is training here") from None
        yield


def start_over(run_dir: pathlib.Path) -> None:
    """Removes what an earlier run left in its directory."""
    for name in ("checkpoints", "metrics.jsonl", "config.json", "data", "samples"):
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for events in run_dir.glob("events.out.tfevents.*"):
        events.unlink()


def write_config(run_dir: pathlib.Path, config) -> None:
    """`runs.write_config`; a directory that cannot be written is a UserError."""
    try:
        runs.write_config(run_dir, config)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def signals(run):
    """SIGTERM and Ctrl-C set run.signal, upon which it ends after the step in hand; a second Ctrl-C ends it at once.

    Where several processes train, JAX takes SIGTERM to any of them and tells the others; Ctrl-C ends the one it reaches.

    Args:
      run: has `signal`, None so far, and `say(text)`.
    """
    if jax.process_count() > 1:
        yield
        return

    def stop(number, frame):
        if run.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.signal = number
        run.say("stopping after this step; the state will be saved")

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
