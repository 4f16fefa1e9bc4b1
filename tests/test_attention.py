"""Attention in its three forms against loops in float64, in blocks of any size, with poisoned slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sparse import attention
from glm5_jax.sparse import dense as dense_module
from glm5_jax.sparse.masks import Rows, softmax_weights, visible

B, T, S, N, R, P, V = 2, 13, 17, 3, 6, 4, 5
RNG = np.random.default_rng(0)
SEGMENT = np.array([[1] * 6 + [2] * 11, [0] * 3 + [4] * 10 + [0] * 4])
SLOT = np.tile(np.arange(S - T, S), (B, 1))
ROWS = Rows(jnp.asarray(SLOT), jnp.asarray(SEGMENT[:, S - T :]))


dense = jax.jit(dense_module.dense, static_argnums=(5, 6))
dense_latent = jax.jit(dense_module.dense_latent, static_argnums=(4, 5, 6))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def selected_latent(q, latent, selected, rank, scale, block):
    """(out, largest logit) of attention to a selection."""
    return attention.attend(q, latent, selected, rank, scale, block)[:2]


def seen_from(b, slot):
    """Key slots that the token at a slot of row b may see."""
    return [s for s in range(slot + 1) if SEGMENT[b, s] == SEGMENT[b, slot] != 0]


def allowed(b, i):
    """The same for query i of the T last ones."""
    return seen_from(b, S - T + i)


def by_loops(q, k, v, keep, scale):
    """Attention of q [B,T,N,H] to the keys k [B,S,N,H] that keep(b, i) lists; a query with none gives zeros."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, i, n in np.ndindex(q.shape[:3]):
        slots = keep(b, i)
        if slots:
            e = np.exp([scale * (q[b, i, n] @ k[b, s, n]) for s in slots])
            out[b, i, n] = (e / e.sum()) @ v[b, slots, n]
    return out


def float32(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


EVERY_ROW = Rows(jnp.tile(jnp.arange(S), (B, 1)), jnp.asarray(SEGMENT))
EXPANDED = [RNG.standard_normal(s) for s in ((B, S, N, R + P), (B, S, N, R + P), (B, S, N, V))]
QUERY, LATENT = RNG.standard_normal((B, T, N, R + P)), RNG.standard_normal((B, S, R + P))
SPREAD = np.repeat(LATENT[:, :, None], N, 2)
SELECTED = np.full((B, T, 4), -1)
for _b, _i in np.ndindex(B, T):
    _some = sorted(RNG.permutation(allowed(_b, _i))[:4].tolist())
    SELECTED[_b, _i, : len(_some)] = _some


def chosen(b, i):
    return [s for s in SELECTED[b, i] if s >= 0]


@pytest.mark.parametrize("block", [1, 3, 4, 5, 7, 8, 13, 16, 17, 100])
def test_dense_in_blocks_of_any_size(block):
    out, _, top = dense(*float32(*EXPANDED), EVERY_ROW, SEGMENT, 0.3, block)
    np.testing.assert_allclose(out, by_loops(*EXPANDED, seen_from, 0.3), rtol=0, atol=1e-5)
    q, k, _ = EXPANDED
    largest = max(0.3 * (q[b, t, n] @ k[b, s, n]) for b, t, n in np.ndindex(B, S, N) for s in seen_from(b, t))
    np.testing.assert_allclose(top, largest, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 8, 13])
