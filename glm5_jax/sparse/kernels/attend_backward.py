"""Backward kernel of `attend`: one walk over a tile's keys recomputes the probabilities and makes all gradients.

The gradients of a block of keys are added to an array in HBM by copying the rows in, adding and copying them back. The rows
of a tile differ, so its copies may overlap; tiles of one core come one after another, and each core has its own array.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse.kernels import parts
from glm5_jax.sparse.kernels.parts import CORES, Plan, Queries
from glm5_jax.sparse.kernels.tiles import Lists, index_start

_SLOTS = 3  # blocks of key gradients in VMEM: one arrives, one is added to, one leaves


class Given(NamedTuple):
    """What the forward pass leaves, and the cotangents, of all tiles.

    Attributes:
      out: [B,tiles,g*N,R]. d_out: likewise. stats: float32 [B,tiles,g,lanes], its column `kl` the cotangent of the loss.
    """

    out: jax.Array
    d_out: jax.Array
    stats: jax.Array


def backward(plan: Plan, queries: Queries, given: Given, rows: jax.Array, lists: Lists) -> tuple[Queries, jax.Array]:
    """Gradients of the queries, and float32 [B,S',W] of the keys in the order of a row (see `tiles.pack_rows`)."""
    b, tiles = lists.blocks.shape[:2]
    scalars, vectors = parts.lists_specs(lists)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    key_gradients = jnp.zeros((b, CORES, rows.shape[1], plan.row), jnp.float32)
    operands = (lists, lists.entries, queries, given, rows, key_gradients)
    loss = plan.index_heads > 0
    d_queries, d_rows = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(b, CORES, tiles // CORES),
        in_specs=[scalars, vectors, parts.own_all(queries), parts.own_all(given), in_hbm, in_hbm],
        out_specs=(parts.own_all(queries), in_hbm),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (queries, key_gradients)),
        input_output_aliases={len(jax.tree.leaves(operands)) - 1: len(jax.tree.leaves(queries))},
        scratch_shapes=dict(
            buffer=parts.key_buffer(plan), arrived=pltpu.SemaphoreType.DMA((2,)),
            grads=parts.block_buffer(plan, _SLOTS, plan.row, jnp.float32),
            read=pltpu.SemaphoreType.DMA((_SLOTS,)), written=pltpu.SemaphoreType.DMA((_SLOTS,)),
            d_q=pltpu.VMEM((plan.matrix, plan.width), jnp.float32),
            d_index=_index_scratch(plan) if loss else None,
        ),
        compiler_params=parts.compiler_params("arbitrary"),
        interpret=plan.interpret,
        name="attend_backward",
    )(*operands)  # fmt: skip
    return d_queries, jnp.sum(d_rows, axis=1)


def _index_scratch(plan):
    """VMEM for the gradients of index queries and head weights."""
    lines = plan.tile * plan.index_heads
    return pltpu.VMEM((lines, plan.index_width), jnp.float32), pltpu.VMEM((lines, 1), jnp.float32)


