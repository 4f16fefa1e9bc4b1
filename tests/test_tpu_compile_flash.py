"""The Pallas kernels of attention to all visible keys compile for real TPUs at GLM-5's widths, and keep scores out of HBM."""

import functools

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.program import instructions
from glm5_jax.sparse.dense import dense
from glm5_jax.sparse.masks import Rows
from helpers_tpu import TOPOLOGIES, compile_for, tpu_sharding

pytestmark = pytest.mark.tpu_compile

N, H, V = 64, 256, 256


def gradients(q, k, v, slot, segment, keys, d_out, block=512):
    out, vjp = jax.vjp(lambda *a: dense(*a, Rows(slot, segment), keys, 0.1, block)[0], q, k, v)
    return out, vjp(d_out)


def compiled(topology, t, s, width=H, dtype=jnp.bfloat16, block=512):
    shape = lambda *dims, dtype=dtype: jax.ShapeDtypeStruct((1, *dims), dtype)  # noqa: E731
    ids = [shape(n, dtype=jnp.int32) for n in (t, t, s)]
    arrays = shape(t, N, width), shape(s, N, width), shape(s, N, V), *ids, shape(t, N, V)
    return compile_for(functools.partial(gradients, block=block), *arrays, topology=topology)


ROW, PIECE = (4096, 4096, 2.5 * 1024), (8192, 131_072, 64.5 * 1024)


@pytest.mark.parametrize("topology, t, s, seen", [*((topology, *ROW) for topology in TOPOLOGIES), (TOPOLOGIES[0], *PIECE)])
def test_both_kernels_at_the_widths_of_glm5(topology, t, s, seen):
    """They hold all products: blocks of 1,024 keys before the diagonal and at it. Around them arrays are moved, no scores."""
    found = instructions(compiled(topology, t, s).as_text())
    products = [i for i in found if i.flops]
    assert len(products) == 2 and all("pallas_call" in i.name for i in products)
    assert sum(i.flops for i in products) == 2 * t * N * seen * (4 * H + 3 * V)
    assert max(i.bytes for i in found if not i.flops) <= 2 * 2 * N * s * (H + V)  # keys and values, read and written


@pytest.mark.parametrize("topology, t, dtype", [
    ("v5p:2x2x1", 16_384, jnp.bfloat16), pytest.param("tpu7x:2x2x1", 8192, jnp.float32, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_longest_rows_fit_into_vmem(topology, t, dtype):
    assert compiled(topology, t, t, dtype=dtype).as_text().count("tpu_custom_call") == 2


@pytest.mark.parametrize("t, s, block", [
    pytest.param(202, 404, 512, id="odd pieces"), pytest.param(700, 700, 100, id="odd blocks", marks=pytest.mark.slow),
])  # fmt: skip
def test_odd_lengths_and_blocks_are_filled_up(t, s, block):
    assert compiled(TOPOLOGIES[0], t, s, block=block).as_text().count("tpu_custom_call") == 2


def test_other_widths_take_the_loops_of_xla():
    def kernels(width):
        shape = lambda n: jax.ShapeDtypeStruct((1, 1024, N, n), jnp.bfloat16)  # noqa: E731
        ids = [jax.ShapeDtypeStruct((1, 1024), jnp.int32)] * 3
        with jax.sharding.use_abstract_mesh(tpu_sharding(TOPOLOGIES[0]).mesh.abstract_mesh):
            return str(jax.make_jaxpr(gradients)(shape(width), shape(width), shape(V), *ids, shape(V))).count("pallas_call")

    assert kernels(256) == 2
    with pytest.warns(UserWarning, match="dense attention takes the loops of XLA: heads of width 192 and 256"):
        assert kernels(192) == 0
