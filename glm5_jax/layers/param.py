"""Declaration of a parameter: shape, logical axes, initialiser and role, in one place.

Sharding, Muon's matrix axes, weight decay, freezing and the Hugging Face name all derive from what is declared here;
nothing matches parameters by name.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.sharding.rules import own_part

Kind = Literal["matrix", "norm", "bias", "embedding", "head", "router", "router_bias"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a parameter is, apart from its value.

    Attributes:
      axes: logical axis name per dimension; stacked layers put "layers" first.
      kind: "matrix" (a linear map, a Muon parameter), or what else it is.
      inputs: dimensions that a matrix contracts with its input, counted from the end (negative).
      outputs: dimensions it produces, counted from the end. All others (layers, experts) are a batch of matrices.
      heads: the output dimension that Muon Split cuts into one matrix per head (paper section 2.1), or None.
      part: "trunk", "indexer" or "mtp"; what a stage may freeze.
      wide: used in float32 whatever the compute dtype.
      fp8: a matrix that FP8 checkpoints hold in FP8, unless it is wide.
      hf: name in the Hugging Face layout, relative to its layer ({e} = expert number).
    """

    axes: tuple[str, ...]
    kind: Kind
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    heads: int | None = None
    part: str = "trunk"
    wide: bool = False
    fp8: bool = True
    hf: str = ""


class Param(nnx.Param):
    """An nnx.Param whose metadata holds its `Spec` under `spec`."""


def declare(
    rngs: nnx.Rngs,
    stack: tuple[int, ...],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    kind: Kind,
    std: float | None = None,
    **spec,
) -> Param:
    """A fresh parameter of shape `stack + shape`, float32; in `sharding.mesh.local` this device's part of it.

    Args:
      rngs: source of the initial values.
      stack: leading dimensions of scanned layers, () for a single layer.
      shape: shape for one layer.
      axes: logical names of `shape`'s dimensions.
      kind: see `Spec`.
      std: standard deviation of a normal initialiser; None = ones for a norm, zeros otherwise.
      **spec: further fields of `Spec`.
    """
    axes = ("layers",) * len(stack) + axes
    starts, part = own_part(axes, stack + shape)
    if std is not None:
        value = std * normal(rngs.params(), stack + shape, starts, part)
    else:
        value = jnp.ones(part, jnp.float32) if kind == "norm" else jnp.zeros(part, jnp.float32)
    return Param(value, spec=Spec(axes=axes, kind=kind, **spec))


_BLOCK = 2**16


@jax.jit
def _normal_block(key: jax.Array, block: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, block), (_BLOCK,), jnp.float32)


def normal(key: jax.Array, shape: tuple[int, ...], starts=None, part: tuple[int, ...] | None = None) -> jax.Array:
    """Standard normal float32 values of an array of `shape`, or the `part` of them that begins at `starts`.

    They are drawn in blocks of one size, numbered through the array: a part holds what the whole has there, up to rounding.
    Outside a trace every parameter of every model uses one compiled function: compiling a generator per parameter took
    26 s for a model of 3M parameters.
    """
    if isinstance(key, jax.core.Tracer):
        return _normal_part(key, shape, starts or [jnp.int32(0)] * len(shape), part or shape)
    size = math.prod(shape)
    values = np.empty(math.ceil(size / _BLOCK) * _BLOCK, np.float32)
    for block in range(len(values) // _BLOCK):
        values[block * _BLOCK : (block + 1) * _BLOCK] = _normal_block(key, block)
    return jnp.asarray(values[:size].reshape(shape))


def _normal_part(key, shape, starts, part):
    """`normal` in a trace: one matrix after another, each drawn whole and then cut."""
    outer, inner = shape[:-2], math.prod(shape[-2:])

    def matrix(place):
        number = jnp.int32(0)  # of the matrix in the whole array
        for at, start, n in zip(place, starts, outer):
            number = number * n + start + at
        rest = number * (inner % _BLOCK)  # the number of its first value does not fit an int32
        first = number * (inner // _BLOCK) + rest // _BLOCK
        blocks = jax.vmap(lambda block: _normal_block(key, block))(first + jnp.arange(inner // _BLOCK + 2))
        values = jax.lax.dynamic_slice(blocks.reshape(-1), (rest % _BLOCK,), (inner,)).reshape(shape[-2:])
        return jax.lax.dynamic_slice(values, starts[-values.ndim :], part[-values.ndim :])

    places = np.array(list(np.ndindex(part[:-2])), np.int32).reshape(-1, len(outer)) if outer else np.zeros((1, 0), np.int32)
    return jax.lax.map(matrix, places).reshape(part)
