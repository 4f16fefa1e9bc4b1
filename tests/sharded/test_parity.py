"""The training step on 8 devices gives the numbers of one device, however the mesh is cut."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from helpers_mesh import LOSS, MESHES, gradients_on, inputs, least_gap, mesh, network, on_one_device

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def compare(got, expected, dtype: str) -> None:
    (loss, parts, grads), (one_loss, one_parts, one_grads) = got, expected
    limit = TOLERANCE[dtype]
    assert loss == pytest.approx(one_loss, rel=limit)
    np.testing.assert_array_equal(parts["load"], one_parts["load"])
    for name in one_parts.keys() - {"load"}:
        assert parts[name] == pytest.approx(one_parts[name], rel=limit), name
    assert grads.keys() == one_grads.keys()
    for path, expected in one_grads.items():
        norm = np.linalg.norm(expected)
        assert norm > 0 and np.linalg.norm(grads[path] - expected) / norm <= limit, path


@functools.cache
def gap_of_inputs() -> float:
    return least_gap(network(dtype="float64"), *inputs("float64"))


@pytest.mark.parametrize("name,dtype", [*((name, "float64") for name in MESHES), ("all three", "float32")])
def test_gradients_are_those_of_one_device(name, dtype):
    """Sparse attention, the indexer's loss, MTP, balance loss and packed rows, on inputs without near ties.

    On the mesh with all three axes also layer by layer recomputed, and in two micro-batches of the same rows: the same means.
    """
    params, batch = inputs(dtype)
    assert gap_of_inputs() > 1e-4
    if name != "all three":
        return compare(gradients_on(mesh(*MESHES[name]), network(dtype=dtype), params, batch), on_one_device(dtype), dtype)
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    loss, parts, grads = gradients_on(mesh(*MESHES[name]), network(dtype=dtype, remat="block"), params, twice)
    compare((loss, parts | {"load": parts["load"] / 2}, grads), on_one_device(dtype), dtype)


def test_gradients_of_layers_that_share_selections():
    """A loop over MoE layers of which the second owns an indexer, layer by layer recomputed; its keys come from all devices."""
    shared = dict(num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"))
    params, batch = inputs("float64", **shared)
    assert least_gap(network(dtype="float64", **shared), params, batch) > 1e-4
    one = gradients_on(None, network(dtype="float64", **shared), params, batch)
    eight = gradients_on(mesh(*MESHES["all three"]), network(dtype="float64", remat="block", **shared), params, batch)
    compare(eight, one, "float64")


def test_gradients_of_dense_attention_and_the_warm_up_loss():
    """All visible keys, among them those of other devices; the loss of the indexer is that of the warm-up."""
    cfg, loss = network(dtype="float64", attention="dense"), dataclasses.replace(LOSS, mtp_steps=0)
    params, batch = inputs("float64")
    one, eight = (gradients_on(m, cfg, params, batch, loss) for m in (None, mesh(*MESHES["context"])))
    compare(*(_without_mtp(x) for x in (eight, one)), "float64")


def _without_mtp(result):
    loss, parts, grads = result
    return loss, parts, {path: x for path, x in grads.items() if path[0] != "mtp"}
