"""Two processes of 4 devices each, the real command line: they train, save, lose one of them, and go on to the same losses."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from glm5_jax.errors import UserError
from glm5_jax.processes import LOST_STATUS, join
from helpers_train import recorded, write_corpus, write_run_config

# One MoE layer and AdamW: fewer collectives, which take milliseconds each between processes.
SETTINGS = (
    "--mesh.expert 2 --mesh.context 2 --micro-rows 4 --batch-rows 0 4 --steps 16 --eval-every 16 --optimizer.name adamw "
    "--model.num-hidden-layers 1 --model.first-k-dense-replace 0"
).split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    return write_run_config(folder / "tiny.py", write_corpus(folder / "texts"))


def start(place: pathlib.Path, run: str, *arguments: str, each=((), ())) -> list[subprocess.Popen]:
    """Both processes; each: further arguments of one of them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    }
    common = ["train", str(place), "--run-dir", str(place.parent / run), *SETTINGS, *arguments]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "glm5_jax", *common, "--processes", "2", "--process", str(i), "--coordinator",
             f"127.0.0.1:{port}", *each[i]],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for i in range(2)
    ]


def end(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    """What they wrote to stderr, when all are done; they are killed after `seconds`."""
    try:
        return [p.communicate(timeout=seconds)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()


def wait_for_step(run: pathlib.Path, step: int, processes) -> None:
    deadline = time.monotonic() + 240
    while not (run / "metrics.jsonl").exists() or not recorded(run) or recorded(run)[-1][0] < step:
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), [p.poll() for p in processes]
        time.sleep(0.1)


@pytest.mark.e2e
def test_a_lost_process_is_named_and_the_same_command_goes_on_to_the_same_losses(place):
    """kill -9 in the middle of a step, first of one, then of the other: who is left ends within a minute and names it."""
    run = place.parent / "lost"
    for lost, step in ((1, 5), (0, 9)):
        processes = start(place, run.name)
        wait_for_step(run, step, processes)
        processes[lost].send_signal(signal.SIGKILL)
        began = time.monotonic()
        errors = end(processes, 60)
        assert time.monotonic() - began < 60
        assert processes[1 - lost].returncode not in (0, -signal.SIGKILL)
        assert f"process {lost} was lost" in errors[1 - lost], errors
    for name in (run.name, "undisturbed"):
        processes = start(place, name)
        errors = end(processes, 400)
        assert [p.returncode for p in processes] == [0, 0], errors
    assert recorded(run) == recorded(place.parent / "undisturbed")


ALONE = """
import sys, time
from glm5_jax import processes
from glm5_jax.errors import UserError
processes.SILENCE_S = 3
me = int(sys.argv[1])
processes.join(sys.argv[2], 2, me)
with processes.watched():
    if me == int(sys.argv[3]):
        raise UserError("a mistake of mine alone")
    time.sleep(100)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_mistake_of_one_process_alone_ends_the_others_too(wrong):
    """They would wait for it for ever, and its runtime for them: a disk that only one of them cannot write, for example."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, str(i), address, str(wrong)], env=env, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    errors = end(processes, 60)
    assert processes[1 - wrong].returncode == LOST_STATUS, errors
    assert f"process {wrong} was lost" in errors[1 - wrong] and "a mistake of mine alone" in errors[wrong]


@pytest.mark.e2e
def test_processes_with_other_settings_say_so_and_stop(place):
    processes = start(place, "other", each=((), ("--seed", "1")))
    errors = end(processes, 120)
    assert [p.returncode for p in processes] == [2, 2], errors
    for error in errors:
        assert 'process 1 differs from process 0 in the settings: "seed": 1, not "seed": 0' in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("", 2, 0), "coordinator: 2 processes need one, HOST:PORT of process 0"),
        (("127.0.0.1:1", 2, 2), "process=2: must lie in 0..1"),
        (("127.0.0.1:1", -1, 0), "processes=-1: must not be negative"),
    ],
)
def test_processes_that_cannot_come_together_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        join(*arguments)
