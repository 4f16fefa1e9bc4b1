"""Several processes that train together: meeting, agreeing on the settings, noticing when one is lost.

JAX's own runtime takes minutes to miss a process, and then names a port. Here each process holds a connection to process 0,
over which they meet before JAX's runtime exists: whatever keeps them from training together is one line in each of them. From
then on each says something every second or two; when one falls silent or its connection closes, all others say which one it
was, and end.
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from glm5_jax.config import check
from glm5_jax.errors import UserError

BEAT_S = 2.0  # between two signs of life; what is waited for longer is said
SILENCE_S = 20.0  # without a sign of life a process counts as lost
JOIN_S = 120.0  # in which all processes have to come
HELLO_S = 5.0  # in which a connection has to say who it is
LOST_STATUS = 3  # exit status of the processes that are left

Say = Callable[[str], None]
_watch: "_Watch | None" = None  # this process's, while it is one of several


def join(coordinator: str, count: int, index: int, settings: str) -> None:
    """Makes this process one of `count` that see each other's devices; before anything asks JAX for devices.

    Args:
      coordinator: HOST:PORT at which process 0 meets the others. count, index: how many processes, which one this is; 0
        processes = all three as JAX finds them (TPU pods, Slurm), and they meet in `watched`.
      settings: lines that have to be the same in all.
    Raises:
      UserError: they did not all come within `JOIN_S`, something else uses the port, or their settings differ.
    """
    check(count >= 0, f"processes={count}: must not be negative")
    check(count == 0 or 0 <= index < count, f"process={index}: must lie in 0..{count - 1} (processes={count})")
    check(count == 0 or bool(coordinator), f"coordinator: {count} processes need one, HOST:PORT of process 0")
    if count == 0:
        _start_jax("the other processes, as JAX finds them", {})
        return
    host, port = _host_and_port(coordinator)
    server = _listen(port, coordinator) if index == 0 else None
    port = _begin(server, coordinator, _Hello("", index, count, settings))
    address = f"{host}:{port}"
    _start_jax(f"JAX's runtime at {address}", dict(coordinator_address=address, num_processes=count, process_id=index))


def _start_jax(what: str, given: dict) -> None:
    def give_up():
        _say(f"glm5: processes: waited {JOIN_S:.0f} s for {what}, in vain")
        os._exit(2)  # the main thread is in JAX's runtime, which would end in a stack

    timers = [threading.Timer(BEAT_S, _say, [f"waiting for {what}"]), threading.Timer(JOIN_S, give_up)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    patience = dict(initialization_timeout=int(JOIN_S) + 30, heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30)
    try:
        jax.distributed.initialize(**given, **patience)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"processes: they did not come together ({str(error).splitlines()[0]})") from None
    finally:
        for timer in timers:
            timer.cancel()


def is_first() -> bool:
    """Whether this is process 0, which writes and speaks for all."""
    return jax.process_index() == 0


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
def watched(settings: str) -> Iterator[None]:
    """Inside, the loss of a process ends this one within `SILENCE_S` with a line that names it, also amid a collective.

    Raises:
      UserError: processes that have not met in `join` meet here, and their `settings` differ.
    """
    global _watch
    if _watch is None and jax.process_count() > 1:
        _meet_through_jax(settings)
    if _watch is None:
        yield
        return
    try:
        yield
    except UserError as error:
        _watch.leave("failed", why=str(error))
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError | ValueError):  # perhaps a collective that failed: the watch is about to say why
            time.sleep(SILENCE_S + 2 * BEAT_S)
        _watch.leave("failed", why=f"{type(error).__name__}: {error}")
        raise
    else:
        _watch.leave("done")
    finally:
        _watch = None


# Messages are lines of JSON: what the line is, and more. Hello, then waiting, refused or welcome; then alive, done, failed or
# lost. Who leaves early says so: if all do, each reports the reason itself; those that do not would wait for ever.

_LONGEST = 1 << 20  # bytes of a line


class _Hello(NamedTuple):
    """What a process says of itself. word: known only to the processes of this run, where they had a way to tell each other."""

    word: str
    process: int
    processes: int
    settings: str


class _Connection:
    """A socket that carries messages. foreign: whether something else came over it."""

    def __init__(self, sock: socket.socket):
        self.sock, self.rest, self.unread, self.foreign = sock, b"", [], False
        sock.settimeout(BEAT_S)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, what: str, **more) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone is noticed by what it does not say
            self.sock.sendall(json.dumps({"glm5_jax": what} | more).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """The messages that have come; [] if none came in time, None if the connection is closed or foreign."""
        if self.unread:
            messages, self.unread = self.unread, []
            return messages
        try:
            new = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        *lines, self.rest = (self.rest + new).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        self.foreign = len(self.rest) > _LONGEST or not all(isinstance(m, dict) and "glm5_jax" in m for m in messages)
        return messages if new and not self.foreign else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Notice:
    """Says what is waited for when that has taken a while, and again when it has changed."""

    def __init__(self, say: Say):
        self.say, self.said, self.earliest = say, "", time.monotonic() + BEAT_S

    def __call__(self, what: str) -> None:
        if what != self.said and time.monotonic() >= self.earliest:
            self.said, self.earliest = what, time.monotonic() + BEAT_S
            self.say(what)


# Meeting.


def _meet_through_jax(settings: str) -> None:
    """For processes that JAX has brought together: the first tells the others where it listens, and a word to know them by."""
    index = jax.process_index()
    server = _listen(0, "process 0") if index == 0 else None
    mine = f"{_own_address()}:{server.getsockname()[1]} {secrets.token_hex(8)}" if server else ""
    where, word = from_first(mine).split()
    _begin(server, where, _Hello(word, index, jax.process_count(), settings))


def _begin(server: socket.socket | None, where: str, hello: _Hello) -> int:
    """Meets the others at `where`, HOST:PORT, and begins to watch; returns a port of process 0 for JAX's runtime."""
    global _watch
    if server:
        peers, port = _receive_all(server, where, hello, _say)
        _watch = _Hub(peers)
    else:
        hub, port = _reach_first(where, hello, _say)
        _watch = _Spoke(hub)
    return port


