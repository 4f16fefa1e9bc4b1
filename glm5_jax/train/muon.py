"""Muon (paper section 2.1, Table 1): momentum, orthogonalised matrix by matrix, on one device or shared out over a mesh.

On a mesh a parameter is cut within its matrices, and orthogonalisation needs them whole. All devices that hold parts of the
same matrices divide them: each is sent whole matrices (all-to-all), orthogonalises those, once and nowhere else, and sends the
parts back. What a device is sent is as much as what it holds, or a matrix where there are fewer than devices.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.sharding.mesh import local, size, spread
from glm5_jax.sharding.rules import axes_by_dimension, uncut

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration in the reference of the method
_STEPS = 5
_AT_ONCE = 1 << 28  # bytes of matrices that are orthogonalised together


class Matrices(NamedTuple):
    """Which dimensions of a parameter form its matrices, counted from the end; all others are a batch of them."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class MuonState(NamedTuple):
    """count: int32 scalar, updates so far. momentum: pytree like the parameters."""

    count: jax.Array
    momentum: optax.Updates


def newton_schulz(x: jax.Array) -> jax.Array:
    """A matrix [m,n] with all singular values of x moved close to 1 (between about 0.7 and 1.2)."""
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / (jnp.linalg.norm(x) + 1e-8)
    a, b, c = _COEFFICIENTS

    def step(_, x):
        square = x @ x.T
        return a * x + (b * square + c * square @ square) @ x

    # A loop: written out, these were four fifths of the products in the program of a small step.
    x = lax.fori_loop(0, _STEPS, step, x)
    return x.T if turned else x


def orthogonalize(x: jax.Array, matrices: Matrices, spec: PartitionSpec | None = None, mesh: Mesh | None = None) -> jax.Array:
    """Each matrix of a parameter orthogonalised; a matrix of zeros stays zeros.

    Args:
      x: the parameter's momentum. matrices: its dimensions. spec: how it is cut over the mesh, if there is one.
    """
    return local(functools.partial(_shared_out, matrices, spec or PartitionSpec()), mesh, (spec,), spec)(x)


def _by_matrix(fn: Callable, matrices: Matrices, x):
    """fn of the parameter with its batch dimensions made one, [batch, inputs.., outputs..]."""
    dims = tuple(at % x.ndim for at in (*matrices.inputs, *matrices.outputs))
    order = tuple(at for at in range(x.ndim) if at not in dims) + dims
    turned = x.transpose(order)
    y = fn(turned.reshape(-1, *turned.shape[x.ndim - len(dims) :]), len(matrices.inputs))
    return y.reshape(turned.shape).transpose([order.index(at) for at in range(x.ndim)])


def _all(x, inputs: int):
    """Orthogonalises every x[i], whose first `inputs` dimensions are those of the matrix's input."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + inputs]), -1)
    return jax.vmap(newton_schulz)(flat).reshape(x.shape)


def _in_turn(fn: Callable, x, step: int, matrix_bytes: int):
    """fn of x [n,...], padded to a multiple of `step`, in parts that take a device about `_AT_ONCE` bytes."""
    each = -(-len(x) // step)  # matrices that a device is to work on
    turns = min(each, -(-each * matrix_bytes // _AT_ONCE))
    size = step * -(-each // turns)  # of a part
    x, n = jnp.pad(x, [(0, turns * size - len(x))] + [(0, 0)] * (x.ndim - 1)), len(x)
    y = fn(x) if turns == 1 else lax.map(fn, x.reshape(turns, size, *x.shape[1:])).reshape(x.shape)
    return y[:n]


def _shared_out(matrices: Matrices, spec: PartitionSpec, x):
    """`orthogonalize` on one device of a mesh: x is its part, cut as `spec` says."""
    dims = tuple(at % x.ndim for at in (*matrices.inputs, *matrices.outputs))
    axes_of = dict(enumerate(axes_by_dimension(spec)))
    cut_dims = [(1 + i, axes) for i, at in enumerate(dims) if (axes := spread(*axes_of.get(at, ())))]
    copies = spread(*uncut(spec))  # devices along them hold the same part
    parts = math.prod(size(*axes) for _, axes in cut_dims)

    def share(x, inputs):
        if copies:
            x = x.reshape(size(*copies), -1, *x.shape[1:])[lax.axis_index(copies)]
        for at, axes in cut_dims:
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=at, tiled=True)
        x = _all(x, inputs)
        for at, axes in reversed(cut_dims):
            x = lax.all_to_all(x, axes, split_axis=at, concat_axis=0, tiled=True)
        return lax.all_gather(x, copies, axis=0, tiled=True) if copies else x

    def in_turn(x, inputs):
        whole_bytes = parts * math.prod(x.shape[1:]) * x.dtype.itemsize
        return _in_turn(functools.partial(share, inputs=inputs), x, size(*copies) * parts, whole_bytes)

    return _by_matrix(in_turn, matrices, x)


def scale_by_muon(
    matrices: dict, beta: float, rms: float, specs: dict | None = None, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised and scaled to a root mean square of `rms` (arXiv 2502.16982).

    Args:
      matrices: path -> `Matrices` of each parameter. beta: decay of the momentum. specs, mesh: how the parameters are cut.
    """

    def init(params):
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(grads, state, params=None):
        momentum = optax.tree.update_moment(grads, state.momentum, beta, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(momentum, beta, optax.safe_increment(count))
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, optax.tree.bias_correction(grads, beta, count))

        def direction(path, x):
            if isinstance(x, optax.MaskedNode):
                return x
            m = matrices[path]
            fan_in, fan_out = (math.prod(x.shape[at] for at in dims) for dims in m)
            return orthogonalize(x, m, specs and specs[path], mesh) * (rms * math.sqrt(max(fan_in, fan_out)))

        return {path: direction(path, x) for path, x in ahead.items()}, MuonState(count, momentum)

    return optax.GradientTransformation(init, update)
