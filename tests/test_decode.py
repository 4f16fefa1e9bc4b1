"""Generation: golden continuations, the cache against full passes, the exact distribution of sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.errors import UserError
from glm5_jax.serve.decode import Sampling, generate, sample, stream
from helpers_train import lively_model, step_config


@pytest.fixture(scope="module", autouse=True)
def fast():
    yield


@pytest.fixture(scope="module")
def model():
    """Selects 4 keys, so generation soon leaves some out."""
    return lively_model(step_config(attention="sparse", eos_token_id=(100,), pad_token_id=3))


def continue_case(data, case: str):
    c = data.cases
    steps = c[f"{case}/new_tokens"].shape[1]
    return list(stream(data.model(), c[f"{case}/input_ids"], steps, segment_ids=c[f"{case}/attention_mask"]))


@pytest.mark.parametrize(
    "name, case",
    [
        pytest.param("glm5_tiny", "gen_short", marks=pytest.mark.smoke),
        ("glm5_tiny", "gen_long"),
        ("glm5_tiny", "gen_stop"),
        ("glm52_tiny", "gen_short"),
        ("glm52_tiny", "gen_long"),
        ("glm52_tiny", "gen_stop"),
    ],
)
def test_greedy_continuation_is_the_golden_one(golden, name, case):
    """Tokens exactly, logits within the goldens' tolerance wherever a row is still alive, pad ids after an end."""
    data = golden(name)
    steps = continue_case(data, case)
    tokens = np.stack([s.tokens for s in steps], axis=1)
    live = np.stack([s.live for s in steps], axis=1)
    logits = np.stack([np.asarray(s.logits) for s in steps], axis=1)
    np.testing.assert_array_equal(tokens, data.cases[f"{case}/new_tokens"])
    np.testing.assert_array_equal(live, data.cases[f"{case}/live"] != 0)
    difference = np.abs(logits - data.cases[f"{case}/step_logits"])[live]
    assert difference.max() < 5e-4
    ended = {"gen_short": 0, "gen_long": 0, "gen_stop": 1}[case]
    assert (~live[:, -1]).sum() == ended
    assert (tokens[~live] == data.raw_config["pad_token_id"]).all()


def test_generate_pads_after_all_rows_have_ended(golden):
    data = golden("glm5_tiny")
    c = data.cases
    row = int(np.flatnonzero((c["gen_stop/live"] == 0).any(axis=1))[0])
    mask = c["gen_stop/attention_mask"][row : row + 1]
    end = int(c["gen_stop/live"][row].sum())  # steps up to and including the end token
    new = generate(data.model(), c["gen_stop/input_ids"][row : row + 1], 20, segment_ids=mask)
    assert new.shape == (1, 20) and new[0, end - 1] in data.raw_config["eos_token_id"]
    np.testing.assert_array_equal(new[0, :end], c["gen_stop/new_tokens"][row, :end])
    assert (new[0, end:] == data.raw_config["pad_token_id"]).all()


def test_each_step_equals_a_full_pass_over_what_stands_so_far(model):
    prompt = np.random.default_rng(0).integers(0, 40, (2, 5))
    steps = list(stream(model, prompt, 8))
    made = np.stack([s.tokens for s in steps], axis=1)
    full = np.asarray(model(np.concatenate([prompt, made], axis=1)).logits)
    for i, step in enumerate(steps):
        np.testing.assert_allclose(step.logits, full[:, 4 + i], atol=2e-5)
        np.testing.assert_array_equal(step.tokens, full[:, 4 + i].argmax(-1))


def test_a_left_padded_row_goes_on_as_it_does_alone(model):
    rng = np.random.default_rng(1)
    short, long = rng.integers(1, 40, (1, 4)), rng.integers(1, 40, (1, 9))
    padded = np.concatenate([np.pad(short, ((0, 0), (5, 0)), constant_values=7), long])
    segment = np.ones_like(padded)
    segment[0, :5] = 0
    together, alone = list(stream(model, padded, 6, segment_ids=segment)), list(stream(model, short, 6))
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a.logits[0], b.logits[0], atol=2e-5)
        assert a.tokens[0] == b.tokens[0]


def test_generating_twice_from_one_model_gives_the_same(model):
    prompt = np.random.default_rng(2).integers(0, 40, (1, 6))
    first = list(stream(model, prompt, 5))
    list(stream(model, np.random.default_rng(3).integers(0, 40, (1, 6)), 5))  # leaves nothing behind
    for a, b in zip(first, stream(model, prompt, 5), strict=True):
        np.testing.assert_array_equal(a.logits, b.logits)


