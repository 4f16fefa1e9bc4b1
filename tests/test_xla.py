"""Selection and sparse attention in chunks against their definitions, gradients in float64, and memory linear in T."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sparse import reference, xla
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows

N, R, P, I, J = 3, 6, 4, 3, 8
SHAPES = {  # B, T, S, K
    "uneven": (2, 13, 17, 5), "more places than keys": (1, 16, 11, 20), "one query": (2, 1, 9, 4), "long row": (1, 6, 97, 30),
}  # fmt: skip


@pytest.fixture(params=["gathered", "all through a mask"])
def reading(request, monkeypatch):
    """How queries read keys."""
    monkeypatch.setattr(xla, "_ALL_KEYS_UP_TO", 0 if request.param == "gathered" else 1000)
    monkeypatch.setattr(xla, "_MANY_QUERIES", 1)


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


@functools.cache
def compiled(attend, chunk, with_index, all_keys_up_to):
    """See `run`; `all_keys_up_to` tells apart what was traced under different settings."""
    attend = attend if chunk is None else functools.partial(attend, chunk=chunk)

    def total(q, latent, index, selected):
        rng = np.random.default_rng(1)
        a = attend(q, latent, selected, R, 0.3, index=index if with_index else None)
        value = jnp.sum(a.out * draw(rng, *a.out.shape))
        return value + (jnp.sum(a.kl * draw(rng, *a.kl.shape)) if with_index else 0), a

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


def run(chunk, q, latent, index, selected, with_index=True):
    """((scalar in which every output has its own weight, outputs), gradients by q, latent and index) in chunks of queries."""
    return compiled(xla.attend, chunk, with_index, xla._ALL_KEYS_UP_TO)(q, latent, index, selected)


def definition(q, latent, index, selected, with_index=True):
    """As `run`, by the reference."""
    return compiled(reference.attend, None, with_index, None)(q, latent, index, selected)


def as_dtype(dtype, q, latent, index):
    wide = jnp.promote_types(dtype, jnp.float32)
    return q.astype(dtype), latent.astype(dtype), Index(index.q.astype(dtype), index.k.astype(dtype), index.w.astype(wide))


def close(got, expected, tolerance):
    """Every leaf within tolerance of the largest number in it."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize(
    "shape, chunk", [("uneven", 4), ("uneven", 1), ("more places than keys", 100), ("one query", 3), ("long row", 2)]
)
def test_attention_and_its_gradients_equal_the_definition_in_float64(shape, chunk, with_index, reading):
    with jax.enable_x64(True):
        q, latent, selected, index = inputs(*SHAPES[shape])
        given = (q, latent, index, selected, with_index)
        close(run(chunk, *given), definition(*given), 1e-13)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_attention_in_narrow_types_is_near_the_definition_in_float64(dtype, tolerance, reading):
    with jax.enable_x64(True):
        q, latent, selected, index = inputs(*SHAPES["uneven"])
        narrow = as_dtype(dtype, q, latent, index)
        (_, a), grads = run(4, *narrow, selected)
        assert a.out.dtype == dtype and a.kl.dtype == jnp.float32 and [g.dtype for g in grads[:2]] == [dtype] * 2
        (_, b), expected = definition(*as_dtype("float64", *narrow), selected)
        close((a, grads), (b, expected), tolerance)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_no_one_selected_may_hold_anything(poison, reading):
    q, latent, selected, index = inputs(2, 9, 40, 3)
    q, latent, index = as_dtype("float32", q, latent, index)
    unread = np.array([[not (row == s).any() for s in range(40)] for row in np.asarray(selected)])
    assert unread[:, -1].any() and unread[:, 0].any()  # what -1 could wrap to, and what a clipped -1 would read
    clean = run(4, q, latent, index, selected)
    dirty_index = index._replace(k=jnp.where(unread[..., None], poison, index.k))
    dirty = run(4, q, jnp.where(unread[..., None], poison, latent), dirty_index, selected)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.asarray(clean[1][1])[unread].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["latent", "index key"])
def test_a_row_that_is_not_finite_reaches_those_that_selected_it_and_no_one_else(poison, part, reading):
    q, latent, selected, index = inputs(2, 9, 40, 12)
    row = int(selected[1, 3, 0])
    if part == "latent":
        latent = latent.at[1, row].set(poison)
    else:
        index = index._replace(k=index.k.at[1, row].set(poison))
    a = jax.jit(xla.attend, static_argnums=(3, 4, 5))(q, latent, selected, R, 0.3, 4, index)
    hit = (np.asarray(selected) == row).any(-1) & (np.arange(2) == 1)[:, None]
    assert hit.any() and not hit.all()
    np.testing.assert_array_equal(np.isfinite(a.kl), ~hit)
    np.testing.assert_array_equal(np.isfinite(a.out).all((-1, -2)), ~hit | (part != "latent"))


def spoil(case, q, latent, index, selected):
    """Inputs with one thing wrong; query (0, 1) selects nothing, (0, 3) something."""
    row = int(selected[0, 3, 0])
    unread = int(np.flatnonzero([not (np.asarray(selected[0]) == s).any() for s in range(latent.shape[1])])[0])
    return {
        "huge row that no one selected": (q, latent.at[0, unread].set(3e38), index),
        "huge index key that no one selected": (q, latent, index._replace(k=index.k.at[0, unread].set(3e38))),
        "query that selects nothing": (q.at[0, 1].set(np.nan), latent, index),
        "query": (q.at[0, 3].set(np.nan), latent, index),
        "selected row": (q, latent.at[0, row].set(np.nan), index),
        "selected index key": (q, latent, index._replace(k=index.k.at[0, row].set(np.nan))),
    }[case]


