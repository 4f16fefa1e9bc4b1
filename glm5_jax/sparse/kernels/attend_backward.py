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
from glm5_jax.sparse.kernels.tiles import LANES, Lists, index_start


class Given(NamedTuple):
    """What the forward pass leaves, and the cotangents.

    Attributes:
      out: [B,N,tiles,g,R]. d_out: likewise. stats: float32 [B,tiles,g,lanes], its column `kl` the cotangent of the loss.
    """

    out: jax.Array
    d_out: jax.Array
    stats: jax.Array


def backward(plan: Plan, queries: Queries, given: Given, rows: jax.Array, lists: Lists) -> tuple[Queries, jax.Array]:
    """Gradients of the queries, and float32 [B,S',lanes] of the keys in the order of a row (see `tiles.pack_rows`)."""
    b, tiles = lists.blocks.shape[:2]
    lists, lists_specs = parts.lists_operands(plan, lists)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    ledger = jnp.pad(rows, ((0, 0), (0, 0), (0, plan.gradient_lines * LANES)))
    ledger = jnp.broadcast_to(ledger[:, None], (b, CORES, *ledger.shape[1:])).reshape(b, CORES, -1, LANES)
    operands = (*lists, queries, given, ledger)
    d_queries, ledger = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(b, CORES, tiles // CORES),
        in_specs=[*lists_specs, parts.own(queries), parts.own(given), in_hbm],
        out_specs=(parts.own(queries), in_hbm),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (queries, ledger)),
        input_output_aliases=_aliases(operands, queries, ledger),
        scratch_shapes=dict(
            before=parts.block_buffers(plan, plan.key_lines + plan.gradient_lines, jnp.int32),
            after=parts.block_buffers(plan, plan.gradient_lines, jnp.int32),
            read=pltpu.SemaphoreType.DMA((2,)), written=pltpu.SemaphoreType.DMA((2,)),
            d_q=pltpu.VMEM((plan.matrix, plan.width), jnp.float32), d_index=_index_scratch(plan),
        ),
        compiler_params=parts.compiler_params("arbitrary"),
        interpret=plan.interpret,
        name="attend_backward",
    )(*operands)  # fmt: skip
    found = ledger.reshape(b, CORES, rows.shape[1], -1)[..., plan.key_lines * LANES :]
    return d_queries, jnp.sum(jax.lax.bitcast_convert_type(found, jnp.float32), axis=1)


def _aliases(operands, queries, ledger):
    """Gradients take the places of queries, whose blocks are read before, and the ledger its own."""
    places = [id(x) for x in jax.tree.leaves(operands)]
    return {places.index(id(x)): i for i, x in enumerate(jax.tree.leaves((queries, ledger)))}


def _index_scratch(plan):
    """VMEM for the gradients of index queries and head weights."""
    lines = plan.tile * plan.index_heads
    return [pltpu.VMEM(x, jnp.float32) for x in ((lines, plan.index_width), (lines, 1))] if lines else []