def _receive_all(server: socket.socket, where: str, mine: _Hello, say: Say) -> tuple[dict[_Connection, int], int]:
    """Process 0: (connection -> number of each other process, the port for JAX), when all have come and agree."""
    lobby = _Lobby(mine)
    with server, lobby.selector:
        try:
            lobby.wait(server, where, say)
            texts = [mine.settings, *(lobby.came[i][1].settings for i in range(1, mine.processes))]
            other = next((i for i, text in enumerate(texts) if text != texts[0]), 0)
            check(not other, f"process {other} differs from process 0 in the settings{_difference(texts[0], texts[other])}")
        except UserError as error:
            lobby.tell("refused", why=str(error))
            raise
        for stranger in lobby.strangers:
            stranger.close()
        port = _free_port()
        peers = {peer: number for number, (peer, _) in lobby.came.items()}
        for peer in peers:
            peer.send("welcome", port=port)
        return peers, port


def _difference(first: str, other: str) -> str:
    pairs = zip(first.splitlines(), other.splitlines())
    found = next(((a, b) for a, b in pairs if a != b), None)
    return f": {found[1].strip().rstrip(',')}, not {found[0].strip().rstrip(',')}" if found else ""


class _Lobby:
    """Process 0 while the others come.

    Attributes:
      came: number -> (connection, hello) of the others that are here. strangers: connection -> when it came, of those that have
      not said who they are; scans of ports do not.
    """

    def __init__(self, mine: _Hello):
        self.mine, self.selector = mine, selectors.DefaultSelector()
        self.came: dict[int, tuple[_Connection, _Hello]] = {}
        self.strangers: dict[_Connection, float] = {}

    def wait(self, server: socket.socket, where: str, say: Say) -> None:
        """Returns when all are here; raises UserError when one does not come, or is not one of this run."""
        server.setblocking(False)
        self.selector.register(server, selectors.EVENT_READ)
        deadline, notice = time.monotonic() + JOIN_S, _Notice(lambda text: (say(text), self.tell("waiting", text=text)))
        while missing := sorted(set(range(1, self.mine.processes)) - self.came.keys()):
            who = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.mine.processes}"
            check(time.monotonic() < deadline, f"processes: {who} did not come to {where} within {JOIN_S:.0f} s")
            notice(f"waiting for {who} at {where}")
            for key, _ in self.selector.select(BEAT_S / 4):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):  # it is gone already
                        self._open(_Connection(server.accept()[0]))
                else:
                    self._hear(key.fileobj)
            for stranger in [s for s, since in self.strangers.items() if time.monotonic() - since > HELLO_S]:
                self._close(stranger)

    def tell(self, what: str, **more) -> None:
        """Says it to all that are here."""
        for peer in (peer for peer, _ in self.came.values()):
            peer.send(what, **more)

    def _open(self, peer: _Connection) -> None:
        self.selector.register(peer, selectors.EVENT_READ)
        self.strangers[peer] = time.monotonic()

    def _close(self, peer: _Connection) -> None:
        self.selector.unregister(peer)
        self.strangers.pop(peer, None)
        self.came = {number: entry for number, entry in self.came.items() if entry[0] is not peer}
        peer.close()

    def _hear(self, peer: _Connection) -> None:
        messages = peer.receive()
        if messages is None:
            self._close(peer)
        elif messages and peer in self.strangers:
            hello = _read_hello(messages[0])
            if hello is None or hello.word != self.mine.word:
                self._close(peer)
            else:
                self._admit(peer, hello)

    def _admit(self, peer: _Connection, hello: _Hello) -> None:
        del self.strangers[peer]
        try:
            here = self.mine.processes
            check(hello.processes == here, f"process {hello.process} has --processes {hello.processes}, process 0 has {here}")
            check(0 < hello.process < here, f"process={hello.process}: must lie in 1..{here - 1}, process 0 is here")
            check(hello.process not in self.came, f"two processes have --process {hello.process}")
        except UserError as error:
            peer.send("refused", why=str(error))
            raise
        self.came[hello.process] = (peer, hello)


