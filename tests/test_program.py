"""What is read from the text of a compiled program: FLOPs of products, trip counts of loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.plan import describe
from glm5_jax.program import collectives, instructions, products
from glm5_jax.sharding.mesh import MeshConfig, make_mesh
from helpers_tpu import compile_for, need_libtpu


def total(found):
    return sum(p.flops * p.times for p in found)


def loops(x, w):
    """3 outer turns, each of 5 inner ones with a product of 8x16 by 16x16, and one of 8x16 by 16x4 behind them."""
    inner = lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)  # noqa: E731
    x = jax.lax.scan(lambda x, _: (inner(x), None), x, length=3)[0]
    return x @ w[:, :4]


LOOPS = 3 * 5 * 2 * 8 * 16 * 16 + 2 * 8 * 16 * 4
SHAPES = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


def test_bodies_of_loops_count_as_often_as_they_run():
    found = products(jax.jit(loops).lower(*SHAPES).compile().as_text())
    assert total(found) == LOOPS and all(p.bounded for p in found)


def test_a_loop_of_unknown_length_counts_as_told():
    def until(x, w):
        with jax.named_scope("climb"):
            return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x @ w, x)

    text = jax.jit(until).lower(*SHAPES).compile().as_text()
    (once,) = products(text)
    assert not once.bounded and once.times == 1 and once.flops == 2 * 8 * 16 * 16
    assert total(products(text, {"climb": 2.5})) == 2.5 * once.flops and not products(text, {"climb": 0})


def test_a_branch_counts_as_often_as_told_and_a_loop_in_it_is_not_named_by_it():
    """A product of 4 turns in 1 of 4 layers; a loop of unknown length in the same branch stays unknown."""

    def layers(x, w):
        def often(x):
            grown = jax.lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x @ w[:, ::-1], x)
            return jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ w), grown)

        def layer(x, own):
            with jax.named_scope("own"):
                return jax.lax.cond(own, often, jnp.sin, x), None

        return jax.lax.scan(layer, x, jnp.array([True, False, False, False]))[0]

    text = jax.jit(layers).lower(*SHAPES).compile().as_text()
    found = products(text, {"own": 1 / 4})
    assert sorted((p.times, p.bounded) for p in found) == [(1, False), (4, True)]
    assert {p.flops for p in found} == {2 * 8 * 16 * 16}
    assert sorted(p.times for p in products(text)) == [4, 16]


MIB = 1 << 20


def moves(x, w, table, rows):
    """A product with each of 3 weights, sums of 256 rows, 128 rows written into a table that is given back."""
    y = jax.lax.scan(lambda y, w: (jax.nn.relu(y @ w), None), x, w)[0]
    sums = jnp.sum(jnp.take(table, rows, axis=0), axis=1)
    return y, sums, jax.lax.dynamic_update_slice(table, jnp.ones((128, table.shape[1]), table.dtype), (rows[0], 0))


@pytest.mark.tpu_compile
def test_bytes_are_those_of_slices_and_of_loops():
    """Weights are read once in each turn, a table only where rows of it are taken or written."""
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    shapes = shape(64, 4096), shape(3, 4096, 4096), shape(32768, 4096), shape(256, dtype=jnp.int32)
    found = instructions(compile_for(moves, *shapes, topology="v5p:2x2x1", donate_argnums=2).as_text())
    assert all(i.bounded for i in found)
    assert sum(i.flops * i.times for i in found) == 3 * 2 * 64 * 4096**2
    moved, weights, rows = sum(i.bytes * i.times for i in found), 3 * 32 * MIB, (256 + 128) * 4096 * 2
    assert weights + rows <= moved <= 1.1 * weights + 3 * rows  # the table has 256 MiB


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "tpu7x:2x2x1"])
def test_products_on_tpus_are_convolutions(topology):
    """Batched, transposed and contracted over several dimensions: the compiler writes them as windows over padding or holes."""
    cases = {
        "bnqh,bnkh->bnqk": ((2, 6, 128, 64), (2, 6, 256, 64)),
        "btnv,nvd->btd": ((2, 64, 5, 32), (5, 32, 128)),
        "bsr,rnc->bsnc": ((2, 64, 32), (32, 7, 48)),
        "btd,btw->dw": ((2, 64, 128), (2, 64, 256)),
        "lij,ljk->lik": ((10, 64, 128), (10, 128, 96)),
    }

    def every(*arrays):
        return [jnp.einsum(spec, *arrays[2 * i : 2 * i + 2]) for i, spec in enumerate(cases)]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for pair in cases.values() for shape in pair]
    found = products(compile_for(every, *shapes, topology=topology).as_text())
    for spec, (a, b) in cases.items():
        sizes = dict(zip("".join(spec.split("->")[0].split(",")), a + b))
        assert any(spec in p.name and p.flops == 2 * np.prod(list(sizes.values())) for p in found), spec
    assert len(found) == len(cases)


@pytest.mark.tpu_compile
def test_loops_on_tpus_have_trip_counts_in_their_conditions():
    found = products(compile_for(loops, *SHAPES, topology="v5p:2x2x1").as_text())
    assert total(found) == LOOPS and all(p.bounded for p in found)


@pytest.mark.tpu_compile
def test_devices_that_differ_in_an_axis_send_along_it():
    need_libtpu()
    mesh = make_mesh(MeshConfig(2, 2, 2), describe("v5p:2x2x2")[1])
    for pairs, axes in (("{0,1},{1,0},{6,7}", ("context",)), ("{0,2},{4,6}", ("expert",)), ("{0,6},{1,3}", ("data", "expert"))):
        line = f"ROOT %y = f32[4]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
        (found,) = collectives(f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  {line}\n}}\n", mesh)
        assert found.axes == axes and found.bytes == 16


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "groups, axes",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("context",)),
        ("replica_groups=[4,2]<=[8]", ("context",)),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", ("data",)),
        ("replica_groups=[2,4]<=[2,4]T(0,1)", ("expert", "context")),
        ("replica_groups=mesh['data'=2,'expert'=2,'context'=2] {'data','context'}", ("data", "context")),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data", "context")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", ("data",)),
        ("replica_groups={}", ("data", "expert", "context")),
        ("replica_groups=of_another_kind", ("?",)),
    ],
)
def test_groups_of_devices_are_axes_however_they_are_written(groups, axes):
    need_libtpu()
    mesh = make_mesh(MeshConfig(2, 2, 2), describe("v5p:2x2x2")[1])
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  ROOT %y = f32[4]{{0}} all-reduce(%x), {groups}, to_apply=%sum\n}}\n"
    (found,) = collectives(text, mesh)
    assert found.axes == axes
