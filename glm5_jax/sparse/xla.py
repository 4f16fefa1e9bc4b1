"""DeepSeek Sparse Attention (paper section 2.1.1) for any backend, in chunks of queries: memory linear in T.

The same functions as `reference`, which defines them.
"""

import functools

import jax
import jax.numpy as jnp

from glm5_jax.compiling import target_platform
from glm5_jax.layers.norm import at_least_float32
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.loss import index_kl
from glm5_jax.sparse.masks import Rows, visible
from glm5_jax.sparse.reference import Attended
from glm5_jax.sparse.topk import MASKED, select_top_k, select_top_k_bisected

_KEY_BLOCK = 2048  # keys whose scores, of all index heads, exist at once
_WIDTHS = 4  # selections are made among the first 1/4, 2/4, .. of the keys, as many as a chunk's queries can see
_FEW_SCORES = 1024  # that lax.top_k goes through faster
_ALL_KEYS_UP_TO = 4  # times K, on CPU: with more keys, reading all of them takes longer than gathering K
_MANY_QUERIES = 8  # of a row, without which it does not pay to make its keys readable by all
# What a chunk may fill with the latents it gathers, or with scores: (a CPU's cache, a small part of another memory), bytes.
_GATHERED_BYTES = (3 << 19, 256 << 20)
_SCORE_BYTES = (4 << 20, 256 << 20)


