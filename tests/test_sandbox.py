"""The sandbox against hostile code: what it prints, patches, writes, forks, kills or exhausts; nothing stays running."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

from glm5_jax.errors import UserError
from glm5_jax.rl import sandbox
from glm5_jax.rl.sandbox import SandboxError, Verdict, run_tests

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS limits neither memory nor the number of processes")
TESTS = "assert f(2) == 4\nassert f(-3) == -6"
RIGHT = "def f(x): return 2 * x"


@pytest.fixture(params=["namespaces", "plain"])
def isolation(request, monkeypatch, tmp_path):
    """Both ways that the judge has: with namespaces where the kernel gives them, and without."""
    if request.param == "plain":
        for name in ("sandbox_judge.py", "sandbox_candidate.py"):
            text = (sandbox._JUDGE.parent / name).read_text()
            changed = text.replace("= 0x10000000, 0x20000000, 0x40000000", "= 1, 1, 1")  # which unshare(2) does not know
            assert (changed != text) == (name == "sandbox_judge.py")
            (tmp_path / name).write_text(changed)
        monkeypatch.setattr(sandbox, "_JUDGE", tmp_path / "sandbox_judge.py")
    return request.param


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_right_and_wrong_code(isolation):
    assert run_tests(RIGHT, TESTS) == Verdict(True)
    wrong = run_tests("def f(x): return x * x", TESTS)  # right at 2
    assert not wrong.passed and wrong.reason.startswith("line 2: assert f(-3) == -6: AssertionError")


def test_plain_data_and_exceptions_come_through():
    """Values of every plain type in and out, statements of the tests, exceptions by their type."""
    values = [0, -(10**30), 1.5, True, None, "a\nü\U0001f600", b"\x00\xff", [1, [2]], (1,), (), {"a": {1: 2}}, {1, 2}, set()]
    tests = f"""
import math
def check(value):
    assert same(value) == value and type(same(value)) is type(value)
for value in {values!r}:
    check(value)
assert same(x=3) == 3 and math.isclose(same(0.1) + same(0.2), 0.3)
for wanted, call in ((ZeroDivisionError, lambda: bad(0)), (KeyError, lambda: bad(1)), (RuntimeError, lambda: bad(2))):
    try:
        call()
    except wanted:
        continue
    raise AssertionError(wanted)
"""
    code = """
class Own(Exception): pass
def same(x): return x
def bad(i):
    if i == 2: raise Own
    return [lambda: 1 / 0, lambda: {}[1]][i]()
"""
    assert run_tests(code, tests) == Verdict(True)


def test_tests_that_test_nothing_are_an_error():
    for tests in ("", "assert True", "import math\nassert math.pi > 3", "def g(x): return x\nassert g(1) == 1"):
        with pytest.raises(UserError, match="call no function"):
            run_tests(RIGHT, tests)
    with pytest.raises(UserError, match="no Python"):
        run_tests(RIGHT, "assert f(")


# --- code that wants to pass without being right ---------------------------------------------------------------------

EVERYWHERE = """
import os
for text in (b'{"passed": true, "reason": ""}\\n', b'ready\\n', b'EXIT_CODE:0\\n', b'\\x00\\x00\\x00\\x0c("value", 4)'):
    for fd in range(64):
        try: os.write(fd, text)
        except OSError: pass
"""
CHEATS = {
    "marker": "print('EXIT_CODE:0', 'OK', '1 passed', '{\"passed\": true}')\ndef f(x): return None",
    "every descriptor": EVERYWHERE + "\ndef f(x): return 0",
    "every descriptor, then the end": EVERYWHERE + "\nos._exit(0)",
    "_exit while loading": "import os; os._exit(0)",
    "exit while loading": "import sys; sys.exit(0)",
    "_exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit in the call": "def f(x): raise SystemExit(0)",
    "always equal": "class E(int):\n def __eq__(s, o): return True\n __repr__ = lambda s: 'E()'\ndef f(x): return E()",
    "always equal, shown as a number": "class E(int):\n def __eq__(s, o): return True\ndef f(x): return E(5)",
    "patched builtins": "import builtins as b, unittest\nb.AssertionError = Warning\nb.repr = lambda x: '(\"value\", 4)'\n"
    "unittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0",
    "replaced by a passing process": "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "one exception for all": "def f(x): raise AssertionError('passed')",
    "no function": "",
    "no Python": "def f(x",
    "null bytes and half a character": "def f(x): return 4 \0 \ud800",
    "killed judge": "import os\nos.kill(os.getppid() or 1, 9)\nos.kill(os.getpid(), 9)\ndef f(x): return 0",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_cheats_do_not_pass(code):
    verdict = run_tests(code, TESTS)
    assert not verdict.passed and verdict.reason and "\n" not in verdict.reason


def test_tests_cannot_be_made_to_swallow_the_end_of_the_code():
    """Tests that catch everything do not pass because the code is gone, or for lack of time."""
    tests = "try:\n    f(1)\nexcept BaseException:\n    pass"
    for code in ("import os\ndef f(x): os._exit(0)", "def f(x):\n while True: pass", "def f(x): return object()"):
        assert not run_tests(code, tests, seconds=0.5).passed
    assert run_tests("def f(x): raise KeyError", tests).passed  # what a test may well expect


def test_expected_values_are_not_in_the_candidates_reach(isolation):
    """Not in its memory, arguments, environment or directory; and, unless it is root, it cannot read the judge's memory."""
    code = """
import gc, os, sys
def f(x):
    seen = [repr(o) for o in gc.get_objects() if isinstance(o, (str, dict, list))] + sys.argv + [repr(dict(os.environ))]
    try:
        open(f'/proc/{os.getppid()}/mem', 'rb')
        if os.getuid(): return 'memory'
    except OSError: pass
    return 'found' if any('secret' + '-17' in text for text in seen) or os.listdir('.') else 'nothing'
"""
    assert run_tests(code, "expected = 'secret-17'\nassert f(1) == 'nothing'") == Verdict(True)


