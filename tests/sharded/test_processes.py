"""Two processes of 4 devices each, the real command line: they train, save, lose one of them, and go on to the same losses.

How they meet, and who is refused, is tested with threads for processes.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from glm5_jax import processes as module
from glm5_jax.errors import UserError
from glm5_jax.processes import LOST_STATUS, _Hello, _reach_first, _receive_all, join
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
            [
                sys.executable,
                "-m",
                "glm5_jax",
                *common,
                "--processes",
                "2",
                "--process",
                str(i),
                "--coordinator",
                f"127.0.0.1:{port}",
                *each[i],
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
        assert processes[1 - lost].returncode == LOST_STATUS, errors
        assert f"process {lost} was lost (its connection closed)" in errors[1 - lost], errors
    for name in (run.name, "undisturbed"):
        processes = start(place, name)
        errors = end(processes, 400)
        assert [p.returncode for p in processes] == [0, 0], errors
    assert recorded(run) == recorded(place.parent / "undisturbed")


def run_script(script: str, *arguments: str, env=None) -> tuple[list[int], list[str]]:
    """(statuses, what they wrote to stderr) of two processes: PROCESS HOST:PORT and the arguments."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(i), address, *arguments],
            env=common | (env(i, address) if env else {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    errors = end(processes, 60)
    return [p.returncode for p in processes], errors


ALONE = """
import sys, time
from glm5_jax import processes
from glm5_jax.errors import UserError
processes.SILENCE_S = 3
me = int(sys.argv[1])
processes.join(sys.argv[2], 2, me, "")
with processes.watched(""):
    if me == int(sys.argv[3]):
        raise UserError("a mistake of mine alone")
    time.sleep(100)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_mistake_of_one_process_alone_ends_the_others_too(wrong):
    """They would wait for it for ever, and its runtime for them: a disk that only one of them cannot write, for example."""
    statuses, errors = run_script(ALONE, str(wrong))
    assert (statuses[1 - wrong], statuses[wrong]) == (LOST_STATUS, 2), errors
    assert errors[1 - wrong] == f"process {wrong} stopped: a mistake of mine alone\n"
    assert "UserError: a mistake of mine alone\n" in errors[wrong]


ABORTS = """
import ctypes, os, signal, sys, time
from glm5_jax import processes
me, lost, place = int(sys.argv[1]), int(sys.argv[3]), sys.argv[2]
server = processes._listen(int(place.split(":")[1]), place) if me == 0 else None
processes._begin(server, place, processes._Hello("", me, 2, ""))
if me == lost:
    os.kill(os.getpid(), signal.SIGKILL)
ctypes.CDLL(None).abort()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("lost", [0, 1])
def test_a_runtime_that_aborts_over_a_lost_process_leaves_time_to_name_it(lost):
    """As JAX's does when the connections of the lost one close: by abort(), in a thread that does not hold the interpreter."""
    statuses, errors = run_script(ABORTS, str(lost))
    assert statuses[1 - lost] == LOST_STATUS, errors
    assert (
        errors[1 - lost]
        == f"process {lost} was lost (its connection closed); resume the run to go on from its last checkpoint\n"
    )


@pytest.mark.e2e
def test_processes_with_other_settings_say_so_and_stop(place):
    processes = start(place, "other", each=((), ("--seed", "1")))
    errors = end(processes, 120)
    assert [p.returncode for p in processes] == [2, 2], errors
    for error in errors:
        assert error == 'glm5: process 1 differs from process 0 in the settings: "seed": 1, not "seed": 0\n'


FOUND = """
import sys
from glm5_jax import processes
processes.join("", 0, 0, "")
with processes.watched(sys.argv[1] + "\\nlast"):
    pass
"""


@pytest.mark.e2e
def test_processes_that_jax_finds_have_to_agree_too():
    """Slurm's variables stand for any cluster that JAX knows."""

    def slurm(index: int, address: str) -> dict[str, str]:
        host, port = address.split(":")
        return dict(
            SLURM_JOB_ID="1", SLURM_STEP_NODELIST=host, SLURM_NTASKS="2", SLURM_PROCID=str(index), SLURM_LOCALID=str(index),
            JAX_COORDINATOR_PORT=port,
        )  # fmt: skip

    statuses, errors = run_script(FOUND, env=slurm)
    assert statuses == [1, 1], errors
    for error in errors:
        assert "UserError: process 1 differs from process 0 in the settings: 1, not 0" in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("", 2, 0), "coordinator: 2 processes need one, HOST:PORT of process 0"),
        (("127.0.0.1:1", 2, 2), "process=2: must lie in 0..1"),
        (("127.0.0.1:1", -1, 0), "processes=-1: must not be negative"),
        (("127.0.0.1", 2, 0), "coordinator=127.0.0.1: need HOST:PORT, port 1 to 65535"),
        ((":80", 2, 1), "coordinator=:80: need HOST:PORT"),
        (("127.0.0.1:abc", 2, 1), "coordinator=127.0.0.1:abc: need HOST:PORT"),
        (("127.0.0.1:99999", 2, 0), "coordinator=127.0.0.1:99999: need HOST:PORT"),
        (("127.0.0.1:0", 2, 0), "coordinator=127.0.0.1:0: need HOST:PORT"),
    ],
)
def test_processes_that_cannot_come_together_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        join(*arguments, "")


def test_a_port_that_something_else_holds_is_refused():
    with module._listen(0, "") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^coordinator=here:{port}: process 0 cannot listen on port {port} .*in use.$"):
            join(f"here:{port}", 2, 0, "")


# Meeting, with threads for processes.


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "JOIN_S", 1.0)
    monkeypatch.setattr(module, "BEAT_S", 0.2)
    monkeypatch.setattr(module, "HELLO_S", 0.3)