def test_dense_latent_in_blocks_of_any_size(block):
    out, _ = dense_latent(*float32(QUERY, LATENT), ROWS, SEGMENT, R, 0.3, block)
    np.testing.assert_allclose(out, by_loops(QUERY, SPREAD, SPREAD[..., :R], allowed, 0.3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [1, 8, 13])
def test_selected_latent_in_blocks_of_any_size(block):
    out, _ = selected_latent(*float32(QUERY, LATENT), SELECTED, R, 0.3, block)
    np.testing.assert_allclose(out, by_loops(QUERY, SPREAD, SPREAD[..., :R], chosen, 0.3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [5, 13])
def test_the_largest_logit_is_that_of_real_queries(block):
    """All logits are negative here: a query that only fills up the last block must not count with 0."""
    q, latent = -np.abs(QUERY), np.abs(LATENT) + 1
    tops = [
        dense_latent(*float32(q, latent), ROWS, SEGMENT, R, 0.3, block),
        selected_latent(*float32(q, latent), SELECTED, R, 0.3, block),
    ]
    every = [(b, i, n, allowed(b, i)) for b, i, n in np.ndindex(B, T, N)]
    largest = max(0.3 * (q[b, i, n] @ latent[b, s]) for b, i, n, slots in every for s in slots)
    largest_chosen = max(0.3 * (q[b, i, n] @ latent[b, s]) for b, i, n, _ in every for s in chosen(b, i))
    np.testing.assert_allclose([top for _, top in tops], [largest, largest_chosen], rtol=1e-5)


def test_a_complete_selection_equals_dense():
    every = np.full((B, T, S), -1)
    for b, i in np.ndindex(B, T):
        every[b, i, : len(allowed(b, i))] = allowed(b, i)
    sparse, _ = selected_latent(*float32(QUERY, LATENT), every, R, 0.3, 5)
    full, _ = dense_latent(*float32(QUERY, LATENT), ROWS, SEGMENT, R, 0.3, 6)
    np.testing.assert_allclose(sparse, full, rtol=0, atol=1e-6)


def test_the_order_of_a_selection_does_not_matter():
    backwards = SELECTED[:, :, ::-1]
    a, _ = selected_latent(*float32(QUERY, LATENT), SELECTED, R, 0.3, 100)
    b, _ = selected_latent(*float32(QUERY, LATENT), backwards, R, 0.3, 100)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("poison", [1e4, np.nan, np.inf])
def test_minus_one_reads_no_slot(poison):
    q, latent = float32(QUERY, LATENT)
    clean, _ = selected_latent(q, latent, SELECTED, R, 0.3, 100)
    unread = [s for s in range(S) if not (SELECTED[1] == s).any()]
    assert S - 1 in unread and 0 in unread  # the last slot, which -1 would wrap to, and the one a clipped -1 reads
    dirty, top = selected_latent(q, latent.at[1, jnp.array(unread)].set(poison), SELECTED, R, 0.3, 100)
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert np.isfinite(top)


@pytest.mark.parametrize("poison", [1e4, np.nan, np.inf])
def test_empty_slots_of_a_cache_do_not_leak_into_dense_attention(poison):
    q, latent = float32(QUERY, LATENT)
    clean, _ = dense_latent(q, latent, ROWS, SEGMENT, R, 0.3, 100)
    dirty, top = dense_latent(
        q, jnp.where(SEGMENT[..., None] == 0, poison, latent), ROWS, SEGMENT, R, 0.3, 100
    )
    np.testing.assert_array_equal(dirty, clean)
    assert np.isfinite(top)


@pytest.mark.parametrize("block", [5, 13])
@pytest.mark.parametrize("poison", [1e4, np.nan])
def test_gradients_do_not_reach_unselected_or_poisoned_slots(poison, block):
    q, latent = float32(QUERY, LATENT)
    unread = jnp.array([s for s in range(S) if not (SELECTED[1] == s).any()])
    grad = jax.jit(jax.grad(lambda latent: jnp.sum(selected_latent(q, latent, SELECTED, R, 0.3, block)[0] ** 2)))
    clean, dirty = grad(latent), grad(latent.at[1, unread].set(poison))
    np.testing.assert_array_equal(clean, dirty)
    assert not np.asarray(clean[1, unread]).any() and np.asarray(clean).any()


def test_gradients_of_sparse_attention_equal_finite_differences_in_float64():
    with jax.enable_x64(True):
        weight = jnp.asarray(RNG.standard_normal((B, T, N, R)))

        def total(q, latent):
            return jnp.sum(weight * selected_latent(q, latent, SELECTED, R, 0.3, 5)[0])

        q, latent = jnp.asarray(QUERY), jnp.asarray(LATENT)
        along = [jnp.asarray(RNG.standard_normal(x.shape)) for x in (q, latent)]
        grads = jax.grad(total, (0, 1))(q, latent)
        for i, (x, d) in enumerate(zip((q, latent), along)):
            step = [q, latent], [q, latent]
            step[0][i], step[1][i] = x + 1e-5 * d, x - 1e-5 * d
            slope = (total(*step[0]) - total(*step[1])) / 2e-5
            np.testing.assert_allclose(jnp.sum(grads[i] * d), slope, rtol=1e-7)


def test_gradients_are_the_same_in_blocks():
    q, k, v = float32(*EXPANDED)

    def total(block):
        return lambda *a: jnp.sum(dense(*a, EVERY_ROW, SEGMENT, 0.3, block)[0] ** 2)

    grads = [jax.jit(jax.grad(total(block), (0, 1, 2)))(q, k, v) for block in (100, 5, 3)]
    for whole, cut, mapped in zip(*grads):
        np.testing.assert_allclose(cut, whole, rtol=0, atol=2e-6)
        np.testing.assert_allclose(mapped, whole, rtol=0, atol=2e-6)


def test_softmax_of_a_row_without_visible_keys_is_zero_with_a_finite_gradient():
    mask = np.array([[False] * 4, [True, False, True, False]])
    scores = jnp.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1e9, 0.0, np.nan]])

    def softmax(scores):
        weights, total, _ = softmax_weights(scores, mask)
        return weights / total

    np.testing.assert_array_equal(softmax(scores), [[0] * 4, [0.5, 0, 0.5, 0]])
    assert softmax_weights(scores, mask)[2] == 0
    grad = jax.grad(lambda s: jnp.sum(softmax(s) ** 2))(scores)
    assert np.isfinite(grad).all() and not np.asarray(grad)[0].any()


def test_softmax_of_large_scores_does_not_overflow():
    weights, total, top = softmax_weights(jnp.array([[3e4, 3e4, -3e4]]), np.ones((1, 3), bool))
    np.testing.assert_array_equal(weights / total, [[0.5, 0.5, 0.0]])
    assert top == 3e4


def test_padded_queries_give_zeros():
    padding = SEGMENT == 0
    out, _, _ = dense(*float32(*EXPANDED), EVERY_ROW, SEGMENT, 0.3, 100)
    assert not np.asarray(out)[padding].any() and np.asarray(out)[~padding].all()
    assert not np.asarray(visible(EVERY_ROW, jnp.asarray(SEGMENT)))[padding].any()
