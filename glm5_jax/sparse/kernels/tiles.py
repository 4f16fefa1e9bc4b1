"""What the attention kernels read: lists of the keys that a tile of neighbouring queries selected, and rows with those keys.

Neighbouring queries select many of the same keys, so each key that at least one query of a tile selected is fetched once
(tpu.md section 5). A list entry is `position << SHIFT | word`; bit i of the word says that query i of the tile selected it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SHIFT = 8  # bits of a word, so at most 8 queries a tile
MOST_KEYS = 1 << 31 - SHIFT  # positions that fit above a word
_LANES = 128
_END = 2**31 - 1  # sorts behind every entry


class Lists(NamedTuple):
    """The union of the selections of each tile.

    Attributes:
      entries: int32 [B,tiles,L/l,l], l = min(block, 128), positions ascending. Behind the real entries come positions
        S, S+1, ... with word 0, so that every block has `block` different rows to fetch.
      blocks: int32 [B,tiles,1,1], how many blocks of entries are to be read, at least 1.
    """

    entries: jax.Array
    blocks: jax.Array


def union_lists(selected: jax.Array, n_keys: int, tile: int, block: int, chunk: int) -> Lists:
    """Lists of `tile` queries each.

    Args:
      selected: int32 [B,T,K], T a multiple of tile; the positions of a query differ, those outside [0,S) count as none.
      n_keys: S. tile: a power of two, at most SHIFT. block: entries that a kernel handles at once. chunk: queries whose
      selections are sorted at the same time.
    """
    b, t, k = selected.shape
    lanes = min(block, _LANES)
    length = _up(tile * k, block)

    def one_tile(chosen):
        return _union(chosen, n_keys, length, block)

    chosen = selected.reshape(b * t // tile, tile, k)
    entries, blocks = jax.lax.map(one_tile, chosen, batch_size=max(1, chunk // tile))
    return Lists(entries.reshape(b, t // tile, length // lanes, lanes), blocks.reshape(b, t // tile, 1, 1))


def _union(chosen, n_keys, length, block):
    """(entries int32 [length], blocks int32 []) of the selections chosen int32 [tile,K] of one tile."""
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
    entries = jnp.where(slot < count, entries, n_keys + slot % block << SHIFT)
    return entries, jnp.maximum(1, (count + block - 1) // block)


def _ahead(x, step):
    """x moved forward by step places, -1 at the end."""
    return jnp.concatenate([x[step:], jnp.full_like(x[:step], -1)])


def index_start(width: int) -> int:
    """Where the index key starts in a row: the latent is padded to whole lanes."""
    return _up(width, _LANES)


def row_width(width: int, index_width: int, dtype) -> int:
    """Numbers in a row with a latent of width R+P and an index key of width J (0 for none)."""
    return _up(index_start(width) + index_width, _LANES if dtype == jnp.float32 else 2 * _LANES)


def row_count(n_keys: int, block: int) -> int:
    """Rows of S keys and of the `block` zero rows that the ends of lists point to."""
    return _up(n_keys + block, 8)


def pack_rows(latent: jax.Array, index_k: jax.Array | None, block: int) -> jax.Array:
    """Rows that a kernel can copy one by one.

    A copy of a single row at a dynamic index is legal for 32-bit numbers only (tpu.md section 3.2), so numbers i and
    i + W/2 of a bfloat16 row share a word: unpacking gives two halves that lie one behind the other.

    Args:
      latent: [B,S,R+P]. index_k: [B,S,J] or None; both float32 or both bfloat16.
    Returns:
      float32 [B,S',W] or int32 [B,S',W/2], W from `row_width`: latent, zeros, index key from `index_start`, zeros; rows
      behind S are zero.
    """
    b, s, width = latent.shape
    total = row_width(width, 0 if index_k is None else index_k.shape[-1], latent.dtype)
    rows = jnp.zeros((b, row_count(s, block), total), latent.dtype).at[:, :s, :width].set(latent)
    if index_k is not None:
        start = index_start(width)
        rows = rows.at[:, :s, start : start + index_k.shape[-1]].set(index_k)
    if latent.dtype == jnp.float32:
        return rows
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(bits, 2, axis=-1)
    return jax.lax.bitcast_convert_type(high << 16 | low, jnp.int32)


def unpack_rows(rows: jax.Array) -> jax.Array:
    """The numbers of rows from `pack_rows`: float32 [...,W] as it is, int32 [...,W/2] as bfloat16 [...,W]. Exact."""
    if rows.dtype == jnp.float32:
        return rows
    halves = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in (rows << 16, rows & jnp.int32(-(1 << 16)))]
    return jnp.concatenate(halves, axis=-1).astype(jnp.bfloat16)


def _up(n, multiple):
    return -(-n // multiple) * multiple
