"""The Pallas selection in TPU interpret mode against a stable sort of float64 scores.

Most inputs are small integers with J a power of 4, so that every sum is exact and ties are plentiful.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse import reference
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels import select as kernel
from glm5_jax.sparse.masks import Rows, visible
from glm5_jax.sparse.topk import MASKED

B, T, S, I, J, K = 2, 21, 601, 3, 64, 150  # three key blocks, two query blocks, an answer of two tiles


@pytest.fixture(autouse=True)
def short_key_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "KEY_BLOCK", 256)


@functools.cache
def compiled(k: int, **interpret):
    """The kernel for this K; equal shapes share one compiled program."""
    params = pltpu.InterpretParams(uninitialized_memory="nan", **interpret)
    return jax.jit(functools.partial(kernel.select, k=k, chunk=16, interpret=params))


def integers(rng, low=-3, high=4, t=T, s=S, dtype=np.float32) -> Index:
    """An index of small integers; w of both signs."""
    q, k = (rng.integers(low, high, shape).astype(dtype) for shape in ((B, t, I, J), (B, s, J)))
    return Index(q, k, rng.integers(-2, 3, (B, t, I)).astype(np.float32))


def everywhere(rng, t=T, s=S) -> tuple[Rows, np.ndarray]:
    """Queries in no order, one document."""
    ones = np.ones((B, max(t, s)), np.int32)
    return Rows(rng.integers(0, s, (B, t)).astype(np.int32), ones[:, :t]), ones[:, :s]


def by_sorting(index, rows, key_segment, k) -> np.ndarray:
    """The definition in float64 numpy: a stable sort of each query's scores."""
    q, keys, w = (np.asarray(a, np.float64) for a in index)
    with np.errstate(invalid="ignore"):
        dots = np.maximum(np.einsum("btij,bsj->btis", q, keys) * q.shape[-1] ** -0.5, 0)
        scores = np.einsum("btis,bti->bts", dots, w)
    seen = np.asarray(visible(Rows(*map(jnp.asarray, rows)), jnp.asarray(key_segment))) & (scores > MASKED)
    answer = np.full((*w.shape[:2], min(k, keys.shape[1])), -1)
    for b, t in np.ndindex(*w.shape[:2]):
        order = np.argsort(np.where(seen[b, t], -scores[b, t], np.inf), kind="stable")
        best = np.sort(order[: min(answer.shape[2], seen[b, t].sum())])
        answer[b, t, : len(best)] = best
    return answer


def check(index, rows, key_segment, k=K, **interpret):
    got = compiled(k, **interpret)(index, rows, key_segment)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, by_sorting(index, rows, key_segment, k))
    return np.asarray(got)


def test_scores_of_both_signs_with_ties_everywhere():
    rng = np.random.default_rng(0)
    got = check(integers(rng), *everywhere(rng))
    assert (got[..., -1] >= 0).any() and (got[..., -1] < 0).any()  # some queries see fewer than K keys


@pytest.mark.parametrize("weight", [0.0, -0.0, -1.0])
def test_all_scores_tied_at_zero_select_the_first_keys(weight):
    rng = np.random.default_rng(1)
    index = integers(rng)._replace(w=np.full((B, T, I), weight, np.float32))
    index = index._replace(q=-np.abs(index.q), k=np.abs(index.k))  # ReLU leaves 0.0, a negative weight makes it -0.0
    rows, key_segment = everywhere(rng)
    expected = np.where(np.arange(K) <= rows.slot[..., None], np.arange(K), -1)
    np.testing.assert_array_equal(check(index, rows, key_segment), expected)


def test_hundreds_of_keys_tied_at_the_threshold():
    rng = np.random.default_rng(2)
    index = integers(rng, 0, 2)
    index = index._replace(q=index.q * (np.arange(J) < 2), w=np.abs(index.w))
    check(index, Rows(np.full((B, T), S - 1, np.int32), np.ones((B, T), np.int32)), everywhere(rng)[1])


def test_packed_documents_and_left_padding():
    rng = np.random.default_rng(3)
    key_segment = np.stack([np.repeat([1, 2, 3], [290, 20, S - 310]), np.repeat([0, 7, 0], [210, 300, S - 510])])
    slot = np.sort(rng.integers(0, S, (B, T)), axis=1)
    rows = Rows(slot.astype(np.int32), np.take_along_axis(key_segment, slot, 1).astype(np.int32))
    assert (rows.segment == 0).any()
    check(integers(rng), rows, key_segment.astype(np.int32))


def test_documents_in_no_order():
    rng = np.random.default_rng(4)
    rows, _ = everywhere(rng)
    check(integers(rng), rows._replace(segment=rng.integers(-1, 3, (B, T), np.int32)), rng.integers(-1, 3, (B, S), np.int32))


