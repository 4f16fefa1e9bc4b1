"""Exact, deterministic top-k over index scores (paper section 2.1.1).

Ties go to the lowest position: ReLU makes exact 0.0 scores common, and a selection that differs between rollout and
trainer makes RL collapse (paper section 3.2).
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # score of a key the query may not see; finite, so that nothing turns into NaN
_GROUP = 8  # keys whose largest score stands for all of them, where there are many


def select_top_k(scores: jax.Array, k: int) -> jax.Array:
    """The k best visible keys of each query.

    Args:
      scores: float [..., S]; invisible keys hold `MASKED`. NaN counts as invisible.
      k: K, at least 1.
    Returns:
      int32 [..., min(k, S)]: positions in ascending order, padded with -1 where fewer keys are visible.
    """
    n_keys = scores.shape[-1]
    scores = jnp.where(jnp.isnan(scores), MASKED, scores)
    scores = jnp.where(scores == 0, 0.0, scores)  # lax.top_k ranks +0.0 above -0.0, which are a tie
    values, positions = jax.lax.top_k(scores, min(k, n_keys))  # lax.top_k is stable: ties keep the lowest position
    ascending = jnp.sort(jnp.where(values > MASKED, positions, n_keys), axis=-1)
    return jnp.where(ascending < n_keys, ascending, -1).astype(jnp.int32)


def select_top_k_bisected(scores: jax.Array, k: int) -> jax.Array:
    """Exactly `select_top_k`, out of sums and comparisons that run over whole vectors, where lax.top_k takes key by key."""
    k = min(k, scores.shape[-1])
    scores = jnp.where(scores == 0, 0.0, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)))
    bits = jax.lax.bitcast_convert_type(scores, jnp.dtype(f"uint{8 * scores.dtype.itemsize}"))
    sign = jnp.asarray(1 << 8 * bits.dtype.itemsize - 1, bits.dtype)
    order = jnp.where(bits < sign, bits | sign, ~bits)  # integers in the order of the scores
    return _largest(jnp.where(scores > MASKED, order, 0), k)  # NaN is not above MASKED


def _largest(numbers, k: int):
    """Positions of the k largest of numbers [..., S], ascending: int32 [..., k], -1 where fewer are above 0.

    Of many numbers, only the k groups of neighbours with the largest maxima are looked at, of equal ones the first. The k
    best lie in them: a group that is left out has k others before it, and each of them a number that is better than all of
    the group, as large and nearer to the front or larger.
    """
    if numbers.shape[-1] < 2 * _GROUP * k:
        return _places(_among_largest(numbers, k), k)
    groups = _cut(numbers, _GROUP)
    chosen = _largest(jnp.max(groups, axis=-1), k)[..., None]
    near = jnp.take_along_axis(groups, jnp.maximum(chosen, 0), axis=-2, mode="promise_in_bounds")
    near = jnp.where(chosen < 0, 0, near).reshape(*numbers.shape[:-1], -1)
    at = _places(_among_largest(near, k), k)
    group = jnp.take_along_axis(chosen[..., 0], jnp.maximum(at, 0) // _GROUP, axis=-1, mode="promise_in_bounds")
    return jnp.where(at < 0, -1, group * _GROUP + at % _GROUP)


def _among_largest(numbers, k: int):
    """Which are the k largest of numbers [..., S], of equal ones the first; never 0."""
    s = numbers.shape[-1]
    last = _kth_largest(numbers, k, 8 * numbers.dtype.itemsize)[..., None]
    above = numbers > last
    from_end = jnp.where(numbers == last, s - jnp.arange(s, dtype=jnp.uint32), 0)
    end = _kth_largest(from_end, k - _count(above), s.bit_length())[..., None]
    return (above | (from_end >= jnp.maximum(end, 1))) & (numbers > 0)


def _kth_largest(numbers, k, bits: int):
    """The k-th largest [...] of unsigned integers [..., S] of that many bits; k at least 1, static or [...]."""

    def bit(i, kth):
        higher = kth | jnp.asarray(1, kth.dtype) << (bits - 1 - i).astype(kth.dtype)
        return jnp.where(_count(numbers >= higher[..., None]) >= k, higher, kth)

    return jax.lax.fori_loop(0, bits, bit, jnp.zeros(numbers.shape[:-1], numbers.dtype))


def _count(mask):
    """How many of the last axis hold, int32 [...]. XLA on CPU adds without vectors along a last axis, or more than 32."""
    sums = jnp.sum(jnp.swapaxes(_cut(mask, -(-mask.shape[-1] // 32)), -1, -2), axis=-1, dtype=jnp.int32)
    return _dot(sums.astype(jnp.float32), jnp.ones(sums.shape[-1])).astype(jnp.int32)


def _places(mask, k: int):
    """Positions of what holds in mask [..., S], at most k, ascending: int32 [..., k], -1 for none."""
    halves = _dot(_cut(mask, 16).astype(jnp.float32), 2.0 ** jnp.arange(16)).astype(jnp.uint32)
    halves = _cut(halves, 2)
    words = halves[..., 0] | halves[..., 1] << 16
    count = jax.lax.population_count(words).astype(jnp.int32)
    until = jnp.cumsum(count, axis=-1)
    place = jnp.arange(k)
    at = jnp.vectorize(functools.partial(jnp.searchsorted, side="right"), signature="(n),(k)->(k)")(until, place)
    inside = jnp.minimum(at, words.shape[-1] - 1)
    word, before = (jnp.take_along_axis(x, inside, axis=-1, mode="promise_in_bounds") for x in (words, until - count))
    left, bit = place - before, jnp.zeros_like(at)
    for size in (16, 8, 4, 2, 1):
        low = jax.lax.population_count(word >> bit.astype(jnp.uint32) & ((1 << size) - 1)).astype(jnp.int32)
        bit, left = jnp.where(left < low, bit, bit + size), jnp.where(left < low, left, left - low)
    return jnp.where(at < words.shape[-1], 32 * at + bit, -1)


def _dot(x, y):
    """Product of integers below 2^24 in float32, exact: an accelerator would otherwise round its factors to bfloat16."""
    return jnp.dot(x, y, precision="highest")


def _cut(x, size: int):
    """x [..., S] in pieces [..., S/size, size], the last filled up with 0."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return x.reshape(*x.shape[:-1], -1, size)
