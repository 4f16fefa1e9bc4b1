"""The judge's process: starts the candidate under limits, runs the tests, kills the candidate's tree, then gives the verdict.

Run by `glm5_jax.rl.sandbox` as `python -I -S sandbox_judge.py FD`; standard library only. The tests run here, where no line of
the candidate runs: a function of the candidate is a name that asks its process and gets plain data back, so that nothing the
candidate patches, prints or returns can pass a test other than by the right value.
"""

import ast
import builtins
import contextlib
import ctypes
import json
import os
import pathlib
import resource
import signal
import socket
import stat
import subprocess
import sys
import time

TICK = 0.05  # seconds between looks at the number of processes and at whether anyone still waits for the verdict
MOST_PROCESSES = 32  # of the candidate and its descendants
LARGEST_REPLY = 1 << 18  # bytes of one returned value as text
LARGEST_FILE = 1 << 20  # bytes of any file that the candidate writes
OPEN_FILES = 64
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000  # flags of unshare(2)
SUBREAPER, DEATH_SIGNAL, DUMPABLE = 36, 1, 4  # options of prctl(2)


class Refused(BaseException):
    """The candidate failed in a way that is no test's business: time, processes, size, or it is gone."""


def main() -> None:
    """Reads the job from the socket (one line of JSON), answers "ready", then the verdict, each a line."""
    verdict_socket = socket.socket(fileno=int(sys.argv[1]))
    with verdict_socket.makefile("r") as stream:
        job = json.loads(stream.readline())
    _isolate()
    candidate = Candidate(job["home"], job["seconds"], job["memory_mb"])
    verdict_socket.sendall(b"ready\n")
    signal.signal(signal.SIGALRM, lambda *_: candidate.refuse("timeout"))  # tests that never end, and catch everything
    signal.setitimer(signal.ITIMER_REAL, job["seconds"] + 2 * TICK, 0.5)
    try:
        reason = _run_tests(job["code"], job["tests"], candidate)
    except Refused as error:
        reason = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    candidate.kill()  # before the verdict: nothing of it is left to change anything
    verdict_socket.sendall(json.dumps({"passed": not reason, "reason": reason}).encode() + b"\n")


def candidate_names(tests: str) -> list[str]:
    """Names that `tests` reads and neither defines nor finds among Python's own: what the candidate has to provide."""
    names = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | _bound(tests)
    return sorted({node.id for node in names} - defined - set(dir(builtins)))


def _bound(tests: str) -> set[str]:
    """Names bound by def, class, import, arguments and except clauses."""
    bound = set()
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
    return bound


def _run_tests(code: str, tests: str, candidate) -> str:
    """ "" if no line of `tests` raises, else what was raised and where."""
    try:
        candidate.ask(code)
    except Exception as error:
        return f"the code does not load: {type(error).__name__}: {str(error)[:200]}"
    namespace = {"__name__": "tests"} | {name: candidate.function(name) for name in candidate_names(tests)}
    try:
        exec(compile(tests, "tests", "exec"), namespace)
    except Refused:
        raise
    except BaseException as error:  # whatever else a test raises, SystemExit too, is a test that failed
        candidate.check()
        frames, line = error.__traceback__, 0
        while frames is not None:
            line = frames.tb_lineno if frames.tb_frame.f_code.co_filename == "tests" else line
            frames = frames.tb_next
        text = tests.splitlines()[line - 1].strip() if line else ""
        return f"line {line}: {text[:200]}: {type(error).__name__}: {str(error)[:200]}"
    candidate.check()
    return ""


