"""Attention over all visible keys for TPUs, with its gradients: what `sparse.dense.dense` computes, scores kept in VMEM.

XLA writes each block of scores to HBM and reads it again, which takes several times as long as its products. Here scores stand
keys by queries, so that what belongs to a query (largest score, sum, slot) is a row. Heads are lanes: arrays [B,T,N,H] are read
as [B,T,N*H], where H numbers, a multiple of 128, are one head's block, and nothing has to be turned. In the backward pass the
gradients of all queries of a head wait in VMEM while blocks of keys pass by: every product is made once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse.kernels.tiles import LANES
from glm5_jax.sparse.masks import Rows, real
from glm5_jax.sparse.topk import MASKED

_MOST_BYTES = 32 << 20  # of VMEM for the gradients of a head's queries


class Plan(NamedTuple):
    """Sizes and settings of a call, all static.

    Attributes:
      queries, keys: of a block. heads: N. width: H = C+P. value: V. scale: factor on q.k.
      seen: keys in the blocks that a query visits, on average; for what the compiler is told of the kernels' costs.
      interpret: as in `pl.pallas_call`.
    """

    queries: int
    keys: int
    heads: int
    width: int
    value: int
    scale: float
    seen: float
    interpret: object


class Given(NamedTuple):
    """What both kernels read, T and S whole numbers of blocks.

    Attributes:
      q: [B,T,N*H]. k: [B,S,N*H]. v: [B,S,N*V].
      tokens: int32 [B,2,T], slots and segments of the queries. segments: int32 [B,S,1], of the keys.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tokens: jax.Array
    segments: jax.Array


def why_not(q, v) -> str | None:
    """Why `flash` does not take q [B,T,N,H] and v [B,S,N,V], in one line, or None if it does."""
    if q.shape[3] % LANES or v.shape[3] % LANES:
        return f"heads of width {q.shape[3]} and {v.shape[3]} are not multiples of {LANES}"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {q.dtype}, not bfloat16 or float32"
    most = _MOST_BYTES // (4 * q.shape[3] * q.dtype.itemsize)  # sums in float32, and twice what they become
    if not LANES <= q.shape[1] <= most:
        return f"{q.shape[1]} tokens of a row on one device are not {LANES} to {most}"
    return None


def flash(q, k, v, rows: Rows, key_segment, scale: float, block: tuple[int, int], interpret=False):
    """(out, logarithms of sums, largest logit) of `sparse.dense.dense`.

    Args:
      block: queries and keys of a block; those of a TPU are multiples of `LANES`, see `whole_lanes`.
      interpret: as in `pl.pallas_call`, for machines without a TPU.
    """
    t, seen = q.shape[1], (k.shape[1] + block[1]) / 2  # half of the keys, and half a block at the diagonal
    plan = Plan(*block, q.shape[2], q.shape[3], v.shape[3], scale, seen, interpret)
    tokens = jnp.stack([_filled(rows.slot, plan.queries, "edge"), _filled(rows.segment, plan.queries)], axis=1)
    q, k, v = (_filled(x.reshape(*x.shape[:2], -1), n) for x, n in ((q, plan.queries), (k, plan.keys), (v, plan.keys)))
    out, lse, top = _flash(plan, Given(q, k, v, tokens, _filled(key_segment, plan.keys)[..., None]))
    return out[:, :t].reshape(len(q), t, plan.heads, -1), jnp.swapaxes(lse[:, :, 0, :t], 1, 2), jnp.max(top)