class Meeting:
    """Threads that meet as processes of a run; said: number -> what each says meanwhile."""

    def __init__(self):
        self.server = module._listen(0, "")
        self.where = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.said: dict[int, list[str]] = {}
        self.pool = concurrent.futures.ThreadPoolExecutor()

    def come(self, index: int, count: int, settings: str = "", word: str = "") -> concurrent.futures.Future:
        hello, say = _Hello(word, index, count, settings), self.said.setdefault(index, []).append
        if index == 0:
            return self.pool.submit(_receive_all, self.server, self.where, hello, say)
        return self.pool.submit(_reach_first, self.where, hello, say)

    def stranger(self, text: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.server.getsockname()[1]))
        sock.sendall(text)
        return sock


@pytest.fixture
def meeting(quick):
    made = Meeting()
    with made.server, made.pool:
        yield made


def mistake(future: concurrent.futures.Future) -> str:
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        future.result(10)
    return str(error.value)


STRANGERS = [
    b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"1\n", b"\xff\xfe\n", b"{}\n", b"[" * 5000 + b"\n", b'{"glm5_jax": "hello"',
    b'{"glm5_jax": "hello"}\n', b'{"glm5_jax": "alive"}\n',
    b'{"glm5_jax": "hello", "word": "", "process": 1, "processes": 3, "settings": ""}\n',
    b'{"glm5_jax": "hello", "word": "ours", "process": "1", "processes": 3, "settings": ""}\n',
]  # fmt: skip


def test_only_who_says_the_word_of_the_run_is_taken_for_a_process(meeting):
    """Strangers hold nobody up, whether they say something, nothing or go away, before the others come and among them."""
    first = meeting.come(0, 3, "same", "ours")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(meeting.stranger(text)) for text in STRANGERS]
        meeting.stranger(b"gone").close()
        others = [meeting.come(i, 3, "same", "ours") for i in (2, 1)]
        peers, port = first.result(10)
        for number, other in zip((2, 1), others):
            hub, told = other.result(10)
            assert told == port
            (peer,) = [p for p, n in peers.items() if n == number]
            assert peer.sock.getpeername()[:2] == (f"::ffff:{hub.sock.getsockname()[0]}", hub.sock.getsockname()[1])
        assert len(peers) == 2
        for text, stranger in zip(STRANGERS, strangers):
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b"", text


def test_connections_that_stay_silent_are_closed(meeting):
    first = meeting.come(0, 2)
    with meeting.stranger(b'{"glm5_jax"') as stranger:
        stranger.settimeout(0.8)  # less than the meeting takes
        assert stranger.recv(100) == b""
        assert not first.done()
    mistake(first)


def test_who_does_not_come_is_named_after_a_while_and_at_the_end(meeting):
    first, third = meeting.come(0, 4), meeting.come(2, 4)
    words = f"processes: processes 1, 3 of 4 did not come to {meeting.where} within 1 s"
    assert mistake(first) == mistake(third) == words
    assert meeting.said[0][-1] == meeting.said[2][-1] == f"waiting for processes 1, 3 of 4 at {meeting.where}"
    assert len(meeting.said[0]) <= 2  # at most once without process 2


def test_a_process_that_leaves_while_others_are_awaited_may_come_again(meeting):
    first = meeting.come(0, 3)
    hello = b'{"glm5_jax": "hello", "word": "", "process": 1, "processes": 3, "settings": ""}\n'
    meeting.stranger(hello).close()
    others = [meeting.come(i, 3) for i in (1, 2)]
    assert sorted(first.result(10)[0].values()) == [1, 2]
    assert all(other.result(10)[1] for other in others)


@pytest.mark.parametrize(
    "others, words",
    [
        ([(1, 3, ""), (2, 3, "same\nother: 1,")], "process 2 differs from process 0 in the settings: other: 1, not seed: 0"),
        ([(1, 3, "same\nseed: 0,"), (2, 4, "")], "process 2 has --processes 4, process 0 has 3"),
        ([(1, 3, ""), (1, 3, "")], "two processes have --process 1"),
    ],
)
def test_processes_that_do_not_fit_are_named_to_all(meeting, others, words):
    first = meeting.come(0, 3, "same\nseed: 0,")
    futures = []
    for index, count, settings in others:
        futures.append(meeting.come(index, count, settings or "same\nseed: 0,"))
        time.sleep(0.3)  # they come in this order
    assert [mistake(f) for f in (first, *futures)] == [words] * 3


def test_without_process_0_the_reason_is_said_and_then_the_end(quick):
    with module._listen(0, "") as server:
        port = server.getsockname()[1]
    for host, why in (("127.0.0.1", "Connection refused"), ("nohost.invalid", "not known|resolution|resolve|associated")):
        said = []
        with pytest.raises(UserError, match=f"^processes: process 0 was not at {host}:{port} within 1 s .*({why})"):
            _reach_first(f"{host}:{port}", _Hello("", 1, 2, ""), said.append)
        assert len(said) == 1 and said[0].startswith(f"process 1: waiting for process 0 at {host}:{port} ("), said


@pytest.mark.parametrize("banner, words", [
    (b"SSH-2.0-OpenSSH_9.2\r\n", "something that is not process 0 of a run answers there"),
    (b"", "what listens there does not answer as process 0 of a run"),
])  # fmt: skip
def test_another_service_at_the_coordinators_port_is_said(quick, banner, words):
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        coming = pool.submit(_reach_first, where, _Hello("", 1, 2, ""), print)
        with server.accept()[0] as peer:
            peer.sendall(banner)
            assert mistake(coming) == f"coordinator={where}: {words}"