def _read_hello(message: dict) -> _Hello | None:
    fields = {name: message.get(name) for name in _Hello._fields}
    types = [type(value) for value in fields.values()]
    return _Hello(**fields) if message["glm5_jax"] == "hello" and types == [str, int, int, str] else None


def _reach_first(where: str, hello: _Hello, say: Say) -> tuple[_Connection, int]:
    """Any other process: (connection to process 0, the port for JAX), when all have come and agree."""
    place, deadline, notice = _host_and_port(where), time.monotonic() + JOIN_S, _Notice(say)
    while True:
        hub, why = _connect(place)
        if hub:
            hub.send("hello", **hello._asdict())
            port, why = _answer(hub, where, say)
            if port:
                return hub, port
        check(time.monotonic() < deadline, f"processes: process 0 was not at {where} within {JOIN_S:.0f} s ({why})")
        notice(f"process {hello.process}: waiting for process 0 at {where} ({why})")
        time.sleep(BEAT_S / 8)


def _connect(place: tuple[str, int]) -> tuple[_Connection | None, str]:
    """(connection, "") or (None, why there is none)."""
    try:
        sock = socket.create_connection((place[0].strip("[]"), place[1]), timeout=HELLO_S)
    except OSError as error:
        return None, error.strerror or str(error)
    if sock.getsockname() == sock.getpeername():  # a free port of this machine may be connected to itself
        sock.close()
        return None, os.strerror(errno.ECONNREFUSED)
    return _Connection(sock), ""


def _answer(hub: _Connection, where: str, say: Say) -> tuple[int, str]:
    """(port, "") as process 0 answers a hello, or (0, why it does not). Raises UserError as process 0 does."""
    end = time.monotonic() + JOIN_S + HELLO_S
    while time.monotonic() < end:
        messages = hub.receive()
        if messages is None:
            check(not hub.foreign, f"coordinator={where}: something that is not process 0 of a run answers there")
            hub.close()
            return 0, "it closed the connection"
        for i, message in enumerate(messages):
            check(message["glm5_jax"] != "refused", str(message.get("why")))
            if message["glm5_jax"] == "waiting":
                say(str(message.get("text")))
            if message["glm5_jax"] == "welcome":
                hub.unread = messages[i + 1 :]
                return message["port"], ""
    raise UserError(f"coordinator={where}: what listens there does not answer as process 0 of a run")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    good = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    check(good, f"coordinator={address}: need HOST:PORT, port 1 to 65535")
    return host, int(port)


def _listen(port: int, where: str) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        raise UserError(f"coordinator={where}: process 0 cannot listen on port {port} ({os.strerror(error.errno)})") from None


def _free_port() -> int:
    with _listen(0, "JAX") as probe:
        return probe.getsockname()[1]


