"""Verifiable tasks: a prompt by its number, and a score of an answer. A ladder of our own from digits to code, and mixtures.

A model with a vocabulary of 16 to 20 characters can learn the first five; their scorers read the answer once, and cannot hang.

    reverse:4          1234=          4321
    copy:4             1234+          1234
    digit_sum:3        1+2+3=         6
    chain:3            12+3-40=       -25
    countdown:3        3,5,7:22=      3*5+7       each number once, + - * / and parentheses
    code               Write a function f(x) that ...
    gym:chain_sum      any data set of reasoning-gym (`glm5_jax.rl.gym`)

Whether a question is for training or held out is decided by the question itself, one in four by its SHA-256, so that no
question is in both, whatever the seeds.
"""

import ast
import dataclasses
import fractions
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from glm5_jax.config import check
from glm5_jax.errors import UserError

HELD_OUT = 4  # one question in so many is held out
_DRAWS = 400  # until a question of the wanted part is found; by chance none is found once in 10^49
_LONGEST = 1000  # characters of an expression that are read


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question. What scoring needs beside the answer is in `metadata`, which JSON can carry; the model never sees it."""

    task: str  # the name of its task
    text: str
    ordinal: int
    metadata: dict


class Task(Protocol):
    """What a task is. `Scorer` runs `score` in worker processes, so the class lies in a module that they can import, unless it
    has an attribute `in_process` = True: for scorers that cannot hang whatever the answer. A score of several parts is their
    mean, weighted by an attribute `weights`, {part: weight}, if there is one."""

    name: str

    def prompt(self, ordinal: int, held_out: bool = False) -> Prompt:
        """The same prompt whenever asked; held-out ones are never among the others."""

    def score(self, prompt: Prompt, answer: str) -> float | dict[str, float]:
        """In [0, 1], or several parts by name. What it raises is 0 for the answer, except what is infrastructure: OSError,
        ImportError and their kind, where there is no score."""


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out part: by its text, so for every seed and every task alike."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT == 0


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """A task whose question is drawn: `_draw(rng) -> (text, metadata)`."""

    seed: int = dataclasses.field(default=0, kw_only=True)
    in_process = True

    def prompt(self, ordinal: int, held_out: bool = False) -> Prompt:
        rng = random.Random(f"{self.name} {self.seed} {ordinal} {held_out}")
        for _ in range(_DRAWS):
            text, metadata = self._draw(rng)
            if is_held_out(text) == held_out:
                return Prompt(self.name, text, ordinal, metadata)
        raise UserError(f"{self.name}: too few questions to hold some out")

    def _draw(self, rng: random.Random) -> tuple[str, dict]:
        raise NotImplementedError

    def score(self, prompt: Prompt, answer: str) -> float:
        return float(answer.strip() == prompt.metadata["answer"])


@dataclasses.dataclass(frozen=True)
class Reverse(_Drawn):
    """`length` digits, to be given backwards. Partial: the share of right places, of the places of the longer of the two."""

    length: int = 4
    partial: bool = True

    def __post_init__(self):
        check(2 <= self.length <= 1000, f"reverse:{self.length}: a length of 2 to 1000")

    @property
    def name(self) -> str:
        return f"reverse:{self.length}" + ("" if self.partial else ":exact")

    def _draw(self, rng):
        digits = "".join(rng.choices("0123456789", k=self.length))
        return f"{digits}=", {"answer": digits[::-1]}

    def score(self, prompt: Prompt, answer: str) -> float:
        answer, right = answer.strip(), prompt.metadata["answer"]
        if not self.partial:
            return float(answer == right)
        return _right_places(answer, right)


@dataclasses.dataclass(frozen=True)
class Copy(_Drawn):
    """`length` digits, to be repeated; a + in place of `Reverse`'s = is all that tells the two apart. Partial, as there."""

    length: int = 4

    def __post_init__(self):
        check(2 <= self.length <= 1000, f"copy:{self.length}: a length of 2 to 1000")

    @property
    def name(self) -> str:
        return f"copy:{self.length}"

    def _draw(self, rng):
        digits = "".join(rng.choices("0123456789", k=self.length))
        return f"{digits}+", {"answer": digits}

    def score(self, prompt: Prompt, answer: str) -> float:
        return _right_places(answer.strip(), prompt.metadata["answer"])


def _right_places(answer: str, right: str) -> float:
    """The share of places at which the two agree, of the places of the longer."""
    return sum(a == b for a, b in zip(answer, right)) / max(len(answer), len(right))


