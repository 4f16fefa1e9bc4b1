"""Tasks whose scorers misbehave as the answer says; a module of its own, which worker processes import without JAX."""

import os
import signal
import sys
import time

from glm5_jax.rl.tasks import Prompt


class Odd:
    """Does what the answer names; any other answer scores its number."""

    name = "odd"

    def prompt(self, ordinal: int, held_out: bool = False) -> Prompt:
        return Prompt(self.name, f"question {ordinal}", ordinal, {})

    def score(self, prompt: Prompt, answer: str):
        match answer:
            case "hang":
                while True:
                    pass
            case "hang, signals blocked":
                signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
                time.sleep(1000)
            case "raise":
                raise KeyError("no field")
            case "exit":
                sys.exit(0)
            case "_exit":
                os._exit(0)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "network":
                raise ConnectionError("refused")
            case "disk":
                raise OSError(28, "No space left on device")
            case "import":
                import no_such_module_anywhere  # noqa: F401
            case "print":
                sys.stdout.write('{"id": 0, "value": 1.0}\n' * 1000)
                os.write(1, b"x" * 10**6)
                return 0.25
            case "every descriptor":
                for fd in range(3, 64):
                    try:
                        os.write(fd, b'{"id": -1, "value": 1.0}\n["noise"]\n5\n{}\n\xff\n')
                    except OSError:
                        continue
                return 0.25
            case "fork":
                os.fork()
                return 0.25
            case "forked sleeper":
                if os.fork() == 0:
                    time.sleep(1000)
                return 0.25
            case "memory":
                return len(bytearray(1 << 40))
            case "modules":
                return float("jax" in sys.modules or "numpy" in sys.modules)
            case "pid":
                time.sleep(0.05)
                return {"pid": os.getpid() / 2**23}
            case "nan":
                return float("nan")
            case "parts":
                return {"right": 1.0, "short": 0.0, "polite": 0.5}
            case "parts with nan":
                return {"right": 1.0, "short": float("nan")}
            case "none":
                return None
            case "empty":
                return {}
            case "text":
                return "1.0"
            case "true":
                return True
        return float(answer)


class Weighted(Odd):
    name = "weighted"
    weights = {"right": 2.0, "short": 1.0, "polite": 1.0}


class Unloadable:
    """Cannot be restored in the worker process."""

    name = "unloadable"

    def __reduce__(self):
        return os.listdir, ("/no/such/folder",)
