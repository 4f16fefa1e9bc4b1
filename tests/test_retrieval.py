"""Retrieval tasks: answers derived from the context alone, one matching key, exact lengths, streams that never meet."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import cli
from glm5_jax.errors import UserError
from glm5_jax.model import merge, split
from glm5_jax.train import evaluate
from glm5_jax.train import retrieval as R
from glm5_jax.train.evaluate import default_lengths, retrieval_by_length
from helpers_train import lively_model, step_config

SYMBOLS = R.Symbols(keys=70, values=9, noise=5)
LENGTHS = (14, 31, 64, 128)


def kind(token):
    """What a token is, by the order of the vocabulary: three ids of structure, 70 keys, 9 values, 5 noise."""
    return ["structure", "key", "value", "noise"][int(np.searchsorted([3, 73, 82, 87], token, side="right"))]


def read(sample):
    """(pairs in order, questions [key, answers...], noise tokens) of a sequence, read as a person would."""
    tokens = sample.tokens.tolist()
    assert tokens[0] == R.START and tokens.count(R.ASK) == 1
    ask = tokens.index(R.ASK)
    pairs, noise, context = [], 0, iter(tokens[1:ask])
    for token in context:
        if kind(token) == "key":
            pairs.append((token, next(context)))
            assert kind(pairs[-1][1]) == "value"
        else:
            assert kind(token) == "noise"
            noise += 1
    questions = []
    for token, answer in zip(tokens[ask + 1 :], sample.answer[ask + 1 :]):
        assert answer == (kind(token) == "value")
        if answer:
            questions[-1].append(token)
        else:
            assert kind(token) == "key"
            questions.append([token])
    assert not sample.answer[: ask + 1].any()
    return pairs, questions, noise


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", R.TASKS)
def test_every_answer_follows_from_the_context(task, length):
    for seed in range(20):
        sample = R.TASKS[task](np.random.default_rng(seed), length, SYMBOLS)
        assert sample.tokens.shape == sample.answer.shape == (length,)
        pairs, questions, noise = read(sample)
        assert questions and len({q[0] for q in questions}) == len(questions)
        for key, *answers in questions:
            assert answers == [v for k, v in pairs if k == key]
        if task != "multi_value":
            assert len({k for k, _ in pairs}) == len(pairs)  # so exactly one key matches
        expected = {
            "single_needle": (1, 1),
            "multi_key": (length // 8, max(length // 16, 1)),
            "multi_value": (3, 1),
            "recall": ((length - 2 - 2 * (length // 8)) // 2, length // 8),
        }[task]
        assert (len(pairs), len(questions)) == expected
        if task == "recall":
            assert noise == length % 2
        if task == "multi_value":
            assert len({v for _, v in pairs}) == 3


def test_places_of_a_needle_are_uniform():
    where = [R.single_needle(np.random.default_rng(s), 12, SYMBOLS).tokens for s in range(4000)]
    at = [next(i for i, t in enumerate(row) if kind(t) == "key") for row in where]
    counts = np.bincount(at)[1:]
    assert len(counts) == 7  # START, 6 noise tokens with 7 gaps for the pair, ASK, the question
    assert (np.abs(counts - 4000 / 7) < 5 * np.sqrt(4000 / 7)).all()


def test_ids_are_a_partition_of_the_vocabulary():
    ids = [R.PAD, R.START, R.ASK, *SYMBOLS.key_ids, *SYMBOLS.value_ids, *SYMBOLS.noise_ids]
    assert ids == list(range(SYMBOLS.vocab_size)) and SYMBOLS.vocab_size == 87


def test_lengths_and_vocabularies_that_do_not_suffice():
    with pytest.raises(UserError, match="length=5: too short"):
        R.single_needle(np.random.default_rng(0), 5, SYMBOLS)
    assert len(R.single_needle(np.random.default_rng(0), 6, SYMBOLS).tokens) == 6
    with pytest.raises(UserError, match="length=5: too short for recall"):
        R.recall(np.random.default_rng(0), 5, SYMBOLS)
    assert len(R.recall(np.random.default_rng(0), 6, SYMBOLS).tokens) == 6
    with pytest.raises(UserError, match="symbols.keys=70: this length needs 95 different keys"):
        R.recall(np.random.default_rng(0), 256, SYMBOLS)
    with pytest.raises(UserError, match="symbols.noise=0"):
        R.Symbols(1, 1, 0)


def test_packed_rows():
    rng = R.stream(3, "train", 0)
    batch = R.packed_batch(rng, (R.multi_key, R.recall), (16, 48, 128), rows=40, seq_len=128, symbols=SYMBOLS)
    seen = set()
    for row in range(40):
        tokens, segments, positions, mask = (batch[n][row] for n in ("tokens", "segment_ids", "positions", "loss_mask"))
        count = segments.max()
        length = int((segments == 1).sum())
        seen.add(length)
        assert count == 128 // length
        np.testing.assert_array_equal(segments, np.repeat([*range(1, count + 1), 0], [length] * count + [128 % length]))
        np.testing.assert_array_equal(positions, [i % length if s else 0 for i, s in enumerate(segments)])
        for s in range(1, count + 1):
            pairs, questions, _ = read(R.Sample(tokens[segments == s], mask[segments == s]))
            assert all(q[1:] == [v for k, v in pairs if k == q[0]] for q in questions)
        assert not tokens[segments == 0].any() and not mask[segments == 0].any()
    assert seen == {16, 48, 128}


def test_same_seed_same_arrays():
    make = lambda step: R.packed_batch(R.stream(5, "train", step), (R.recall,), (32,), 2, 64, SYMBOLS)  # noqa: E731
    for name, array in make(1).items():
        np.testing.assert_array_equal(array, make(1)[name])
    assert (make(1)["tokens"] != make(2)["tokens"]).any()


def test_training_and_evaluation_never_share_a_stream():
    seeds, steps = range(4), range(200)
    draw = lambda *place: tuple(R.stream(*place).integers(0, 2**63, 2))  # noqa: E731
    train = {draw(seed, "train", step) for seed in seeds for step in steps}
    places = [(task, length, part) for task in range(4) for length in (32, 64, 128, 256) for part in range(8)]
    evaluation = {draw(seed, "eval", *place) for seed in seeds for place in places}
    assert len(train) == len(seeds) * len(steps) and len(evaluation) == len(seeds) * len(places)
    assert not train & evaluation


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def by_words(text):  # a tokenizer whose tokens are longer than a byte and of several lengths
    return np.array([hash(word) % 2**31 for word in re.findall(r"\s?\S+", text)], np.int32)


@pytest.mark.parametrize("task", R.TASKS)
def test_a_text_sample_can_be_answered_by_reading_it(task):
    for seed in range(30):
        length = 180 + 37 * seed
        sample = R.text_sample(np.random.default_rng(seed), task, length, as_bytes)
        assert len(sample.tokens) == len(sample.answer) == length
        text = bytes(sample.tokens.tolist()).decode()
        context, question = text.split("\n")
        name = re.match(r"The (?:three codes|code) of (\w+ \w+) (?:is|are) \d", question).group(1)
        found = re.findall(r" The code of (\w+ \w+) is (\d{4})\.", context)
        codes = [code for n, code in found if n == name]
        assert len(codes) == (3 if task == "multi_value" else 1)
        assert question.endswith(", ".join(codes))
        assert bytes(sample.tokens[sample.answer].tolist()).decode() == "".join(f" {code}" for code in codes)
        assert len({code for _, code in found}) == len(found)
        others = {n for n, _ in found} - {name}
        assert len(others) == len(found) - len(codes)
        assert bool(others) == (task in ("multi_key", "recall") and length > 320) or length <= 320


def test_text_samples_fill_their_length_with_any_tokenizer():
    for task in R.TASKS:
        for length in range(40, 90):
            assert len(R.text_sample(np.random.default_rng(length), task, length, by_words).tokens) == length


@pytest.mark.parametrize("task", R.TASKS)
def test_another_length_asks_the_same_question_and_the_least_length_is_exact(task):
    for seed in range(5):
        draw = lambda length: R.text_sample(np.random.default_rng(seed), task, length, as_bytes).tokens  # noqa: B023, E731
        text, longer = (bytes(draw(length).tolist()).decode() for length in (400, 700))
        question = text.split("\n")[1]
        assert longer.endswith("\n" + question)
        name = re.match(r"The (?:three codes|code) of (\w+ \w+) ", question).group(1)
        sentences = re.findall(rf" The code of {name} is \d{{4}}\.", text)
        least = sum(map(len, sentences)) + len("\n" + question)
        assert R.least_length(np.random.default_rng(seed), task, as_bytes) == least == len(draw(least))
        with pytest.raises(UserError, match=f"length={least - 1}: too short for this sample of {task}, .* {least} tokens"):
            draw(least - 1)


class TwoIds:
    """A tokenizer that tells only the digit 9 from all else: a model that always says "all else" answers some questions."""

    vocab_size = 40

    def encode(self, text):
        return np.where(as_bytes(text) == ord("9"), 7, 3)


@pytest.fixture(scope="module")
def model():
    """A network that says 3 after many 3s, and is not made to say anything after a 7."""
    cfg = step_config(num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0, max_position_embeddings=256)
    graphdef, params = split(lively_model(cfg))
    hidden = merge(graphdef, params)(np.full((1, 90), 3)).hidden[0, -1]
    params["head"] = jnp.zeros_like(params["head"]).at[:, 3].set(hidden).at[:, 7].set(-hidden)
    return merge(graphdef, params)


def by_hand(model, task, length, samples):
    """The share of samples whose answer is what the model would say token by token."""
    right = 0
    for i in range(samples):
        tokens, answer = R.text_sample(R.stream(4, "eval", list(R.TASKS).index(task), i), task, length, TwoIds().encode)
        said = np.argmax(model(tokens[None]).logits[0], -1)
        right += all(said[at - 1] == tokens[at] for at in np.flatnonzero(answer))
    return right / samples


def test_accuracy_is_the_share_of_samples_that_greedy_decoding_gets_right(model):
    tasks = ["single_needle", "multi_value"]  # one answer, and three that must all be right
    shares = retrieval_by_length(model, TwoIds().encode, tasks, [200], samples=19, seed=4, batch_rows=8)
    assert shares == {task: {200: by_hand(model, task, 200, 19)} for task in tasks}
    assert all(0 < share[200] < 1 for share in shares.values())


def test_the_least_length_named_is_that_of_the_longest_sample_of_all_tasks(model):
    """Each code is " 1234", each name two words; multi_value says its name four times, so it needs most."""
    measure = lambda length: retrieval_by_length(model, TwoIds().encode, list(R.TASKS), [length], samples=9, seed=1)  # noqa: E731
    samples = [R.text_sample(R.stream(1, "eval", 2, i), "multi_value", 256, as_bytes).tokens for i in range(9)]
    names = [re.search(r"codes of (\w+ \w+) are", bytes(sample.tolist()).decode()).group(1) for sample in samples]
    least = len(" The code of  is 1234.") * 3 + len("\nThe three codes of  are 1234, 1234, 1234") + 4 * max(map(len, names))
    with pytest.raises(UserError, match=f"lengths=3: too short for multi_value, whose samples take {least} tokens at least"):
        measure(3)
    with pytest.raises(UserError, match=f"lengths={least - 1}: too short .* {least} tokens at least"):
        measure(least - 1)
    assert all(list(shares) == [least] for shares in measure(least).values())


def test_eval_prints_and_plots_retrieval_by_length(model, monkeypatch, tmp_path, capsys):
    asked, png = {}, tmp_path / "by_length.png"

    def measure(model, encode, tasks, lengths, samples, seed, batch_rows, progress):
        asked.update(tasks=tuple(tasks), lengths=lengths, samples=samples, seed=seed, batch_rows=batch_rows)
        return {task: {n: n / 1000 for n in lengths} for task in tasks}

    monkeypatch.setattr(cli, "_load_with_tokenizer", lambda *_: (model, TwoIds()))
    monkeypatch.setattr(evaluate, "retrieval_by_length", measure)
    arguments = ["--retrieval", "recall", "--lengths", "90", "200", "--samples", "31", "--seed", "4", "--json"]
    arguments += ["--plot", str(png)]
    assert cli.evaluate(["DIR", *arguments]) == 0
    assert asked == dict(tasks=("recall",), lengths=(90, 200), samples=31, seed=4, batch_rows=8)
    header, lengths, row, plot, line = capsys.readouterr().out.splitlines()
    assert plot == f"plot: {png}" and png.read_bytes().startswith(b"\x89PNG")
    assert "31 samples" in header and lengths.split() == ["90", "200"] and row.split() == ["recall", "9.0", "20.0"]
    assert json.loads(line) == {"retrieval": {"recall": {"90": 0.09, "200": 0.2}}}
    for every in (["all"], []):
        asked.clear()
        assert cli.evaluate(["DIR", "--retrieval", *every]) == 0
        assert asked["tasks"] == tuple(R.TASKS) and asked["lengths"] == (256,)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--retrieval", "haystack"], "retrieval=haystack: one of single_needle, multi_key, multi_value, recall, or all"),
        (["--retrieval", "all", "--lengths", "300"], "lengths=300: the position limit is 256"),
        (["--retrieval", "all", "--samples", "0"], "samples=0: must be at least 1"),
        (["--retrieval", "all", "--seed", "-1"], "seed=-1: must not be negative"),
        (["--retrieval", "recall", "--lengths", "200", "20"], "lengths=20: too short for recall, .* take 7. tokens at least"),
        (["--retrieval", "all", "--lengths", "-1"], "lengths=-1: too short for multi_value, .* take 1.. tokens at least"),
    ],
)
def test_eval_refuses(model, monkeypatch, options, message):
    monkeypatch.setattr(cli, "_load_with_tokenizer", lambda *_: (model, TwoIds()))
    with pytest.raises(UserError, match=message):
        cli.evaluate(["DIR", *options])


def test_default_lengths():
    assert default_lengths(202_752) == (256, 512, 1024, 2048, 4096)
    assert default_lengths(600) == (256, 512) and default_lengths(64) == (64,)
