"""DeepSeek Sparse Attention for any backend, in blocks of queries: the same functions as `reference`, memory linear in T."""

import jax

from glm5_jax.sparse import reference
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows, in_query_blocks
from glm5_jax.sparse.reference import Attended


def select(index: Index, rows: Rows, key_segment: jax.Array, k: int, chunk: int) -> jax.Array:
    """See `reference.select`; scores exist for `chunk` queries at a time."""

    def choose(q, w, rows):
        return reference.select(Index(q, index.k, w), rows, key_segment, k), jax.numpy.float32(0)

    return in_query_blocks(choose, chunk, index.q, index.w, rows)[0]


def attend(q, latent, selected, rank: int, scale: float, chunk: int, index: Index | None = None) -> Attended:
    """See `reference.attend`; latents are gathered for `chunk` queries at a time."""

    def block(q, selected, index_q, w):
        part = None if index is None else Index(index_q, index.k, w)
        out = reference.attend(q, latent, selected, rank, scale, part)
        return (out.out, out.kl), out.max_logit

    own = (None, None) if index is None else (index.q, index.w)
    (out, kl), top = in_query_blocks(block, chunk, q, selected, *own)
    return Attended(out, top, kl)