def _own_address() -> str:
    """The address of this machine that the others reach, by the route it would take to any other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


# Watching.


class _Watch:
    """One end of the connections, in a thread of its own.

    Attributes:
      left: set when this process has said that it leaves. finished: whether it left because all is done.
    """

    def __init__(self):
        self.left, self.finished = threading.Event(), False
        self.restore_abort = _slow_abort()
        threading.Thread(target=self._run, daemon=True, name="liveness").start()

    def leave(self, what: str, **more) -> None:
        """Tells the others. what: "done", which ends the watch, or "failed" with `why`."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # what a sudden end would lose
        self.finished = what == "done"
        self.left.set()
        for peer in self.peers:
            peer.send(what, **more)
        if self.finished:
            self.restore_abort()

    def _end(self, words: str) -> None:
        """Ends this process at once: its main thread may wait for the lost one for ever.

        Who left over a mistake of its own has said why, and waits in JAX's exit for those who did not make it.
        """
        if self.finished:
            sys.exit()  # this thread alone
        if self.left.is_set():
            os._exit(2)
        _say(words)
        os._exit(LOST_STATUS)


def _lost(process: int, how: str) -> str:
    return f"process {process} was lost ({how}); resume the run to go on from its last checkpoint"


def _stopped(process: int, why: str) -> str:
    return f"process {process} stopped: {' '.join(why.split())}"


_CLOSED, _SILENT = "its connection closed", "silent for {:.0f} s"


class _Hub(_Watch):
    """Process 0: hears all others, tells them who is lost."""

    def __init__(self, peers: dict[_Connection, int]):
        self.peers = peers
        self.heard = {peer: time.monotonic() for peer in peers}  # of those that have not left as they should
        self.mistakes: dict[_Connection, str] = {}
        self.selector = selectors.DefaultSelector()
        for peer in peers:
            self.selector.register(peer, selectors.EVENT_READ)
        super().__init__()

    def _run(self) -> None:
        while self.heard:
            for key, _ in self.selector.select(BEAT_S / 2):
                self._hear(key.fileobj)
            for peer, at in list(self.heard.items()):
                peer.send("alive")
                if peer in self.mistakes and self.left.is_set():
                    del self.heard[peer]
                elif time.monotonic() - at > SILENCE_S:
                    number = self.peers[peer]
                    self._tell(number, self.mistakes.get(peer) or _lost(number, _SILENT.format(SILENCE_S)))

    def _hear(self, peer: _Connection) -> None:
        messages, number = peer.receive(), self.peers[peer]
        if messages is None:
            self._tell(number, _lost(number, _CLOSED))
        self.heard[peer] = time.monotonic()
        for message in messages:
            if message["glm5_jax"] in ("done", "failed"):
                self.selector.unregister(peer)
            if message["glm5_jax"] == "done":
                del self.heard[peer]
            if message["glm5_jax"] == "failed":
                self.mistakes[peer] = _stopped(number, message["why"])

    def _tell(self, process: int, words: str) -> None:
        for peer, number in self.peers.items():
            if number != process and not self.left.is_set():
                peer.send("lost", words=words)
        self._end(words)


class _Spoke(_Watch):
    """Any other process: speaks to process 0 and hears from it."""

    def __init__(self, hub: _Connection):
        self.peers, self.hub = [hub], hub
        super().__init__()

    def _run(self) -> None:
        heard = time.monotonic()
        while True:
            self.hub.send("alive")
            messages = self.hub.receive()
            if messages is None:
                self._end(_lost(0, _CLOSED))
            if messages:
                heard = time.monotonic()
            for message in messages:
                if message["glm5_jax"] == "lost":
                    self._end(message["words"])
                if message["glm5_jax"] == "failed" and not self.left.wait(SILENCE_S):
                    self._end(_stopped(0, message["why"]))
                if message["glm5_jax"] in ("done", "failed"):
                    return
            if time.monotonic() - heard > SILENCE_S:
                self._end(_lost(0, _SILENT.format(SILENCE_S)))


def _slow_abort() -> Callable[[], None]:
    """Makes abort() take 6 seconds, in which the watch can speak; returns what undoes it.

    The runtime below aborts this process when the connections of a lost one close, often before the watch's has closed. libc's
    sleep is the handler: it takes the signal's number for seconds, needs no interpreter, and may be called in a handler.
    """
    libc = ctypes.CDLL(None)
    handlers, sleep = ctypes.c_void_p, ctypes.cast(libc.sleep, ctypes.c_void_p)
    libc.signal.restype, libc.signal.argtypes = handlers, [ctypes.c_int, handlers]
    before = libc.signal(signal.SIGABRT, sleep)
    return lambda: libc.signal(signal.SIGABRT, before)