@dataclasses.dataclass(frozen=True)
class DigitSum(_Drawn):
    """The sum of `length` digits: 0 or 1."""

    length: int = 3

    def __post_init__(self):
        check(2 <= self.length <= 100, f"digit_sum:{self.length}: a length of 2 to 100")

    @property
    def name(self) -> str:
        return f"digit_sum:{self.length}"

    def _draw(self, rng):
        digits = rng.choices(range(10), k=self.length)
        return "+".join(map(str, digits)) + "=", {"answer": str(sum(digits))}


@dataclasses.dataclass(frozen=True)
class ArithmeticChain(_Drawn):
    """`length` numbers of one or two digits, added and subtracted from left to right: 0 or 1."""

    length: int = 3

    def __post_init__(self):
        check(2 <= self.length <= 100, f"chain:{self.length}: a length of 2 to 100")

    @property
    def name(self) -> str:
        return f"chain:{self.length}"

    def _draw(self, rng):
        numbers = [rng.randrange(100) for _ in range(self.length)]
        signs = [1] + [rng.choice((1, -1)) for _ in numbers[1:]]
        text = str(numbers[0]) + "".join(f"{'+' if s > 0 else '-'}{n}" for s, n in zip(signs[1:], numbers[1:]))
        return f"{text}=", {"answer": str(sum(s * n for s, n in zip(signs, numbers)))}


@dataclasses.dataclass(frozen=True)
class Countdown(_Drawn):
    """An expression over `count` given numbers, each exactly once, that has the given value: 0 or 1."""

    count: int = 3

    def __post_init__(self):
        check(2 <= self.count <= 8, f"countdown:{self.count}: 2 to 8 numbers")

    @property
    def name(self) -> str:
        return f"countdown:{self.count}"

    def _draw(self, rng):
        numbers = [rng.randrange(1, 20) for _ in range(self.count)]
        answer, value = str(numbers[0]), numbers[0]
        for number in numbers[1:]:
            sign = rng.choice("+-*" if value * number <= 1000 else "+-")
            if sign == "*" and set("+-") & set(answer):
                answer = f"({answer})"
            answer, value = answer + sign + str(number), {"+": value + number, "-": value - number, "*": value * number}[sign]
        shown = sorted(numbers)
        return f"{','.join(map(str, shown))}:{value}=", {"numbers": shown, "target": value, "answer": answer}

    def score(self, prompt: Prompt, answer: str) -> float:
        try:
            used, value = evaluate(answer)
        except (ValueError, ZeroDivisionError):  # no expression: a wrong answer like any other
            return 0.0
        return float(Counter(used) == Counter(prompt.metadata["numbers"]) and value == prompt.metadata["target"])


_OPERATIONS: dict[type, Callable] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate(expression: str) -> tuple[list[int], fractions.Fraction]:
    """(the numbers in it, its exact value) of an expression of integers, + - * / and parentheses; nothing is executed.

    Raises:
      ValueError: anything else in it, or more than 1,000 characters.
      ZeroDivisionError: division by zero.
    """
    text = expression.strip()
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        raise ValueError("no expression of integers, + - * / and parentheses")
    numbers = []

    def value(node) -> fractions.Fraction:
        match node:
            case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int(number)):
                numbers.append(number)
                return fractions.Fraction(number)
        raise ValueError("no expression of integers, + - * / and parentheses")

    try:
        result = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no expression: {error}") from None
    return numbers, result


@dataclasses.dataclass(frozen=True)
class Code(_Drawn):
    """A Python function to be written, judged by hidden tests in the sandbox (`glm5_jax.rl.sandbox`): 0 or 1.

    The answer is the last fenced block, or all of it. `seconds`: wall-clock time of the tests of one answer.
    """

    seconds: float = 4.0
    in_process = False
    name = "code"

    def _draw(self, rng):
        write, reference, argument = rng.choice(_FUNCTIONS)
        a, b = rng.randrange(2, 50), rng.randrange(2, 50)
        text, source = (part.format(a=a, b=b) for part in (write, reference))
        function = eval(source)  # of the table below
        arguments = [argument(rng) for _ in range(5)]
        tests = "\n".join(f"assert f({value!r}) == {function(value)!r}" for value in arguments)
        return f"Write a Python function f(x) that returns {text}.\n", {"tests": tests, "answer": f"f = {source}"}

    def score(self, prompt: Prompt, answer: str) -> float:
        from glm5_jax.rl.sandbox import run_tests

        return float(run_tests(code_of(answer), prompt.metadata["tests"], self.seconds).passed)


