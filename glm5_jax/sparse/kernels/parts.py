"""What the forward and the backward kernel of `attend` share: sizes, operands, the walk over a tile's keys, and scores.

Heads come before queries, as in the products that make and use the arrays. Inside a kernel a tile is a matrix: row
h * g + i belongs to head h of query i of g; keys lie on the lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from glm5_jax.sparse.kernels.tiles import LANES, SHIFT, Lists, index_start, row_lines, row_width, unpack_rows
from glm5_jax.sparse.topk import MASKED

# v4 and v5p run a parallel grid dimension on both cores of the chip, which share HBM; elsewhere one core does both halves.
CORES = 2


class Plan(NamedTuple):
    """Sizes and settings of a call, all static.

    Attributes:
      tile: g, queries that share a list. block: keys handled at once. heads: N. rank: R. width: R+P.
      index_heads: I, 0 where no indexer loss is asked for. index_width: J. dtype: of queries and keys.
      scale: factor on q.k. interpret: as in `pl.pallas_call`.
    """

    tile: int
    block: int
    heads: int
    rank: int
    width: int
    index_heads: int
    index_width: int
    dtype: jnp.dtype
    scale: float
    interpret: object

    @property
    def matrix(self) -> int:
        """Rows of a tile's matrix of scores."""
        return self.heads * self.tile

    @property
    def row(self) -> int:
        """Numbers in a key's row."""
        return row_width(self.width, self.index_width, self.dtype)

    @property
    def key_lines(self) -> int:
        """Lines of a key's row."""
        return row_lines(self.width, self.index_width, self.dtype)

    @property
    def gradient_lines(self) -> int:
        """Lines of a key's gradient, float32 in the order of the row."""
        return self.row // LANES

    @property
    def stats(self) -> int:
        """Lanes of the statistics of a query: log-sum-exp of each head, then the three columns below."""
        return -(-(self.heads + 3) // LANES) * LANES

    @property
    def index_lse(self) -> int:
        """Column with the log-sum-exp of the index scores."""
        return self.heads

    @property
    def kl(self) -> int:
        """Column with the indexer's loss; in the backward pass its cotangent."""
        return self.heads + 1

    @property
    def top(self) -> int:
        """Column with the largest attention logit."""
        return self.heads + 2


class Queries(NamedTuple):
    """The query side, tiles a multiple of CORES: q [B,N,tiles,g,R+P]; index_q [B,I,tiles,g,J] and w float32 [B,tiles,g,I],
    or None.

    Tiles have their own axis because memory may come in tiles of 16 rows (7x), of which g would be no multiple.
    """

    q: jax.Array
    index_q: jax.Array | None
    w: jax.Array | None


def in_tiles(plan: Plan, x):
    """[..,tiles,g,_] of x [..,T,_]."""
    return _row_major(x).reshape(*x.shape[:-2], -1, plan.tile, x.shape[-1])


def joined(x):
    """[..,T,_] of x [..,tiles,g,_]."""
    return _row_major(x.reshape(*x.shape[:-3], -1, x.shape[-1]))


def _row_major(x):
    """x as the kernels want it in memory: XLA does not see that through a change of shape, and would copy."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def own(tree):
    """Block specs in a grid [B,CORES,tiles/CORES]: what belongs to a tile in arrays [B,n,tiles,g,_] or [B,tiles,g,_]."""

    def spec(x):
        heads, tiles, *rest = x.shape[1:-3], *x.shape[-3:]
        at = lambda b, c, t: (b, *(0 for _ in heads), c * (tiles // CORES) + t, 0, 0)  # noqa: E731
        return pl.BlockSpec((1, *heads, 1, *rest), at)

    return jax.tree.map(spec, tree)


def only(ref):
    """The one tile in a block of `own`: where to read or write [n,g,_] or [g,_]."""
    return ref.at[0, 0] if ref.ndim == 4 else ref.at[0, :, 0]


def lists_operands(plan: Plan, lists: Lists):
    """((scalars, vectors), their block specs): the same lists, where a kernel reads addresses and where it reads masks."""
    b, tiles = lists.blocks.shape[:2]
    length = lists.entries.size // (b * tiles)
    lanes = min(plan.block, LANES)
    per_core = tiles // CORES

    def spec(*shape, **where):
        return pl.BlockSpec((1, 1, *shape), lambda b, c, t: (b, c * per_core + t, 0, 0), **where)

    entries = pl.BlockSpec((length,), lambda b, c, t: (b * tiles + c * per_core + t,), memory_space=pltpu.SMEM)
    scalars = Lists(entries, spec(1, 1, memory_space=pltpu.SMEM))
    vectors = lists.entries.reshape(b, tiles, length // lanes, lanes)
    return (lists, vectors), (scalars, spec(length // lanes, lanes))


def for_rows(plan: Plan, entries, j, act, unroll: bool):
    """Calls act(position, i) for the keys i of block j.

    Args:
      unroll: writes all calls out. Starting a copy takes scalar instructions; written out, with buffers that differ from
        those of the computation around them, the compiler puts them beside its vector instructions.
    """

    def one(i, _):
        act(entries[j * plan.block + i] >> SHIFT, i)
        return 0

    jax.lax.fori_loop(0, plan.block, one, 0, unroll=plan.block if unroll else 8)


def block_buffers(plan: Plan, lines: int, dtype) -> list:
    """VMEM for two blocks of rows: while one is computed with, the other one arrives or leaves."""
    return [pltpu.VMEM((plan.block * lines, LANES), dtype)] * 2


def lines_of(array, row, lines: int, first: int = 0, count: int | None = None):
    """Where (some of) the lines of a row are in an array [rows*lines,128]."""
    return array.at[pl.ds(row * lines + first, count or lines)]


def wait_for(buffer, semaphore):
    """Waits until as many bytes as the buffer has were copied."""
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def read_keys(plan: Plan, buffer):
    """Keys [block,W] in a buffer whose rows begin with a row of `tiles.pack_rows`."""
    words = [read_line(plan, buffer, i) for i in range(plan.key_lines)]
    return unpack_rows(jnp.concatenate(words, axis=-1), plan.dtype)


def read_line(plan: Plan, buffer, i: int):
    """[block,128]: line i of all rows of a buffer."""
    return buffer[pl.ds(i, plan.block, buffer.shape[0] // plan.block), :]


def write_gradients(plan: Plan, after, before, found: list):
    """Fills the buffer `after` with the gradients of a block: those in `before`, behind the keys, plus what was found.

    Args:
      found: (first lane, a multiple of 128; x float32 [block,_]) pairs.
    """
    for i in range(plan.gradient_lines):
        total = jax.lax.bitcast_convert_type(read_line(plan, before, plan.key_lines + i), jnp.float32)
        for start, x in found:
            lane = i * LANES - start
            if 0 <= lane < x.shape[1]:
                part = x[:, lane : lane + LANES]
                total += jnp.pad(part, ((0, 0), (0, LANES - part.shape[1])))
        after[pl.ds(i, plan.block, plan.gradient_lines), :] = jax.lax.bitcast_convert_type(total, jnp.int32)


def words(plan: Plan, vectors, j):
    """int32 [1,block]: which queries selected the keys of block j."""
    lines = plan.block // vectors.shape[-1]
    row = jnp.concatenate([vectors[0, 0, pl.ds(j * lines + i, 1), :] for i in range(lines)], axis=-1)
    return row & ((1 << SHIFT) - 1)


def selected(plan: Plan, word):
    """bool [g,block] of words [1,block]: query i selected the key."""
    bit = jax.lax.broadcasted_iota(jnp.int32, (plan.tile, plan.block), 0)
    return (word >> bit) & 1 != 0


def product(plan: Plan, a, b, over: tuple[int, int]):
    """float32 product of matrices over axis over[0] of a and over[1] of b."""
    precision = jax.lax.Precision.HIGHEST if plan.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def attention_scores(plan: Plan, q, keys, mask):
    """float32 [N*g,block], `MASKED` where mask [g,block] is false."""
    scores = product(plan, q, keys[:, : plan.width], (1, 1)) * plan.scale
    return flat(jnp.where(mask, by_head(scores, plan.heads), MASKED))


def flat(x):
    """The matrix [n*g,_] of x [n,g,_]."""
    return x.reshape(-1, x.shape[-1])


def by_head(x, n: int):
    """[n,g,_] of the matrix x [n*g,_]."""
    return x.reshape(n, -1, x.shape[-1])


def mean_over_heads(plan: Plan, p):
    """float32 [g,block] of the attention probabilities p [N*g,block]."""
    return jnp.sum(by_head(p, plan.heads), axis=0) * (1 / plan.heads)


def index_dots(plan: Plan, index_q, keys):
    """(dots float32 [I*g,block], index keys [block,J]): index queries times index keys."""
    start = index_start(plan.width)
    index_k = keys[:, start : start + plan.index_width]
    return product(plan, index_q, index_k, (1, 1)) * plan.index_width**-0.5, index_k


def index_scores(plan: Plan, dots, w):
    """float32 [g,block] of dots [I*g,block] and head weights as a column w [I*g,1]."""
    return jnp.sum(by_head(jnp.maximum(dots, 0) * w, plan.index_heads), axis=0)


def as_column(x, n: int):
    """[n*g,1] with the first n lanes of x [g,lanes] under each other."""
    spread = jnp.where(_same(n, *x.shape), x, 0)
    return flat(jnp.sum(spread, axis=2, keepdims=True))


def as_lanes(column, n: int, lanes: int):
    """[g,lanes] of a column [n*g,1], the inverse of `as_column`; zeros behind."""
    x = by_head(column, n)
    return jnp.sum(jnp.where(_same(n, x.shape[1], lanes), x, 0), axis=0)


def _same(n, g, lanes):
    shape = (n, g, lanes)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 2)


def set_column(x, column: int, value):
    """x [g,lanes] with a column replaced by value [g,1]."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == column, value, x)


def compiler_params(tiles: str) -> pltpu.CompilerParams:
    """Parameters of both kernels; tiles: semantics of the grid dimension over the tiles of a core."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", tiles),
        # Blocks of queries come twice, and matrices of scores do not fit into registers. A core of v5p and 7x has 64 MiB.
        vmem_limit_bytes=56 << 20,
        # Checks cost as much as the row copies themselves; `tiles.union_lists` makes no position outside the rows.
        disable_bounds_checks=True,
    )