def test_what_is_not_finite():
    rng = np.random.default_rng(5)
    index, (rows, key_segment) = integers(rng), everywhere(rng)
    index.k[:, 100:150] = np.nan  # padding, never seen
    key_segment[:, 100:150] = 0
    index.k[:, 200:203] = np.nan  # keys that can be seen, of no use
    index.k[:, 300] *= 1e30  # scores beyond `MASKED` are not selected, large ones are
    index.q[0, 3] = np.inf
    index.w[1, 2] = np.nan
    got = check(index, rows, key_segment)
    assert not (((got >= 100) & (got < 150)) | ((got >= 200) & (got < 203))).any()
    assert (got == 300).any() and (got[1, 2] == -1).all()


def test_a_query_later_than_its_keys_and_k_beyond_them():
    rng = np.random.default_rng(6)
    index = integers(rng, t=1, s=37)
    rows = Rows(np.array([[5000], [36]], np.int32), np.ones((B, 1), np.int32))
    got = check(index, rows, np.ones((B, 37), np.int32), k=2048)
    np.testing.assert_array_equal(got, np.tile(np.arange(37), (B, 1, 1)))


def test_integers_have_the_order_of_the_scores():
    ascending = [-9e29, -1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, np.inf]
    scores = np.array(ascending + [np.nan, -np.nan, -np.inf, -2e30], np.float32)[None]
    got = np.asarray(kernel._order(scores, 0, np.ones((1, 12), np.int32), np.array([[10, 1]], np.int32)))[0]
    assert got[3] == got[4] and (np.diff(np.delete(got[:8], 3)) > 0).all()
    assert (got[8:] == kernel.UNSEEN).all() and (got[:8] > kernel.UNSEEN).all()


def gap(index, rows, key_segment, k) -> float:
    """Smallest distance between the k-th and the next score of a query, those exactly tied (at 0.0) left out."""
    mask = visible(Rows(*map(jnp.asarray, rows)), jnp.asarray(key_segment))
    scores = np.sort(reference.index_scores(*map(jnp.asarray, index), mask), axis=-1)
    distance = scores[..., -k] - scores[..., -k - 1]
    return np.min(distance[distance > 0])


def test_bfloat16_inputs_equal_the_reference():
    rng = np.random.default_rng(8)
    q, k = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((B, T, I, 128), (B, S, 128)))
    index = Index(q, k, jnp.asarray(rng.standard_normal((B, T, I)), jnp.float32))
    rows, key_segment = everywhere(rng)
    rows = rows._replace(slot=rows.slot // 2 + S // 2)
    assert gap(index, rows, key_segment, K) > 1e-5  # rounding differs by 1e-6
    np.testing.assert_array_equal(check(index, rows, key_segment), reference.select(index, rows, key_segment, K))


def test_no_data_race_with_two_cores(capfd, monkeypatch):
    monkeypatch.setattr(kernel, "KEY_BLOCK", 128)
    rng = np.random.default_rng(7)
    check(integers(rng, s=300), *everywhere(rng, s=300), k=20, detect_races=True, num_cores_or_threads=2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_blocks_of_the_size_that_runs_on_a_tpu(monkeypatch):
    monkeypatch.undo()
    rng = np.random.default_rng(9)
    index, (rows, key_segment) = integers(rng, t=20, s=1100), everywhere(rng, t=20, s=1100)
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    got = jax.jit(functools.partial(kernel.select, k=K, interpret=params))(index, rows, key_segment)
    np.testing.assert_array_equal(got, by_sorting(index, rows, key_segment, K))


def test_autodiff_stops_before_the_kernel():
    rng = np.random.default_rng(10)
    index, (rows, key_segment) = integers(rng), everywhere(rng)
    total = lambda index: jnp.sum(kernel.select(index, rows, key_segment, K)) * 1.0  # noqa: E731
    jax.eval_shape(jax.grad(total), Index(*map(jnp.asarray, index)))  # a kernel that copies by itself has no derivative


def shapes(dtype=jnp.bfloat16, w=jnp.float32, batch=1, t=4096, s=4096, k_dtype=None) -> Index:
    struct = jax.ShapeDtypeStruct
    return Index(struct((batch, t, 32, 128), dtype), struct((batch, s, 128), k_dtype or dtype), struct((batch, t, 32), w))


def test_what_the_kernel_takes():
    for s in (1, 4096, 131072, 202752):
        assert kernel.why_not(shapes(t=s, s=s), 2048) is None
    assert kernel.why_not(shapes(jnp.float32), 2048) is None


@pytest.mark.parametrize(
    "reason, index, k",
    [
        ("bfloat16 or float32, not float16 and float16", shapes(jnp.float16), 2048),
        ("not bfloat16 and float32", shapes(k_dtype=jnp.float32), 2048),
        ("head weights must be float32, not bfloat16", shapes(w=jnp.bfloat16), 2048),
        ("MiB of VMEM", shapes(s=1 << 20), 2048),
        ("queries of one call", shapes(batch=16, t=131072), 2048),
    ],
)
def test_what_the_kernel_refuses(reason, index, k):
    assert reason in kernel.why_not(index, k)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda i: kernel.select(i, None, None, k), index)