def test_a_seed_decides_the_draws(model):
    prompt = np.random.default_rng(2).integers(0, 40, (1, 6))
    made = {seed: generate(model, prompt, 12, temperature=1.0, seed=seed).tolist() for seed in (0, 1)}
    assert generate(model, prompt, 12, temperature=1.0, seed=0).tolist() == made[0] != made[1]


# What a token is drawn from

P = np.array([0.02, 0.4, 0.08, 0.3, 0.2])  # in no particular order


def draws(logits: np.ndarray, sampling: Sampling, count: int = 20_000) -> np.ndarray:
    """Frequency of each id over many keys."""
    keys = jax.random.split(jax.random.key(0), count)
    ids = jax.jit(jax.vmap(lambda key: sample(jnp.asarray(logits, jnp.float32)[None], key, sampling)[0]))(keys)
    return np.bincount(np.asarray(ids), minlength=len(logits)) / count


@pytest.mark.parametrize(
    "temperature, top_p, nucleus",
    [
        (1.0, 1.0, [0, 1, 2, 3, 4]),
        (2.0, 1.0, [0, 1, 2, 3, 4]),
        (1.0, 0.39, [1]),
        (1.0, 0.41, [1, 3]),  # the token that crosses the border belongs
        (1.0, 0.69, [1, 3]),
        (1.0, 0.71, [1, 3, 4]),
        (1.0, 0.97, [1, 2, 3, 4]),
        (0.5, 0.75, [1, 3]),  # the border is drawn after the temperature: 0.16, 0.09, 0.04.. of 0.2968 in all
    ],
)
def test_frequencies_are_the_enumerated_probabilities_of_the_nucleus(temperature, top_p, nucleus):
    p = P ** (1 / temperature)
    p = np.where(np.isin(np.arange(5), nucleus), p, 0)
    p /= p.sum()
    count = 20_000
    got = draws(np.log(P) + 3.0, Sampling(temperature, top_p), count)
    assert set(np.flatnonzero(got)) == set(nucleus)
    np.testing.assert_array_less(np.abs(got - p), 4 * np.sqrt(p * (1 - p) / count) + 1e-12)


def test_of_equal_tokens_at_the_border_the_lowest_ids_belong_to_the_nucleus():
    got = draws(np.zeros(5), Sampling(1.0, 0.5))
    assert set(np.flatnonzero(got)) == {0, 1, 2}  # the smallest set with at least half of the probability


def test_temperature_zero_takes_the_lowest_of_the_largest():
    logits = jnp.array([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert sample(logits, jax.random.key(0), Sampling()).tolist() == [1, 0]


def test_rows_draw_independently():
    ids = sample(jnp.zeros((4096, 4)), jax.random.key(0), Sampling(1.0))
    pairs = np.bincount(np.asarray(ids[::2] * 4 + ids[1::2]), minlength=16)
    assert np.abs(pairs / 2048 - 1 / 16).max() < 4 * np.sqrt(1 / 16 * 15 / 16 / 2048)


# Bad input


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(segment_ids=[[1, 1, 0]]), r"tokens: every row must end in a real token \(pad on the left\)"),
        (dict(tokens=[[]]), r"tokens: every row must end in a real token"),
        (dict(tokens=[[1, 40]]), r"token ids 1\.\.40: the vocabulary is 0\.\.39"),
        (dict(tokens=[[-1, 2]]), r"token ids -1\.\.2: the vocabulary is 0\.\.39"),
        (dict(tokens=[1, 2]), r"tokens: shape \(2,\), need \[B,T\]"),
        (dict(max_new_tokens=0), r"max_new_tokens=0: must be at least 1"),
        (dict(max_new_tokens=62), r"prompt of 3 \+ max_new_tokens=62: the position limit is 64"),
        (dict(temperature=-0.1), r"temperature=-0\.1: must not be negative"),
        (dict(top_p=0.0), r"top_p=0\.0: must lie in \(0, 1\]"),
        (dict(top_p=1.1), r"top_p=1\.1: must lie in \(0, 1\]"),
    ],
)
def test_bad_input_is_one_line_that_names_it(model, change, message):
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        generate(model, **(dict(tokens=[[1, 2, 3]]) | change))


def test_the_whole_position_limit_can_be_used(model):
    prompt = np.random.default_rng(4).integers(0, 40, (1, 60))
    assert generate(model, prompt, 4).shape == (1, 4)