def _kernel(
    plan, lists, entries, queries, given, rows, _, d_queries, d_rows,
    *, buffer, arrived, grads, read, written, d_q, d_index,
):  # fmt: skip
    batch, core, blocks = pl.program_id(0), pl.program_id(1), lists.blocks[0, 0, 0, 0]
    visit = _visit(plan, entries, queries, given, d_q, d_index)

    def fetch(j):
        slot, place3 = j % 2, j % _SLOTS

        def start(position, place):
            pltpu.make_async_copy(rows.at[batch, position], buffer.at[(slot, *place)], arrived.at[slot]).start()
            row = d_rows.at[batch, core, position]
            pltpu.make_async_copy(row, grads.at[(place3, *place)], read.at[place3]).start()

        parts.for_rows(plan, lists.entries, j, start)

    def put(j):
        slot = j % _SLOTS

        def start(position, place):
            row = d_rows.at[batch, core, position]
            pltpu.make_async_copy(grads.at[(slot, *place)], row, written.at[slot]).start()

        parts.for_rows(plan, lists.entries, j, start)

    def left(j):
        parts.wait_for_block(grads, j % _SLOTS, written)

    def step(j, carry):
        @pl.when(j + 1 < blocks)
        def _():
            pl.when(j + 1 >= _SLOTS)(lambda: left(j + 1 - _SLOTS))
            fetch(j + 1)

        parts.wait_for_block(buffer, j % 2, arrived)
        parts.wait_for_block(grads, j % _SLOTS, read)
        visit(j, parts.read_block(buffer, j % 2), grads.at[j % _SLOTS])
        put(j)
        return carry

    for x in jax.tree.leaves((d_q, d_index)):
        x[...] = jnp.zeros_like(x)
    fetch(0)
    jax.lax.fori_loop(0, blocks, step, 0)
    for late in range(_SLOTS, 0, -1):  # before the next tile reads the same rows
        pl.when(blocks >= late)(functools.partial(left, blocks - late))
    d_queries.q[0, 0] = d_q[...].astype(plan.dtype)
    if d_index is not None:
        d_queries.index_q[0, 0] = d_index[0][...].astype(plan.dtype)
        d_queries.w[0, 0] = parts.as_lanes(d_index[1][...], plan.index_heads, plan.index_heads)


def _visit(plan, entries, queries, given, d_q, d_index):
    """visit(j, keys [block,W], grads) adds what the keys of block j contribute to d_q, d_index and grads [block/8,8,W]."""
    q, d_out, stats = queries.q[0, 0], given.d_out[0, 0], given.stats[0, 0]
    lse = parts.as_column(stats, plan.head_rows)
    through_sum = jnp.sum(d_out.astype(jnp.float32) * given.out[0, 0].astype(jnp.float32), axis=1, keepdims=True)

    def visit(j, keys, grads):
        mask = parts.selected(plan, parts.words(plan, entries, j))
        p = jnp.exp(parts.attention_scores(plan, q, keys, mask) - lse)
        d_p = parts.product(plan, d_out, keys[:, : plan.rank], (1, 1))
        d_scores = (p * (d_p - through_sum) * plan.scale).astype(plan.dtype)
        d_q[...] += parts.product(plan, d_scores, keys[:, : plan.width], (1, 0))
        _add(grads, 0, parts.product(plan, d_scores, q, (0, 0)))
        _add(grads, 0, parts.product(plan, p.astype(plan.dtype), d_out, (0, 0)))
        if d_index is not None:
            d_index_k = _index_loss(plan, queries, stats, keys, mask, parts.mean_over_heads(plan, p), d_index)
            _add(grads, index_start(plan.width), d_index_k)

    return visit


def _index_loss(plan, queries, stats, keys, mask, target, d_index):
    """Adds the gradients of index queries and head weights to d_index; returns those of the index keys, [block,J]."""
    d_index_q, d_w = d_index
    index_q, w = queries.index_q[0, 0], parts.as_column(queries.w[0, 0], plan.index_heads)
    dots, index_k = parts.index_dots(plan, index_q, keys)
    x = parts.index_scores(plan, dots, w)
    q = jnp.where(mask, jnp.exp(x - stats[:, plan.index_lse : plan.index_lse + 1]), 0)
    d_x = (q - target) * stats[:, plan.kl : plan.kl + 1]
    shape = (plan.tile, plan.index_heads, plan.block)
    d_x = jnp.broadcast_to(d_x[:, None], shape).reshape(-1, plan.block)
    d_w[...] += jnp.sum(d_x * jnp.maximum(dots, 0), axis=1, keepdims=True)
    d_dots = (jnp.where(dots > 0, d_x * w, 0) * plan.index_width**-0.5).astype(plan.dtype)
    d_index_q[...] += parts.product(plan, d_dots, index_k, (1, 0))
    return parts.product(plan, d_dots, index_q, (0, 0))


def _add(grads, start, x):
    """grads [block/8,8,W] += x [block,_] from lane `start` on."""
    steps, sublanes, _ = grads.shape
    grads[:, :, start : start + x.shape[1]] += x.reshape(steps, sublanes, -1)
