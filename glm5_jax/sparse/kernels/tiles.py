"""What the attention kernels read: lists of the keys that a tile of neighbouring queries selected, and rows with those keys.

Neighbouring queries select many of the same keys, so each key that at least one query of a tile selected is fetched once.
A list entry is `position << SHIFT | word`; bit i of the word says that query i of the tile selected it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SHIFT = 8  # bits of a word, so at most 8 queries a tile
MOST_KEYS = 1 << 31 - SHIFT  # positions that fit above a word
LANES = 128
_END = 2**31 - 1  # sorts behind every entry


class Lists(NamedTuple):
    """The union of the selections of each tile.

    Attributes:
      entries: int32 [B*tiles*L], L from `list_length`; those of a tile ascend. Behind them come entries with word 0 whose
        positions S, S+1, ... name zero rows. They differ within a block and in neighbouring blocks, and the last block of
        a list shares none with any other.
      blocks: int32 [B,tiles,1,1], how many blocks of entries are to be read, an even number.
    """

    entries: jax.Array
    blocks: jax.Array


def list_length(tile: int, k: int, block: int) -> int:
    """Entries of a list: room for all selections, one block of zero rows, and what the tiling of 1D memory asks for."""
    return _up(_up(tile * k, 2 * block) + block, max(1024, block))


def union_lists(selected: jax.Array, n_keys: int, tile: int, block: int, chunk: int) -> Lists:
    """Lists of `tile` queries each.

    Args:
      selected: int32 [B,T,K], T a multiple of tile; the positions of a query differ, those outside [0,S) count as none.
      n_keys: S. tile: a power of two, at most SHIFT. block: entries that a kernel handles at once, a power of two.
      chunk: queries whose selections are sorted at the same time.
    """
    b, t, k = selected.shape
    length = list_length(tile, k, block)
    chosen = selected.reshape(b * t // tile, tile, k)
    entries, blocks = jax.lax.map(
        lambda chosen: _union(chosen, n_keys, length, block), chosen, batch_size=max(1, chunk // tile)
    )
    return Lists(entries.reshape(-1), blocks.reshape(b, t // tile, 1, 1))


def _union(chosen, n_keys, length, block):
    """(entries int32 [length/128,128], blocks int32 []) of the selections chosen int32 [tile,K] of one tile."""
    tile = chosen.shape[0]
    real = (chosen >= 0) & (chosen < n_keys)
    pairs = jnp.where(real, chosen * tile + jnp.arange(tile, dtype=jnp.int32)[:, None], _END).reshape(-1)
    pairs = jax.lax.sort(pairs, is_stable=False)
    position, word = pairs >> tile.bit_length() - 1, 1 << (pairs & tile - 1)
    step = 1
    while step < tile:  # a key has at most `tile` equal neighbours; each pass joins twice as many
        word |= jnp.where(_ahead(position, step) == position, _ahead(word, step), 0)
        step *= 2
    first = (pairs != _END) & (position != jnp.concatenate([jnp.array([-1], jnp.int32), position[:-1]]))
    entries = jax.lax.sort(jnp.where(first, position << SHIFT | word, _END), is_stable=False)
    count = jnp.sum(first, dtype=jnp.int32)
    slot = jnp.arange(length, dtype=jnp.int32)
    entries = jnp.pad(entries, (0, length - len(entries)))
    empty = jnp.where(slot < length - block, slot % (2 * block), 2 * block + slot % block)
    entries = jnp.where(slot < count, entries, n_keys + empty << SHIFT)
    # In lines of 128 the chunks that are stacked already lie in memory as the whole flat array does.
    return entries.reshape(-1, LANES), (count + 2 * block - 1) // (2 * block) * 2


def _ahead(x, step):
    """x moved forward by step places, -1 at the end."""
    return jnp.concatenate([x[step:], jnp.full_like(x[:step], -1)])


def index_start(width: int) -> int:
    """Where the index key starts in a row: the latent is padded to whole lanes."""
    return _up(width, LANES)


def row_width(width: int, index_width: int, dtype) -> int:
    """Numbers in a key's row with a latent of width R+P and an index key of width J (0 for none)."""
    return _up(index_start(width) + index_width, LANES if dtype == jnp.float32 else 2 * LANES)


def row_count(n_keys: int, block: int) -> int:
    """Rows of S keys and the zero rows that the ends of lists name."""
    return n_keys + 3 * block


def row_lines(width: int, index_width: int, dtype) -> int:
    """Lines of 128 words that a key's row fills."""
    return row_width(width, index_width, dtype) * jnp.dtype(dtype).itemsize // (4 * LANES)


def pack_rows(latent: jax.Array, index_k: jax.Array | None, block: int) -> jax.Array:
    """Rows that a kernel can copy one by one.

    Copies from any row on are legal for 32-bit numbers in lines of 128, which lie one behind the other in memory. So
    numbers i and i + W/2 of a bfloat16 row share a word: unpacking gives two halves that lie one behind the other.

    Args:
      latent: [B,S,R+P]. index_k: [B,S,J] or None; both float32 or both bfloat16.
    Returns:
      int32 [B,S',w], the bits of rows. A row of W numbers (`row_width`) is latent, zeros, index key from `index_start`,
      zeros; behind S there are zero rows. w is W for float32 and W/2 for bfloat16.
    """
    b, s, width = latent.shape
    rows = _widen(latent, index_start(width))
    if index_k is not None:
        rows = jnp.concatenate([rows, index_k], axis=-1)
    rows = _widen(rows, row_width(width, 0 if index_k is None else index_k.shape[-1], latent.dtype))
    rows = jnp.pad(rows, ((0, 0), (0, row_count(s, block) - s), (0, 0)))
    if latent.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(rows, jnp.int32)
    low, high = jnp.split(jax.lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32), 2, axis=-1)
    return jax.lax.bitcast_convert_type(high << 16 | low, jnp.int32)


def _widen(x, width):
    """x with zeros behind its last axis."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


def unpack_rows(words: jax.Array, dtype) -> jax.Array:
    """The numbers [...,W] of words from `pack_rows`, int32 [...,W] for float32, [...,W/2] for bfloat16. Exact."""
    if dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    halves = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in (words << 16, words & jnp.int32(-(1 << 16)))]
    return jnp.concatenate(halves, axis=-1).astype(dtype)


def _up(n, multiple):
    return -(-n // multiple) * multiple
