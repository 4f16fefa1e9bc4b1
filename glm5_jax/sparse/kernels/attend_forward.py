"""Forward kernel of `attend`: online softmax over the keys of a tile, then a second walk over them for the indexer's loss."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse.kernels import parts
from glm5_jax.sparse.kernels.parts import CORES, Plan, Queries
from glm5_jax.sparse.kernels.tiles import LANES, Lists
from glm5_jax.sparse.topk import MASKED


def forward(plan: Plan, queries: Queries, rows: jax.Array, lists: Lists) -> tuple[jax.Array, jax.Array]:
    """Attention of all tiles to their lists.

    Args:
      rows: from `tiles.pack_rows`. lists: from `tiles.union_lists`, an even number of tiles.
    Returns:
      (out [B,N,tiles,g,R], statistics float32 [B,tiles,g,lanes] with the columns that `Plan` names).
    """
    b, tiles = lists.blocks.shape[:2]
    lists, lists_specs = parts.lists_operands(plan, lists)
    results = [
        jax.ShapeDtypeStruct((b, plan.heads, tiles, plan.tile, plan.rank), plan.dtype),
        jax.ShapeDtypeStruct((b, tiles, plan.tile, plan.stats), jnp.float32),
    ]
    column = pltpu.VMEM((plan.matrix, 1), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(b, CORES, tiles // CORES),
        in_specs=[*lists_specs, parts.own(queries), pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=parts.own(results),
        out_shape=results,
        scratch_shapes=dict(
            buffers=parts.block_buffers(plan, plan.key_lines, jnp.int32), arrived=pltpu.SemaphoreType.DMA((2,)),
            acc=pltpu.VMEM((plan.matrix, plan.rank), jnp.float32), top=column, total=column,
        ),
        compiler_params=parts.compiler_params("parallel"),
        interpret=plan.interpret,
        name="attend",
    )(*lists, queries, rows.reshape(b, -1, LANES))  # fmt: skip


def _kernel(plan, lists, vectors, queries, rows, out, stats, *, buffers, arrived, acc, top, total):
    walk = functools.partial(_walk, plan, lists, pl.program_id(0), rows, buffers, arrived)
    q = parts.flat(parts.only(queries.q)[...])
    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, MASKED / 2)
    total[...] = jnp.zeros_like(total)

    def attend(j, keys, carry):
        scores = parts.attention_scores(plan, q, keys, parts.selected(plan, parts.words(plan, vectors, j)))
        highest = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - highest)
        shrink = jnp.exp(top[...] - highest)
        top[...] = highest
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        value = parts.product(plan, weights.astype(plan.dtype), keys[:, : plan.rank], (1, 0))
        acc[...] = acc[...] * shrink + value
        return carry

    walk(attend, 0)
    sums = jnp.where(total[...] == 0, 1, total[...])
    parts.only(out)[...] = parts.by_head(acc[...] / sums, plan.heads).astype(plan.dtype)
    lse = top[...] + jnp.log(sums)
    own = parts.as_lanes(lse, plan.heads, plan.stats)
    highest = jnp.max(parts.by_head(top[...], plan.heads), axis=0)
    own = parts.set_column(own, plan.top, highest)
    if plan.index_heads:
        index_lse, kl = _index_loss(plan, walk, vectors, queries, lse)
        own = parts.set_column(parts.set_column(own, plan.index_lse, index_lse), plan.kl, kl)
    parts.only(stats)[...] = own


def _walk(plan, lists, batch, rows, buffers, arrived, visit, carry):
    """Folds visit(j, keys [block,W], carry) over the blocks of a tile's list."""

    def fetch(side):
        def start(position, i):
            row = parts.lines_of(rows.at[batch], position, plan.key_lines)
            to = parts.lines_of(buffers[side], i, plan.key_lines)
            pltpu.make_async_copy(row, to, arrived.at[side]).start()

        return start

    def one(j, side, carry):
        parts.wait_for(buffers[side], arrived.at[side])
        # Behind the last block of a list there are zero rows to fetch.
        parts.for_rows(plan, lists.entries, j + 1, fetch(1 - side), unroll=True)
        return visit(j, parts.read_keys(plan, buffers[side]), carry)

    def two(i, carry):
        return one(2 * i + 1, 1, one(2 * i, 0, carry))

    parts.for_rows(plan, lists.entries, 0, fetch(0), unroll=False)
    carry = jax.lax.fori_loop(0, lists.blocks[0, 0, 0, 0] // 2, two, carry)
    parts.wait_for(buffers[0], arrived.at[0])
    return carry


def _index_loss(plan, walk, vectors, queries, lse):
    """(log-sum-exp of the index scores, KL(p || softmax(index scores))), each [g,1], p from the log-sum-exp of attention.

    With x the scores and m their maximum, KL = sum p log p + sum p (m - x) + log(sum exp(x - m)), whose terms are not
    large numbers that cancel.
    """
    q, index_q = parts.flat(parts.only(queries.q)[...]), parts.flat(parts.only(queries.index_q)[...])
    w = parts.as_column(parts.only(queries.w)[...], plan.index_heads)

    def visit(j, keys, carry):
        top, total, mass, entropy, below = carry
        mask = parts.selected(plan, parts.words(plan, vectors, j))
        p = jnp.exp(parts.attention_scores(plan, q, keys, mask) - lse)
        p = parts.mean_over_heads(plan, p)
        x = parts.index_scores(plan, parts.index_dots(plan, index_q, keys)[0], w)
        highest = jnp.maximum(top, jnp.max(jnp.where(mask, x, MASKED / 2), axis=1, keepdims=True))
        total = total * jnp.exp(top - highest) + _sum(jnp.exp(jnp.where(mask, x, MASKED) - highest))
        below += mass * (highest - top) + _sum(jnp.where(mask, p * (highest - x), 0))
        entropy += _sum(p * jnp.log(jnp.where(p > 0, p, 1)))
        return highest, total, mass + _sum(p), entropy, below

    zero = jnp.zeros((plan.tile, 1), jnp.float32)
    top, total, mass, entropy, below = walk(visit, (zero + MASKED / 2, zero, zero, zero, zero))
    log_total = jnp.log(jnp.where(total == 0, 1, total))
    return top + log_total, entropy + below + mass * log_total


def _sum(x):
    return jnp.sum(x, axis=1, keepdims=True)
