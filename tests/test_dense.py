"""Attention over all visible keys in blocks, and the indexer's loss over them: against float64 definitions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sparse import dense as module
from glm5_jax.sparse import reference
from glm5_jax.sparse.dense import Tiles, dense, dense_kl
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows, softmax_weights, visible

B, T, N, H, V, I, J = 2, 19, 4, 10, 5, 3, 8
SEGMENTS = {"packed": [[1] * 8 + [2] * 11, [1] * 3 + [2] * 16], "padded on the left": [[0] * 7 + [1] * 12, [0] + [3] * 18]}
# Heads one by one as on CPU, or all at once as elsewhere.
TILES = [Tiles(4, 8, 1), Tiles(3, 3, N), Tiles(19, 19, 1), Tiles(1, 2, N)]


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def inputs(segment, seed=0):
    """((q, k, v), rows, segments) in float64."""
    rng, segment = np.random.default_rng(seed), jnp.array(segment)
    q, k, v = draw(rng, B, T, N, H), draw(rng, B, T, N, H), draw(rng, B, T, N, V)
    return (q, k, v), Rows(jnp.tile(jnp.arange(T), (B, 1)), segment), segment


def index_inputs(seed=1):
    rng = np.random.default_rng(seed)
    return Index(draw(rng, B, T, I, J), draw(rng, B, T, J), draw(rng, B, T, I))


def whole(q, k, v, rows, segment, scale):
    """The definition with stored scores: (out, logarithm of sums, largest logit)."""
    mask = visible(rows, segment)[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    weights, total, top = softmax_weights(scores, mask)
    lse = jax.nn.logsumexp(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights / total, v), jnp.swapaxes(lse, 1, 2), top


def run(fn, arrays, rows, segment, seed=2):
    """(sum of weighted outputs, outputs) of dense attention and its gradients by q, k, v."""

    def total(q, k, v):
        out, lse, top = fn(q, k, v, rows, segment, 0.3)
        return jnp.sum(out * draw(np.random.default_rng(seed), *out.shape)), (out, lse, top)

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("tiles", TILES)
def test_dense_and_its_gradients_equal_stored_scores_in_float64(tiles, segments, monkeypatch):
    monkeypatch.setattr(module, "_tiles", lambda t, n, block: tiles)
    with jax.enable_x64(True):
        arrays, rows, segment = inputs(SEGMENTS[segments])
        (_, (out, lse, top)), grads = run(functools.partial(dense, block=100), arrays, rows, segment)
        (_, (out_w, lse_w, top_w)), grads_w = run(whole, arrays, rows, segment)
        real = np.asarray(segment) != 0
        np.testing.assert_allclose(out, out_w, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse[real], lse_w[real], rtol=0, atol=1e-14)
        np.testing.assert_allclose(top, top_w, rtol=1e-14)
        for got, expected in zip(grads, grads_w):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("block", [1, 6, 19, 100])
def test_dense_takes_any_block(block):
    arrays, rows, segment = inputs(SEGMENTS["packed"])
    arrays = [x.astype(jnp.float32) for x in arrays]
    out, *_ = jax.jit(dense, static_argnums=(5, 6))(*arrays, rows, segment, 0.3, block)
    np.testing.assert_allclose(out, whole(*arrays, rows, segment, 0.3)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_dense_in_narrow_types(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(module, "_tiles", lambda t, n, block: Tiles(4, 8, 1))
    with jax.enable_x64(True):
        arrays, rows, segment = inputs(SEGMENTS["packed"])
        narrow = [x.astype(dtype) for x in arrays]
        (_, (out, lse, _)), grads = run(functools.partial(dense, block=100), narrow, rows, segment)
        assert [x.dtype for x in (out, *grads)] == [dtype] * 4 and lse.dtype == jnp.float32
        (_, (expected, _, _)), grads_w = run(whole, [x.astype("float64") for x in narrow], rows, segment)
        for a, b in zip((out, *grads), (expected, *grads_w)):
            np.testing.assert_allclose(a.astype("float64"), b, rtol=0, atol=tolerance * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize("poison", [1e4, np.nan, np.inf])
def test_padding_may_hold_anything(poison):
    arrays, rows, segment = inputs(SEGMENTS["padded on the left"])
    arrays = [x.astype(jnp.float32) for x in arrays]
    padding = (segment == 0)[..., None, None]
    dirty = [jnp.where(padding, poison, x) for x in arrays]
    clean, got = (run(functools.partial(dense, block=5), x, rows, segment) for x in (arrays, dirty))
    jax.tree.map(np.testing.assert_array_equal, got, clean)
    assert all(np.isfinite(x).all() and not np.asarray(x)[np.asarray(segment) == 0].any() for x in got[1])


def test_tied_scores_average_the_values():
    rows, ones = Rows(jnp.arange(9)[None], jnp.ones((1, 9), jnp.int32)), jnp.ones((1, 9), jnp.int32)
    v = jnp.arange(9.0)[None, :, None, None]
    out, lse, top = dense(jnp.zeros((1, 9, 1, 2)), jnp.ones((1, 9, 1, 2)), v, rows, ones, 1.0, 2)
    np.testing.assert_allclose(out[0, :, 0, 0], np.arange(9) / 2, rtol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], np.log(np.arange(1, 10)), rtol=1e-6)
    assert top == 0


def test_only_the_output_has_gradients():
    arrays, rows, segment = inputs(SEGMENTS["packed"])
    grads = jax.grad(lambda q: sum(jnp.sum(x) for x in dense(q, *arrays[1:], rows, segment, 0.3, 5)[1:]))(arrays[0])
    assert not np.asarray(grads).any()


def run_kl(fn, index, segment, weight):
    def total(index):
        kl = fn(index)
        return jnp.sum(kl * weight), kl

    return jax.jit(jax.value_and_grad(total, has_aux=True))(index)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("tiles", TILES)
def test_the_loss_over_all_keys_equals_the_definition_in_float64(tiles, segments, monkeypatch):
    monkeypatch.setattr(module, "_tiles", lambda t, n, block: tiles)
    with jax.enable_x64(True):
        (q, k, v), rows, segment = inputs(SEGMENTS[segments])
        index, weight = index_inputs(), draw(np.random.default_rng(3), B, T)
        _, lse, _ = dense(q, k, v, rows, segment, 0.3, 100)
        got = run_kl(lambda index: dense_kl(q, k, lse, index, rows, segment, 0.3, 100), index, segment, weight)
        expected = run_kl(lambda index: reference.dense_kl(q, k, index, rows, segment, 0.3), index, segment, weight)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-13), got, expected)


def test_the_loss_reaches_the_indexer_only_and_padding_may_hold_anything():
    (q, k, v), rows, segment = inputs(SEGMENTS["padded on the left"])
    index = jax.tree.map(lambda x: x.astype(jnp.float32), index_inputs())
    _, lse, _ = dense(q, k, v, rows, segment, 0.3, 5)

    def total(q, k, lse, index):
        return jnp.sum(dense_kl(q, k, lse, index, rows, segment, 0.3, 5))

    def poisoned(x):
        return jnp.where((segment == 0).reshape(B, T, *[1] * (x.ndim - 2)), jnp.nan, x)

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))
    both = [run(*jax.tree.map(change, (q, k, lse, index))) for change in (jnp.array, poisoned)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    *constants, learned = both[0][1]
    assert not any(np.asarray(x).any() for x in constants) and all(np.asarray(x).any() for x in learned)
    assert both[0][0].dtype == jnp.float32


def test_memory_grows_linearly_with_the_length_of_a_row():
    n, h, i, j = 2, 24, 2, 8

    def loss(t, q, k, v, index_q, index_k, w):
        ones = jnp.ones((1, t), jnp.int32)
        rows = Rows(jnp.arange(t)[None], ones)
        out, lse, _ = dense(q, k, v, rows, ones, 0.2, 512)
        return jnp.sum(out**2) + jnp.sum(dense_kl(q, k, lse, Index(index_q, index_k, w), rows, ones, 0.2, 512))

    def measure(t):
        """(bytes of temporaries, elements of the largest array) of the compiled program."""
        shapes = *[(1, t, n, h)] * 3, (1, t, i, j), (1, t, j), (1, t, i)
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        program = jax.jit(jax.grad(functools.partial(loss, t), tuple(range(6)))).lower(*arrays).compile()
        sizes = [np.prod([int(d) for d in dims.split(",")]) for dims in re.findall(r"\w\d+\[([\d,]+)\]", program.as_text())]
        return program.memory_analysis().temp_size_in_bytes, max(sizes)

    (half, _), (all_, largest) = measure(16_384), measure(32_768)
    assert all_ <= 2.2 * half
    assert largest < 32_768**2
    (longest, largest), t = measure(202_752), 202_752  # GLM-5's limit
    assert longest <= 1.1 * t / 32_768 * all_ and largest < t**2 // 100
