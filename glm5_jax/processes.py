"""Several processes that train together: joining them, agreeing, and noticing when one is lost.

JAX's own runtime takes minutes to miss a process and then names a port. Here each process holds a connection to the first one
and says something every two seconds; when one falls silent or its connection closes, all others say which one it was and end.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from glm5_jax.config import check
from glm5_jax.errors import UserError

BEAT_S = 2.0  # between two signs of life
SILENCE_S = 20.0  # without a sign of life a process counts as lost
LOST_STATUS = 3  # exit status of the processes that are left


def join(coordinator: str, count: int, index: int) -> None:
    """Makes this process one of `count` that see each other's devices; before anything asks JAX for devices.

    Args:
      coordinator: HOST:PORT that process 0 listens on. count, index: how many processes, which one this is; 0 processes = all
        three as JAX finds them (TPU pods, Slurm).
    Raises:
      UserError: they did not all come together.
    """
    check(count >= 0, f"processes={count}: must not be negative")
    check(count == 0 or 0 <= index < count, f"process={index}: must lie in 0..{count - 1} (processes={count})")
    check(count == 0 or bool(coordinator), f"coordinator: {count} processes need one, HOST:PORT of process 0")
    given = dict(coordinator_address=coordinator, num_processes=count, process_id=index) if count else {}
    patience = dict(initialization_timeout=120, heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30)
    try:
        jax.distributed.initialize(**given, **patience)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"processes: they did not come together ({str(error).splitlines()[0]})") from None


def is_first() -> bool:
    """Whether this is process 0, which writes and speaks for all."""
    return jax.process_index() == 0


def agree(what: str, value: str) -> None:
    """Raises UserError, in every process, unless all processes have the same string. what: its name for people."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(value.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(mine)))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(mine)] = mine
    texts = [bytes(row[:n]).decode() for row, n in zip(multihost_utils.process_allgather(padded), lengths)]
    others = [i for i, text in enumerate(texts) if text != texts[0]]
    check(not others, f"process {others[0] if others else 0} differs from process 0 in {what}{_difference(texts, others)}")


def _difference(texts: list[str], others: list[int]) -> str:
    if not others:
        return ""
    pairs = zip(texts[0].splitlines(), texts[others[0]].splitlines())
    first = next(((a, b) for a, b in pairs if a != b), None)
    return f": {first[1].strip().rstrip(',')}, not {first[0].strip().rstrip(',')}" if first else ""


def first_alone(fn: Callable):
    """fn() in process 0, then in all others; a UserError in process 0 is raised in all."""
    if jax.process_count() == 1:
        return fn()
    mistake, result = "", None
    if is_first():
        try:
            result = fn()
        except UserError as error:
            mistake = str(error)
    mistake = from_first(mistake)
    check(not mistake, mistake)
    return result if is_first() else fn()


def from_first(text: str) -> str:
    """What process 0 gives here, in every process; at most 4,000 bytes."""
    if jax.process_count() == 1:
        return text
    raw = np.zeros(4000, np.uint8)
    mine = np.frombuffer(text.encode()[: len(raw)], np.uint8)
    raw[: len(mine)] = mine
    return bytes(multihost_utils.broadcast_one_to_all(raw)).rstrip(b"\0").decode(errors="ignore")


@contextlib.contextmanager
def watched(say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)) -> Iterator[None]:
    """Inside, the loss of a process ends this one within `SILENCE_S` with a line that names it, also amid a collective."""
    if jax.process_count() == 1:
        yield
        return
    watch = _Hub(say) if is_first() else _Spoke(say)
    try:
        yield
    except RuntimeError:  # perhaps a collective that failed: then the watch is about to say why
        time.sleep(SILENCE_S + 2 * BEAT_S)
        watch.leave(_FAILED)
        raise
    except UserError:
        watch.leave(_FAILED)
        raise
    watch.leave(_DONE)


# Messages. Who leaves with a mistake says so: if all make it, each reports it itself; those that do not would wait for ever.
_ALIVE, _DONE, _FAILED, _LOST = b".", b"q", b"f", b"x"  # the last is followed by a number, a reason and a newline


class _Watch:
    """One end of the connections."""

    def __init__(self, say):
        self.say, self.done = say, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="liveness")

    def _end(self, process: int, how: str) -> None:
        self.say(f"process {process} was lost ({how}); the same command goes on from the last checkpoint")
        os._exit(LOST_STATUS)  # the main thread may wait for that process for ever


class _Hub(_Watch):
    """Process 0: hears all others, tells them who is lost."""

    def __init__(self, say):
        super().__init__(say)
        self.server = socket.create_server(("", 0))
        from_first(f"{_own_address()}:{self.server.getsockname()[1]}")
        self.peers: dict[socket.socket, int] = {}
        for _ in range(jax.process_count() - 1):
            peer, _ = self.server.accept()
            self.peers[peer] = int(peer.recv(16).split(b"\n")[0])
        self.thread.start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        heard = {peer: time.monotonic() for peer in self.peers}
        for peer in self.peers:
            selector.register(peer, selectors.EVENT_READ)
        while not self.done.is_set():
            for key, _ in selector.select(BEAT_S / 2):
                peer = key.fileobj
                message = _receive(peer)
                heard[peer] = time.monotonic()
                if _DONE in message or _FAILED in message:
                    selector.unregister(peer)
                    if _DONE in message:
                        del heard[peer]
                elif not message:
                    self._tell(self.peers[peer], "its connection closed")
            for peer, at in heard.items():
                _send(peer, _ALIVE)
                if time.monotonic() - at > SILENCE_S:
                    self._tell(self.peers[peer], f"silent for {SILENCE_S:.0f} s")

    def _tell(self, process: int, how: str) -> None:
        for peer, number in self.peers.items():
            if number != process:
                _send(peer, _LOST + f"{process} {how}\n".encode())
        time.sleep(0.2)
        self._end(process, how)

    def leave(self, how: bytes) -> None:
        for peer in self.peers:
            _send(peer, how)
        self.done.set()


class _Spoke(_Watch):
    """Any other process: speaks to process 0 and hears from it."""

    def __init__(self, say):
        super().__init__(say)
        host, port = from_first("").rsplit(":", 1)
        self.hub = socket.create_connection((host, int(port)), timeout=60)
        self.hub.sendall(f"{jax.process_index()}\n".encode().ljust(16))
        self.thread.start()

    def _run(self) -> None:
        self.hub.settimeout(BEAT_S)
        heard = time.monotonic()
        while not self.done.is_set():
            _send(self.hub, _ALIVE)
            try:
                message = self.hub.recv(4096)
            except TimeoutError:
                message = None
            except OSError:
                message = b""
            if message:
                heard = time.monotonic()
                if _LOST in message:
                    process, how = message[message.index(_LOST) + 1 :].decode().split("\n")[0].split(" ", 1)
                    self._end(int(process), how)
                if _DONE in message:
                    return
                if _FAILED in message and not self.done.wait(SILENCE_S):
                    self._end(0, f"silent for {SILENCE_S:.0f} s")
            elif message == b"" and not self.done.is_set():
                self._end(0, "its connection closed")
            elif time.monotonic() - heard > SILENCE_S:
                self._end(0, f"silent for {SILENCE_S:.0f} s")

    def leave(self, how: bytes) -> None:
        self.done.set()
        _send(self.hub, how)


def _send(peer: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # a peer that is gone is noticed by what it does not say
        peer.sendall(message)


def _receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(4096)
    except OSError:
        return b""


def _own_address() -> str:
    """The address of this machine that the others reach, by the route it would take to any other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
