"""Code of a model run against tests: no verdict but by right values, and nothing left running (docs/rewards.md).

Three processes. This one starts a judge (`sandbox_judge.py`) in a session of its own; the judge runs the tests and starts the
candidate (`sandbox_candidate.py`), which alone runs the model's code, under limits of time, memory, files and processes. A test
calls a function of the candidate by a message and compares the plain data that comes back, in the judge. Linux and macOS.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

from glm5_jax.config import check
from glm5_jax.rl.sandbox_judge import candidate_names

_JUDGE = pathlib.Path(__file__).parent / "sandbox_judge.py"
_GRACE = 5.0  # seconds that the judge may take beyond the candidate's, to start and to clean up


class SandboxError(OSError):
    """The sandbox failed, not the code in it: there is no verdict."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether all tests passed; if not, why, in one line."""

    passed: bool
    reason: str = ""


def run_tests(code: str, tests: str, seconds: float = 4.0, memory_mb: int = 256) -> Verdict:
    """Runs `tests`, trusted Python that raises where a test fails, against the functions of `code`, which is not trusted.

    Names that the tests neither define nor import are functions of the candidate. They take and return plain data: numbers,
    strings, bytes, None, and lists, tuples, dicts and sets of them; finite floats. A built-in exception of the candidate comes
    through as itself, any other as RuntimeError.

        run_tests("def double(x): return 2 * x", "assert double(4) == 8")

    Args:
      seconds: wall-clock time for all of it; the whole tree of processes is killed then.
      memory_mb: address space of each of the candidate's processes, where the system can limit it.
    Raises:
      UserError: the tests are no Python, or call no function of the candidate.
      SandboxError: no verdict, for a reason that is not the candidate's.
    """
    _check_tests(tests)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, ours:
        job = {"code": code, "tests": tests, "seconds": seconds, "memory_mb": memory_mb, "home": home}
        try:
            judge = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_JUDGE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                cwd="/", env={}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"the judge does not start: {error}") from None
        finally:
            theirs.close()
        try:
            return _verdict(ours, job, judge)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(judge.pid, signal.SIGKILL)
            judge.wait()


def _check_tests(tests: str) -> None:
    """Raises UserError if nothing can be tested: such tests would pass whatever the code."""
    try:
        names = candidate_names(tests)
    except (SyntaxError, ValueError) as error:
        names = None
        problem = f"{type(error).__name__}: {error}"
    check(names is not None, f"tests: no Python: {problem if names is None else ''}")
    check(bool(names), f"tests: they call no function of the candidate: {tests[:60]!r}")


def _verdict(channel: socket.socket, job: dict, judge: subprocess.Popen) -> Verdict:
    """What the judge says to `job`, or what its end means."""
    deadline = time.monotonic() + job["seconds"] + _GRACE
    lines = b""
    try:
        channel.settimeout(_GRACE)
        channel.sendall(json.dumps(job).encode() + b"\n")
        while lines.count(b"\n") < 2:
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = channel.recv(1 << 16)
            if not piece:
                break
            lines += piece
    except TimeoutError:
        pass
    except OSError as error:
        raise SandboxError(f"the judge hung up: {error}") from None
    ready, _, verdict = lines.partition(b"\n")
    if verdict.endswith(b"\n"):
        return Verdict(**json.loads(verdict))
    late = time.monotonic() >= deadline
    status = None if late else judge.wait()
    # Before the candidate ran, and by an exit of its own, the judge can only have failed by itself.
    if ready != b"ready" or (status is not None and status >= 0):
        raise SandboxError(f"no verdict from the judge: {'too late' if late else f'exit status {status}'}")
    return Verdict(False, "timeout" if late else f"the judge was killed by signal {-status}")
