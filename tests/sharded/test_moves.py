"""A state saved on one mesh and read on another, and rows of a batch shared out anew: nothing changes and nothing is lost."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from glm5_jax.errors import UserError
from glm5_jax.layers.param import declare
from glm5_jax.sharding.mesh import MeshConfig, check_rows, local, make_mesh, put_all_rows, readers, shardings_of
from glm5_jax.sharding.rules import partition
from glm5_jax.train.checkpoint import CheckpointConfig, Checkpoints, restore_params
from glm5_jax.train.step import LossConfig, state_specs
from helpers_mesh import inputs, make, mesh, network, state_on

CFG = network(dtype="float64")


def some_mesh(*sizes):
    """A mesh of as many of the 8 devices as it needs; None for one."""
    return make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])


def state(m):
    """A state on a mesh whose moments are not zero either."""
    _, model, optimizer = make(CFG, None, LossConfig(mtp_steps=1, index_weight=1.0))
    full = jax.tree.map(lambda x: np.asarray(x) + 1, state_on(None, model, optimizer, inputs("float64")[0]))
    return jax.device_put(full, shardings_of(m, state_specs(full, make(CFG, m, LossConfig(mtp_steps=1, index_weight=1.0))[1])))


def template(m):
    _, model, optimizer = make(CFG, m, LossConfig(mtp_steps=1, index_weight=1.0))
    shapes = jax.eval_shape(lambda: state_on(None, model, optimizer, inputs("float64")[0]))
    if m is None:
        return shapes
    return jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings_of(m, state_specs(shapes, model)))


def test_a_checkpoint_moves_between_meshes(tmp_path):
    """8 devices to 4 and 1, and to another factorisation of 8: every value to the bit, each part where its rule says."""
    full = state(mesh(2, 2, 2))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(7, full, {"at": 3}, wait=True)
    for sizes in ((1, 4, 1), (1, 1, 1), (1, 2, 4), (8, 1, 1)):
        wanted = template(some_mesh(*sizes))
        step, found, data = checkpoints.restore(wanted)
        assert (step, data) == (7, {"at": 3})
        for a, b, w in zip(*map(jax.tree.leaves, (full, found, wanted)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            assert w.sharding is None or b.sharding.is_equivalent_to(w.sharding, b.ndim)
        _, params = restore_params(tmp_path, wanted.params)
        jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(full.params))
    checkpoints.close()


def test_rows_of_a_batch_lie_in_order_over_data_and_expert():
    m = mesh(2, 2, 2)
    rows = np.arange(8 * 3).reshape(8, 3)
    placed = put_all_rows({"tokens": rows}, m)["tokens"]
    for shard in placed.addressable_shards:
        at = [int(i) for i in np.argwhere(m.devices == shard.device)[0]]
        first = 4 * at[0] + 2 * at[1]
        np.testing.assert_array_equal(shard.data, rows[first : first + 2])
    assert readers(m) == (0, 1)


@pytest.mark.parametrize(
    "cfg, words",
    [
        (dict(data=3), "mesh data x expert x context = 3x1x1: there are 8 devices"),
        (dict(expert=3), "mesh expert x context = 3x1: does not divide the 8 devices"),
        (dict(context=16), "mesh expert x context = 1x16: does not divide the 8 devices"),
        (dict(data=0), "mesh.data=0: must be at least 1, or -1"),
        (dict(expert=-1), "mesh.expert=-1: must be at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(cfg, words):
    with pytest.raises(UserError, match=words):
        make_mesh(MeshConfig(**cfg))


def test_what_does_not_divide_is_refused_by_name():
    with pytest.raises(UserError, match="micro_rows=6: must be a multiple of mesh data x expert = 4"):
        check_rows(mesh(2, 2, 2), 6, 16)
    with pytest.raises(UserError, match="mesh.context=2: rows of 18 tokens cannot be cut into 4 equal pieces"):
        check_rows(mesh(2, 2, 2), 8, 18)
    with pytest.raises(UserError, match="mesh.expert=8: 5 experts cannot be spread evenly over it"):
        make(network(n_routed_experts=5), mesh(1, 8, 1), LossConfig(mtp_steps=1, index_weight=1.0))


def test_each_device_draws_the_values_that_the_whole_has_there():
    """Matrices that begin and end inside the blocks of random numbers; experts, two cuts of one dimension, stacks."""
    m = mesh(2, 2, 2)
    sizes = dict(m.shape)
    for stack, shape, axes in (
        ((3,), (4, 48, 40), ("experts", "embed", "expert_mlp")),
        ((), (300, 256), ("vocab", "embed")),
        ((2,), (16, 3, 24), ("heads", "head_dim", "embed")),
    ):
        draw = lambda: declare(nnx.Rngs(5), stack, shape, axes, "matrix", 0.5)[...]  # noqa: B023, E731
        logical = ("layers",) * len(stack) + axes
        cuts = PartitionSpec(*(cut or None for cut in partition(logical, stack + shape, sizes)))
        found = jax.jit(local(draw, m, (), cuts))()
        assert found.shape == stack + shape and found.addressable_shards[0].data.size == found.size // 8
        np.testing.assert_allclose(found, draw(), rtol=1e-6)  # another program rounds otherwise
