"""The Pallas attention in TPU interpret mode against `reference.attend` in float64: values, gradients, poison, races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse import reference
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels import tiles
from glm5_jax.sparse.kernels.attend import attend, why_not

B, T, S, N, R, P, K, I, J = 2, 13, 29, 3, 8, 4, 5, 2, 8
SCALE = 0.3
RNG = np.random.default_rng(0)


def random(t=T, s=S, n=N, r=R, p=P, i=I, j=J):
    """(q, latent, index), (cotangents of out and of kl), float32."""
    shapes = ((B, t, n, r + p), (B, s, r + p), (B, t, i, j), (B, s, j), (B, t, i), (B, t, n, r), (B, t))
    q, latent, iq, ik, w, d_out, d_kl = (RNG.standard_normal(shape, np.float32) for shape in shapes)
    return (q, latent, Index(iq, ik, w)), (d_out, d_kl)


def some(t=T, s=S, k=K):
    """Selections with empty places anywhere; queries without any key and with all K."""
    selected = np.full((B, t, k), -1, np.int32)
    for b, i in np.ndindex(B, t):
        n = RNG.integers(0, k + 1)
        selected[b, i, RNG.permutation(k)[:n]] = RNG.permutation(s)[:n]
    selected[0, 3] = -1
    selected[1, 0] = np.arange(k)
    return selected


def with_gradients(function, arrays, cotangents):
    """(`Attended`, gradients of arrays) of function(*arrays)."""

    def run(*arrays):
        attended = function(*arrays)
        return (attended.out, attended.kl), attended

    _, vjp, attended = jax.vjp(run, *arrays, has_aux=True)
    return attended, vjp(cotangents)


@functools.partial(jax.jit, static_argnames=("rank", "block", "races"))
def in_jit(arrays, selected, cotangents, rank, block, races):
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=races)
    call = functools.partial(attend, interpret=params, block=block)
    return with_gradients(lambda q, c, index=None: call(q, c, selected, rank, SCALE, 8, index), arrays, cotangents)


def by_kernel(arrays, selected, cotangents, rank=R, block=8, races=False):
    """Blocks of 8 keys, so that small selections fill several of them."""
    return jax.tree.map(np.asarray, in_jit(arrays, selected, cotangents, rank, block, races))


def by_definition(arrays, selected, cotangents, rank=R):
    """`reference.attend` and its gradients in float64."""
    with jax.enable_x64(True):
        arrays, cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arrays, cotangents))
        call = lambda q, c, index=None: reference.attend(q, c, selected, rank, SCALE, index)  # noqa: E731
        return jax.tree.map(np.asarray, with_gradients(call, arrays, cotangents))


def assert_close(got, want, atol):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


ARRAYS, COTANGENTS = random()
SELECTED = some()


@functools.cache
def clean():
    return by_kernel(ARRAYS, SELECTED, COTANGENTS)


def test_values_and_gradients_equal_the_definition():
    attended, gradients = clean()
    assert attended.out.dtype == attended.kl.dtype == np.float32
    assert_close((attended, gradients), by_definition(ARRAYS, SELECTED, COTANGENTS), 2e-6)


def test_copies_do_not_race():
    raced = by_kernel(ARRAYS, SELECTED, COTANGENTS, races=True)
    assert not interpret_pallas_call.races.races_found
    assert_close(raced, clean(), 0)


def test_a_query_without_keys_gives_zeros():
    attended, (d_q, _, d_index) = clean()
    for x in (attended.out, attended.kl, d_q, d_index.q, d_index.w):
        assert not x[0, 3].any() and x[1, 0].all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_no_query_selected_are_never_read(poison):
    (q, latent, index), unread = ARRAYS, np.ones((B, S), bool)
    for b in range(B):
        unread[b, SELECTED[b][SELECTED[b] >= 0]] = False
    assert unread[0, S - 1] or unread[1, S - 1]  # the row that -1 would wrap to
    latent, keys = (np.where(unread[..., None], poison, x).astype(np.float32) for x in (latent, index.k))
    dirty = by_kernel((q, latent, index._replace(k=keys)), SELECTED, COTANGENTS)
    assert_close(dirty, clean(), 0)
    _, (_, d_latent, d_index) = dirty
    assert not d_latent[unread].any() and not d_index.k[unread].any() and d_latent[~unread].all()


def test_queries_that_all_select_nothing():
    attended, gradients = by_kernel(ARRAYS, np.full_like(SELECTED, -1), COTANGENTS)
    assert not any(x.any() for x in jax.tree.leaves((attended.out, attended.kl, gradients)))
    assert np.isfinite(attended.max_logit)


def test_attention_alone_equals_dense_attention_where_all_keys_are_selected():
    """S is not a multiple of anything, T is one of two tiles, and there is no indexer loss."""
    (q, latent, _), (d_out, _) = random(t=16, s=21)
    every = np.where(np.tri(16, 21, 5, dtype=bool), np.arange(21, dtype=np.int32), -1)[None].repeat(B, axis=0)
    attended, (d_q, d_latent) = by_kernel((q, latent), every, (d_out, None))
    scores = np.einsum("btnr,bsr->btns", q, latent) * SCALE
    e = np.exp(np.where(every[:, :, None] >= 0, scores, -np.inf))
    p = e / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(attended.out, np.einsum("btns,bsr->btnr", p, latent[..., :R]), rtol=0, atol=2e-6)
    np.testing.assert_allclose(attended.max_logit, scores[e > 0].max(), rtol=1e-6)
    assert attended.kl is None
    d_p = np.einsum("btnr,bsr->btns", d_out, latent[..., :R])
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * SCALE
    np.testing.assert_allclose(d_q, np.einsum("btns,bsr->btnr", d_scores, latent), rtol=0, atol=5e-6)
    d_value = np.pad(np.einsum("btns,btnr->bsr", p, d_out), ((0, 0), (0, 0), (0, P)))
    np.testing.assert_allclose(d_latent, np.einsum("btns,btnr->bsr", d_scores, q) + d_value, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_at_moderate_widths():
    """Rows of several lines; the float64 reference sees the same rounded inputs."""
    sizes = dict(t=16, s=150, n=8, r=128, p=16, i=4, j=32)
    (q, latent, index), (d_out, d_kl) = random(**sizes)
    q, latent, iq, ik, d_out = (jnp.asarray(x, jnp.bfloat16) for x in (q, latent, index.q, index.k, d_out))
    arrays, selected = (q, latent, Index(iq, ik, index.w)), some(16, 150, 64)
    got = by_kernel(arrays, selected, (d_out, d_kl), rank=128, block=32)
    want = by_definition(arrays, selected, (d_out, d_kl), rank=128)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(a.astype(np.float64) - b)
        name = jax.tree_util.keystr(path)
        assert error.max() < 0.02 * np.abs(b).max() and error.mean() < 0.005 * np.abs(b).mean() + 1e-4, name
    assert got[0].out.dtype == jnp.bfloat16 and got[0].kl.dtype == np.float32


@pytest.mark.parametrize("tile,block,k", [(8, 8, 5), (8, 128, 40), (4, 16, 7), (1, 8, 3)])
def test_lists_hold_each_selected_key_once(tile, block, k):
    t, s = 24, 50
    selected = some(t, s, k)
    selected[0, 0, 0] = s + 3  # out of range: as if empty
    lists = tiles.union_lists(jnp.asarray(selected), s, tile, block, 16)
    entries = np.asarray(lists.entries).reshape(B, t // tile, -1)
    for b, i in np.ndindex(B, t // tile):
        own = selected[b, i * tile : (i + 1) * tile]
        want = {}
        for query, position in ((q, p) for q, row in enumerate(own) for p in row if 0 <= p < s):
            want[position] = want.get(position, 0) | 1 << query
        position, word = entries[b, i] >> tiles.SHIFT, entries[b, i] & 255
        assert list(zip(position, word))[: len(want)] == sorted(want.items())
        assert not word[len(want) :].any() and (position[len(want) :] >= s).all()
        assert lists.blocks[b, i, 0, 0] == -(-len(want) // (2 * block)) * 2
        blocks = [set(x) for x in position.reshape(-1, block)]
        assert all(len(x) == block and not x & y for x, y in zip(blocks, blocks[1:]))
        assert not blocks[-1] & set().union(*blocks[:-1])
        assert lists.blocks[b, i, 0, 0] < len(blocks) and position.max() < tiles.row_count(s, block)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_rows_unpack_exactly(dtype):
    latent, keys = (jnp.asarray(RNG.standard_normal((B, S, w)) * 1e3, dtype) for w in (140, 8))
    rows = tiles.unpack_rows(tiles.pack_rows(latent, keys, 8), dtype)
    np.testing.assert_array_equal(rows[:, :S, :140], latent)
    np.testing.assert_array_equal(rows[:, :S, 256:264], keys)
    assert rows.shape == (B, S + 24, tiles.row_width(140, 8, dtype))
    assert not rows[:, S:].any() and not rows[..., 140:256].any() and not rows[..., 264:].any()


def test_refusals_name_their_reason():
    (q, latent, index), _ = ARRAYS, None
    assert why_not(q, latent, index, K) is None and why_not(q, latent, None, K) is None
    half = latent.astype(jnp.bfloat16)
    assert "bfloat16" in why_not(q, half, None, K)
    assert "float64" in why_not(q.astype(np.float64), latent.astype(np.float64), None, K)
    assert "head weights" in why_not(q, latent, index._replace(w=index.w.astype(jnp.bfloat16)), K)
    assert "9000 selected" in why_not(q, latent, None, 9000)
    huge = jax.ShapeDtypeStruct((1, 1 << 23, R + P), jnp.float32)
    assert "8388608 keys" in why_not(q, huge, None, K)
    assert "heads" in why_not(jax.ShapeDtypeStruct((1, 8, 256, 576), jnp.bfloat16), half, None, K)
    with pytest.raises(ValueError, match="attention kernel: "):
        attend(q, half, SELECTED, R, SCALE, 8)