def whole_lanes(block: tuple[int, int]) -> tuple[int, int]:
    """A block at least as large that a TPU takes."""
    return tuple(-(-n // LANES) * LANES for n in block)


def _filled(x, block: int, mode="constant"):
    """x [B,T,...] with T filled up to whole blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2), mode=mode)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: Plan, given: Given):
    """(out [B,T,N*V], logarithms of sums float32 [B,N,1,T], largest logits [B,N,1,T])."""
    (b, t, _), s = given.q.shape, given.k.shape[1]
    blocks = t // plan.queries, s // plan.keys
    # What a block of queries visits: blocks of keys up to its last slot. Behind them the grid stands still.
    visits = 1 + jnp.max(given.tokens[:, 0].reshape(b, blocks[0], -1), axis=2) // plan.keys
    row = jax.ShapeDtypeStruct((b, plan.heads, 1, t), jnp.float32)
    result = [jax.ShapeDtypeStruct((b, t, plan.heads * plan.value), given.v.dtype), row, row]
    here, there = lambda i, j, n: i, lambda i, j, n: jnp.minimum(j, n - 1)  # noqa: E731
    specs = functools.partial(_specs, plan, lambda b, n, i, j, visits: (i, j, visits[b * blocks[0] + i]), here, there)
    column = pltpu.VMEM((1, plan.queries), jnp.float32)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, plan.heads, *blocks),
            in_specs=specs("qkvts"),
            out_specs=specs("orr"),
            scratch_shapes=[pltpu.VMEM((plan.value, plan.queries), jnp.float32), column, column],
        ),
        compiler_params=_compiler_params(),
        cost_estimate=_cost(plan, given, plan.width + plan.value, plan.width + plan.value, plan.queries),
        interpret=plan.interpret,
        name="flash",
    )(visits.reshape(-1), *given)


def _forward_kernel(plan, visits, q, k, v, tokens, segments, out, lse, largest, acc, top, total):
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, MASKED / 2)
        total[...] = jnp.zeros_like(total)

    @pl.when(j < visits[pl.program_id(0) * pl.num_programs(2) + i])
    def _():
        scores, seen = _product(k[0], q[0], (1, 1)) * plan.scale, _seen(plan, tokens, segments, j)
        new = jnp.maximum(top[...], jnp.max(jnp.where(seen, scores, MASKED), axis=0, keepdims=True))
        weights, shrink = jnp.where(seen, jnp.exp(scores - new), 0), jnp.exp(top[...] - new)
        acc[...] = acc[...] * shrink + _product(v[0], weights.astype(v.dtype), (0, 0))
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        top[...] = new

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        sums = jnp.where(total[...] == 0, 1, total[...])
        out[0] = (acc[...] / sums).T.astype(out.dtype)
        lse[0, 0] = top[...] + jnp.log(sums)
        largest[0, 0] = top[...]


def _flash_fwd(plan, given):
    out, lse, top = _flash(plan, given)
    return (out, lse, top), (given, out, lse)


def _flash_bwd(plan, saved, cotangents):
    given, out, lse = saved
    d_out = real(given.tokens[:, 1], cotangents[0])
    (b, t, _), s = given.q.shape, given.k.shape[1]
    blocks = s // plan.keys, t // plan.queries
    last = given.tokens[:, 0, plan.queries - 1 :: plan.queries]  # slots ascend
    first = jnp.sum(last[:, None] < plan.keys * jnp.arange(blocks[0])[:, None], axis=2)  # blocks before it do not see the keys
    here, there = lambda j, i, n: j, lambda j, i, n: jnp.maximum(i, jnp.minimum(n, blocks[1] - 1))  # noqa: E731
    specs = functools.partial(_specs, plan, lambda b, n, j, i, first: (j, i, first[b * blocks[0] + j]), there, here)
    # The outputs are read with the first block of keys only.
    once = pl.BlockSpec((1, plan.queries, plan.value), lambda b, n, j, i, _: (b, jnp.where(j == 0, i, blocks[1] - 1), n))
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:3]],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, plan.heads, *blocks),
            in_specs=[*specs("qkvtsor"), once],
            out_specs=[pl.BlockSpec((1, t, plan.width), lambda b, n, *_: (b, 0, n)), *specs("kv")],
            scratch_shapes=[
                pltpu.VMEM((blocks[1], plan.queries, plan.width), jnp.float32),
                pltpu.VMEM((blocks[1], 1, plan.queries), jnp.float32),
                pltpu.VMEM((plan.keys, plan.width), jnp.float32),
                pltpu.VMEM((plan.keys, plan.value), jnp.float32),
            ],
        ),
        compiler_params=_compiler_params(),
        cost_estimate=_cost(plan, given, 3 * plan.width + 2 * plan.value, 3 * plan.width + 2 * plan.value, plan.keys),
        interpret=plan.interpret,
        name="flash_backward",
    )(first.reshape(-1), *given, d_out, lse, out)
    return (Given(d_q, d_k, d_v, None, None),)


_flash.defvjp(_flash_fwd, _flash_bwd)


def _backward_kernel(
    plan, first, q, k, v, tokens, segments, d_out, lse, out, d_q, d_k, d_v, all_d_q, all_inner, acc_k, acc_v
):  # fmt: skip
    j, i = pl.program_id(2), pl.program_id(3)
    ends = i == pl.num_programs(3) - 1

    @pl.when((j == 0) & (i == 0))
    def _():
        all_d_q[...] = jnp.zeros_like(all_d_q)

    @pl.when(j == 0)  # which all queries see
    def _():
        ones = jnp.ones((8, plan.value), jnp.float32)  # a product with them sums into a row
        all_inner[i] = _product(ones, d_out[0].astype(jnp.float32) * out[0].astype(jnp.float32), (1, 1))[:1]

    @pl.when(i == 0)
    def _():
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(i >= first[pl.program_id(0) * pl.num_programs(2) + j])
    def _():
        scores = _product(k[0], q[0], (1, 1)) * plan.scale
        p = jnp.where(_seen(plan, tokens, segments, j), jnp.exp(scores - lse[0, 0]), 0)
        d_scores = p * (_product(v[0], d_out[0], (1, 1)) - all_inner[i]) * plan.scale
        p, d_scores = p.astype(q.dtype), d_scores.astype(q.dtype)
        acc_v[...] += _product(p, d_out[0], (1, 0))
        acc_k[...] += _product(d_scores, q[0], (1, 0))
        all_d_q[i] += _product(d_scores, k[0], (0, 0))

    @pl.when(ends)
    def _():
        d_k[0] = acc_k[...].astype(d_k.dtype)
        d_v[0] = acc_v[...].astype(d_v.dtype)

    @pl.when(ends & (j == pl.num_programs(2) - 1))
    def _():
        d_q[0] = all_d_q[...].reshape(d_q.shape[1:]).astype(d_q.dtype)


def _specs(plan: Plan, at, of_queries, of_keys, names: str) -> list:
    """Block specs of operands and results, a letter each: q, k, v, o (an output), r (a row), t (tokens), s (segments).

    Args:
      at: makes (outer block, inner block, limit) of what a grid passes. of_queries, of_keys: which block of each that is.
    """
    shapes = {
        "q": (of_queries, (1, plan.queries, plan.width), lambda b, n, i: (b, i, n)),
        "o": (of_queries, (1, plan.queries, plan.value), lambda b, n, i: (b, i, n)),
        "r": (of_queries, (1, 1, 1, plan.queries), lambda b, n, i: (b, n, 0, i)),
        "t": (of_queries, (1, 2, plan.queries), lambda b, n, i: (b, 0, i)),
        "k": (of_keys, (1, plan.keys, plan.width), lambda b, n, j: (b, j, n)),
        "v": (of_keys, (1, plan.keys, plan.value), lambda b, n, j: (b, j, n)),
        "s": (of_keys, (1, plan.keys, 1), lambda b, n, j: (b, j, 0)),
    }

    def spec(which, shape, place):
        return pl.BlockSpec(shape, lambda b, n, *grid: place(b, n, which(*at(b, n, *grid))))

    return [spec(*shapes[name]) for name in names]


def _seen(plan: Plan, tokens, segments, j):
    """Whether queries see the keys of block j, bool [keys,queries]: `masks.visible`."""
    slot, segment = tokens[0, 0:1, :], tokens[0, 1:2, :]
    place = j * plan.keys + jax.lax.broadcasted_iota(jnp.int32, (plan.keys, plan.queries), 0)
    return (place <= slot) & (segments[0] == segment) & (segment != 0)


def _product(a, b, over: tuple[int, int]):
    """float32 product of matrices over axis over[0] of a and over[1] of b."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _cost(plan: Plan, given: Given, product: int, held: int, block: int) -> pl.CostEstimate:
    """What the compiler is told. For each pair of a query and a key it sees products over `product` numbers; `held` numbers of
    each query or key are moved once, those of the other side for each `block` of them."""
    (b, t, _), itemsize = given.q.shape, given.q.dtype.itemsize
    pairs = b * t * plan.heads * plan.seen
    numbers = b * t * plan.heads * held + pairs / block * (plan.width + plan.value)
    return pl.CostEstimate(flops=int(2 * pairs * product), transcendentals=int(pairs), bytes_accessed=int(itemsize * numbers))


def _compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=56 << 20,  # a core of v5p and 7x has 64 MiB
    )