def code_of(answer: str) -> str:
    """The last fenced block of a Markdown answer, also one that is not closed; without any, all of it."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)(?:^```|\Z)", answer, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else answer


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randrange(-50, 50) for _ in range(rng.randrange(3, 9))]


# (what to write, a reference as an expression, an argument); a and b are drawn.
_FUNCTIONS: tuple[tuple[str, str, Callable], ...] = (
    ("{a} times x plus {b}", "lambda x: {a} * x + {b}", lambda rng: rng.randrange(-99, 99)),
    ("x squared minus {a} times x, plus {b}", "lambda x: x * x - {a} * x + {b}", lambda rng: rng.randrange(-99, 99)),
    ("the remainder of {a} times x divided by {b}", "lambda x: {a} * x % {b}", lambda rng: rng.randrange(999)),
    ("the sum of the numbers in the list x that are above {a}", "lambda x: sum(n for n in x if n > {a})", _numbers),
    ("the list x without its multiples of {a}, each plus {b}", "lambda x: [n + {b} for n in x if n % {a}]", _numbers),
    ("the largest number of the list x times {a}, minus {b}", "lambda x: max(x) * {a} - {b}", _numbers),
    ("the list x sorted by the remainders modulo {a}", "lambda x: sorted(x, key=lambda n: n % {a})", _numbers),
)


def task(name: str, seed: int = 0) -> Task:
    """The task of a name such as "reverse:4", "reverse:4:exact", "digit_sum:3", "code", "gym:chain_sum", "gym:gcd:partial".

    Raises:
      UserError: no such task, or arguments that it does not take.
    """
    kind, *arguments = name.split(":")
    if kind == "gym":
        from glm5_jax.rl.gym import Gym

        check(len(arguments) == 1 or arguments[1:] == ["partial"], f"{name}: gym:DATASET or gym:DATASET:partial")
        return Gym(arguments[0], partial=len(arguments) == 2, seed=seed)
    check(kind in _KINDS, f"{name}: no such task; {', '.join(_KINDS)} or gym:DATASET")
    if kind == "reverse" and arguments[1:] == ["exact"]:
        return Reverse(_integer(name, arguments[0]), partial=False, seed=seed)
    check(len(arguments) <= (kind != "code"), f"{name}: too many arguments; e.g. reverse:4, reverse:4:exact, digit_sum:3, code")
    return _KINDS[kind](*(_integer(name, argument) for argument in arguments), seed=seed)


_KINDS = {
    "reverse": Reverse, "copy": Copy, "digit_sum": DigitSum, "chain": ArithmeticChain, "countdown": Countdown, "code": Code,
}  # fmt: skip


def _integer(name: str, text: str) -> int:
    check(re.fullmatch("[0-9]{1,9}", text) is not None, f"{name}: {text!r} is no number")
    return int(text)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several tasks by weight. The domain of a prompt follows from its ordinal alone; of any n prompts in a row each task has
    its share to within a few, so every batch has all domains."""

    tasks: tuple[Task, ...]
    weights: tuple[float, ...]  # as given; only their ratios matter
    seed: int = 0

    def prompt(self, ordinal: int, held_out: bool = False) -> Prompt:
        """The prompt of one of the tasks, which has the same ordinal."""
        # Multiples of the golden ratio spread more evenly over [0, 1) than any random numbers; in integers, so exactly.
        start = random.Random(f"mixture {self.seed}").getrandbits(64)
        place = (start + ordinal * 0x9E3779B97F4A7C15) % 2**64 / 2**64 * sum(self.weights)
        borders = itertools.accumulate(self.weights)
        chosen = next((t for t, border in zip(self.tasks, borders) if place < border), self.tasks[-1])
        return chosen.prompt(ordinal, held_out)


def mixture(tasks: Sequence[str | Task | tuple[Task, float]], seed: int = 0) -> Mixture:
    """Tasks by name, "reverse:4" or with a weight "reverse:4@2", as objects, or as (object, weight); weight 1 if not given.

    Raises:
      UserError: none, two of one name, an unknown one, or a weight that is not positive.
    """
    check(len(tasks) > 0, "tasks: at least one, e.g. reverse:4")
    pairs = [_weighted(entry, seed) for entry in tasks]
    names = [chosen.name for chosen, _ in pairs]
    check(len(set(names)) == len(names), f"tasks: {', '.join(names)}: one name twice")
    for name, (_, weight) in zip(names, pairs):
        check(0 < weight < float("inf"), f"{name}@{weight}: a positive weight")
    return Mixture(tuple(chosen for chosen, _ in pairs), tuple(float(weight) for _, weight in pairs), seed)


def _weighted(entry, seed: int) -> tuple[Task, float]:
    if not isinstance(entry, str):
        return entry if isinstance(entry, tuple) else (entry, 1.0)
    name, at, weight = entry.partition("@")
    check(not at or re.fullmatch(r"[0-9]*\.?[0-9]+", weight) is not None, f"{entry}: the weight after @ is no number")
    return task(name, seed), float(weight) if at else 1.0
