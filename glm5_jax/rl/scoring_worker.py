"""A worker process of `glm5_jax.rl.rewards.Scorer`: reads an answer, writes its score, until the scorer hangs up.

Run as `python -P scoring_worker.py FD`. The socket carries two pickles, each behind its length in 8 bytes (settings; tasks by
name), then lines of JSON. Standard input and output lead nowhere: what a task's scorer prints is lost.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import signal
import socket
import sys
import types

_LARGEST = 4 << 30  # bytes of address space: an answer like 9**9**9 must not take the machine's memory


def _main(channel) -> None:
    stream = channel.makefile("rb")
    settings = _pickled(stream)
    sys.path[:] = settings["path"]
    # The package without its __init__, which imports JAX: seconds, and hundreds of megabytes, that no scorer needs.
    package = types.ModuleType("glm5_jax")
    package.__path__ = [str(pathlib.Path(__file__).resolve().parents[1])]
    sys.modules["glm5_jax"] = package
    try:
        from glm5_jax.rl.rewards import score_of
        from glm5_jax.rl.tasks import Prompt

        tasks = _pickled(stream)
    except Exception as error:
        channel.sendall(f"{type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        return
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_LARGEST, _LARGEST))
    channel.sendall(b"ready\n")
    process = os.getpid()
    while line := stream.readline():
        request = json.loads(line)
        prompt = Prompt(**request["prompt"])
        # If the scorer's process is gone nobody else ends a scorer that hangs. The signal's default is to end the process.
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"] + 10)
        score = score_of(tasks[prompt.task], prompt, request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != process:  # a scorer forked, and this is the child
            os._exit(0)
        channel.sendall(json.dumps({"id": request["id"]} | dataclasses.asdict(score)).encode() + b"\n")


def _pickled(stream):
    return pickle.loads(stream.read(int.from_bytes(stream.read(8), "big")))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _main(socket.socket(fileno=int(sys.argv[1])))
