"""Attention over selected keys for TPUs, with its gradients and the indexer's loss (definition: `sparse.reference.attend`).

A tile of neighbouring queries fetches the union of the keys they selected once, row by row, and masks what a query did not
select (`kernels.tiles`, `kernels.attend_forward`, `kernels.attend_backward`). Memory is linear in T and S; the number of
keys in the unions decides the time.
"""

import functools

import jax
import jax.numpy as jnp

from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels import parts, tiles
from glm5_jax.sparse.kernels.attend_backward import Given, backward
from glm5_jax.sparse.kernels.attend_forward import forward
from glm5_jax.sparse.kernels.parts import CORES, Plan, Queries
from glm5_jax.sparse.reference import Attended
from glm5_jax.sparse.topk import MASKED

BLOCK = 256  # keys handled at once: fills the 256-wide matrix units of v6e and 7x
_WIDEST = 640  # width of queries that fits into VMEM with as many heads as `why_not` allows
_MOST_SELECTED = 8192  # lists twice in scalar memory, 1 MiB, with room to spare


def why_not(q, latent, index: Index | None, k: int) -> str | None:
    """Why `attend` does not take these arguments, in one line, or None if it does; k: K."""
    same = [q, latent] if index is None else [q, latent, index.q, index.k]
    if len({x.dtype for x in same}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries, latents and index must all be bfloat16 or all float32, not {[str(x.dtype) for x in same]}"
    if index is not None and index.w.dtype != jnp.float32:
        return f"the index's head weights must be float32, not {index.w.dtype}"
    if tiles.row_count(latent.shape[1], BLOCK) > tiles.MOST_KEYS:
        return f"{latent.shape[1]} keys are more than a list can name"
    most_heads = 64 if q.dtype == jnp.float32 else 128
    if q.shape[2] > most_heads or q.shape[3] > _WIDEST:
        return f"{q.shape[2]} heads of width {q.shape[3]} are more than there is room for ({most_heads} of {_WIDEST})"
    if k > _MOST_SELECTED:
        return f"{k} selected keys are more than there is room for ({_MOST_SELECTED})"
    return None


def make_plan(q, index: Index | None, rank: int, scale: float, block: int = BLOCK, interpret=False) -> Plan:
    """The sizes of a call with q [B,T,N,R+P]."""
    return Plan(
        tile=tiles.SHIFT,
        block=block,
        heads=q.shape[2],
        rank=rank,
        width=q.shape[3],
        index_heads=0 if index is None else index.q.shape[2],
        index_width=0 if index is None else index.q.shape[3],
        dtype=q.dtype,
        scale=scale,
        interpret=interpret,
    )


def attend(
    q, latent, selected, rank: int, scale: float, chunk: int, index: Index | None = None, *, interpret=False, block=BLOCK
) -> Attended:
    """See `reference.attend`; the positions that a query selects differ.

    Args:
      chunk: queries whose selections are sorted at the same time. interpret: as in `pl.pallas_call`, for machines without
      a TPU. block: keys handled at once, for tests.
    Raises:
      ValueError: see `why_not`.
    """
    if reason := why_not(q, latent, index, selected.shape[2]):
        raise ValueError(f"attention kernel: {reason}")
    t = q.shape[1]
    plan = make_plan(q, index, rank, scale, block, interpret)
    more = -t % (plan.tile * CORES)

    def pad(x, value=0):
        return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    def heads_first(x):
        return parts.in_tiles(plan, jnp.swapaxes(pad(x), 1, 2))

    queries, index_k = Queries(heads_first(q), None, None), None
    if index is not None:
        queries, index_k = queries._replace(index_q=heads_first(index.q), w=parts.in_tiles(plan, pad(index.w))), index.k
    lists = tiles.union_lists(pad(selected, -1), latent.shape[1], plan.tile, block, chunk)
    out, stats = (parts.joined(x) for x in _attend(plan, queries, latent, index_k, lists))
    out, stats = jnp.swapaxes(out, 1, 2)[:, :t], stats[:, :t]
    top = jnp.max(jax.lax.stop_gradient(stats[..., plan.top]), initial=MASKED / 2)
    return Attended(out, top, None if index is None else stats[..., plan.kl])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, queries: Queries, latent, index_k, lists: tiles.Lists):
    """(out, statistics) of `forward`; the column `Plan.kl` of the statistics has a gradient."""
    return forward(plan, queries, tiles.pack_rows(latent, index_k, plan.block), lists)


def _attend_fwd(plan, queries, latent, index_k, lists):
    out, stats = _attend(plan, queries, latent, index_k, lists)
    return (out, stats), (queries, latent, index_k, lists, out, stats)


def _attend_bwd(plan, residuals, cotangents):
    queries, latent, index_k, lists, out, stats = residuals
    d_out, d_stats = cotangents
    stats = stats.at[..., plan.kl].set(d_stats[..., plan.kl])
    rows = tiles.pack_rows(latent, index_k, plan.block)
    d_queries, d_rows = backward(plan, queries, Given(out, d_out, stats), rows, lists)
    d_rows = d_rows[:, : latent.shape[1]]
    d_latent = d_rows[..., : plan.width].astype(plan.dtype)
    start = tiles.index_start(plan.width)
    d_index_k = None if index_k is None else d_rows[..., start : start + plan.index_width].astype(plan.dtype)
    return d_queries, d_latent, d_index_k, None


_attend.defvjp(_attend_fwd, _attend_bwd)
