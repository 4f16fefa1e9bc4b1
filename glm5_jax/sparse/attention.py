"""DeepSeek Sparse Attention: one operation, three implementations, one dispatcher (paper section 2.1.1).

`reference` is the definition, `xla` runs fast on any backend, `pallas` is for TPUs. All three select the same keys and
compute the same function; `implementation` says which one a call takes.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.compiling import target_platform
from glm5_jax.config import ModelConfig, check
from glm5_jax.sparse import reference, xla
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows
from glm5_jax.sparse.reference import Attended

IMPLEMENTATIONS = ("reference", "xla", "pallas")


class SparseAttention(NamedTuple):
    """selected: int32 [B,T,min(K,S)], -1 for none. attended: see `Attended`."""

    selected: jax.Array
    attended: Attended


def sparse_attention(
    q, latent, index: Index, rows: Rows, key_segment, *, k: int, rank: int, scale: float, chunk: int = 512,
    loss: bool = False, asked: str = "auto",
) -> SparseAttention:  # fmt: skip
    """Selection and attention together: `select`, then `attend` (with the indexer's loss if `loss`)."""
    selected = select(index, rows, key_segment, k, chunk, asked)
    return SparseAttention(selected, attend(q, latent, selected, rank, scale, chunk, index if loss else None, asked))


def select(index: Index, rows: Rows, key_segment, k: int, chunk: int, asked: str = "auto") -> jax.Array:
    """The k best visible keys of each query.

    Args:
      index: what scores are made from. rows: where the queries stand. key_segment: int32 [B,S], documents of the keys,
        0 = padding. k: K. chunk: queries whose scores may exist at the same time. asked: see `implementation`.
    Returns:
      int32 [B,T,min(K,S)], positions in ascending order, -1 for none; ties go to the lowest position. No gradient.
    """
    index = jax.lax.stop_gradient(index)
    taken = implementation(asked, lambda: _kernels("select").why_not(index, k))
    if taken == "reference":
        return reference.select(index, rows, key_segment, k)
    function = xla.select if taken == "xla" else _kernels("select").select
    return function(index, rows, key_segment, k, chunk)


def attend(
    q, latent, selected, rank: int, scale: float, chunk: int, index: Index | None = None, asked: str = "auto"
) -> Attended:
    """Attention of absorbed queries to selected latents, and the indexer's loss if `index` is given.

    Args:
      q: [B,T,N,R+P]. latent: [B,S,R+P], its first R numbers are also the value. selected: int32 [B,T,K] from `select`:
        positions, no one twice in a query's K; -1 for none.
      rank: R. scale: factor on q.k. chunk: most queries handled at once. index: what the selection was made from.
    Returns:
      See `Attended`. Gradients reach q and latent through the selected set from `out` only, and `index` from `kl` only.
    """
    taken = implementation(asked, lambda: _kernels("attend").why_not(q, latent, index, selected.shape[-1]))
    if taken == "reference":
        return reference.attend(q, latent, selected, rank, scale, index)
    function = xla.attend if taken == "xla" else _kernels("attend").attend
    return function(q, latent, selected, rank, scale, chunk, index)


def implementation(asked: str = "auto", why_not: Callable[[], str | None] = lambda: None) -> str:
    """The implementation that a call takes.

    Args:
      asked: "auto" takes `pallas` where programs are compiled for a TPU and the kernels can take the call, else `xla`; on
        a TPU that choice is said once. Any other name is that implementation.
      why_not: says why the kernels cannot take a call, None if they can.
    Raises:
      UserError: the implementation that was asked for cannot be had.
    """
    check(asked in ("auto", *IMPLEMENTATIONS), f"sparse_implementation={asked}: auto, {', '.join(IMPLEMENTATIONS)}")
    if asked in ("reference", "xla"):
        return asked
    reason = _no_pallas() or why_not()
    if reason is None:
        return "pallas"
    check(asked == "auto", f"sparse_implementation=pallas: {reason}; use xla or auto")
    if target_platform() == "tpu":
        warnings.warn(f"sparse attention takes the xla implementation: {reason}", stacklevel=2)
    return "xla"


def implementation_of(cfg: ModelConfig, rows: int, tokens: int) -> str:
    """What a network takes for `rows` rows of `tokens` tokens, known before anything is traced; see `implementation`."""

    def array(*shape, dtype=cfg.dtype):
        return jax.ShapeDtypeStruct((rows, tokens, *shape), jnp.dtype(dtype))

    width, k = cfg.kv_lora_rank + cfg.qk_rope_head_dim, min(cfg.index_topk, tokens)
    q, latent = array(cfg.num_attention_heads, width), array(width)
    heads, index_width = cfg.index_n_heads, cfg.index_head_dim
    index = Index(array(heads, index_width), array(index_width), array(heads, dtype="float32"))

    def why_not():
        return _kernels("select").why_not(index, k) or _kernels("attend").why_not(q, latent, index, k)

    return implementation(cfg.sparse_implementation, why_not)


def _no_pallas() -> str | None:
    """Why the kernels cannot run at all, or None."""
    if target_platform() != "tpu":
        return f"the kernels are for TPUs, this is {target_platform()}"
    try:
        _kernels("select"), _kernels("attend")
    except (ImportError, AttributeError) as error:
        return f"JAX {jax.__version__} lacks what the kernels need ({error})"
    return None


@functools.cache
def _kernels(name: str):
    """A kernel module; imported late, because Pallas takes a second to import and only TPUs need it."""
    return importlib.import_module(f"glm5_jax.sparse.kernels.{name}")