@pytest.mark.parametrize(
    "case", ["huge row that no one selected", "huge index key that no one selected", "query that selects nothing", "query",
             "selected row", "selected index key"],
)  # fmt: skip
def test_what_is_not_finite_spreads_as_in_the_definition(case, reading):
    q, latent, selected, index = inputs(1, 5, 40, 6, seed=4)
    given = spoil(case, *as_dtype("float32", q, latent, index), selected)
    (_, got), got_grads = run(8, *given, selected)
    (_, expected), grads = definition(*given, selected)
    finite = lambda tree: [np.isfinite(x) for x in jax.tree.leaves(tree)]  # noqa: E731
    for a, b in zip(finite((got.out, got.kl, got_grads[:2])), finite((expected.out, expected.kl, grads[:2])), strict=True):
        np.testing.assert_array_equal(a.all(-1), b.all(-1))
    for a, b in zip(finite(got_grads[2]), finite(grads[2]), strict=True):
        np.testing.assert_array_equal(a.all(-1), b.all(-1))
    assert np.isfinite(got.max_logit) == np.isfinite(expected.max_logit)


def test_an_empty_selection_gives_zeros_and_no_gradient(reading):
    q, latent, selected, index = inputs(1, 5, 7, 3)
    q, latent, index = as_dtype("float32", q, latent, index)
    (_, a), grads = run(2, q, latent, index, jnp.full_like(selected, -1))
    assert not np.asarray(a.out).any() and not np.asarray(a.kl).any() and a.max_logit < -1e29
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_largest_logit_is_that_of_real_queries(reading):
    """All logits are negative: what fills up the last chunk must not count as 0."""
    q, latent, selected, _ = inputs(2, 13, 17, 5)
    q, latent = -jnp.abs(q), jnp.abs(latent) + 1
    expected = reference.attend(q, latent, selected, R, 0.3).max_logit
    got = jax.jit(xla.attend, static_argnums=(3, 4, 5))(q, latent, selected, R, 0.3, 4).max_logit
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert expected < 0


def integers(rng, *shape):
    """Small integers, of which sums are exact in any order, and tie often."""
    return jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)


ROWS = {  # B, T, S, K, slots of the queries, segments of the keys
    "packed": (2, 45, 45, 5, np.arange(45), [[1] * 20 + [2] * 25, [1] * 3 + [2] * 30 + [3] * 12]),
    "padded on the left": (2, 45, 45, 5, np.arange(45), [[0] * 20 + [1] * 25, [1] * 45]),
    "more places than keys": (1, 10, 10, 30, np.arange(10), [[1] * 10]),
    "one document, two keys": (1, 45, 45, 2, np.arange(45), [[1] * 45]),
    "queries of a cache": (2, 3, 45, 4, np.arange(17, 20), [[1] * 20 + [0] * 25, [0] * 9 + [1] * 11 + [0] * 25]),
    "last slots of a cache": (1, 2, 45, 4, np.arange(43, 45), [[1] * 45]),
}


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("case", ROWS)
def test_selection_equals_the_definition(case, chunk, monkeypatch):
    monkeypatch.setattr(xla, "_KEY_BLOCK", 4)
    b, t, s, k, slots, segments = ROWS[case]
    rng, key_segment = np.random.default_rng(2), jnp.array(segments)
    index = Index(integers(rng, b, t, I, J), integers(rng, b, s, J), integers(rng, b, t, I))
    index = index._replace(k=jnp.where(key_segment[..., None] == 0, jnp.nan, index.k))
    rows = Rows(jnp.tile(jnp.array(slots, jnp.int32), (b, 1)), key_segment[:, slots])
    got = jax.jit(xla.select, static_argnums=(3, 4))(index, rows, key_segment, k, chunk)
    expected = reference.select(index, rows, key_segment, k)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == jnp.int32 and (np.asarray(expected) >= 0).any()


def test_tied_scores_select_the_lowest_positions():
    rows, ones = Rows(jnp.arange(30)[None], jnp.ones((1, 30), jnp.int32)), jnp.ones((1, 30), jnp.int32)
    index = Index(jnp.zeros((1, 30, I, J)), jnp.zeros((1, 30, J)), jnp.ones((1, 30, I)))
    got = xla.select(index, rows, ones, 3, 8)
    np.testing.assert_array_equal(got[0, 2:], np.tile([0, 1, 2], (28, 1)))


def footprint(fn, *shapes):
    """(bytes of temporaries, elements of the largest array) of the compiled program of a function of float32 arrays."""
    program = jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    sizes = [np.prod([int(d) for d in dims.split(",")]) for dims in re.findall(r"\w\d+\[([\d,]+)\]", program.as_text())]
    return program.memory_analysis().temp_size_in_bytes, max(sizes)


def test_memory_grows_linearly_with_the_length_of_a_row():
    n, r, p, k, i, j = 2, 16, 8, 64, 2, 8

    def loss(t, q, latent, index_q, index_k, w):
        ones, index = jnp.ones((1, t), jnp.int32), Index(index_q, index_k, w)
        selected = xla.select(index, Rows(jnp.arange(t)[None], ones), ones, k, 512)
        a = xla.attend(q, latent, selected, r, 0.2, 512, index)
        return jnp.sum(a.out**2) + jnp.sum(a.kl)

    def measure(t):
        shapes = (1, t, n, r + p), (1, t, r + p), (1, t, i, j), (1, t, j), (1, t, i)
        return footprint(jax.grad(functools.partial(loss, t), (0, 1, 2, 3, 4)), *shapes)

    (half, _), (whole, largest) = measure(16_384), measure(32_768)
    assert whole <= 2.2 * half
    assert largest < 32_768**2
    (longest, largest), t = measure(202_752), 202_752  # GLM-5's limit
    assert longest <= 1.1 * t / 32_768 * whole and largest < t**2 // 100
