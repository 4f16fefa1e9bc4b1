"""Data sets of reasoning-gym as tasks: `pip install "glm5_jax[rl]"`, then "gym:chain_sum".

Its item i of seed s is item i - 1 of seed s + 1, so neighbouring seeds share all but one question: seeds here are far apart,
and beyond that the text of a question decides whether it is held out. Its scorers are hardened: white space and empty answers,
an answer in a tag, partial credit for junk, answers that they would execute.
"""

import dataclasses
import functools
import re

from glm5_jax.config import check
from glm5_jax.errors import UserError
from glm5_jax.rl.tasks import Prompt, is_held_out

_ITEMS = 512  # of one data set object; several thousand are too many for some
_TAKEN = 64  # prompts taken from its items, of which about 128 are held out
_SETS = 4096  # data set objects of one seed: 2^18 prompts, after which they come again
_SEEDS = 1024
_REFUSED = {
    "composite": "needs a configuration",
    "codeio": "not the same question twice",
    "game_of_life_halting": "its scorer gives any text full marks",
}
# Scorers that execute the answer as Python, and what they may get: a literal, or an expression of the usual functions.
_LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_EXPRESSIONS = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
_FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sec", "csc", "cot", "exp", "log", "ln", "sqrt", "pi", "Abs"}


@dataclasses.dataclass(frozen=True)
class Gym:
    """One data set. The score is 1 from 0.999 on and else 0; with `partial` it is what the data set's scorer says.

    An answer inside <answer> tags is the last such; without tags all of it is the answer.
    """

    dataset: str
    partial: bool = False
    seed: int = 0  # 0 to 1023

    def __post_init__(self):
        names = _library().factory.DATASETS
        check(self.dataset in names, f"gym:{self.dataset}: no such data set; e.g. chain_sum, gcd, countdown, spell_backward")
        check(self.dataset not in _REFUSED, f"gym:{self.dataset}: cannot be used: {_REFUSED.get(self.dataset)}")
        check(0 <= self.seed < _SEEDS, f"gym:{self.dataset}: seed {self.seed}: 0 to {_SEEDS - 1}")

    @property
    def name(self) -> str:
        return f"gym:{self.dataset}" + (":partial" if self.partial else "")

    def prompt(self, ordinal: int, held_out: bool = False) -> Prompt:
        """The metadata names the item; its gold "answer" is None where the data set has none."""
        group, place = divmod(ordinal, _TAKEN)
        seed = ((held_out * _SEEDS + self.seed) * _SETS + group % _SETS) * _ITEMS
        for index in range(_ITEMS):
            entry = _entry(self.dataset, seed, index)
            if is_held_out(entry["question"]) == held_out:
                if place == 0:
                    item = {"seed": seed, "index": index, "answer": entry["answer"]}
                    return Prompt(self.name, entry["question"], ordinal, item)
                place -= 1
        raise UserError(f"{self.name}: too few questions to hold some out")

    def score(self, prompt: Prompt, answer: str) -> float:
        tagged = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
        answer = (tagged[-1] if tagged else answer).strip()
        gold = prompt.metadata["answer"]
        if not answer or not _harmless(self.dataset, answer):
            return 0.0
        if gold is not None and answer == gold.strip():
            return 1.0
        seed, index = prompt.metadata["seed"], prompt.metadata["index"]
        score = _dataset(self.dataset, seed).score_answer(answer, _entry(self.dataset, seed, index))
        return score if self.partial or not 0 <= score <= 1 else float(score >= 0.999)


def _library():
    try:
        import reasoning_gym
    except ImportError:
        raise UserError('gym: needs reasoning-gym: pip install "glm5_jax[rl]"') from None
    return reasoning_gym


@functools.lru_cache(maxsize=8)
def _dataset(name: str, seed: int):
    return _library().create_dataset(name, seed=seed, size=_ITEMS)


@functools.lru_cache(maxsize=4096)
def _entry(name: str, seed: int, index: int) -> dict:
    return _dataset(name, seed)[index]


def _harmless(name: str, answer: str) -> bool:
    """Whether the scorer of a data set may get `answer`: True for those that do not execute it."""
    if name in _LITERALS:  # without parentheses nothing is called
        return "(" not in answer
    if name not in _EXPRESSIONS:
        return True
    if not re.fullmatch(r"[\w\s+\-*/^().,=]*", answer, re.ASCII) or "__" in answer:
        return False
    names = set(re.findall(r"[A-Za-z_]\w*", answer))
    attributes = re.search(r"\.\s*[A-Za-z_]|[)\w]\s*\.\s*[A-Za-z_]", answer)
    return not attributes and all(len(name) == 1 or name in _FUNCTIONS for name in names)
