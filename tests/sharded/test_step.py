"""One whole step on 2 x 2 x 2 devices: its numbers, where its results lie, and everything that its program sends."""

import collections
import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax.model import specs, split
from glm5_jax.program import by_axes, collectives
from glm5_jax.sharding.mesh import local, put_rows, shardings_of
from glm5_jax.sharding.rules import axes_by_dimension, parameter_specs
from glm5_jax.train.step import LossConfig, flat, state_specs
from helpers_mesh import inputs, make, mesh, network, state_on

CFG = network(num_hidden_layers=3, num_nextn_predict_layers=0, remat="block", dtype="float64")
LOSS = LossConfig(mtp_steps=0, index_weight=1.0, chunk=16)
MESH = (2, 2, 2)
EVERY = ("data", "expert", "context")


@functools.cache
def result(sharded: bool):
    """(compiled program, state after one step, metrics)."""
    m = mesh(*MESH) if sharded else None
    step, model, optimizer = make(CFG, m, LOSS)
    params, batch = inputs("float64", num_hidden_layers=3, num_nextn_predict_layers=0)
    state = state_on(m, model, optimizer, params)
    out = (shardings_of(m, state_specs(state, model)), None) if m else None
    batch = put_rows(batch, m)
    program = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state, batch).compile()
    state, metrics = program(state, batch)
    return program, model, state, metrics


def test_parameters_and_moments_after_a_step_are_those_of_one_device():
    (_, _, one, one_metrics), (_, _, many, metrics) = result(False), result(True)
    for name in one_metrics:
        np.testing.assert_allclose(metrics[name], one_metrics[name], rtol=1e-9, atol=1e-12, err_msg=name)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-7, atol=1e-10)


def test_large_arrays_are_cut_over_all_devices_and_stay_so():
    """A device holds an eighth of each matrix and of its moments, before the step and after it."""
    _, _, state, _ = result(True)
    for leaf in jax.tree.leaves(state):
        held = leaf.addressable_shards[0].data.size
        matrix = leaf.ndim == 3 or leaf.ndim == 2 and leaf.shape[0] > 2  # not a stack of vectors
        assert held == (leaf.size // 8 if leaf.ndim > 3 or matrix else leaf.size), (leaf.shape, leaf.sharding)


def budget(model) -> dict:
    """(kind, axes) -> most bytes that each device may send in a step, from the declarations and the shapes of the batch."""
    parameters = flat(model_specs(model))
    wide, rows, t, d = 8, 2, 16, CFG.hidden_size  # bytes of a number; rows of a device's group, tokens of a row
    most, vectors = collections.Counter(), 0
    for (spec, shape), cuts in zip(parameters.values(), flat(parameter_specs(model)).values()):
        size = wide * math.prod(shape)
        if len(set(spec.axes) - {"layers", "experts"}) < 2:
            vectors += size
            continue
        of_expert = "experts" in spec.axes
        axes = ("data", "context") if of_expert else EVERY
        if spec.kind != "embedding":  # gathered once forward and once backward, one axis after another
            part = size / 8
            for axis in reversed([a for cut in axes_by_dimension(cuts) for a in cut if a in axes]):
                part *= 2
                most["all-gather", (axis,)] += 2 * part / 2
                most["reduce-scatter", (axis,)] += part / 2
        if spec.kind == "matrix":
            inner = {at % len(shape) for at in spec.inputs + spec.outputs} - {(spec.heads or 0) % len(shape)}
            count = math.prod(n for at, n in enumerate(shape) if at not in inner) // (2 if of_expert else 1)
            devices = 4 if of_expert else 8
            held = size / 8 / count * (devices * math.ceil(count / devices))  # filled up to as many for each
            most["all-to-all", axes] += 2 * held * (1 - 1 / devices)  # Muon: whole matrices there, parts back
    tokens = rows * t // 2
    most["all-gather", EVERY] += tokens * 4 * 7
    most["all-to-all", EVERY] += 2 * tokens * d * wide * 7 / 8  # embeddings there, their gradients back
    keys = CFG.num_hidden_layers * rows * t * (CFG.kv_lora_rank + CFG.qk_rope_head_dim + CFG.index_head_dim) * wide / 2
    most["all-gather", ("context",)] += 2 * keys
    most["reduce-scatter", ("context",)] += keys
    # Rounds of 24 and 8 picks a pair (32 picks on 2 devices): rows there and back, forward; rows, gradients and both back.
    picks = tokens * CFG.num_experts_per_tok
    room = sum(8 * math.ceil(picks / 2 * part / 8) for part in (1.25, 0.25))
    most["all-to-all", ("expert",)] = (CFG.num_hidden_layers - 1) * room * (5 * d * wide + 6 * wide)
    most["all-reduce", EVERY] = 2 * (vectors + 200 * wide)
    most["all-reduce", ("context",)] = most["all-reduce", ("data", "expert")] = 1500
    most["all-reduce", ("data", "context")] = most["all-reduce", ("expert",)] = 2 * 30 * wide  # sums of squares of experts
    return most


def model_specs(model):
    shapes = jax.tree.map(lambda x: x.shape, split(model)[1])
    return jax.tree.map(lambda spec, shape: (spec, shape), specs(model), shapes, is_leaf=lambda x: hasattr(x, "kind"))


def test_every_collective_is_known_and_within_its_budget():
    """Nothing else is sent: no axis without a reason, no stack of weights gathered at once, no parameter gathered twice."""
    program, model, _, _ = result(True)
    found = collectives(program.as_text(), mesh(*MESH))
    assert {c.times for c in found if c.bounded} == {1, 2}  # two layers are one loop
    spent, most = by_axes(found), budget(model)
    assert set(spent) <= set(most), set(spent) - set(most)
    for key, (_, sent) in spent.items():
        assert 0 < sent <= most[key], (key, sent, most[key])
    for kind, axes in most:
        if kind in ("all-gather", "reduce-scatter"):  # what must be sent is sent: the count sees it
            assert spent[kind, axes][1] > 0.6 * most[kind, axes], (kind, axes)


def test_a_loop_counts_as_often_as_it_runs():
    """A psum of 64 float32 over 4 of 8 devices, 5 times in a loop; a ring sends 2 x 3/4 of it."""
    def body(x):
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c, ("data", "context")) / 4, None), x, None, length=5)[0]

    m = mesh(*MESH)
    program = jax.jit(local(body, m, P("expert"), P("expert"))).lower(np.ones((2, 64), np.float32)).compile()
    expected = {("all-reduce", ("data", "context")): (5, pytest.approx(5 * 256 * 1.5))}
    assert by_axes(collectives(program.as_text(), m)) == expected
