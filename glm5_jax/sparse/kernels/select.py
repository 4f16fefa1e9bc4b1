"""Index scores and exact top-k in one TPU kernel: what `reference.select` defines, without a score ever leaving VMEM.

One program handles a block of queries, in three passes over the keys that any of them can see:

1. score: keys come from HBM block by block; each score becomes an int32 of the same order, kept in VMEM.
2. threshold: the K-th largest of each query by bisection over the 32 bits, a counting pass each.
3. compact: positions above the threshold, and the lowest of those equal to it, are packed in ascending order.

Mosaic has neither sort nor cumulative sum, and indexes nothing wider than a vector register. So
ranks within a register are a product with a triangular matrix of ones, and what stands in a place of the answer is
found by bisection over the ranks, with lookups inside the register.

libtpu's schedule for v5p, cycles for 32 queries x 1,024 keys at GLM-5's widths: score 2,100 (2,048 is what the products
alone take), threshold 31 for each of at most 33 passes, compact 1,110 and 20 for each tile of the answer reached.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows
from glm5_jax.sparse.topk import MASKED

LANES = 128
KEY_BLOCK = 1024  # keys handled at once: compaction waits for lookups with fewer, and its registers spill with more
QUERY_BLOCKS = (32, 16)  # 32 queries do 1,024 FLOP for each byte of bf16 keys, more than any TPU needs; 16 is a bf16 tile
VMEM_BYTES = 56 << 20  # of the 64 MiB a core of v5p and 7x has; v5e and v6e have 128
SMEM_BYTES = 512 << 10  # of 1 MiB, for the key blocks that each program visits
UNSEEN = -(2**31)  # stands for what may not be selected; no score maps to it


def select(index: Index, rows: Rows, key_segment: jax.Array, k: int, chunk: int = 32, *, interpret=False) -> jax.Array:
    """The k best visible keys of each query, as `reference.select`.

    Args:
      index: q and k bfloat16 or float32, w float32. rows, key_segment: see `reference.select`. k: K.
      chunk: at most this many queries are handled at once; less than 16 counts as 16, and VMEM never holds more than 32.
      interpret: True or `pltpu.InterpretParams` runs the kernel without a TPU.
    Returns:
      int32 [B,T,min(K,S)], positions in ascending order, -1 for none; ties go to the lowest position. No gradient.
    Raises:
      ValueError: for shapes or dtypes that `why_not` names.
    """
    if reason := why_not(index, k):
        raise ValueError(f"the Pallas selection does not take this call: {reason}")
    index = jax.lax.stop_gradient(index)
    batch, t, heads, width = index.q.shape
    s = index.k.shape[1]
    block = query_block(index, k, chunk)
    n_blocks, unit, wide, slots = pl.cdiv(t, block), _key_block(s), _up(width, LANES), _up(min(k, s), LANES)
    q = _pad(index.q, 3, wide)  # zeros do not change dots
    keys = _pad(_pad(index.k, 2, wide), 1, unit)
    key_segment = _pad(key_segment, 1, unit)
    per_query = _pad(_per_query(index.w * width**-0.5, rows), 1, block)
    first, end = _reach(per_query[..., heads], per_query[..., heads + 1], key_segment, block, unit)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, n_blocks),
        in_specs=[
            pl.BlockSpec((1, block, heads, wide), lambda b, i, *_: (b, i, 0, 0)),
            pl.BlockSpec((1, block, heads + 2), lambda b, i, *_: (b, i, 0)),
            pl.BlockSpec((1, keys.shape[1] // LANES, LANES), lambda b, i, *_: (b, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((1, block, slots), lambda b, i, *_: (b, i, 0)),
        scratch_shapes=[
            pltpu.VMEM((heads * block, wide), q.dtype),
            pltpu.VMEM((keys.shape[1] // LANES, block, LANES), jnp.int32),
            pltpu.VMEM((2, unit, wide), q.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    out = pl.pallas_call(
        functools.partial(_kernel, k=min(k, s)),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((batch, t, slots), jnp.int32),
        # The default of 16 MiB holds the scores of 32 queries for 100,000 keys at best; this kernel takes what it needs.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_vmem_bytes(index, k, block)
        ),
        interpret=interpret,
        name="dsa_select",
    )(first, end, q, per_query, key_segment.reshape(batch, -1, LANES), keys)
    return out[..., : min(k, s)]


def why_not(index: Index, k: int) -> str | None:
    """Why the kernel cannot take these shapes and dtypes, or None if it can."""
    if index.q.dtype not in (jnp.bfloat16, jnp.float32) or index.k.dtype != index.q.dtype:
        return f"index queries and keys must both be bfloat16 or float32, not {index.q.dtype} and {index.k.dtype}"
    if index.w.dtype != jnp.float32:
        return f"index head weights must be float32, not {index.w.dtype}"
    least = QUERY_BLOCKS[-1]
    if (need := _vmem_bytes(index, k, least)) > VMEM_BYTES:
        return f"S {index.k.shape[1]} with K {k} needs {need >> 20} MiB of VMEM, {VMEM_BYTES >> 20} may be used"
    batch, t = index.q.shape[:2]
    if 8 * batch * pl.cdiv(t, least) > SMEM_BYTES:
        return f"B {batch} x T {t} is more than the {SMEM_BYTES // 8 * least} queries of one call"
    return None


def query_block(index: Index, k: int, chunk: int) -> int:
    """Queries of one program: the most that chunk allows and VMEM holds."""
    fits = [n for n in QUERY_BLOCKS if n <= chunk and _vmem_bytes(index, k, n) <= VMEM_BYTES]
    return (fits or QUERY_BLOCKS[-1:])[0]


def _vmem_bytes(index: Index, k: int, block: int) -> int:
    """VMEM of a program with this many queries."""
    heads, wide, s = _up(index.q.shape[2], 16), _up(index.q.shape[3], LANES), index.k.shape[1]
    unit, item = _key_block(s), index.q.dtype.itemsize
    scores = block * _up(s, unit) * 4
    dots = block * heads * unit * 4
    queries = 3 * block * heads * wide * item  # two buffers of the pipeline, and heads first
    keys = 2 * unit * wide * item
    out = 2 * block * _up(min(k, s), LANES) * 4
    segments = 2 * _up(s, unit) * 4
    return scores + 2 * dots + queries + keys + out + segments + (4 << 20)  # the rest: spilled registers, small blocks


def _key_block(s: int) -> int:
    return min(KEY_BLOCK, _up(s, LANES))


def _up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """x with zeros up to a multiple along an axis."""
    short = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)]) if short else x


def _per_query(w: jax.Array, rows: Rows) -> jax.Array:
    """int32 [B,T,I+2]: bits of the head weights, slot, segment. In one array, since each is padded to 128 lanes in HBM."""
    w = jax.lax.bitcast_convert_type(w, jnp.int32)
    return jnp.concatenate([w, rows.slot[..., None], rows.segment[..., None]], axis=-1)


def _reach(slot, segment, key_segment, block: int, unit: int) -> tuple[jax.Array, jax.Array]:
    """Which key blocks any query of a block can see.

    Args:
      slot, segment: int32 [B,T]. key_segment: int32 [B,S]; T and S are multiples of block and unit.
    Returns:
      (first, end) int32 [B * T/block]: visible keys lie in key blocks first to end - 1.
    """

    def span(segment, size):  # smallest and largest segment of each block, padding left out
        segment = segment.reshape(segment.shape[0], -1, size)
        least = jnp.min(jnp.where(segment == 0, 2**31 - 1, segment), axis=-1)
        return least, jnp.max(jnp.where(segment == 0, UNSEEN, segment), axis=-1)

    least, most = span(segment, block)
    key_least, key_most = span(key_segment, unit)
    latest = jnp.max(jnp.where(segment == 0, -1, slot).reshape(*least.shape, block), axis=-1)
    starts = jnp.arange(key_least.shape[1], dtype=jnp.int32) * unit
    seen = (key_least[:, None] <= most[..., None]) & (key_most[:, None] >= least[..., None]) & (starts <= latest[..., None])
    number = jnp.arange(1, starts.size + 1, dtype=jnp.int32)
    end = jnp.max(jnp.where(seen, number, 0), axis=-1)
    return jnp.minimum(jnp.argmax(seen, axis=-1).astype(jnp.int32), end).reshape(-1), end.reshape(-1)


def _kernel(first, end, q, per_query, key_segment, keys, out, q_by_head, ordered, key_buffer, semaphores, *, k: int):
    """One block of queries.

    Args:
      first, end: int32 [programs] in SMEM, key blocks to visit.
      q: [1,block,I,J]. per_query: int32 [1,block,I+2]. key_segment: int32 [1,S/128,128]. keys: [B,S,J] in HBM.
      out: int32 [1,block,K].
      q_by_head: [I*block,J]. ordered: int32 [S/128,block,128], scores as integers of the same order, by tiles of 128 keys.
      key_buffer: [2,unit,J]. semaphores: of the copies into its halves.
    """
    batch = pl.program_id(0)
    program = batch * pl.num_programs(1) + pl.program_id(1)
    visits = (first[program], end[program])
    block = q.shape[1]
    for h in range(q.shape[2]):
        q_by_head[pl.ds(h * block, block)] = q[0, :, h]
    _score(visits, keys.at[batch], q_by_head, per_query.at[0], key_segment.at[0], ordered, key_buffer, semaphores)
    tiles = key_buffer.shape[1] // LANES
    threshold, ties = _threshold(visits, ordered, tiles, k)
    _compact(visits, ordered, tiles, threshold, ties, out)


def _score(visits, keys, q_by_head, per_query, key_segment, ordered, key_buffer, semaphores):
    """Fills `ordered` for the key blocks of visits; the copy of the next block runs while one is scored."""
    first, end = visits
    unit = key_buffer.shape[1]
    tiles = unit // LANES

    def copy(j):
        source = keys.at[pl.ds(pl.multiple_of(j * unit, unit), unit)]
        half = jax.lax.rem(j, 2)
        return pltpu.make_async_copy(source, key_buffer.at[half], semaphores.at[half])

    @pl.when(first < end)
    def _():
        copy(first).start()

    def body(j, carry):
        @pl.when(j + 1 < end)
        def _():
            copy(j + 1).start()

        copy(j).wait()
        scores = _block_scores(q_by_head, key_buffer[jax.lax.rem(j, 2)], per_query)
        segments = key_segment[pl.ds(pl.multiple_of(j * tiles, tiles), tiles)]
        for u in range(tiles):
            tile = scores[:, u * LANES : (u + 1) * LANES]
            ordered[j * tiles + u] = _order(tile, (j * tiles + u) * LANES, segments[u : u + 1], per_query)
        return carry

    jax.lax.fori_loop(first, end, body, 0)


def _block_scores(q_by_head, keys, per_query) -> jax.Array:
    """Index scores float32 [block,unit] of keys [unit,J]."""
    block = per_query.shape[0]
    heads = q_by_head.shape[0] // block
    # bfloat16 products are exact in float32; the multiplier's several passes are for float32 only.
    precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    dots = jax.lax.dot_general(
        q_by_head[...], keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    w = jax.lax.bitcast_convert_type(per_query[...], jnp.float32)
    scores = jnp.zeros((block, keys.shape[0]), jnp.float32)
    for h in range(heads):
        scores += jnp.maximum(dots[h * block : (h + 1) * block], 0) * w[:, h : h + 1]
    return scores


def _order(scores, start, key_segment, per_query) -> jax.Array:
    """Integers in the order of the scores [block,128] of keys start to start + 127, `UNSEEN` where not selectable."""
    slot, segment = per_query[:, -2:-1], per_query[:, -1:]
    position = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    visible = (position <= slot) & (key_segment == segment) & (segment != 0)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # a tiny sum may be flushed to -0.0
    # Negative floats descend as their bits ascend, so the bits below the sign are turned over.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jnp.where(visible & (scores > MASKED), ordered, UNSEEN)  # NaN compares false


def _threshold(visits, ordered, tiles: int, k: int) -> tuple[jax.Array, jax.Array]:
    """The k-th largest of each query, and how many equal to it are wanted; int32 [block,1].

    A query that sees at most k keys gets (UNSEEN, 0).
    """
    block = ordered.shape[1]

    def count(holds, threshold):
        threshold = jnp.broadcast_to(threshold, (block, LANES))

        def add(j, total):
            return total + jnp.sum(holds(ordered[pl.ds(j * tiles, tiles)], threshold[None]).astype(jnp.int32), axis=0)

        total = jax.lax.fori_loop(*visits, add, jnp.zeros((block, LANES), jnp.int32))
        return jnp.sum(total, axis=1, keepdims=True)

    def unsettled(carry):
        bit, _, reached = carry
        return (bit >= 0) & (jnp.max(jnp.abs(reached - k)) > 0)

    def set_bit(carry):  # the sum wraps around for the sign bit, which turns UNSEEN into 0
        bit, threshold, reached = carry
        higher = threshold + jax.lax.shift_left(jnp.int32(1), bit)
        at_least = count(jnp.greater_equal, higher)
        take = (at_least >= k) & (reached != k)
        return bit - 1, jnp.where(take, higher, threshold), jnp.where(take, at_least, reached)

    lowest = jnp.full((block, 1), UNSEEN, jnp.int32)
    seen = count(jnp.greater, lowest)
    few = seen <= k
    # `reached` counts keys at or above the threshold; k of them settle a query, exact ties take all 32 bits.
    _, threshold, _ = jax.lax.while_loop(unsettled, set_bit, (jnp.int32(31), lowest, jnp.where(few, k, k + 1)))
    return threshold, jnp.where(few, 0, k - count(jnp.greater, threshold))


def _compact(visits, ordered, tiles: int, threshold, ties, out):
    """Writes the positions above the threshold, and the first `ties` of those equal to it, in ascending order."""
    block = threshold.shape[0]
    out[...] = jnp.full(out.shape, -1, jnp.int32)
    lane = jax.lax.broadcasted_iota(jnp.int32, (block, LANES), 1)
    wanted = jnp.broadcast_to(ties, (block, LANES)).astype(jnp.float32)

    def body(j, carry):
        taken, equal = carry
        before = taken
        (above, more), (level, equals) = _ranks(ordered[pl.ds(j * tiles, tiles)], threshold)
        moves = []
        for u in range(tiles):
            tied = jnp.minimum(equal, wanted)
            rank = above[u] + jnp.minimum(equal + level[u], wanted) - tied
            equal = equal + equals[u]
            count = (more[u] + jnp.minimum(equal, wanted) - tied).astype(jnp.int32)
            nth = (lane - taken) & (LANES - 1)  # which of the tile's chosen keys belongs in this lane of the answer
            place = jnp.where(nth < count, (taken + nth) >> 7, -1)
            moves.append((place, (j * tiles + u) * LANES + _find(rank, (nth + 1).astype(jnp.float32))))
            taken = taken + count
        _merge(moves, jnp.min(before), jnp.max(taken), out)
        return taken, equal

    # Running counts stand in all lanes: moving one number into all lanes is what would cost time here.
    jax.lax.fori_loop(*visits, body, (jnp.zeros((block, LANES), jnp.int32), jnp.zeros((block, LANES), jnp.float32)))


def _ranks(ordered, threshold):
    """How many keys of each tile are above and at the threshold; ordered int32 [tiles,block,128].

    Returns:
      two pairs (up to each lane, in the whole tile), float32 like ordered: of keys above, of keys equal.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), axis) for axis in (0, 1))
    ones = jnp.where(row <= column, 1.0, 0.0).astype(jnp.bfloat16)  # a triangle, then ones; counts up to 128 are exact

    def count(flags):
        flags = jnp.where(flags, 1.0, 0.0).astype(jnp.bfloat16).reshape(-1, LANES)
        ranks = jnp.dot(flags, ones, preferred_element_type=jnp.float32)
        return ranks[:, :LANES].reshape(ordered.shape), ranks[:, LANES:].reshape(ordered.shape)

    return count(ordered > threshold[None]), count(ordered == threshold[None])


def _find(rank, wanted) -> jax.Array:
    """The first lane whose rank reaches the wanted one, int32 [block,128]; rank float32 ascends along the lanes."""
    found = jnp.zeros(wanted.shape, jnp.int32)
    for step in (64, 32, 16, 8, 4, 2, 1):
        probe = jnp.take_along_axis(rank, found + (step - 1), axis=1, mode="promise_in_bounds")
        found = jnp.where(probe < wanted, found + step, found)
    return found


def _merge(moves, low, high, out):
    """Puts positions into the tiles of the answer that places low to high - 1 lie in.

    Args:
      moves: pairs (tile of the answer or -1, position), int32 [block,128], in the lanes they belong in.
    """

    def body(m, carry):
        where = pl.ds(pl.multiple_of(m * LANES, LANES), LANES)
        tile = out[0, :, where]
        for place, position in moves:
            tile = jnp.where(place == m, position, tile)
        out[0, :, where] = tile
        return carry

    jax.lax.fori_loop(low >> 7, (high + LANES - 1) >> 7, body, 0)
