"""Exact top-k with one answer for ties, against a stable numpy sort."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.sparse.topk import MASKED, select_top_k, select_top_k_bisected


def by_sorting(scores, k):
    """The k best of each row, ties to the lowest position, ascending, -1 for none."""
    rows = []
    for row in scores:
        order = sorted((s for s in range(len(row)) if row[s] > MASKED), key=lambda s: (-row[s], s))
        best = sorted(order[:k])
        rows.append(best + [-1] * (min(k, len(row)) - len(best)))
    return np.array(rows)


def test_tied_scores_choose_the_lowest_positions():
    scores = np.zeros((2, 20), np.float32)
    scores[1, 15] = 1.0
    np.testing.assert_array_equal(select_top_k(scores, 4), [[0, 1, 2, 3], [0, 1, 2, 15]])


def test_ties_at_the_last_place_choose_the_lowest_positions():
    scores = np.array([[1.0, 5.0, 1.0, 1.0, 7.0, 1.0]], np.float32)
    np.testing.assert_array_equal(select_top_k(scores, 3), [[0, 1, 4]])


def test_narrow_range_and_a_plateau_of_zeros_equal_a_sort():
    rng = np.random.default_rng(0)
    scores = (1.0 + 1e-4 * rng.random((3, 4096))).astype(np.float32)
    scores[1, rng.random(4096) < 0.6] = 0.0
    scores[2] = np.where(rng.random(4096) < 0.6, 0.0, -scores[2])
    for k in (64, 2000):
        np.testing.assert_array_equal(select_top_k(scores, k), by_sorting(scores, k))


def test_bfloat16_ties_equal_a_sort():
    scores = np.random.default_rng(1).standard_normal((4, 3000)).astype("bfloat16").astype(np.float32)
    assert len(np.unique(scores[0])) < 2000
    np.testing.assert_array_equal(select_top_k(scores, 500), by_sorting(scores, 500))


def test_the_answer_is_the_same_under_jit_and_on_a_second_run():
    scores = np.random.default_rng(2).integers(0, 5, (8, 300)).astype(np.float32)
    expected = by_sorting(scores, 17)
    jitted = jax.jit(select_top_k, static_argnums=1)
    for got in (select_top_k(scores, 17), jitted(scores, 17), jitted(scores, 17)):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("n_keys", [1, 5, 7, 8])
def test_k_beyond_the_number_of_keys_selects_all(n_keys):
    scores = np.random.default_rng(3).standard_normal((2, n_keys)).astype(np.float32)
    np.testing.assert_array_equal(select_top_k(scores, 2048), np.tile(np.arange(n_keys), (2, 1)))


def test_missing_keys_are_minus_one_at_the_end():
    scores = np.full((1, 12), MASKED, np.float32)
    scores[0, [2, 5, 9]] = [-3.0, 0.0, 2.0]
    np.testing.assert_array_equal(select_top_k(scores, 8), [[2, 5, 9, -1, -1, -1, -1, -1]])


def test_a_row_without_visible_keys_selects_none():
    np.testing.assert_array_equal(select_top_k(np.full((1, 6), MASKED, np.float32), 4), [[-1] * 4])


def test_nan_scores_are_never_selected():
    scores = np.full((2, 10), np.nan, np.float32)
    scores[1, [3, 4, 8]] = [1.0, -2.0, MASKED]
    np.testing.assert_array_equal(select_top_k(scores, 4), [[-1] * 4, [3, 4, -1, -1]])


def test_infinite_scores_give_positions_in_range():
    scores = np.array([[-np.inf, np.inf, 1.0, -np.inf, MASKED]], np.float32)
    np.testing.assert_array_equal(select_top_k(scores, 4), [[1, 2, -1, -1]])


def test_negative_scores_win_over_masked_ones():
    scores = np.array([[-5.0, MASKED, -1.0, -9e29]], np.float32)
    np.testing.assert_array_equal(select_top_k(scores, 4), [[0, 2, 3, -1]])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([MASKED, -2.0, -0.0, 0.0, 1e-30, 1.0, 1.0000001, 7.0]), min_size=12, max_size=12))
def test_any_row_of_ties_and_masked_keys_equals_a_sort(row):
    scores = np.array([row], np.float32)
    np.testing.assert_array_equal(select_top_k(scores, 5), by_sorting(scores, 5))


SPECIAL = [MASKED, -np.inf, -2.0, -0.0, 0.0, 1e-30, 1.0, 1.0000001, 7.0, np.inf, np.nan]


def check_bisected(scores, k):
    np.testing.assert_array_equal(jax.jit(select_top_k_bisected, static_argnums=1)(scores, k), by_sorting(scores, k))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([1, 15, 16, 33, 90, 700]), st.sampled_from([1, 2, 9]), st.integers(0, 2**32 - 1))
def test_bisected_top_k_equals_a_sort_for_any_scores(n_keys, k, seed):
    rng = np.random.default_rng(seed)
    few = rng.choice(np.array(SPECIAL, np.float32), rng.integers(1, 12))  # of few values: many ties
    check_bisected(rng.choice(few, (3, n_keys)), k)


@pytest.mark.parametrize("k", [3, 40, 300])
def test_bisected_top_k_equals_a_sort_for_long_rows(k):
    rng, n = np.random.default_rng(4), 5000
    normal, rising = rng.standard_normal(n), np.arange(n) / 7
    rows = [normal, np.round(3 * normal), np.maximum(normal, 0), rising, -rising, np.where(np.arange(n) % 8, 0.0, normal)]
    rows += [np.where(np.arange(n) < n - 2 * k, MASKED, normal), np.where(rng.random(n) < k / n / 2, normal, MASKED)]
    check_bisected(np.stack(rows).astype(np.float32), k)


def test_bisected_top_k_of_bfloat16_and_float64_equals_a_sort():
    scores = np.random.default_rng(5).standard_normal((2, 400))
    check_bisected(scores.astype("bfloat16"), 20)
    with jax.enable_x64(True):
        check_bisected(1 + 1e-12 * scores, 20)