def select(index: Index, rows: Rows, key_segment: jax.Array, k: int, chunk: int) -> jax.Array:
    """See `reference.select`; scores exist for at most `chunk` queries at a time, and those of single heads for a few keys.

    Keys behind the last query of a chunk are not visited.
    """
    index = jax.lax.stop_gradient(index)
    s = key_segment.shape[1]
    n_blocks = max(1, -(-s // _KEY_BLOCK))
    block = -(-s // n_blocks)
    keys, key_segment = (_pad(x, 1, n_blocks * block) for x in (index.k, key_segment))
    widths = sorted({block * -(-n_blocks * i // _WIDTHS) for i in range(1, _WIDTHS + 1)})
    wide = jnp.promote_types(index.w.dtype, at_least_float32(index.q.dtype))
    choices = [functools.partial(_choose, width=width, k=k, places=min(k, s)) for width in widths]

    def choose(x):
        # Tied together, nothing of a chunk is known before its queries are. Otherwise differentiating a loop over layers
        # moves start values and masks, which no layer changes, out of that loop and keeps them for all chunks: T x S numbers.
        q, w, rows, masked = jax.lax.optimization_barrier((*x, jnp.asarray(MASKED, wide)))
        visited = 1 + jnp.max(rows.slot) // block
        scores = jnp.full((*rows.slot.shape, keys.shape[1]), masked)
        scores = _block_scores(scores, q, w, rows, keys, key_segment, block, jnp.clip(visited, 0, n_blocks))
        return jax.lax.switch(jnp.searchsorted(jnp.array(widths), visited * block), choices, scores)

    chunk = _queries_at_once(chunk, rows.slot.shape, 4 * n_blocks * block, _SCORE_BYTES)
    return _join(rows.slot.shape[1], jax.lax.map(choose, _split(chunk, (index.q, index.w, rows))))


def _block_scores(scores, q, w, rows: Rows, keys, key_segment, block: int, n_blocks):
    """`scores` [B,t,S] with those of the first `n_blocks` blocks of keys filled in, `MASKED` for invisible keys."""

    def score(j, scores):
        at = j * block
        k, segment = (jax.lax.dynamic_slice_in_dim(x, at, block, axis=1) for x in (keys, key_segment))
        dots = _dot("btij,bsj->btis", q, k) * q.shape[-1] ** -0.5
        # Head by head, which XLA fuses with ReLU; as a product of its own, on CPU, it takes longer than the dots.
        total = sum(jax.nn.relu(dots[:, :, i]) * w[:, :, i, None] for i in range(w.shape[2]))
        seen = visible(Rows(rows.slot - at, rows.segment), segment)
        return jax.lax.dynamic_update_slice_in_dim(scores, jnp.where(seen, total, MASKED), at, axis=2)

    return jax.lax.fori_loop(0, n_blocks, score, scores)


def _choose(scores, width: int, k: int, places: int):
    """Selection among the first `width` keys, int32 [B,t,places]."""
    scores = scores[..., :width]
    # Both select the same; a loop over bits takes a third of a millisecond on CPU even if there is next to nothing to do.
    choose = select_top_k if target_platform() == "cpu" and scores.size <= _FEW_SCORES else select_top_k_bisected
    return _pad(choose(scores, k), 2, places, fill=-1)[..., :places]


def attend(q, latent, selected, rank: int, scale: float, chunk: int, index: Index | None = None) -> Attended:
    """See `reference.attend`, for some queries at a time, forward and backward.

    Each query gathers the latents it selected; on CPU, where a gradient is scattered row by row, all queries read all
    latents through a mask instead, as long as the keys are few and the queries many.
    """
    few_keys = latent.shape[1] <= _ALL_KEYS_UP_TO * selected.shape[2]
    all_keys = target_platform() == "cpu" and few_keys and q.shape[1] >= _MANY_QUERIES
    s, width = latent.shape[1:]
    if all_keys:
        query_bytes, budget = (q.shape[2] + (index.q.shape[2] if index else 0)) * s * 4, _SCORE_BYTES
    else:
        query_bytes, budget = selected.shape[2] * width * latent.dtype.itemsize, _GATHERED_BYTES
    chunk = _queries_at_once(chunk, selected.shape[:2], query_bytes, budget)
    out, top, kl = _attend(rank, scale, chunk, all_keys, q, latent, selected, index)
    return Attended(out, jax.lax.stop_gradient(top), kl)


def _queries_at_once(chunk: int, shape, query_bytes: int, budget: tuple[int, int]) -> int:
    """Queries to take at once of each row of [B,T]: `chunk`, or as many as `budget` has room for at `query_bytes` each."""
    b, t = shape
    budget = budget[target_platform() != "cpu"]
    n = max(1, min(chunk, t, budget // max(1, b * query_bytes)))
    return 1 << (n.bit_length() - 1)  # a power of two divides most T: nothing needs to be filled up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _attend(rank, scale, chunk, all_keys, q, latent, selected, index):
    """(out, largest logit, kl or None) of `reference.attend`."""
    return _forward(rank, scale, chunk, all_keys, q, latent, selected, index)[0]


def _forward(rank, scale, chunk, all_keys, q, latent, selected, index):
    keys_of, index_keys_of = _reader(latent, all_keys), _reader(index and index.k, all_keys)

    def attend(x):
        q, selected, index_q, w = x
        keys, keep = keys_of(selected), _keep(selected, latent.shape[1], all_keys)
        scores = _products(q, keys) * scale
        p, lse, top = _softmax(scores, keep[:, :, None])
        # A key is multiplied whole and what is no value cut off: cheaper than a copy of the value.
        out = jnp.einsum(f"btnk,{_axes(keys)}r->btnr", p.astype(q.dtype), keys)[..., :rank]
        kl = None
        if index is not None:
            _, chosen = _index_scores(index_q, index_keys_of(selected), w)
            kl = index_kl(jnp.mean(p, axis=2), chosen, keep)
        if all_keys:  # what is NaN in lse is NaN in the gradients of the query
            out, lse, top, kl = (_spoil(x, keep, latent) for x in (out, lse, top, kl))
            kl = _spoil(kl, keep, index and index.k)
        return (out, lse, kl), jnp.max(top, initial=MASKED / 2)

    own = (None, None) if index is None else (index.q, index.w)
    results, top = _map(attend, _split(chunk, (q, selected, *own)))
    out, lse, kl = _join(q.shape[1], results)
    return (out, jnp.max(top, initial=MASKED / 2), kl), (q, latent, selected, index, out, lse)


def _backward(rank, scale, chunk, all_keys, saved, cotangents):
    q, latent, selected, index, out, lse = saved
    d_out, _, d_kl = cotangents
    keys_of, index_keys_of = _reader(latent, all_keys), _reader(index and index.k, all_keys)
    add = (lambda sums, _, values: sums + values) if all_keys else _scatter_add

    def step(sums, x):
        q, selected, lse, out, d_out, index_q, w, d_kl = x
        keys, keep = keys_of(selected), _keep(selected, latent.shape[1], all_keys)
        inner = jnp.sum(d_out.astype(lse.dtype) * out, axis=-1)
        # A latent is key and value: what reads it as one and as the other, side by side, takes one product.
        n, rest = q.shape[2], q.shape[3] - rank
        readers = jnp.concatenate([q, jnp.pad(d_out, [(0, 0)] * 3 + [(0, rest)])], axis=2)
        products = _products(readers, keys)
        p = jnp.where(keep[:, :, None], jnp.exp(products[:, :, :n] * scale - lse[..., None]), 0)
        d_scores = jnp.where(keep[:, :, None], p * (products[:, :, n:] - inner[..., None]) * scale, 0)
        p, d_scores = jax.lax.optimization_barrier((p, d_scores))  # or XLA computes them again for every use
        d_q = jnp.einsum(f"btnk,{_axes(keys)}r->btnr", d_scores.astype(q.dtype), keys)
        weights = jnp.concatenate([d_scores, p], axis=2).astype(q.dtype)
        if all_keys:  # a reader that is not finite has weight NaN for keys it selected, 0 for others, and 0 * NaN is NaN
            readers = jnp.where(jnp.isfinite(readers), readers, 0)
        sums[0] = add(sums[0], selected, _key_gradients(weights, readers, keys))
        if index is None:
            return sums, (d_q,)
        if all_keys:
            d_kl = _spoil(d_kl, keep, index.k)
        d_index_q, d_index_keys, d_w = _index_gradients(index_q, index_keys_of(selected), w, jnp.mean(p, axis=2), keep, d_kl)
        sums[1] = add(sums[1], selected, d_index_keys)
        return sums, (d_q, d_index_q, d_w)

    own = (None, None, None) if index is None else (index.q, index.w, d_kl)
    sums = [jnp.zeros(k.shape, lse.dtype) for k in (latent, index and index.k) if k is not None]
    sums, by_query = _scan(step, sums, _split(chunk, (q, selected, lse, out, d_out, *own)))
    d_q, *d_own = _join(q.shape[1], by_query)
    d_index = None if index is None else Index(d_own[0], sums[1].astype(index.k.dtype), d_own[1])
    return d_q, sums[0].astype(latent.dtype), None, d_index


_attend.defvjp(_forward, _backward)


def _axes(keys) -> str:
    """The axes of keys in a product: [B,t,K,R] gathered by each query, or [B,S,R] read by all."""
    return "btk" if keys.ndim == 4 else "bk"


def _products(q, keys):
    """Products [B,t,N,K] of readers [B,t,N,R] and keys.

    The barrier keeps XLA from exchanging the factors, after which a CPU would copy all gathered keys, turned round, first.
    """
    if keys.ndim == 3:
        return _dot("btnr,bkr->btnk", q, keys)
    return jnp.swapaxes(jax.lax.optimization_barrier(_dot("btkr,btnr->btkn", keys, q)), 2, 3)


def _key_gradients(weights, q, keys):
    """Gradients of keys, in their axes, of the weights [B,t,N,K] with which their readers q [B,t,N,R] read them.

    Where all queries read the same keys the sum runs over t and N, and a CPU copies its first factor turned round: the
    readers, which are narrower than the weights.
    """
    if keys.ndim == 3:
        q, weights = (x.astype(at_least_float32(x.dtype)) for x in (q, weights))  # XLA lacks this product of bfloat16
        return jnp.swapaxes(_dot("btnr,btnk->brk", q, weights), 1, 2)
    return _dot("btnk,btnr->btkr", weights, q)


def _index_scores(q, keys, w):
    """(scores of every head before ReLU [B,t,I,K], index scores [B,t,K]) of index keys."""
    dots = _dot(f"btij,{_axes(keys)}j->btik", q, keys) * q.shape[-1] ** -0.5
    return dots, jnp.einsum("btik,bti->btk", jax.nn.relu(dots), w, precision="highest")


def _index_gradients(q, keys, w, target, keep, d_kl):
    """Gradients of sum(d_kl * KL(target || softmax(scores))) by q, keys and w; target and keep [B,t,K], d_kl [B,t]."""
    dots, scores = _index_scores(q, keys, w)
    dots = jnp.where(keep[:, :, None], dots, 0)
    d_scores = jnp.where(keep, (_softmax(scores, keep)[0] - target) * d_kl[..., None], 0)
    d_w = jnp.einsum("btik,btk->bti", jax.nn.relu(dots), d_scores, precision="highest")
    d_dots = jnp.where(dots > 0, w[..., None] * d_scores[:, :, None] * q.shape[-1] ** -0.5, 0).astype(q.dtype)
    d_q = jnp.einsum(f"btik,{_axes(keys)}j->btij", d_dots, keys)
    q = q if keys.ndim == 4 else jnp.where(jnp.isfinite(q), q, 0)
    return d_q, _key_gradients(d_dots, q, keys), d_w.astype(w.dtype)


def _softmax(scores, mask):
    """Softmax over the last axis where mask holds, its log-sum-exp, and its largest score, the latter two without that
    axis. Where nothing holds they are 0, `MASKED`/2 and `MASKED`/2."""
    scores = jnp.where(mask, scores, MASKED)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), MASKED / 2)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    return weights / total, (top + jnp.log(total))[..., 0], top[..., 0]


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, preferred_element_type=at_least_float32(x.dtype))


def _reader(rows, all_keys: bool):
    """A function from positions [B,t,K] to the rows, of rows [B,S,...], that their queries read.

    Gathered [B,t,K,...], zeros for -1, and nothing else read; or if all_keys [B,S,...], those not finite as zeros.
    """
    if rows is None:
        return None
    if all_keys:
        rows = jnp.where(_finite(rows)[..., None], rows, 0)  # or 0 * NaN would leak out of what was not selected
        return lambda at: rows
    s = rows.shape[1]
    rows = _pad(rows, 1, s + 1)  # a row of zeros for -1
    read = _by_batch(lambda rows, at: rows.at[at].get(mode="promise_in_bounds"))
    return lambda at: read(rows, jnp.where(at < 0, s, at))


def _keep(selected, s: int, all_keys: bool):
    """Which of the keys that a query reads it has selected, bool [B,t,K], or [B,t,S] if all_keys."""
    if not all_keys:
        return selected >= 0
    # One bit a key in words of 32: a query's K positions are compared with S/32 words instead of S places. The sum is an
    # OR, since no position comes twice; -1 lies in no word.
    at = selected[:, :, None]
    bit = jnp.uint32(1) << (at & 31).astype(jnp.uint32)
    here = at >> 5 == jnp.arange(-(-s // 32))[:, None]
    words = jnp.sum(jnp.where(here, bit, 0), axis=-1, dtype=jnp.uint32)[..., None]
    return (words >> jnp.arange(32, dtype=jnp.uint32) & 1).astype(bool).reshape(*selected.shape[:2], -1)[..., :s]


def _spoil(x, keep, rows):
    """x [B,t,...], NaN for queries that selected a row that is not finite, as if they had gathered it."""
    if x is None or rows is None:
        return x
    spoilt = jnp.any(keep & ~_finite(rows)[:, None], axis=-1)
    return jnp.where(spoilt.reshape(*spoilt.shape, *[1] * (x.ndim - 2)), jnp.nan, x)


def _finite(rows):
    return jnp.all(jnp.isfinite(rows), axis=-1)


def _scatter_add(sums, at, values):
    """sums [B,S,...] with values [B,t,K,...] added at positions [B,t,K]; -1 adds nowhere."""
    add = _by_batch(lambda sums, at, values: sums.at[at].add(values, mode="drop"))
    return add(sums, jnp.where(at < 0, sums.shape[1], at), values)


def _by_batch(fn):
    """jax.vmap(fn), without the batch dimension if that is 1: with it XLA copies what a scatter adds."""

    def call(*arrays):
        if arrays[0].shape[0] == 1:
            return fn(*(x[0] for x in arrays))[None]
        return jax.vmap(fn)(*arrays)

    return call


def _scan(step, carry, xs):
    """jax.lax.scan; on CPU, where a step is too small for all cores, a long loop takes 4 of them a turn.

    If 4 divide it: what is left over would be a second copy of the program.
    """
    n = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, carry, xs, unroll=4 if target_platform() == "cpu" and n >= 16 and n % 4 == 0 else 1)


def _map(fn, xs):
    """jax.lax.map, as `_scan`."""
    return _scan(lambda nothing, x: (nothing, fn(x)), None, xs)[1]


def _split(chunk: int, arrays):
    """Arrays [B,T,...] in chunks of queries [n,B,chunk,...]; the last is filled up with -1 in integers, 0 in others."""

    def split(x):
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = _pad(x, 1, -(-x.shape[1] // chunk) * chunk, fill)
        return _swap(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]))

    return jax.tree.map(split, arrays)


def _join(t: int, arrays):
    """What `_split` made, put together again: [B,t,...]."""

    def join(x):
        x = _swap(x)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :t]

    return jax.tree.map(join, arrays)


def _swap(x):
    """x with its first two axes exchanged; XLA copies even where one is 1, unless told that it is a mere reshape."""
    return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]) if 1 in x.shape[:2] else jnp.swapaxes(x, 0, 1)


def _pad(x, axis: int, size: int, fill=0):
    """x, filled up to `size` along an axis."""
    return jnp.pad(x, [(0, max(0, size - n) if a == axis else 0) for a, n in enumerate(x.shape)], constant_values=fill)