def _kernel(
    plan, lists, vectors, queries, given, _, d_queries, ledger, *, before, after, read, written, d_q, d_index
):
    batch, core, blocks = pl.program_id(0), pl.program_id(1), lists.blocks[0, 0, 0, 0]
    last = lists.entries.shape[0] // plan.block - 1  # a block of zero rows that no other block names
    visit = _visit(plan, vectors, queries, given, d_q, d_index)
    lines = plan.key_lines + plan.gradient_lines

    def fetch(side):
        """Starts the copy of a key and its gradient so far."""

        def start(position, i):
            row = parts.lines_of(ledger.at[batch, core], position, lines)
            pltpu.make_async_copy(row, parts.lines_of(before[side], i, lines), read.at[side]).start()

        return start

    def put(side):
        """Starts the copy of a key's new gradient."""

        def start(position, i):
            row = parts.lines_of(ledger.at[batch, core], position, lines, plan.key_lines, plan.gradient_lines)
            of = parts.lines_of(after[side], i, plan.gradient_lines)
            pltpu.make_async_copy(of, row, written.at[side]).start()

        return start

    def one(j, side):
        parts.wait_for(before[side], read.at[side])
        parts.for_rows(plan, lists.entries, j + 1, fetch(1 - side), unroll=True)
        # Not right after block j - 1, so that the copies start during the products of block j.
        parts.for_rows(plan, lists.entries, jnp.where(j > 0, j - 1, last), put(1 - side), unroll=True)
        found = visit(j, parts.read_keys(plan, before[side]))
        left = functools.partial(parts.wait_for, after[side], written.at[side])
        if side == 1:
            left()
        else:
            pl.when(j > 0)(left)  # nothing left this side before the first block
        parts.write_gradients(plan, after[side], before[side], found)

    def two(i, carry):
        one(2 * i, 0)
        one(2 * i + 1, 1)
        return carry

    for x in (d_q, *d_index):
        x[...] = jnp.zeros_like(x)
    parts.for_rows(plan, lists.entries, 0, fetch(0), unroll=False)
    jax.lax.fori_loop(0, blocks // 2, two, 0)
    parts.for_rows(plan, lists.entries, jnp.where(blocks > 0, blocks - 1, last), put(1), unroll=False)
    parts.wait_for(before[0], read.at[0])
    pl.when(blocks > 0)(lambda: parts.wait_for(after[0], written.at[0]))
    parts.wait_for(after[1], written.at[1])  # before the next tile reads the same rows
    parts.only(d_queries.q)[...] = parts.by_head(d_q[...], plan.heads).astype(plan.dtype)
    if d_index:
        d_index_q = parts.by_head(d_index[0][...], plan.index_heads)
        parts.only(d_queries.index_q)[...] = d_index_q.astype(plan.dtype)
        parts.only(d_queries.w)[...] = parts.as_lanes(d_index[1][...], plan.index_heads, plan.index_heads)


def _visit(plan, vectors, queries, given, d_q, d_index):
    """visit(j, keys [block,W]) adds to d_q and d_index and returns the gradients of block j.

    They are a list of (first lane in the row, float32 [block,_]), to be added up.
    """
    q, d_out, out = (parts.flat(parts.only(x)[...]) for x in (queries.q, given.d_out, given.out))
    stats = parts.only(given.stats)[...]
    lse = parts.as_column(stats, plan.heads)
    through_sum = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=1, keepdims=True)

    def visit(j, keys):
        mask = parts.selected(plan, parts.words(plan, vectors, j))
        p = jnp.exp(parts.attention_scores(plan, q, keys, mask) - lse)
        d_p = parts.product(plan, d_out, keys[:, : plan.rank], (1, 1))
        d_scores = (p * (d_p - through_sum) * plan.scale).astype(plan.dtype)
        d_q[...] += parts.product(plan, d_scores, keys[:, : plan.width], (1, 0))
        d_latent = parts.product(plan, d_scores, q, (0, 0))
        d_value = parts.product(plan, p.astype(plan.dtype), d_out, (0, 0))
        if not d_index:
            return [(0, d_latent), (0, d_value)]
        d_index_k = _index_loss(plan, queries, stats, keys, mask, parts.mean_over_heads(plan, p), d_index)
        return [(0, d_latent), (0, d_value), (index_start(plan.width), d_index_k)]

    return visit


def _index_loss(plan, queries, stats, keys, mask, target, d_index):
    """Adds the gradients of index queries and head weights to d_index; returns those of the index keys, [block,J]."""
    d_index_q, d_w = d_index
    index_q = parts.flat(parts.only(queries.index_q)[...])
    w = parts.as_column(parts.only(queries.w)[...], plan.index_heads)
    dots, index_k = parts.index_dots(plan, index_q, keys)
    x = parts.index_scores(plan, dots, w)
    q = jnp.where(mask, jnp.exp(x - stats[:, plan.index_lse : plan.index_lse + 1]), 0)
    d_x = (q - target) * stats[:, plan.kl : plan.kl + 1]
    d_x = parts.flat(jnp.broadcast_to(d_x, (plan.index_heads, *d_x.shape)))
    d_w[...] += jnp.sum(d_x * jnp.maximum(dots, 0), axis=1, keepdims=True)
    d_dots = (jnp.where(dots > 0, d_x * w, 0) * plan.index_width**-0.5).astype(plan.dtype)
    d_index_q[...] += parts.product(plan, d_dots, index_k, (1, 0))
    return parts.product(plan, d_dots, index_q, (0, 0))
