"""Attention over all visible keys, in blocks: memory linear in T.

`dense` takes expanded heads (training), `dense_kl` is the indexer's loss over the same keys (warm-up). `dense_latent` takes
the absorbed form, in which all heads read one latent key of width R + P per token (serving).

Scores stand keys by queries in `dense`: on CPU, sums over keys then run over whole vectors, and no product has to turn the
scores around first.
"""

import functools
import importlib
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.compiling import target_platform
from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows, in_query_blocks, real, softmax_weights, visible
from glm5_jax.sparse.topk import MASKED


class Tiles(NamedTuple):
    """How a matrix of scores is cut: queries and keys of a block, heads that are taken at once."""

    queries: int
    keys: int
    heads: int


def dense(q, k, v, rows: Rows, key_segment, scale: float, block: int):
    """Attention to all visible keys, expanded heads.

    Args:
      q: [B,T,N,C+P]. k: [B,S,N,C+P]. v: [B,S,N,V]. rows: where the queries stand, slots ascending. key_segment: int32 [B,S].
      scale: factor on q.k. block: queries handled at once, at most.
    Returns:
      ([B,T,N,V] in v.dtype, logarithm of the softmax's sum float32 or wider [B,T,N], largest attention logit). The last two
      have no gradient. A token without visible keys, padding, gets 0 and `MASKED`/2.
    """
    q, k, v = real(rows.segment, q), real(key_segment, k), real(key_segment, v)
    tiles = _tiles(q.shape[1], q.shape[2], block)
    reason = _kernels().why_not(q, v) if target_platform() == "tpu" else "the kernels are for TPUs"
    if reason is None:
        lanes = _kernels().whole_lanes((tiles.queries, tiles.keys))
        out, lse, top = _kernels().flash(q, k, v, rows, key_segment, scale, lanes)
    else:
        if target_platform() == "tpu":
            warnings.warn(f"dense attention takes the loops of XLA: {reason}", stacklevel=2)
        out, lse, top = _dense(scale, tiles, q, k, v, rows, key_segment)
    return out, jax.lax.stop_gradient(lse), jax.lax.stop_gradient(top)


def _kernels():
    """The Pallas kernels; imported late, because Pallas takes a second to import and only TPUs need it."""
    return importlib.import_module("glm5_jax.sparse.kernels.flash")