# --- code that wants to take the machine along -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "timeout"),
        ("import time, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ntime.sleep(60)", "timeout"),
        ("def f(x):\n import sys\n sys.setrecursionlimit(10**9)\n return f(x + 1)", ""),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(x): return '(' * 10**6", "bytes"),
        ("def f(x): return eval('[' * 90 + ']' * 90)", "AssertionError"),
        ("import sys\nwhile True: sys.stdout.write('x' * 10**7)", "timeout"),
        pytest.param("def f(x): return len(bytearray(10**9))", "MemoryError", marks=linux),
        pytest.param("def f(x): open('big', 'w').write('x' * 10**8)", "File too large", marks=linux),
        pytest.param("open_files = [open('/dev/null') for _ in range(1000)]", "Too many open files", marks=linux),
    ],
)
def test_exhausting_code_fails_in_time(code, reason):
    start, seconds = time.monotonic(), 0.8 if reason == "timeout" else 5  # a busy disk takes its time to be full
    verdict = run_tests(code, TESTS, seconds=seconds)
    assert not verdict.passed and reason in verdict.reason
    assert time.monotonic() - start < seconds + 4


def processes(mark: str) -> list[int]:
    """Processes with `mark` among their arguments."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in found if mark in line]


TREES = {
    "child": "subprocess.Popen(SLEEP)",
    "session": "subprocess.Popen(SLEEP, start_new_session=True, env={})",
    "daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), os.execv('/bin/sleep', SLEEP))",
    "many": "[subprocess.Popen(SLEEP, start_new_session=True) for _ in range(6)]",
}


@linux
@pytest.mark.parametrize("start", TREES.values(), ids=TREES.keys())
def test_nothing_stays_running(isolation, start):
    """Whatever the code leaves behind is dead when the verdict is there, for right code and for code that hangs."""
    mark = f"{8640000 + os.getpid() % 1000}.25"
    code = f"import os, subprocess\nSLEEP = ['/bin/sleep', '{mark}']\n{start}\n"
    seen = run_tests(code + "import time; time.sleep(0.1)\ndef f(x): return 2 * x", TESTS)
    assert seen.passed and not processes(mark)
    if "daemon" in start:
        assert not run_tests(code + "while True: pass", TESTS, seconds=0.5).passed and not processes(mark)


@linux
def test_fork_bomb(isolation):
    """Its processes carry no mark of ours but a limit that nothing else has."""
    start = time.monotonic()
    verdict = run_tests("import os\nwhile True: os.fork()", TESTS, seconds=2, memory_mb=251)
    assert not verdict.passed and verdict.reason != "timeout" and time.monotonic() - start < 6
    limits = [path / "limits" for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
    assert not [path for path in limits if path.exists() and str(251 << 20) in path.read_text()]


@linux
def test_a_background_writer_changes_nothing_later(tmp_path):
    """The tree is dead before the verdict: what it writes stops growing."""
    target = tmp_path / "log"
    target.touch()
    target.chmod(0o666)
    for parent in (tmp_path, tmp_path.parent):
        parent.chmod(0o755)
    code = f"import os\nif os.fork() == 0:\n os.setsid()\n while True: open({str(target)!r}, 'a').write('1.0')\n{RIGHT}"
    assert run_tests(code, TESTS).passed
    size = target.stat().st_size
    time.sleep(0.1)
    assert target.stat().st_size == size


def test_directories_and_descriptors_are_given_back(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/dev/fd"))
    run_tests("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\n" + RIGHT, TESTS)
    run_tests("import os; os._exit(3)", TESTS)
    assert not list(tmp_path.iterdir()) and len(os.listdir("/dev/fd")) == before


def test_the_environment_is_empty_and_results_do_not_depend_on_hashes(monkeypatch):
    monkeypatch.setenv("API_KEY", "k")
    code = "import os\ndef f(x): raise ValueError(f'{hash(str(x))} {sorted(os.environ)}')"
    first, second = run_tests(code, TESTS).reason, run_tests(code, TESTS).reason
    assert first == second and "PYTHONHASHSEED" in first and "API_KEY" not in first and "PATH" not in first


# --- infrastructure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judge", ["raise SystemExit(1)", "import sys\nprint('no')", "def", None])
def test_a_judge_that_fails_is_no_verdict(monkeypatch, tmp_path, judge):
    monkeypatch.setattr(sandbox, "_JUDGE", tmp_path / "judge.py")
    if judge is not None:
        (tmp_path / "judge.py").write_text(judge)
    with pytest.raises(SandboxError):
        run_tests(RIGHT, TESTS)


def test_no_process_to_be_had_is_no_verdict(monkeypatch):
    def no_process(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(sandbox.subprocess, "Popen", no_process)
    with pytest.raises(SandboxError, match="does not start"):
        run_tests(RIGHT, TESTS)


def test_the_judge_needs_the_standard_library_alone():
    for name in ("sandbox_judge.py", "sandbox_candidate.py"):
        assert "glm5_jax" not in (pathlib.Path(sandbox.__file__).parent / name).read_text().split('"""', 2)[2]
