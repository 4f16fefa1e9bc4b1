"""Retrieval tasks made offline, at exact lengths: needles in a haystack and associative recall (paper Tables 3 and 6).

Every task is a context that holds pairs of a key and a value, then questions: a key, whose value is the answer. In symbols,
ids of a small vocabulary, for small models that learn the tasks; `text_sample` tells the same in words, for any tokenizer.
Pure numpy and seeded: the same arguments give the same arrays, and no training draw shares a stream with an evaluation.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from glm5_jax.config import check

PAD, START, ASK = 0, 1, 2  # ids: padding, first token of every sequence, what separates context and questions
_RESERVED = 3


@dataclasses.dataclass(frozen=True)
class Symbols:
    """The vocabulary: three ids of structure, then keys, values and noise, which share no id."""

    keys: int  # different keys
    values: int  # different values
    noise: int  # different tokens of the haystack that mean nothing

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check(value >= 1, f"symbols.{field.name}={value}: must be at least 1")

    @property
    def vocab_size(self) -> int:
        """Ids in all."""
        return _RESERVED + self.keys + self.values + self.noise

    @property
    def key_ids(self) -> range:
        """Ids of the keys."""
        return range(_RESERVED, _RESERVED + self.keys)

    @property
    def value_ids(self) -> range:
        """Ids of the values."""
        return range(self.key_ids.stop, self.key_ids.stop + self.values)

    @property
    def noise_ids(self) -> range:
        """Ids of the noise."""
        return range(self.value_ids.stop, self.value_ids.stop + self.noise)


class Sample(NamedTuple):
    """One sequence: tokens int32 [length], answer bool [length]: tokens that are answers, so targets of the loss."""

    tokens: np.ndarray
    answer: np.ndarray


def single_needle(rng: np.random.Generator, length: int, symbols: Symbols) -> Sample:
    """One pair in noise, one question."""
    return _needles(rng, length, symbols, pairs=1, questions=1)


def multi_key(rng: np.random.Generator, length: int, symbols: Symbols) -> Sample:
    """A pair every 8 tokens of noise, all keys different; half of them are asked for."""
    return _needles(rng, length, symbols, pairs=max(length // 8, 1), questions=max(length // 16, 1))


def multi_value(rng: np.random.Generator, length: int, symbols: Symbols, count: int = 3) -> Sample:
    """One key with `count` different values at different places of the noise; the answer is all, in order of appearance."""
    key = rng.choice(symbols.key_ids)
    values = _draw(rng, symbols.value_ids, count, "values")
    return _sequence(rng, length, symbols, [(key, v) for v in values], [(key, *values)])


def recall(rng: np.random.Generator, length: int, symbols: Symbols, every: int = 8) -> Sample:
    """Associative recall: pairs without noise between them, all keys different; a question for `every` tokens of length."""
    questions = max(length // every, 1)
    pairs = (length - 2 - 2 * questions) // 2
    check(pairs >= questions, f"length={length}: too short for recall, the least is 6")
    return _needles(rng, length, symbols, pairs, questions)


Task = Callable[[np.random.Generator, int, Symbols], Sample]
TASKS: dict[str, Task] = {f.__name__: f for f in (single_needle, multi_key, multi_value, recall)}


def _needles(rng, length: int, symbols: Symbols, pairs: int, questions: int) -> Sample:
    keys = _draw(rng, symbols.key_ids, pairs, "keys")
    values = rng.choice(symbols.value_ids, pairs)
    made = list(zip(keys, values))
    asked = [made[i] for i in rng.choice(pairs, questions, replace=False)]
    return _sequence(rng, length, symbols, made, asked)


def _draw(rng, ids: range, count: int, what: str) -> np.ndarray:
    check(count <= len(ids), f"symbols.{what}={len(ids)}: this length needs {count} different {what}")
    return rng.choice(ids, count, replace=False)


def _sequence(rng, length: int, symbols: Symbols, pairs: list, asked: list) -> Sample:
    """START, noise with the pairs at random places in their order, ASK, the questions; noise fills it up to `length`."""
    tail = sum(map(len, asked))
    noise = length - 2 - 2 * len(pairs) - tail
    check(noise >= 0, f"length={length}: too short, the pairs and questions take {length - noise} tokens")
    # A place for each pair between the noise tokens: all choices equally likely.
    is_pair = np.zeros(noise + len(pairs), bool)
    is_pair[rng.choice(noise + len(pairs), len(pairs), replace=False)] = True
    filler, left = iter(rng.choice(symbols.noise_ids, noise)), iter(pairs)
    context = [token for pair in is_pair for token in (next(left) if pair else (next(filler),))]
    tokens = [START, *context, ASK, *(token for question in asked for token in question)]
    answer = np.zeros(length, bool)
    answer[length - tail :] = [i > 0 for question in asked for i in range(len(question))]
    return Sample(np.array(tokens, np.int32), answer)


def stream(seed: int, split: Literal["train", "eval"], *where: int) -> np.random.Generator:
    """The random numbers of one place (step, task, length ...) of one split; no two places share a stream."""
    return np.random.default_rng([("train", "eval").index(split), seed, len(where), *where])


def packed_batch(
    rng: np.random.Generator, tasks: Sequence[Task], lengths: Sequence[int], rows: int, seq_len: int, symbols: Symbols
) -> dict[str, np.ndarray]:
    """Training batch: every row is filled with sequences of one length, drawn for the row; tasks are drawn for each sequence.

    Returns:
      tokens, segment_ids, positions int32 [rows,seq_len] and loss_mask bool [rows,seq_len]: the answers.
    """
    batch = _empty(rows, seq_len)
    for row in range(rows):
        length = int(rng.choice(lengths))
        check(length <= seq_len, f"length={length}: longer than a row, seq_len={seq_len}")
        for segment in range(seq_len // length):
            sample = tasks[rng.integers(len(tasks))](rng, length, symbols)
            _place(batch, row, segment * length, segment + 1, sample)
    return batch


def _empty(rows: int, seq_len: int) -> dict[str, np.ndarray]:
    kinds = {"tokens": np.int32, "segment_ids": np.int32, "positions": np.int32, "loss_mask": bool}
    return {name: np.zeros((rows, seq_len), kind) for name, kind in kinds.items()}


def _place(batch: dict, row: int, at: int, segment: int, sample: Sample) -> None:
    span = slice(at, at + len(sample.tokens))
    batch["tokens"][row, span] = sample.tokens
    batch["segment_ids"][row, span] = segment
    batch["positions"][row, span] = np.arange(len(sample.tokens))
    batch["loss_mask"][row, span] = sample.answer


# The same tasks in words. A question continues as the needle did, so that a base model can answer it.
_WORDS = (
    "amber anchor basil beacon birch cactus candle canyon cedar cherry clover comet copper coral cotton crane daisy "
    "delta ember falcon fern fiddle flint forest garnet ginger glacier granite harbor hazel heron honey indigo "
    "ivory jasmine jungle juniper kettle lagoon lantern lemon lilac linen lotus maple marble meadow mint mirror "
    "nectar needle nutmeg ocean olive onyx orchid otter pebble pepper pine planet plum poppy quartz rabbit raven "
    "ribbon river robin rocket saddle saffron sage sandal sapphire shadow silver spruce summit sunset thistle "
    "timber topaz tulip tunnel turtle valley velvet violet walnut willow winter zephyr"
).split()
_NOISE = (
    " The grass is green.", " The sky is blue.", " The sun is yellow.", " Here we go.", " There and back again.",
    " The wind is mild today.", " Nobody came to the gate.", " The road goes on for a while.",
)  # fmt: skip


class _Question(NamedTuple):
    """The part of a text sample that its length does not change, and needles to fill it up with."""

    needles: list[np.ndarray]  # ids of the sentences that hold the answers
    tail: list[tuple[np.ndarray, bool]]  # ids of the question and its answers, piece by piece; True for answers
    others: Iterator[np.ndarray]  # ids of sentences with codes of other names

    @property
    def tokens(self) -> int:
        """What both take: the least length of the sample."""
        return sum(map(len, self.needles)) + sum(len(ids) for ids, _ in self.tail)


def _question(rng: np.random.Generator, task: str, encode: Callable[[str], np.ndarray]) -> _Question:
    numbers = iter(rng.permutation(np.arange(1000, 10_000)))
    pairs = iter(rng.choice(len(_WORDS) ** 2, 8000, replace=False))  # fewer than there are numbers

    def new_name():
        return "{} {}".format(*(_WORDS[i] for i in divmod(int(next(pairs)), len(_WORDS))))

    def needle(name, code):
        return encode(f" The code of {name} is{code}.")

    name, answers = new_name(), [f" {next(numbers)}" for _ in range(3 if task == "multi_value" else 1)]
    question = f"\nThe three codes of {name} are" if task == "multi_value" else f"\nThe code of {name} is"
    tail = [(encode(question), False)]
    for i, answer in enumerate(answers):
        tail += [(encode(","), False)] * (i > 0) + [(encode(answer), True)]
    others = (needle(new_name(), f" {number}") for number in numbers)
    return _Question([needle(name, answer) for answer in answers], tail, others)


def least_length(rng: np.random.Generator, task: str, encode: Callable[[str], np.ndarray]) -> int:
    """Tokens that `text_sample` needs at least when it draws from `rng` as it stands."""
    return _question(rng, task, encode).tokens


def text_sample(rng: np.random.Generator, task: str, length: int, encode: Callable[[str], np.ndarray]) -> Sample:
    """One question of `task` in words, exactly `length` tokens with its answer; all of it must be right.

    single_needle: one code in noise. multi_key: a code in every fourth sentence, all names different. multi_value: three codes
    of one name, asked for in order. recall: codes only. A code is 4 digits; numbers of a sample are all different.
    At another length the same `rng` gives the same question.

    Args:
      encode: text -> ids, of a tokenizer. Pieces are encoded one by one and joined.
    """
    needles, tail, others = question = _question(rng, task, encode)
    missing, rest, turn = length - question.tokens, [], 0
    check(missing >= 0, f"length={length}: too short for this sample of {task}, which takes {question.tokens} tokens")
    while missing > 0:
        is_needle = task == "recall" or (task == "multi_key" and turn % 4 == 3)
        turn += 1
        if is_needle:
            check(turn < 8000, f"length={length}: longer than all different codes fill")
            piece = next(others)
        if not is_needle or len(piece) > missing:  # the last gap takes the end of a sentence of noise
            piece = encode(_NOISE[rng.integers(len(_NOISE))])[-missing:]
        rest.append(piece)
        missing -= len(piece)
    first, rest = (rest[-1:], rest[:-1]) if rest else ([], [])  # what was cut off stands first
    at = np.sort(rng.integers(0, len(rest) + 1, len(needles)))
    for place, ids in zip(at[::-1], needles[::-1]):
        rest.insert(int(place), ids)
    pieces = [(ids, False) for ids in first + rest] + tail
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in pieces])
    return Sample(tokens, np.concatenate([np.full(len(ids), answer) for ids, answer in pieces]))
