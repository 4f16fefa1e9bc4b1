"""Compiling for TPUs that are not there: libtpu compiles ahead of time for a described topology.

Nothing runs; what a test learns is whether the compiler accepts a program, and the memory it plans.
"""

import functools
import importlib.util
import os

import jax
import numpy as np
import pytest

from glm5_jax.plan import describe

TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def need_libtpu():
    """Skips the calling test where libtpu is not installed; in CI, where it must be, fails it."""
    if importlib.util.find_spec("libtpu") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("libtpu is not installed")


@functools.cache
def tpu_sharding(topology: str) -> jax.sharding.NamedSharding:
    """Replicated sharding on a mesh of one device of a topology such as "v5p:2x2x1"."""
    need_libtpu()
    mesh = jax.sharding.Mesh(np.array(describe(topology)[1][:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_for(function, *shapes, topology: str, donate_argnums=()) -> jax.stages.Compiled:
    """Compiles function for one device of a topology; works while JAX_PLATFORMS is cpu.

    Args:
      function: takes arrays. shapes: pytrees of `jax.ShapeDtypeStruct`, its arguments. topology: one of `TOPOLOGIES`.
      donate_argnums: as in `jax.jit`.
    """
    sharding = tpu_sharding(topology)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):  # how kernels learn the chip's facts
        jitted = jax.jit(function, out_shardings=sharding, donate_argnums=donate_argnums)
        return jitted.lower(*shapes).compile()
