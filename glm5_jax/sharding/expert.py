"""Expert parallelism: each device of the axis "expert" holds some experts, and tokens travel to theirs (paper section 2.4).

Dropless and exact for any routing, without buffers for the worst case: tokens travel in rounds of a fixed size. The first has
room for 1/4 more than an even routing sends; what is left over goes in small rounds, as many as the fullest pair of devices
needs, none if the routing is close to even. A round is: rows to the experts' devices (all-to-all), experts, rows back.

The first round does not wait for a count, and nothing but the sum of its result depends on it: a compiler can overlap its
communication with the shared expert.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.sharding import mesh

AXIS = "expert"
_ROOM = 1.25  # rows that the first round has room for, in multiples of what an even routing sends
_MORE = 0.25  # the same of each later round


class _Plan(NamedTuple):
    """This device's picks (a row and one of its experts), sorted by expert and so by device.

    order: int32 [R], pick (m * X + j) per sorted pick. position: int32 [M,X], sorted pick per pick. begin, count: int32 [n],
    first sorted pick and number of picks for each device. sizes: rows a pair of devices exchanges in (first, later) rounds.
    """

    order: jax.Array
    position: jax.Array
    begin: jax.Array
    count: jax.Array
    sizes: tuple[int, int]


def by_expert(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Stable order of the picks (m, j) of ids [M,X] by expert, int32 [R], and where each one went, int32 [M,X]."""
    order = jnp.argsort(ids.reshape(-1), stable=True).astype(jnp.int32)
    place = jnp.arange(order.size, dtype=jnp.int32)
    position = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
    return order, position.reshape(ids.shape)


def sum_of_picks(rows: jax.Array, position: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """[M,D], float32 or wider: sum over j of rows[position[:, j]], times weights[:, j] if given.

    One gather per j: XLA on CPU is eight times slower at one gather of [M,X,D] with a reduction over X behind it.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    picked = [rows[position[:, j]].astype(wide) for j in range(position.shape[1])]
    if weights is not None:
        picked = [row * weights[:, j, None] for j, row in enumerate(picked)]
    return sum(picked)


def exchange(apply: Callable, x, ids, weights, *matrices) -> jax.Array:
    """The weighted sum of each row's selected experts, which lie on the devices of the axis "expert".

    Where there are no several, `apply` itself.

    Args:
      apply: (rows [m,D], ids int32 [m,X], weights [m,X], *matrices) -> [m,D], the weighted output of this device's experts;
        an id equal to the number of them is no expert, and its row is 0. Differentiable in all but ids.
      x: [M,D] rows of this device. ids: int32 [M,X], all different within a row, over all devices' experts. weights: [M,X].
      matrices: this device's experts, [E/n,...] each.
    Returns:
      [M,D] in the dtype of x, sums in float32 or wider.
    """
    if mesh.size(AXIS) == 1:
        return apply(x, ids, weights, *matrices)
    return _exchange(apply, x, ids, weights, matrices)


def _plan(ids, experts: int) -> _Plan:
    n = mesh.size(AXIS)
    order, position = by_expert(ids)
    count = jnp.bincount(ids.reshape(-1) // experts, length=n).astype(jnp.int32)
    sizes = tuple(min(order.size, 8 * math.ceil(order.size / n * share / 8)) for share in (_ROOM, _MORE))
    return _Plan(order, position, jnp.cumsum(count) - count, count, sizes)


def _rounds(plan: _Plan, body: Callable, carry):
    """`carry` after all rounds of `body(start, size, carry)`, which takes the picks start..start+size for each device."""
    first, later = plan.sizes
    carry = body(0, first, carry)
    # All devices take as many rounds as the one that needs most, or they would wait for each other in different places.
    most = mesh.largest(jnp.max(plan.count), *mesh.AXES)
    more = -(-jnp.maximum(most - first, 0) // later)
    with jax.named_scope("more_rounds"):
        return lax.fori_loop(0, more, lambda i, carry: body(first + i * later, later, carry), carry)


def _places(plan: _Plan, start, size: int):
    """(sorted picks [n,size], whether they exist) of a round."""
    at = start + jnp.arange(size, dtype=jnp.int32)
    there = at < plan.count[:, None]
    return jnp.where(there, plan.begin[:, None] + at, 0), there


def _send(rows, plan: _Plan, per_token: int, places, there):
    """Rows [M,D] of the picks at `places`, to the devices of their experts: [n * size,D]."""
    return _swap(jnp.where(there[..., None], rows[plan.order[places] // per_token], 0))


def _swap(x):
    """What each device of the axis has for each [n,size,...], at its destination: [n * size,...]."""
    return lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True).reshape(-1, *x.shape[2:])


def _keep(buffer, rows, places, there):
    """`buffer` [R,...] with the rows that came back [n,size,...] at their places."""
    rows = rows.reshape(*places.shape, *rows.shape[1:])
    places = jnp.where(there, places, buffer.shape[0])
    return buffer.at[places].set(rows.astype(buffer.dtype), mode="drop", unique_indices=True)


def _back(x, shape):
    return _swap(x.reshape(*shape, *x.shape[1:]))


def _addressed(x, ids, weights, plan: _Plan, experts: int, places, there):
    """What an expert's device is sent in a round: (rows, ids among its experts, weights)."""
    picks = plan.order[places]
    rows = _send(x, plan, ids.shape[1], places, there)
    own = jnp.where(there, ids.reshape(-1)[picks] % experts, experts)
    sent = jnp.where(there, weights.reshape(-1)[picks], 0)
    return rows, _swap(own)[:, None], _swap(sent)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(apply, x, ids, weights, matrices):
    experts = matrices[0].shape[0]
    plan = _plan(ids, experts)

    def body(start, size, y):
        places, there = _places(plan, start, size)
        rows = apply(*_addressed(x, ids, weights, plan, experts, places, there), *matrices)
        return _keep(y, _back(rows, places.shape), places, there)

    y = _rounds(plan, body, jnp.zeros((plan.order.size, x.shape[1]), x.dtype))
    return sum_of_picks(y, plan.position).astype(x.dtype)


def _forward(apply, x, ids, weights, matrices):
    return _exchange(apply, x, ids, weights, matrices), (x, ids, weights, matrices)


def _backward(apply, saved, dy):
    x, ids, weights, matrices = saved
    experts = matrices[0].shape[0]
    plan = _plan(ids, experts)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def body(start, size, carry):
        dx, dweights, dmatrices = carry
        places, there = _places(plan, start, size)
        rows, own, sent = _addressed(x, ids, weights, plan, experts, places, there)
        vjp = jax.vjp(lambda rows, sent, *matrices: apply(rows, own, sent, *matrices), rows, sent, *matrices)[1]
        d_rows, d_sent, *d_more = vjp(_send(dy, plan, ids.shape[1], places, there))
        dx = _keep(dx, _back(d_rows, places.shape), places, there)
        dweights = _keep(dweights, _back(d_sent[:, 0], places.shape), places, there)
        return dx, dweights, [a + b.astype(wide) for a, b in zip(dmatrices, d_more)]

    zeros = jnp.zeros((plan.order.size, x.shape[1]), x.dtype), jnp.zeros(plan.order.size, weights.dtype)
    start = (*zeros, [jnp.zeros(m.shape, wide) for m in matrices])
    dx, dweights, dmatrices = _rounds(plan, body, start)
    dmatrices = tuple(d.astype(m.dtype) for d, m in zip(dmatrices, matrices))
    return sum_of_picks(dx, plan.position).astype(x.dtype), None, dweights[plan.position], dmatrices


_exchange.defvjp(_forward, _backward)
