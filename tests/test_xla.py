"""Sparse attention in chunks: values and gradients against the definition in float64, and memory linear in T."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sparse import reference, xla
from glm5_jax.sparse.indexer import Index

N, R, P, I, J = 3, 6, 4, 3, 8
SHAPES = {"uneven": (2, 13, 17, 5), "more places than keys": (1, 16, 11, 20), "one query": (2, 1, 9, 4)}  # B, T, S, K


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def inputs(b, t, s, k, seed=0):
    """(q, latent, selected, index) in float64; a third of the selections is full, some are empty, row 1 reads no row 0."""
    rng = np.random.default_rng(seed)
    selected = np.full((b, t, k), -1, np.int32)
    for row, i in np.ndindex(b, t):
        size = (min(k, s), 0, rng.integers(1, min(k, s) + 1))[i % 3]
        selected[row, i, :size] = np.sort(rng.permutation(s)[:size])
    index = Index(draw(rng, b, t, I, J), draw(rng, b, s, J), draw(rng, b, t, I))
    return draw(rng, b, t, N, R + P), draw(rng, b, s, R + P), jnp.asarray(selected), index


def weighted(attend, selected, with_index=True, seed=1):
    """A scalar of (q, latent, index) in which every output has its own weight, and the outputs."""

    def total(q, latent, index):
        rng = np.random.default_rng(seed)
        a = attend(q, latent, selected, R, 0.3, index=index if with_index else None)
        value = jnp.sum(a.out * draw(rng, *a.out.shape))
        return value + (jnp.sum(a.kl * draw(rng, *a.kl.shape)) if with_index else 0), a

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


def as_dtype(dtype, q, latent, index):
    wide = jnp.promote_types(dtype, jnp.float32)
    return q.astype(dtype), latent.astype(dtype), Index(index.q.astype(dtype), index.k.astype(dtype), index.w.astype(wide))


def close(got, expected, tolerance):
    """Every leaf within tolerance of the largest number in it."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("shape, chunk", [("uneven", 4), ("uneven", 1), ("more places than keys", 100), ("one query", 3)])
def test_attention_and_its_gradients_equal_the_definition_in_float64(shape, chunk, with_index):
    with jax.enable_x64(True):
        q, latent, selected, index = inputs(*SHAPES[shape])
        got = weighted(functools.partial(xla.attend, chunk=chunk), selected, with_index)(q, latent, index)
        close(got, weighted(reference.attend, selected, with_index)(q, latent, index), 1e-13)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_attention_in_narrow_types_is_near_the_definition_in_float64(dtype, tolerance):
    with jax.enable_x64(True):
        q, latent, selected, index = inputs(*SHAPES["uneven"])
        narrow = as_dtype(dtype, q, latent, index)
        (_, a), grads = weighted(functools.partial(xla.attend, chunk=4), selected)(*narrow)
        assert a.out.dtype == dtype and a.kl.dtype == jnp.float32 and [g.dtype for g in grads[:2]] == [dtype] * 2
        (_, b), expected = weighted(reference.attend, selected)(*as_dtype("float64", *narrow))
        close((a, grads), (b, expected), tolerance)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_no_one_selected_may_hold_anything(poison):
    q, latent, selected, index = inputs(2, 9, 40, 3)
    q, latent, index = as_dtype("float32", q, latent, index)
    unread = np.array([[not (row == s).any() for s in range(40)] for row in np.asarray(selected)])
    assert unread[:, -1].any() and unread[:, 0].any()  # what -1 could wrap to, and what a clipped -1 would read
    run = weighted(functools.partial(xla.attend, chunk=4), selected)
    clean = run(q, latent, index)
    dirty_index = index._replace(k=jnp.where(unread[..., None], poison, index.k))
    dirty = run(q, jnp.where(unread[..., None], poison, latent), dirty_index)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.asarray(clean[1][1])[unread].any()


def test_an_empty_selection_gives_zeros_and_no_gradient():
    q, latent, selected, index = inputs(1, 5, 7, 3)
    q, latent, index = as_dtype("float32", q, latent, index)
    (_, a), grads = weighted(functools.partial(xla.attend, chunk=2), jnp.full_like(selected, -1))(q, latent, index)
    assert not np.asarray(a.out).any() and not np.asarray(a.kl).any() and a.max_logit < -1e29
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_largest_logit_is_that_of_real_queries():
    """All logits are negative: what fills up the last chunk must not count as 0."""
    q, latent, selected, _ = inputs(2, 13, 17, 5)
    q, latent = -jnp.abs(q), jnp.abs(latent) + 1
    expected = reference.attend(q, latent, selected, R, 0.3).max_logit
    got = jax.jit(xla.attend, static_argnums=(3, 4, 5))(q, latent, selected, R, 0.3, 4).max_logit
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert expected < 0
