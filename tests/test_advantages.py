"""Advantages against exact fractions, degenerate groups of every kind, and token weights added up by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.errors import UserError
from glm5_jax.rl.advantages import check_rollouts, group_advantages, keep_informative, token_weights

CONSTANTS = [0.1, 0.2, 0.3, 0.6, 0.7, 0.9, 1 / 3, 0.35, 0.0, 1.0, -0.7, 1e9 + 0.1]
REWARDS = st.sampled_from([0.0, 0.1, 0.35, 1 / 3, 1.0, -2.7, 1e3])
GROUPED = st.lists(st.tuples(st.integers(0, 2), st.none() | REWARDS), max_size=20)


def exact(rewards, weights=None, std=True, eps=1e-6):
    """The definition for one group in rational arithmetic; the root alone is rounded."""
    weights = [Fraction(w) for w in weights or [1] * len(rewards)]
    rewards = [Fraction(r) for r in rewards]
    mean = sum(w * r for w, r in zip(weights, rewards)) / sum(weights)
    variance = sum(w * (r - mean) ** 2 for w, r in zip(weights, rewards)) / (sum(weights) - 1)
    return [float(r - mean) / (math.sqrt(variance) + eps if std else 1) for r in rewards]


def bits(array):
    return array.tobytes()


@pytest.mark.parametrize("size", range(2, 65))
def test_equal_rewards_give_exactly_zero(size):
    for scale in ("std", "none"):
        result = group_advantages(CONSTANTS * size, list(range(len(CONSTANTS))) * size, scale)
        assert not result.values.any() and result.zero_variance.all()
        assert not result.singleton.any() and not result.missing.any()


@pytest.mark.parametrize(
    "rewards",
    [
        [1, 0],
        [1, 0, 0, 0],
        [0.35] * 7 + [0.0],
        [0.9] * 31 + [0.8],
        [1, 1.00001],
        [True, False, True],
        [-1e6, 1e6, 3],
        [np.float32(0.5), np.int64(2), np.bool_(True)],
    ],
)
def test_values_are_the_definition(rewards):
    for scale in ("std", "none"):
        values = group_advantages(rewards, ["p"] * len(rewards), scale).values
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, exact([float(r) for r in rewards], std=scale == "std"), rtol=1e-9, atol=1e-15)
        assert abs(values).max() <= 10 or scale == "none"  # a std of n values bounds every deviation from it


def test_eps_is_added_to_the_unbiased_std():
    np.testing.assert_allclose(group_advantages([1, 1.00001], [0, 0]).values, [-0.61948, 0.61948], atol=2e-5)
    np.testing.assert_allclose(group_advantages([1, 1.00001], [0, 0], eps=1e-12).values, np.array([-1, 1]) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(group_advantages([0, 2], [0, 0], eps=1.0).values, np.array([-1, 1]) / (2**0.5 + 1))


def test_groups_are_those_of_the_ids_and_nothing_else():
    """Two prompts of different size, each constant: rewards of the whole batch differ, advantages are all 0."""
    result = group_advantages([1, 1, 0, 0, 0], ["a", "a", "b", "b", "b"])
    assert not result.values.any() and result.zero_variance.all()
    mixed = group_advantages([1, 5, 0, 6, 7.5], [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 0)]).values
    np.testing.assert_allclose(mixed[[0, 2]], exact([1, 0]))
    np.testing.assert_allclose(mixed[[1, 3, 4]], exact([5, 6, 7.5]))


@pytest.mark.parametrize("scale", ["std", "none"])
def test_degenerate_samples_are_zero_and_flagged_once(scale):
    rewards = [1, None, 0.0, 1.0, None, None, 3, 3, None, 5, 0.0]
    groups = ["single", "single", "live", "live", "live", "empty", "same", "same", "same", "alone", "zero"]
    result = group_advantages(rewards, groups, scale)
    assert result.missing.tolist() == [reward is None for reward in rewards]  # 0.0 is a reward
    assert result.singleton.tolist() == [i in (0, 9, 10) for i in range(11)]
    assert result.zero_variance.tolist() == [i in (6, 7) for i in range(11)]
    np.testing.assert_allclose(result.values[2:4], exact([0, 1], std=scale == "std"))
    assert not result.values[[0, 1, 4, 5, 6, 7, 8, 9, 10]].any()
    assert keep_informative(rewards, groups).tolist() == [i in (2, 3) for i in range(11)]


def test_nothing_at_all():
    result = group_advantages([], [])
    assert all(len(field) == 0 for field in result) and result.values.dtype == np.float64
    assert not len(keep_informative([], [])) and token_weights([], []) == []
    assert [len(array) for array in check_rollouts([], [])] == [0, 0]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(GROUPED, st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_no_bit(samples, random):
    shuffled = random.sample(range(len(samples)), len(samples))
    groups, rewards = [g for g, _ in samples], [r for _, r in samples]
    before = group_advantages(rewards, groups)
    after = group_advantages([rewards[i] for i in shuffled], [groups[i] for i in shuffled])
    for a, b in zip(before, after):
        assert bits(a[shuffled]) == bits(b)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(GROUPED)
def test_a_sample_without_reward_is_as_if_it_were_not_there(samples):
    scored = [i for i, (_, reward) in enumerate(samples) if reward is not None]
    groups, rewards = [g for g, _ in samples], [r for _, r in samples]
    everything = group_advantages(rewards, groups)
    alone = group_advantages([rewards[i] for i in scored], [groups[i] for i in scored])
    for a, b in zip(everything, alone):
        assert bits(a[scored]) == bits(b)
    by_weight = group_advantages([r or 0.0 for r in rewards], groups, weights=[r is not None for r in rewards])
    for a, b in zip(everything, by_weight):
        assert bits(a) == bits(b)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_whole_weights_are_repetitions(scale):
    rewards, weights = [0.0, 1.0, 0.25, 1.0], [2, 1, 3, 1]
    repeated = np.repeat(np.arange(4), weights)
    expected = group_advantages([rewards[i] for i in repeated], [0] * 7, scale).values
    actual = group_advantages(rewards, [0] * 4, scale, weights=weights).values
    np.testing.assert_allclose(actual[repeated], expected, rtol=1e-14)


def test_five_samples_that_stand_for_eight():
    rewards, weights = [0, 1, 1, 0.5, 0, None, None, None], [1.6] * 5 + [0] * 3
    result = group_advantages(rewards, [0] * 8, weights=weights)
    np.testing.assert_allclose(result.values[:5], exact(rewards[:5], [1.6] * 5))
    tokens = token_weights([np.ones(2, bool)] * 8, list(range(8)), weights)
    assert [w.tolist() for w in tokens] == [[0.1, 0.1]] * 5 + [[0, 0]] * 3  # 1 / 2 tokens / 5 rollouts


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 1e300, "1.0", {"a": 1.0}, [1.0], 1j, 10**400, *np.float32(["nan", "inf"])]
)
def test_a_reward_that_is_no_finite_number_names_its_sample(bad):
    for call in (group_advantages, keep_informative):
        with pytest.raises(UserError, match=r"^reward of sample 2 must be a finite number or None, not .*$"):
            call([1.0, None, bad, 0.0], [0, 0, 1, 1])


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(group_ids=[0, 0]), "group_ids has 2 entries for 3 samples"),
        (dict(scale="var"), "scale must be std or none, not 'var'"),
        (dict(eps=0), "eps must be positive, not 0"),
        (dict(eps=math.nan), "eps must be positive, not nan"),
        (dict(weights=[1, 1]), r"weights has shape \(2,\) for 3 samples"),
        (dict(weights=[1, -1, 1]), r"weights\[1\] must be a number from 0"),
        (dict(weights=[1, 1, math.nan]), r"weights\[2\] must be a number from 0"),
        (dict(weights=[1, 0.5, 0.5]), "weights of group 1 add up to 1: a std needs more than 1"),
    ],
)
def test_bad_arguments_are_one_line(kwargs, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        group_advantages(**(dict(rewards=[1, 2, 3], group_ids=[0, 1, 1]) | kwargs))


def test_rollouts_in_the_order_of_appearance():
    first, index = check_rollouts(["r1", "r0", "r1", "r2", "r0"], [0.0, 1.0, 0.0, None, 1.0])
    assert first.tolist() == [0, 1, 3] and index.tolist() == [0, 1, 0, 2, 1]


@pytest.mark.parametrize("rewards", [[0.0, 3, 1.0], [1.0, 3, None], [None, 3, 0.0], [0.0, 3, 1e-9], [None, 3, False]])
def test_samples_of_one_rollout_with_different_rewards(rewards):
    with pytest.raises(UserError, match="^samples 0 and 2 of rollout 'a' have different rewards: "):
        check_rollouts(["a", "b", "a"], rewards)


def test_a_rollout_cut_in_three_counts_once_in_its_group():
    rewards, groups, rollouts = [1.0, 1.0, 1.0, 0.0, 0.5], ["g"] * 5, ["a", "a", "a", "b", "c"]
    first, index = check_rollouts(rollouts, rewards)
    values = group_advantages([rewards[i] for i in first], [groups[i] for i in first], "none").values[index]
    np.testing.assert_allclose(values, [0.5, 0.5, 0.5, -0.5, 0])


def mask(*tokens):
    return np.array(tokens, bool)


def test_weights_divide_by_trainable_tokens_not_by_the_length():
    (weights,) = token_weights([mask(1, 1, 0, 0, 0, 0)], ["a"])
    assert weights.dtype == np.float64 and weights.tolist() == [0.5, 0.5, 0, 0, 0, 0]


def test_steps_of_one_rollout_share_its_tokens():
    """Spans [2:4], [5:6], [1:3] of one rollout: 5 tokens, each under its own mask; the other rollout has the other half."""
    spans = [(2, 4), (5, 6), (1, 3)]
    masks = [np.isin(np.arange(7), np.arange(a, b)) for a, b in spans] + [np.ones(2, bool)]
    weights = token_weights(masks, ["a", "a", "a", "b"])
    for (a, b), w in zip(spans, weights):
        np.testing.assert_allclose(w, [0.1 * (a <= t < b) for t in range(7)])
    np.testing.assert_allclose(weights[3], [0.25, 0.25])


def test_a_parent_turn_granted_to_one_branch_is_trained_once():
    """A turn of 2 tokens with 3 children of 1 token, the turn unmasked in the first branch only: 5 tokens of weight 1/5."""
    masks = [mask(1, 1, 1), mask(0, 0, 1), mask(0, 0, 1)]
    np.testing.assert_allclose(np.sum(token_weights(masks, ["a"] * 3), axis=0), [0.2, 0.2, 0.6])


def test_a_rollout_without_trainable_tokens_is_counted_and_adds_nothing():
    weights = token_weights([mask(0, 0), mask(1), mask()], ["a", "b", "c"])
    assert [w.tolist() for w in weights] == [[0, 0], [1 / 3], []]


def test_missing_rewards_leave_the_count():
    missing = group_advantages([1, None, 0], [0, 0, 0]).missing
    weights = token_weights([mask(1, 1)] * 3, [0, 1, 2], ~missing)
    assert [w.tolist() for w in weights] == [[0.25, 0.25], [0, 0], [0.25, 0.25]]
    assert not np.any(token_weights([mask(1, 1)] * 2, [0, 1], [0, 0]))  # all filtered


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.booleans(), max_size=6)), max_size=12))
def test_every_rollout_with_tokens_has_the_same_weight(samples):
    rollouts, masks = [r for r, _ in samples], [np.array(m, bool) for _, m in samples]
    totals, live = dict.fromkeys(rollouts, 0.0), set()
    for rollout, m, w in zip(rollouts, masks, token_weights(masks, rollouts)):
        assert w.shape == m.shape and not w[~m].any()
        totals[rollout] += w.sum()
        live |= {rollout} if m.any() else set()
    for rollout, total in totals.items():
        assert total == pytest.approx((rollout in live) / len(totals))


@pytest.mark.parametrize(
    "masks, rollouts, weights, message",
    [
        ([np.array([1, 0])], [0], None, r"masks\[0\] must be a bool array \[T\], not int64\(2,\)"),
        ([mask(1), np.ones((1, 2), bool)], [0, 1], None, r"masks\[1\] must be a bool array \[T\], not bool\(1, 2\)"),
        ([[True]], [0], None, r"masks\[0\] must be a bool array \[T\], not list\(1,\)"),
        ([mask(1)], [0, 1], None, "rollout_ids has 2 entries for 1 samples"),
        ([mask(1)] * 2, ["a", "a"], [1, 2], "samples of rollout 'a' have different weights"),
        ([mask(1)] * 2, ["a", "b"], [1, -2], r"sample_weights\[1\] must be a number from 0"),
    ],
)
def test_bad_masks_and_weights_are_one_line(masks, rollouts, weights, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        token_weights(masks, rollouts, weights)
