"""The routed experts of a mixture-of-experts layer, without capacity and without dropped tokens.

GLM-5 (paper section 2.1, Table 10) keeps the DeepSeek-style MoE: many narrow SwiGLU experts, of which the router picks
X per token. This file is what comes after the router:

    y[m] = sum_j weights[m, j] * down[e] (silu(x[m] gate[e]) * (x[m] up[e])),    e = ids[m, j]

Implementations of that sum; `implementation` says which one a backend takes:

  - "reference": the definition, every expert for every row. For tests.
  - "blocked": rows sorted by expert and cut into blocks of one expert each; a loop runs over the blocks in use and
    writes its own gradient. The default on CPU, where XLA lowers `ragged_dot` to every expert for every row.
  - "ragged": the same sort, then `jax.lax.ragged_dot`. The default on GPU, which has grouped kernels for it.
  - "megablox": the same sort, then JAX's Pallas kernels for grouped products. The default on TPU, where XLA lowers the
    gradient of `ragged_dot` by the matrices to every expert for every row (jax 0.10).

Rows move by gathers in both directions, never by scatter-add: that is faster on CPU and gives the same bits every run.

Shape letters: M rows (B * T tokens), D model width, E experts, X experts per token, F expert width, and here
R = M * X the selected rows, S the rows of one block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.compiling import target_platform
from glm5_jax.config import check
from glm5_jax.sharding.expert import by_expert, sum_of_picks

IMPLEMENTATIONS = ("reference", "blocked", "ragged", "megablox")


def implementation(backend: str, requested: str | None = None) -> str:
    """The implementation that `experts` takes.

    Args:
      backend: name of the backend as `target_platform()` gives it: "cpu", "tpu", "gpu".
      requested: one of `IMPLEMENTATIONS`, or None for the backend's default.

    Returns:
      `requested` if given, otherwise "blocked" on CPU, "megablox" on TPU and "ragged" elsewhere.

    Raises:
      UserError: `requested` is not one of `IMPLEMENTATIONS`.
    """
    if requested is None:
        return {"cpu": "blocked", "tpu": "megablox"}.get(backend, "ragged")
    check(requested in IMPLEMENTATIONS, f"implementation={requested!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    return requested


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """The weighted sum of each row's selected experts (paper section 2.1).

    Differentiable (once) in x, weights, gate, up and down. An expert that no row selects is never read, except by
    "reference", and its gradient is exactly 0.

    Args:
      x: [M, D] rows, float.
      ids: [M, X] int32, the experts of each row, all different within a row, in 0..E-1, or E for none.
      weights: [M, X] float32 router weights; 0 is allowed. That of no expert does not count and gets the gradient 0.
      gate: [E, D, F], dtype of x.
      up: [E, D, F], dtype of x.
      down: [E, F, D], dtype of x.
      implementation: one of `IMPLEMENTATIONS`; None = the default of the platform that is compiled for.

    Returns:
      [M, D], dtype of x. The sum over the X experts runs in float32 (float64 if x is).

    Raises:
      UserError: shapes or dtypes do not fit together or the implementation, or that is unknown.
    """
    _check_arguments(x, ids, weights, gate, up, down)
    if x.shape[0] == 0:
        return x
    chosen = _choose(implementation)
    check(
        chosen != "megablox" or x.dtype in (jnp.float32, jnp.bfloat16),
        f"implementation=megablox: takes float32 or bfloat16, not {x.dtype}",
    )
    return _run(chosen, x, ids, weights, gate, up, down)


def block_rows(rows: int, experts: int) -> int:
    """S, rows per block: the power of two at or below the mean group, at most 256; below 16 twice that.

    Larger blocks waste more rows at the end of each group, smaller ones leave products too small for two cores, and copy an
    expert's matrices more often. Where most groups are of one row, as when one request decodes, so are the blocks.
    """
    mean = rows // experts
    below = 1 << max(mean.bit_length() - 1, 0)
    return min(max(below, min(2 * below, 16)), 256) if mean else 1


def _choose(requested):
    return implementation(target_platform(), requested)


@functools.partial(jax.jit, static_argnums=0)  # one program also when called outside jit: the same bits, and fast
def _run(chosen, x, ids, weights, gate, up, down):
    weights = jnp.where(ids < gate.shape[0], weights, 0)
    if chosen == "blocked":
        return _blocked(block_rows(ids.size, gate.shape[0]), x, ids, weights, gate, up, down)
    if chosen == "reference":
        return _reference(x, ids, weights, gate, up, down)
    return _ragged({"ragged": lax.ragged_dot, "megablox": _megablox}[chosen], x, ids, weights, gate, up, down)


def _check_arguments(x, ids, weights, gate, up, down):
    check(x.ndim == 2 and gate.ndim == 3, f"experts: x must be [M, D] and gate [E, D, F]; got {x.shape}, {gate.shape}")
    e, d, f = gate.shape
    check(x.shape[1] == d, f"experts: x {x.shape} and gate {gate.shape} differ in the model width D")
    check(up.shape == (e, d, f), f"experts: up {up.shape} must have gate's shape {gate.shape}")
    check(down.shape == (e, f, d), f"experts: down {down.shape} must be {(e, f, d)}")
    check(
        ids.shape == weights.shape and ids.ndim == 2 and ids.shape[0] == x.shape[0],
        f"experts: ids {ids.shape} and weights {weights.shape} must both be [M, X] with M = {x.shape[0]}",
    )
    check(jnp.issubdtype(ids.dtype, jnp.integer), f"experts: ids must be integers, got {ids.dtype}")
    kinds = {str(a.dtype) for a in (x, gate, up, down)}
    check(len(kinds) == 1, f"experts: x, gate, up and down must share one dtype, got {', '.join(sorted(kinds))}")


# Shared pieces


def _swiglu(g: jax.Array, u: jax.Array) -> jax.Array:
    return jax.nn.silu(g) * u


def _wide(dtype) -> jnp.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


# "reference"


def _reference(x, ids, weights, gate, up, down):
    wide = _wide(x.dtype)
    x_, gate, up, down = (a.astype(wide) for a in (x, gate, up, down))
    h = _swiglu(jnp.einsum("md,edf->mef", x_, gate), jnp.einsum("md,edf->mef", x_, up))
    combine = jnp.einsum("mxe,mx->me", jax.nn.one_hot(ids, gate.shape[0], dtype=wide), weights.astype(wide))
    return jnp.einsum("mef,efd,me->md", h, down, combine).astype(x.dtype)


# "ragged" and "megablox"


@jax.custom_vjp
def _permute(rows, index, inverse):
    """rows[index] for a permutation; the gradient gathers by the inverse where JAX would scatter."""
    return rows[index]


_permute.defvjp(lambda rows, index, inverse: (rows[index], inverse), lambda inverse, dy: (dy[inverse], None, None))


def _ragged(dot, x, ids, weights, gate, up, down):
    """dot: (rows [R,.], matrices [E,.,.], sizes int32 [E]) -> [R,.], product of each group of rows and its matrix."""
    order, position = by_expert(ids)
    position = position.reshape(-1)
    sizes = jnp.bincount(ids.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    # What a grouped product leaves in rows of no group is not defined, nor what its gradient does.
    grouped = (jnp.arange(order.size) < jnp.sum(sizes))[:, None]
    rows = jnp.where(grouped, _permute(jnp.repeat(x, ids.shape[1], axis=0), order, position), 0)
    h = _swiglu(dot(rows, gate, sizes), dot(rows, up, sizes))
    y = jnp.where(grouped, dot(h, down, sizes), 0)
    y = _permute(y, position, order).reshape(*ids.shape, -1)
    wide = _wide(x.dtype)
    return jnp.sum(y.astype(wide) * weights.astype(wide)[..., None], axis=1).astype(x.dtype)


# Rows, contracted and resulting width of a block. The second does not change what is moved, but how long the compiler takes.
_MEGABLOX_TILES = (512, 512, 1024)


def _megablox(rows, matrices, sizes):
    """Pallas kernels; elsewhere than on a TPU, for tests, interpreted."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # late: Pallas takes a second to import

    n, (_, k, m) = rows.shape[0], matrices.shape
    tiling = tuple(min(most, -(-size // 128) * 128) for most, size in zip(_MEGABLOX_TILES, (n, k, m)))
    rows = jnp.pad(rows, ((0, -n % tiling[0]), (0, 0)))
    return gmm(rows, matrices, sizes, rows.dtype, tiling, interpret=target_platform() != "tpu")[:n]


# "blocked"


class _Blocks(NamedTuple):
    """The selected rows sorted by expert, cut into blocks of S rows of one expert.

    Groups lie next to each other without padding, so the last block of a group reaches into the next groups. Blocks run
    in order, and each overwrites what its predecessor wrote there. Row-wise buffers have R + S rows for the last block.
    """

    order: jax.Array  # [R] selected row (m * X + j) per sorted row
    token: jax.Array  # [R + S] m per sorted row, 0 in the padding
    position: jax.Array  # [M, X] sorted row per selected row
    expert: jax.Array  # [blocks] of each block, valid below `used`
    begin: jax.Array  # [blocks] first sorted row
    end: jax.Array  # [blocks] one past the last row of the block's group
    used: jax.Array  # [] number of blocks that hold rows


def _cut(ids: jax.Array, count: int, block: int) -> _Blocks:
    order, position = by_expert(ids)
    edges = jnp.searchsorted(ids.reshape(-1)[order], jnp.arange(count + 1)).astype(jnp.int32)
    per_expert = -(-jnp.diff(edges) // block)
    last = jnp.cumsum(per_expert)
    number = jnp.arange(order.size // block + min(count, order.size), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, number, side="right"), count - 1).astype(jnp.int32)
    begin = edges[expert] + block * (number - (last - per_expert)[expert])
    token = jnp.pad(order // ids.shape[1], (0, block))
    return _Blocks(order, token, position, expert, begin, edges[expert + 1], last[-1])


def _put(buffer, rows, begin):
    return lax.dynamic_update_slice_in_dim(buffer, rows, begin, axis=0)


def _gate_up(gate, up, expert):
    """[D, 2F]: side by side, the two products become one that is large enough for both cores."""
    return jnp.concatenate([gate[expert], up[expert]], axis=1)


def _pre_activations(rows, gate, up, expert, dtype):
    """[S, 2F]. Of few rows two products cost less than another copy of the matrices."""
    dot = functools.partial(jnp.dot, preferred_element_type=dtype)
    if rows.shape[0] > 32:
        return dot(rows, _gate_up(gate, up, expert))
    return jnp.concatenate([dot(rows, gate[expert]), dot(rows, up[expert])], axis=1)


def _forward_block(block, cut, x, gate, up, down, i, carry):
    """Writes the outputs and the pre-activations of block i."""
    y, pre = carry
    expert, begin = cut.expert[i], cut.begin[i]
    rows = x[lax.dynamic_slice_in_dim(cut.token, begin, block)]
    p = _pre_activations(rows, gate, up, expert, y.dtype)
    h = _swiglu(*jnp.split(p, 2, axis=1)).astype(x.dtype)
    out = jnp.dot(h, down[expert], preferred_element_type=y.dtype)
    return _put(y, out, begin), _put(pre, p.astype(x.dtype), begin)


def _backward_block(block, cut, x, dy, sorted_weights, pre, gate, up, down, i, carry):
    """Writes the row gradients of block i and adds to the gradients of its expert, in place in the carry."""
    dx, dweights, dgate, dup, ddown = carry
    wide = dx.dtype
    dot = functools.partial(jnp.dot, preferred_element_type=wide)
    expert, begin = cut.expert[i], cut.begin[i]
    token = lax.dynamic_slice_in_dim(cut.token, begin, block)
    # Rows past the group's end belong to other experts; where, not times 0: what they hold may not be finite.
    own = (begin + jnp.arange(block) < cut.end[i])[:, None]
    rows, dout = (jnp.where(own, a[token], 0) for a in (x, dy))
    p = jnp.where(own, lax.dynamic_slice_in_dim(pre, begin, block), 0).astype(wide)
    w = lax.dynamic_slice_in_dim(sorted_weights, begin, block)[:, None]

    h, swiglu_vjp = jax.vjp(_swiglu, *jnp.split(p, 2, axis=1))
    dh = dot(dout, down[expert].T)
    dp = jnp.concatenate(swiglu_vjp(dh * w), axis=1).astype(x.dtype)
    dgate_i, dup_i = jnp.split(dot(rows.T, dp), 2, axis=1)
    return (
        _put(dx, dot(dp, _gate_up(gate, up, expert).T), begin),
        _put(dweights, jnp.sum(h * dh, axis=1), begin),
        dgate.at[expert].add(dgate_i),
        dup.at[expert].add(dup_i),
        ddown.at[expert].add(dot((h * w).astype(x.dtype).T, dout)),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block, x, ids, weights, gate, up, down):
    return _blocked_forward(block, x, ids, weights, gate, up, down)[0]


def _blocked_forward(block, x, ids, weights, gate, up, down):
    cut = _cut(ids, gate.shape[0], block)
    rows = cut.token.size
    # Pre-activations are kept, 2F per selected row: computing them again costs two of eleven products (measured 20%).
    carry = (jnp.zeros((rows, x.shape[1]), _wide(x.dtype)), jnp.zeros((rows, 2 * gate.shape[2]), x.dtype))
    body = functools.partial(_forward_block, block, cut, x, gate, up, down)
    y, pre = lax.fori_loop(0, cut.used, body, carry)
    y = sum_of_picks(y, cut.position, weights.astype(y.dtype)).astype(x.dtype)
    return y, (x, weights, gate, up, down, cut, pre)


def _blocked_backward(block, saved, dy):
    x, weights, gate, up, down, cut, pre = saved
    wide = _wide(x.dtype)
    rows = cut.token.size
    sorted_weights = jnp.pad(weights.astype(wide).reshape(-1)[cut.order], (0, block))
    carry = (
        jnp.zeros((rows, x.shape[1]), wide),
        jnp.zeros(rows, wide),
        *(jnp.zeros(a.shape, wide) for a in (gate, up, down)),
    )
    body = functools.partial(_backward_block, block, cut, x, dy, sorted_weights, pre, gate, up, down)
    dx, dweights, *dmatrices = lax.fori_loop(0, cut.used, body, carry)
    dx = sum_of_picks(dx, cut.position).astype(x.dtype)
    dweights = dweights[cut.position].astype(weights.dtype)
    return (dx, None, dweights, *(d.astype(x.dtype) for d in dmatrices))


_blocked.defvjp(_blocked_forward, _blocked_backward)
