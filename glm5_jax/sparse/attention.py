"""DeepSeek Sparse Attention: one operation, three implementations, one dispatcher (paper section 2.1.1).

`reference` is the definition, `xla` runs fast on any backend, `pallas` is for TPUs. All three select the same keys and
compute the same function; `implementation` says which one a call takes.
"""

import functools

import jax

from glm5_jax.sparse import reference, xla
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows
from glm5_jax.sparse.reference import Attended

IMPLEMENTATIONS = ("reference", "xla", "pallas")


def implementation(asked: str = "auto") -> str:
    """The implementation that a call with this setting takes."""
    return "xla" if asked == "auto" else asked


def select(index: Index, rows: Rows, key_segment, k: int, chunk: int, asked: str = "auto") -> jax.Array:
    """The k best visible keys of each query (model.md section 4).

    Args:
      index: what scores are made from. rows: where the queries stand. key_segment: int32 [B,S], documents of the keys,
        0 = padding. k: K. chunk: queries whose scores may exist at the same time. asked: see `implementation`.
    Returns:
      int32 [B,T,min(K,S)], positions in ascending order, -1 for none; ties go to the lowest position. No gradient.
    """
    index = jax.lax.stop_gradient(index)
    functions = {"reference": reference.select, "xla": functools.partial(xla.select, chunk=chunk)}
    return functions[implementation(asked)](index, rows, key_segment, k)


def attend(
    q, latent, selected, rank: int, scale: float, chunk: int, index: Index | None = None, asked: str = "auto"
) -> Attended:
    """Attention of absorbed queries to selected latents, and the indexer's loss if `index` is given.

    Args:
      q: [B,T,N,R+P]. latent: [B,S,R+P], its first R numbers are also the value. selected: int32 [B,T,K] from `select`.
      rank: R. scale: factor on q.k. chunk: queries handled at once. index: what the selection was made from.
    Returns:
      See `Attended`. Gradients reach q and latent through the selected set from `out` only, and `index` from `kl` only.
    """
    functions = {"reference": reference.attend, "xla": functools.partial(xla.attend, chunk=chunk)}
    return functions[implementation(asked)](q, latent, selected, rank, scale, index=index)