class Candidate:
    """The process of the candidate's code, and everything that it starts."""

    def __init__(self, home: str, seconds: float, memory_mb: int):
        self._refused = None
        self._deadline = time.monotonic() + seconds
        self._channel, theirs = socket.socketpair()
        source = (pathlib.Path(__file__).parent / "sandbox_candidate.py").read_text()
        user = _other_user()
        if user:
            os.chown(home, user, user)
        # -P -s and an environment of our own in place of -I, which would ignore the hash seed: verdicts must not depend on it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-c", source, str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            cwd=home, env={"PYTHONHASHSEED": "0"}, start_new_session=True,
            preexec_fn=lambda: _limit(seconds, memory_mb, bool(user)),
            **({"user": user, "group": user, "extra_groups": []} if user else {}),
        )  # fmt: skip
        theirs.close()

    def function(self, name: str):
        """The candidate's function `name`, for the tests: arguments and result are plain data."""

        def call(*args, **kwargs):
            return self.ask(repr((name, args, kwargs)))

        return call

    def ask(self, text: str):
        """Sends a message, returns the value that comes back. Raises what the candidate raised, or `Refused`."""
        try:
            data = text.encode(errors="replace")  # an answer may hold half a surrogate pair
            self._channel.settimeout(max(self._deadline - time.monotonic(), 0.001))
            self._channel.sendall(len(data).to_bytes(4, "big") + data)
            size = int.from_bytes(self._receive(4), "big")
            if size > LARGEST_REPLY:
                self.refuse(f"a returned value of more than {LARGEST_REPLY} bytes")
            reply = self._receive(size)
        except TimeoutError:
            self.refuse("timeout")
        except OSError:
            self.refuse(self._end())
        return self._value(reply)

    def check(self) -> None:
        """Raises the first `Refused` again, should the tests have swallowed it."""
        if self._refused:
            raise Refused(self._refused)

    def kill(self) -> None:
        """Ends every process that the candidate started, whatever session it is in."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the first process of a namespace takes all of it along
        # Elsewhere: stopped processes start no others, so when all are stopped none is missed.
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def refuse(self, reason: str):
        """Ends the run: fails with the first `reason`, whatever the tests catch."""
        self._refused = self._refused or reason
        raise Refused(self._refused)

    def _receive(self, size: int) -> bytes:
        """`size` bytes, with a look around at every tick."""
        data = b""
        while len(data) < size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self.refuse("timeout")
            self._channel.settimeout(min(TICK, left))
            try:
                piece = self._channel.recv(size - len(data))
            except TimeoutError:
                if len(_descendants()) > MOST_PROCESSES:
                    self.refuse(f"more than {MOST_PROCESSES} processes")
                continue
            if not piece:
                self.refuse(self._end())
            data += piece
        return data

    def _end(self) -> str:
        """How the candidate's process ended, or that it hung up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(max(min(self._deadline - time.monotonic(), 0.5), 0))
            return f"the code ended with signal {-status}" if status < 0 else f"the code ended with exit status {status}"
        return "the code hung up"

    def _value(self, reply: bytes):
        try:
            kind, *value = ast.literal_eval(reply.decode())
            if kind == "value":
                return value[0]
            name, message = map(str, value)
        except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError):
            self.refuse(f"not plain data was returned: {reply[:60].decode(errors='replace')}")
        error = getattr(builtins, name, None)
        catchable = isinstance(error, type) and issubclass(error, Exception)
        raise error(message) if catchable and not issubclass(error, UnicodeError) else RuntimeError(f"{name}: {message}")


def _isolate() -> None:
    """On Linux: orphans come to this process, others cannot read it, and, where the kernel lets us, what it starts sees neither
    processes outside nor a network. Elsewhere: nothing."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    user, group = os.getuid(), os.getgid()
    if user == 0:
        libc.unshare(NEW_PIDS | NEW_NETWORK)
    elif libc.unshare(NEW_USER | NEW_PIDS | NEW_NETWORK) == 0:  # in it this user still has its own files
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            pathlib.Path("/proc/self", name).write_text(text)
    libc.prctl(DUMPABLE, 0, 0, 0, 0)


def _other_user() -> int | None:
    """A user id that nobody has, if this is root and that user could run Python; else None: the candidate is the same user."""
    if sys.platform != "linux" or os.getuid() != 0:
        return None
    if pathlib.Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return None
    for path in (pathlib.Path(sys.executable), pathlib.Path(sys.executable).resolve(), pathlib.Path(os.__file__).resolve()):
        if not all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) or not path.stat().st_mode & stat.S_IROTH:
            return None
    return (1 << 30) + os.getpid()


def _limit(seconds: float, memory_mb: int, alone: bool) -> None:
    """In the candidate's process, before its first instruction: limits that it cannot lift, those that the system has."""
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": LARGEST_FILE,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    if alone:  # the limit counts all processes of the user
        limits["RLIMIT_NPROC"] = MOST_PROCESSES
    for name, value in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))
    os.nice(10)  # whatever it starts, the judge gets its turn
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _descendants() -> set[int]:
    """Process ids below this process. Without /proc: none."""
    parents = {}
    for entry in os.scandir("/proc") if sys.platform == "linux" else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(pathlib.Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


if __name__ == "__main__":
    main()