def _tiles(t: int, n: int, block: int) -> Tiles:
    """Tiles for T queries of N heads.

    On CPU one head's blocks are small for short rows, where more of the scores are never computed and one core does all, and
    large for long ones, so that a product of two blocks is worth sharing among the cores.
    """
    cpu = target_platform() == "cpu"
    queries = max(1, min(block, 128 if cpu and t < 2048 else 512, t))
    keys = queries * max(1, min(2, t // (4 * queries)))
    return Tiles(queries, keys, 1 if cpu else n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dense(scale, tiles, q, k, v, rows, key_segment):
    return _forward(scale, tiles, q, k, v, rows, key_segment)[0]


def _forward(scale, tiles, q, k, v, rows, key_segment):
    def some_heads(x):
        q, k, v = x
        attend = functools.partial(_attend, scale, tiles, q, k, jnp.swapaxes(v, 2, 3), _padded(tiles, rows, key_segment))
        return jax.lax.map(attend, jnp.arange(q.shape[2] // tiles.queries))

    out, lse, top = jax.lax.map(some_heads, tuple(_by_heads(tiles, x) for x in (q, k, v)))
    out, lse = _by_queries(q.shape[1], out), _by_queries(q.shape[1], lse)
    out = out.astype(v.dtype)
    return (out, lse, jnp.max(top)), (q, k, v, rows, key_segment, out, lse)


def _attend(scale, tiles, q, k, v, tokens, i):
    """Block i of queries: (outputs [B,n,V,queries], logarithms of sums [B,n,queries], largest logit).

    q: [B,n,T,.]. k: [B,n,S,.]. v: [B,n,V,S].
    """
    q = _block(q, i, tiles.queries, 2)

    def visit(j, carry):
        top, total, out = carry
        scores, seen = _dot("bnkh,bnqh->bnkq", _block(k, j, tiles.keys, 2), q) * scale, _seen(tiles, tokens, i, j)
        new = jnp.maximum(top, jnp.max(jnp.where(seen, scores, MASKED), axis=2))
        weights, shrink = jnp.where(seen, jnp.exp(scores - new[:, :, None]), 0), jnp.exp(top - new)
        out = out * shrink[:, :, None] + _dot("bnvk,bnkq->bnvq", _block(v, j, tiles.keys, 3), weights.astype(v.dtype))
        return new, total * shrink + jnp.sum(weights, axis=2), out

    b, n, t, _ = q.shape
    wide = at_least_float32(q.dtype)
    start = (jnp.full((b, n, t), MASKED / 2, wide), jnp.zeros((b, n, t), wide), jnp.zeros((b, n, v.shape[2], t), wide))
    top, total, out = _over_visible_keys(tiles, tokens, i, visit, start)
    total = jnp.where(total == 0, 1, total)
    return out / total[:, :, None], top + jnp.log(total), jnp.max(top)


def _backward(scale, tiles, saved, cotangents):
    q, k, v, rows, key_segment, out, lse = saved
    d_out = real(rows.segment, cotangents[0])
    inner = jnp.sum(d_out.astype(lse.dtype) * out, axis=-1)

    def some_heads(x):
        q, k, *_ = x
        step = functools.partial(_attend_backward, scale, tiles, x, _padded(tiles, rows, key_segment))
        b, n, t, h = q.shape
        d_q = jnp.zeros((t // tiles.queries, b, n, h, tiles.queries), lse.dtype)
        return jax.lax.scan(step, d_q, jnp.arange(k.shape[2] // tiles.keys))

    d_q, (d_k, d_v) = jax.lax.map(some_heads, tuple(_by_heads(tiles, x) for x in (q, k, v, d_out, lse, inner)))
    d_k, d_v = (_by_queries(k.shape[1], jnp.swapaxes(x, -1, -2)) for x in (d_k, d_v))
    return _by_queries(q.shape[1], d_q).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


def _attend_backward(scale, tiles, heads, tokens, d_q, j):
    """Adds to d_q [blocks,B,n,H,queries] what reaches it through block j of keys; gives gradients [B,n,keys,.] of the block.

    heads: arrays [B,n,T or S,.] of some heads: q, k, v, d_out, lse, inner products of outputs and their gradients.
    """
    k, v = (_block(x, j, tiles.keys, 2) for x in heads[1:3])
    turned = jnp.swapaxes(k, 2, 3)

    def visit(i, carry):
        d_k, d_v, d_q = carry
        q, d_out, lse, inner = (_block(heads[x], i, tiles.queries, 2) for x in (0, 3, 4, 5))
        scores = _dot("bnkh,bnqh->bnkq", k, q) * scale
        p = jnp.where(_seen(tiles, tokens, i, j), jnp.exp(scores - lse[:, :, None]), 0)
        d_scores = p * (_dot("bnkv,bnqv->bnkq", v, d_out) - inner[:, :, None]) * scale
        d_scores, p = d_scores.astype(q.dtype), p.astype(q.dtype)
        d_v += _dot("bnkq,bnqv->bnkv", p, d_out)
        d_k += _dot("bnkq,bnqh->bnkh", d_scores, q)
        return d_k, d_v, d_q.at[i].add(_dot("bnhk,bnkq->bnhq", turned, d_scores))

    start = (jnp.zeros(k.shape, d_q.dtype), jnp.zeros(v.shape, d_q.dtype), d_q)
    last = tokens[0][:, tiles.queries - 1 :: tiles.queries]  # slots of the blocks' last queries
    first = jnp.min(jnp.sum(last < j * tiles.keys, axis=1))  # queries before it do not see these keys
    with jax.named_scope("seeing_queries"):
        d_k, d_v, d_q = jax.lax.fori_loop(first, d_q.shape[0], visit, start)
    return d_q, (d_k, d_v)


_dense.defvjp(_forward, _backward)


def dense_kl(q, k, lse, index: Index, rows: Rows, key_segment, scale: float, block: int):
    """The indexer's loss over all visible keys, `reference.dense_kl`: KL(mean of the heads' softmax || softmax(scores)).

    Args:
      q, k, rows, key_segment, scale, block: as for `dense`. lse: its second result [B,T,N]. All of them are constants.
      index: what index scores are made from.
    Returns:
      float32 or wider [B,T]; 0 for padding. Gradients reach `index` only.
    """
    q, k, lse = jax.lax.stop_gradient((q, k, lse))
    q, k = real(rows.segment, q), real(key_segment, k)
    index = Index(real(rows.segment, index.q), real(key_segment, index.k), real(rows.segment, index.w))
    return _kl(scale, _tiles(q.shape[1], q.shape[2], block), q, k, lse, index, rows, key_segment)


class _Parts(NamedTuple):
    """Arguments of `dense_kl` by heads, n at once, T and S filled up to whole blocks.

    q: [N/n,B,n,T,C+P]. k: [N/n,B,n,S,C+P]. lse: [N/n,B,n,T]. index_q: [I/n,B,n,T,J]. index_k: [1,B,1,S,J]. w: [I/n,B,n,T].
    tokens: `_padded`.
    """

    q: jax.Array
    k: jax.Array
    lse: jax.Array
    index_q: jax.Array
    index_k: jax.Array
    w: jax.Array
    tokens: tuple

    def queries(self, tiles, i):
        """Block i of what belongs to index heads: (q, w)."""
        return _block(self.index_q, i, tiles.queries, 3), _block(self.w, i, tiles.queries, 3)

    def keys(self, tiles, j):
        """Block j of the index keys, [B,1,keys,J]."""
        return _block(self.index_k[0], j, tiles.keys, 2)


def _parts(tiles, q, k, lse, index, rows, key_segment) -> _Parts:
    of_index = tiles._replace(heads=1 if tiles.heads == 1 else index.q.shape[2])
    heads = (_by_heads(tiles, x) for x in (q, k, lse))
    index_k = _by_heads(tiles._replace(heads=1), index.k[:, :, None])
    tokens = _padded(tiles, rows, key_segment)
    return _Parts(*heads, _by_heads(of_index, index.q), index_k, _by_heads(of_index, index.w), tokens)


def _target(scale, tiles, parts: _Parts, i, j):
    """Mean of the heads' softmax for block i of queries and j of keys, [B,keys,queries]."""

    def add(total, x):
        q, k, lse = x
        return total + jnp.sum(jnp.exp(_dot("bnkh,bnqh->bnkq", k, q) * scale - lse[:, :, None]), axis=1), None

    g, b, n, *_ = parts.q.shape
    heads = (_block(parts.q, i, tiles.queries, 3), _block(parts.k, j, tiles.keys, 3), _block(parts.lse, i, tiles.queries, 3))
    total, _ = jax.lax.scan(add, jnp.zeros((b, tiles.keys, tiles.queries), parts.lse.dtype), heads)
    return jnp.where(_seen(tiles, parts.tokens, i, j)[:, 0], total / (g * n), 0)


def _index_dots(q, k):
    """Scores [B,n,keys,queries] of some index heads before ReLU."""
    return _dot("bkj,bnqj->bnkq", k[:, 0], q) * q.shape[-1] ** -0.5


def _index_scores(tiles, parts: _Parts, i, j):
    """Index scores [B,keys,queries], `MASKED` for invisible keys."""
    k = parts.keys(tiles, j)

    def add(total, x):
        q, w = x
        return total + jnp.sum(jax.nn.relu(_index_dots(q, k)) * w[:, :, None], axis=1), None

    total = jnp.zeros((k.shape[0], tiles.keys, tiles.queries), parts.lse.dtype)
    total, _ = jax.lax.scan(add, total, parts.queries(tiles, i))
    return jnp.where(_seen(tiles, parts.tokens, i, j)[:, 0], total, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kl(scale, tiles, q, k, lse, index, rows, key_segment):
    return _kl_forward(scale, tiles, q, k, lse, index, rows, key_segment)[0]


def _kl_forward(scale, tiles, q, k, lse, index, rows, key_segment):
    parts = _parts(tiles, q, k, lse, index, rows, key_segment)

    def some_queries(i):
        def add_scores(j, carry):
            top, total = carry
            scores = _index_scores(tiles, parts, i, j)
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            return new, total * jnp.exp(top - new) + jnp.sum(jnp.exp(scores - new[:, None]), axis=1)

        def add_kl(j, kl):
            p, log_q = _target(scale, tiles, parts, i, j), _index_scores(tiles, parts, i, j) - index_lse[:, None]
            return kl + jnp.sum(p * (jnp.log(jnp.where(p > 0, p, 1)) - log_q), axis=1)

        zero = jnp.zeros((q.shape[0], tiles.queries), lse.dtype)
        top, total = _over_visible_keys(tiles, parts.tokens, i, add_scores, (zero + MASKED / 2, zero))
        index_lse = top + jnp.log(jnp.where(total == 0, 1, total))
        return _over_visible_keys(tiles, parts.tokens, i, add_kl, zero), index_lse

    kl, index_lse = jax.lax.map(some_queries, jnp.arange(parts.q.shape[3] // tiles.queries))
    return _by_queries(q.shape[1], kl[None, :, :, None])[..., 0], (q, k, lse, index, rows, key_segment, index_lse)


def _kl_backward(scale, tiles, saved, d_kl):
    *arguments, index_lse = saved
    parts, index, rows, key_segment = _parts(tiles, *arguments), *arguments[3:]
    d_kl = _by_heads(tiles._replace(heads=1), real(rows.segment, d_kl)[..., None])[0]

    def some_queries(d_k, x):
        i, index_lse = x
        weight, own = _block(d_kl, i, tiles.queries, 2), parts.queries(tiles, i)

        def visit(j, carry):
            d_k, d_own = carry
            k, scores = parts.keys(tiles, j), _index_scores(tiles, parts, i, j)
            learned = jnp.where(scores > MASKED, jnp.exp(scores - index_lse[:, None]), 0)
            d_scores = (learned - _target(scale, tiles, parts, i, j)) * weight
            d_block, d_more = jax.lax.scan(functools.partial(_index_gradients, k, d_scores), jnp.zeros(k.shape, d_k.dtype), own)
            return d_k.at[j].add(d_block), jax.tree.map(jnp.add, d_own, d_more)

        start = (jnp.zeros(jnp.swapaxes(own[0], -1, -2).shape, d_k.dtype), jnp.zeros(own[1].shape, d_k.dtype))
        return _over_visible_keys(tiles, parts.tokens, i, visit, (d_k, start))

    _, b, _, s, width = parts.index_k.shape
    d_k = jnp.zeros((s // tiles.keys, b, 1, tiles.keys, width), index_lse.dtype)
    d_k, (d_q, d_w) = jax.lax.scan(some_queries, d_k, (jnp.arange(len(index_lse)), index_lse))
    d_q, d_w = (_by_queries(rows.slot.shape[1], jnp.swapaxes(x, 0, 1)) for x in (d_q, d_w))
    d_k = _by_queries(key_segment.shape[1], jnp.swapaxes(d_k, -1, -2)[None])
    d_index = Index(d_q.astype(index.q.dtype), d_k[:, :, 0].astype(index.k.dtype), d_w.astype(index.w.dtype))
    return None, None, None, d_index, None, None


def _index_gradients(k, d_scores, d_k, own):
    """Gradients by some index heads' q [B,n,J,queries] and w; those by the block's keys k are added to d_k."""
    q, w = own
    dots = _index_dots(q, k)
    d_w = jnp.sum(jax.nn.relu(dots) * d_scores[:, None], axis=2)
    d_dots = jnp.where(dots > 0, d_scores[:, None] * w[:, :, None] * q.shape[-1] ** -0.5, 0).astype(q.dtype)
    d_q = _dot("bjk,bnkq->bnjq", jnp.swapaxes(k[:, 0], 1, 2), d_dots)
    return d_k + _dot("bnkq,bnqj->bkj", d_dots, q)[:, None], (d_q, d_w)


_kl.defvjp(_kl_forward, _kl_backward)


def _over_visible_keys(tiles: Tiles, tokens, i, body, carry):
    """`carry` after body(j, carry) for each block j of keys that block i of queries visits; the others lie behind it."""
    blocks = 1 + jnp.max(_block(tokens[0], i, tiles.queries, 1)) // tiles.keys
    with jax.named_scope("visible_keys"):
        return jax.lax.fori_loop(0, blocks, body, carry)


def mean_turns(t: int, context: int, heads: int, block: int) -> tuple[dict[str, float], int]:
    """(how often the loops above run on average, by their names in the traced program; keys of a block), for one document of
    T tokens whose pieces (`sharding.context`) lie on `context` devices. For `program.products`."""
    tiles = _tiles(t // context, heads, block)
    pieces = np.arange(t).reshape(2 * context, -1) if context > 1 else np.arange(t)[None]
    visits, queries, keys = 0, 0, -(-t // tiles.keys)
    for i in range(context):
        slots = np.concatenate([pieces[i], pieces[-1 - i]]) if context > 1 else pieces[0]
        slots = np.pad(slots, (0, -len(slots) % tiles.keys), mode="edge")
        last = slots[tiles.queries - 1 :: tiles.queries]
        visits += np.sum(1 + last // tiles.keys)
        queries += len(last)
    return {"visible_keys": visits / queries, "seeing_queries": visits / (keys * context)}, tiles.keys


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=at_least_float32(x.dtype))


def _block(x, i, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _padded(tiles: Tiles, rows: Rows, key_segment):
    """(slots, segments, segments of keys), int32 [B,T], [B,T], [B,S], filled up with padding to whole blocks."""
    fill = [[(0, 0), (0, -x.shape[1] % tiles.keys)] for x in (rows.slot, key_segment)]
    slot = jnp.pad(rows.slot, fill[0], mode="edge")  # ascending to the end
    return slot, jnp.pad(rows.segment, fill[0]), jnp.pad(key_segment, fill[1])


def _seen(tiles: Tiles, tokens, i, j):
    """Whether the keys of block j are visible to the queries of block i, bool [B,1,keys,queries]."""
    slot, segment = (_block(x, i, tiles.queries, 1) for x in tokens[:2])
    seen = visible(Rows(slot - j * tiles.keys, segment), _block(tokens[2], j, tiles.keys, 1))
    return jnp.swapaxes(seen, 1, 2)[:, None]


def _by_heads(tiles: Tiles, x):
    """[B,T,N,...] as [N/n,B,n,T,...], n heads at once, T filled up with 0 to whole blocks."""
    b, t, n, *rest = x.shape
    x = jnp.pad(x, [(0, 0), (0, -t % tiles.keys)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(b, -1, n // tiles.heads, tiles.heads, *rest), (2, 3), (0, 2))


def _by_queries(t: int, x):
    """[N/n,blocks,B,n,...,tokens of a block] as [B,T,N,...]."""
    x = jnp.moveaxis(x, (2, 1, -1, 0, 3), (0, 1, 2, 3, 4))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3] * x.shape[4], *x.shape[5:])[:, :t]


def dense_latent(q, latent, rows: Rows, key_segment, rank: int, scale: float, block: int):
    """Attention to all visible keys, absorbed.

    Args:
      q: absorbed queries [B,T,N,R+P]. latent: [B,S,R+P]. rank: R, the part of a latent that is also the value.
    Returns:
      ([B,T,N,R], largest attention logit).
    """
    # Slots of the cache that hold no token have weight 0, but 0 * NaN would still leak out of them.
    latent = jnp.where(key_segment[..., None] != 0, latent, 0)

    def attend(q, rows):
        scores = jnp.einsum("btnr,bsr->bnts", q, latent, preferred_element_type=at_least_float32(q.dtype)) * scale
        weights, total, top = softmax_weights(scores, visible(rows, key_segment)[:, None])
        o = jnp.einsum("bnts,bsr->bntr", weights.astype(q.dtype), latent[..., :rank]) / total.astype(q.dtype)
        return jnp.swapaxes(o, 1, 2), top

    return in_query_blocks(attend, block, q, rows)
