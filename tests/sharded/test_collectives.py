"""What travels between devices, alone: rows over the context, tokens to experts, matrices to those who orthogonalise them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax.layers.experts import experts
from glm5_jax.sharding import expert
from glm5_jax.sharding.context import gather_row, own, slots
from glm5_jax.sharding.mesh import local
from glm5_jax.sharding.rules import partition
from glm5_jax.train.muon import Matrices, orthogonalize
from helpers_mesh import mesh


def test_a_device_owns_two_pieces_that_balance_causal_work():
    """Device i of 4 holds pieces i and 7 - i of 8, and the keys come back in the order of the row."""
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3)

    def body(x):
        mine = own(x)
        return mine[None], slots(2, 16)[None], gather_row(mine)[None]

    spec = P(("expert", "context"))
    mine, at, back = jax.jit(local(body, mesh(1, 2, 4), P(), (spec, spec, spec)))(x)
    for device in range(8):
        i = device % 4
        expected = [2 * i, 2 * i + 1, 14 - 2 * i, 15 - 2 * i]
        np.testing.assert_array_equal(at[device], [expected, expected])
        np.testing.assert_array_equal(mine[device], x[:, expected])
        np.testing.assert_array_equal(back[device], x)


def test_gradients_of_gathered_keys_come_back_to_their_owners():
    """Each device reads the whole row with weights of its own; what it owns gets the sum over all devices."""
    x, w = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(1, 16, 2), (8, 1, 16, 2)]))
    gradient = jax.grad(lambda mine, w: jnp.sum(gather_row(mine) * w[0]))
    run = local(lambda x, w: gradient(own(x), w)[None], mesh(context=8), (P(), P("context")), P("context"))
    got = np.asarray(jax.jit(run)(x, w))
    for i in range(8):
        np.testing.assert_allclose(got[i, 0], w.sum(axis=0)[0, [i, 15 - i]], rtol=1e-12)


ROUTING = ("random", "one expert", "one device", "other devices")


def routed(kind: str, rows: int, picks: int, count: int, seed=0):
    """int32 [rows,picks], all different within a row."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return np.argsort(rng.random((rows, count)), axis=1)[:, :picks].astype(np.int32)
    first = {"one expert": [5, 11, 2], "one device": [4, 5, 11], "other devices": [15, 14, 13]}[kind][:picks]
    return np.tile(np.array(first, np.int32), (rows, 1))


@pytest.mark.parametrize("kind", ROUTING)
def test_every_token_reaches_its_experts_under_any_routing(kind, monkeypatch):
    """16 experts on 4 devices, 2 groups of which have other tokens: outputs and all gradients, in float64."""
    m, x, e, d, f = 80, 3, 16, 6, 4
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((m, d)), routed(kind, m, x, e), rng.random((m, x)), *(
        rng.standard_normal(shape) for shape in ((e, d, f), (e, d, f), (e, f, d))
    )
    weight = rng.standard_normal((m, d))

    def total(fn, x, ids, weights, gate, up, down, weight):
        y = fn(x, ids, weights, gate, up, down)
        return jnp.sum(y * weight), y

    grad = lambda fn: jax.value_and_grad(functools.partial(total, fn), argnums=(0, 2, 3, 4, 5), has_aux=True)  # noqa: E731

    def body(*args):
        (_, y), (dx, dw, *d_matrices) = grad(functools.partial(expert.exchange, experts))(*args)
        return y, dx, dw, [jax.lax.psum(g, "data") for g in d_matrices]

    rows, at = P(("data", "expert")), P("expert")
    run = local(body, mesh(2, 4), (rows, rows, rows, at, at, at, rows), (rows, rows, rows, [at] * 3))
    (_, y), (dx, dw, *d_matrices) = jax.jit(grad(experts))(*arrays, weight)
    got = jax.jit(run)(*arrays, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, (y, dx, dw, d_matrices))


def test_close_to_even_routing_takes_one_round_and_the_worst_as_many_as_it_needs():
    """Counted where the compiled program counts them: in the bound of its loop."""
    bounds = []

    def body(ids):
        plan = expert._plan(ids, 2)
        return expert._rounds(plan, lambda start, size, n: n + 1, jnp.int32(0))[None]

    run = jax.jit(local(body, mesh(expert=8), P("expert"), P("expert")))
    for ids in (np.arange(8 * 64 * 2).reshape(-1, 2) % 16, np.tile([[2, 3]], (512, 1))):
        bounds.append(np.asarray(run(ids.astype(np.int32))).tolist())
    # 128 picks a device, 16 for each other: the first round takes 24, later ones 8; the worst sends all 128 to one device.
    assert bounds == [[1] * 8, [1 + (128 - 24) // 8] * 8]


MATRICES = {
    "a stack of layers": ((3, 16, 24), Matrices((-2,), (-1,)), P(None, ("data", "expert", "context"))),
    "experts": ((3, 4, 16, 8), Matrices((-2,), (-1,)), P(None, "expert", ("data", "context"))),
    "heads": ((2, 8, 6, 10), Matrices((-3,), (-1,)), P(None, ("data", "expert"), "context")),
    "both sides of a matrix": ((5, 8, 4, 8), Matrices((-3, -2), (-1,)), P(None, "data", "context", "expert")),
    "whole everywhere": ((3, 8, 10), Matrices((-2,), (-1,)), P()),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_orthogonalised_by_one_device_each(kind):
    shape, matrices, spec = MATRICES[kind]
    x = np.random.default_rng(2).standard_normal(shape)
    one = jax.jit(lambda x: orthogonalize(x, matrices))(x)
    many = jax.jit(lambda x: orthogonalize(x, matrices, spec, mesh(2, 2, 2)))(x)
    np.testing.assert_allclose(many, one, rtol=1e-9, atol=1e-12)


def test_orthogonalisation_is_not_repeated():
    """16 matrices on 8 devices, half of which hold copies of the other half's parts: 2 for each device, not 16 or 4."""
    matrices, x = Matrices((-2,), (-1,)), jnp.zeros((16, 32, 48))

    def flops(*where):
        return jax.jit(lambda x: orthogonalize(x, matrices, *where)).lower(x).compile().cost_analysis()["flops"]

    assert flops(P(None, ("data", "context")), mesh(2, 2, 2)) == pytest.approx(flops() / 8, rel=0.02)


def test_parameters_are_cut_by_one_table():
    sizes = {"data": 4, "expert": 2, "context": 1}
    assert partition(("layers", "experts", "embed", "expert_mlp"), (3, 8, 16, 6), sizes) == ((), ("expert",), ("data",), ())
    assert partition(("embed", "q_rank"), (16, 6), sizes) == (("data", "expert"), ())
    assert partition(("kv_rank", "heads", "head_dim"), (4, 6, 5), sizes) == (("data",), ("expert",), ())
    assert partition(("layers", "embed"), (3, 16), sizes) == ((), ())  # a vector
