"""glm5_jax/layers/experts.py against a float64 loop over tokens, and what the compiled program may hold."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.errors import UserError
from glm5_jax.layers import experts as module
from glm5_jax.layers.experts import IMPLEMENTATIONS, experts, implementation

INEXACT = (0, 2, 3, 4, 5)  # x, weights, gate, up, down among the arguments
NAMES = ("x", "weights", "gate", "up", "down")


def make(m, x_per_token, e, d=12, f=10, routing="random", seed=0, dtype=np.float64):
    """(x, ids, weights, gate, up, down) as numpy arrays."""
    rng = np.random.default_rng(seed)
    scores = rng.random((m, e))
    if routing == "skewed":  # most rows on few experts, some experts empty
        scores = scores - 0.3 * np.arange(e)
    ids = np.argsort(-scores, axis=1)[:, :x_per_token]
    if routing == "same":  # every row on the same experts, not the first ones
        ids = np.tile((np.arange(x_per_token) * 2 + 1) % e, (m, 1))
    weights = rng.random((m, x_per_token))
    weights[0, 0] = 0.0
    arrays = [rng.normal(size=s) / np.sqrt(s[-2]) for s in ((e, d, f), (e, d, f), (e, f, d))]
    x = rng.normal(size=(m, d))
    return (x.astype(dtype), ids.astype(np.int32), weights.astype(dtype), *(a.astype(dtype) for a in arrays))


def loop(x, ids, weights, gate, up, down):
    """The definition, token by token in float64."""
    y = np.zeros(x.shape)
    for m in range(x.shape[0]):
        for j, e in enumerate(ids[m]):
            g = x[m] @ gate[e]
            y[m] += weights[m, j] * ((g / (1 + np.exp(-g)) * (x[m] @ up[e])) @ down[e])
    return y


def loop_gradients(x, ids, weights, gate, up, down):
    """Gradients of sum(loop(...) * probe) by hand: dx, dweights, dgate, dup, ddown."""
    dy = probe(x.shape)
    dx, dweights, dgate, dup, ddown = (np.zeros(a.shape) for a in (x, weights, gate, up, down))
    for m in range(x.shape[0]):
        for j, e in enumerate(ids[m]):
            g, u = x[m] @ gate[e], x[m] @ up[e]
            sigmoid = 1 / (1 + np.exp(-g))
            h = g * sigmoid * u
            dweights[m, j] = h @ down[e] @ dy[m]
            dh = weights[m, j] * (down[e] @ dy[m])
            dg, du = dh * u * sigmoid * (1 + g * (1 - sigmoid)), dh * g * sigmoid
            dx[m] += gate[e] @ dg + up[e] @ du
            dgate[e] += np.outer(x[m], dg)
            dup[e] += np.outer(x[m], du)
            ddown[e] += np.outer(weights[m, j] * h, dy[m])
    return dx, dweights, dgate, dup, ddown


def probe(shape):
    """A fixed cotangent, so that a gradient is that of one number."""
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


@functools.cache
def program(which):
    """Jitted args -> (y, gradients of sum(y * probe) to the five float arguments), by implementation or block size."""
    if isinstance(which, int):
        run = functools.partial(module._blocked, which)
    else:
        run = functools.partial(experts, implementation=which)

    def loss(*args):
        y = run(*args)
        return jnp.sum(y * probe(y.shape).astype(y.dtype)), y

    def both(*args):
        grads, y = jax.grad(loss, INEXACT, has_aux=True)(*args)
        return y, grads

    return jax.jit(both)


def float32(args):
    return tuple(jnp.asarray(a, jnp.int32 if a.dtype == np.int32 else jnp.float32) for a in args)


CASES = {  # the first three share one compilation; no M * X is a multiple of its block
    "balanced": dict(m=75, x_per_token=2, e=8),
    "unbalanced, empty experts": dict(m=75, x_per_token=2, e=8, routing="skewed"),
    "all on one pair": dict(m=75, x_per_token=2, e=8, routing="same"),
    "one row, many experts": dict(m=1, x_per_token=2, e=40),
    "X = 1": dict(m=50, x_per_token=1, e=6),
    "X = E": dict(m=33, x_per_token=4, e=4),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_float64(case):
    args = make(**CASES[case])
    exact = loop_gradients(*args)
    for name in IMPLEMENTATIONS:
        y, grads = program(name)(*float32(args))
        np.testing.assert_allclose(y, loop(*args), rtol=2e-5, atol=2e-6, err_msg=name)
        for what, got, want in zip(NAMES, grads, exact):
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=1e-5, err_msg=f"{name}: gradient of {what}")


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "megablox"])
def test_float64_and_finite_differences(name):
    args = make(75, 2, 8, routing="skewed")
    with jax.enable_x64(True):
        y, grads = jax.tree.map(np.asarray, program(name)(*args))
    np.testing.assert_allclose(y, loop(*args), rtol=1e-11, atol=1e-13)
    for what, got, want in zip(NAMES, grads, loop_gradients(*args)):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13, err_msg=what)
    rng = np.random.default_rng(1)
    for argument, grad in zip(INEXACT, grads):
        for _ in range(4):
            entry = tuple(rng.integers(0, n) for n in grad.shape)
            if argument >= 3:  # an expert that is selected
                entry = (int(args[1][rng.integers(0, 75), 0]), *entry[1:])
            sums = []
            for step in (1e-6, -1e-6):
                moved = [a.copy() for a in args]
                moved[argument][entry] += step
                sums.append(np.sum(loop(*moved) * probe(args[0].shape)))
            assert grad[entry] == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("block", [1, 4, 32, 256])
def test_block_size_does_not_change_the_result(block):
    args = float32(make(75, 2, 8, routing="skewed"))
    for got, want in zip(jax.tree.leaves(program(block)(*args)), jax.tree.leaves(program("reference")(*args))):
        np.testing.assert_allclose(got, want, rtol=5e-5, atol=1e-5)


def test_unselected_experts_are_never_read():
    args = float32(make(75, 2, 8, routing="skewed"))
    used = np.unique(args[1])
    unused = np.setdiff1d(np.arange(8), used)
    assert len(unused) > 0
    poisoned = args[:3] + tuple(a.at[unused].set(jnp.nan) for a in args[3:])
    y, grads = program("blocked")(*args)
    poisoned_y, poisoned_grads = program("blocked")(*poisoned)
    assert np.array_equal(poisoned_y, y)
    for what, got, clean in zip(NAMES, poisoned_grads, grads):
        assert np.array_equal(got, clean), what
        if what in ("gate", "up", "down"):
            assert not np.any(got[unused]) and np.all(np.any(np.asarray(got)[used], axis=(1, 2)))


def test_a_broken_expert_reaches_only_its_own_rows():
    """The padding of a block holds rows of other experts: neither 0 * nan nor a stray write may pass between them."""
    args = float32(make(75, 2, 8))
    broken = args[:3] + (args[3].at[2].set(jnp.nan), *args[4:])
    touched = np.any(np.asarray(args[1]) == 2, axis=1)
    y, (dx, _, *dmatrices) = jax.tree.map(np.asarray, program("blocked")(*broken))
    clean_y, (_, _, *clean) = jax.tree.map(np.asarray, program("blocked")(*args))
    assert np.isnan(y[touched]).all() and np.array_equal(y[~touched], clean_y[~touched])
    assert np.array_equal(np.isnan(dx).any(axis=1), touched)
    others = np.arange(8) != 2
    for got, want in zip(dmatrices, clean):
        assert np.array_equal(got[others], want[others])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bfloat16(name):
    args = make(75, 2, 8, routing="skewed")
    half = [a.astype(jnp.bfloat16) if i in (0, 3, 4, 5) else a for i, a in enumerate(float32(args))]
    y, grads = program(name)(*half)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), loop(*args), atol=0.04)
    assert [g.dtype for g in grads] == [a.dtype for i, a in enumerate(half) if i != 1]
    for g, want in zip(grads, program("reference")(*float32(args))[1]):
        assert np.abs(g.astype(np.float32) - want).max() < 0.03 * np.abs(want).max() + 0.02


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_same_bits_every_run_and_with_or_without_jit(name):
    args = float32(make(75, 2, 8))
    first, second = program(name)(*args), program(name)(*args)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)))
    assert np.array_equal(experts(*args, implementation=name), first[0])


def test_scan_over_layers_with_checkpoint():
    layers = [make(40, 2, 6, seed=s) for s in range(3)]
    x, ids, weights = float32(layers[0])[:3]
    stacked = [jnp.stack(a) for a in zip(*(float32(layer)[3:] for layer in layers))]

    def scanned(stacked, x):
        body = jax.checkpoint(lambda x, w: (x + experts(x, ids, weights, *w, implementation="blocked"), None))
        return jnp.sum(jnp.square(jax.lax.scan(body, x, stacked)[0]))

    def unrolled(stacked, x):
        for i in range(3):
            x = x + experts(x, ids, weights, *(a[i] for a in stacked), implementation="reference")
        return jnp.sum(jnp.square(x))

    got = jax.jit(jax.grad(scanned, (0, 1)))(stacked, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.grad(unrolled, (0, 1))(stacked, x))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_dispatcher():
    assert implementation("cpu") == "blocked"
    assert (implementation("tpu"), implementation("gpu")) == ("megablox", "ragged")
    assert implementation("tpu", "reference") == "reference"
    with pytest.raises(UserError, match="implementation=megablox: takes float32 or bfloat16, not float16"):
        experts(*(a.astype(jnp.float16) if a.dtype == jnp.float32 else a for a in float32(make(4, 2, 4))), "megablox")
    with pytest.raises(UserError, match="implementation='dense'.*reference, blocked, ragged, megablox"):
        implementation("cpu", "dense")


def test_bad_arguments_are_refused():
    args = float32(make(5, 2, 4))
    for index, value, message in (
        (0, args[0][:, :3], "model width"),
        (2, args[2][:, :1], "ids"),
        (5, args[3], "down"),
        (3, args[3].astype(jnp.bfloat16), "one dtype"),
        (1, args[1].astype(jnp.float32), "integers"),
    ):
        with pytest.raises(UserError, match=message):
            experts(*args[:index], value, *args[index + 1 :])


def test_block_rows():
    sizes = {
        (1, 8): 1,
        (8, 8): 2,
        (31, 8): 4,
        (32, 8): 8,
        (64, 8): 16,
        (128, 8): 16,
        (1024, 8): 128,
        (1023, 8): 64,
        (4096, 16): 256,
        (32768, 8): 256,
    }
    assert {arguments: module.block_rows(*arguments) for arguments in sizes} == sizes


@pytest.mark.parametrize("routing", ["random", "skewed", "same"])
def test_only_blocks_in_use_are_computed(routing):
    ids = make(500, 2, 40, routing=routing)[1]
    cut = jax.jit(module._cut, static_argnums=(1, 2))(jnp.asarray(ids), 40, 32)
    counts = np.bincount(ids.ravel(), minlength=40)
    assert cut.used == np.sum(-(-counts // 32)) and cut.used <= cut.expert.size
    spans = list(zip(np.asarray(cut.begin), np.asarray(cut.end)))[: int(cut.used)]
    assert [row for begin, end in spans for row in range(begin, min(begin + 32, end))] == list(range(1000))


def compiled(e, m=512, d=32, f=16):
    return program(32).lower(*float32(make(m, 2, e, d, f))).compile()


def test_cost_follows_the_selection():
    """No buffer spans experts x rows x width, and the products of one pass do not grow with the number of experts."""
    few, many = compiled(8), compiled(64)
    sizes = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", many.as_text())]
    assert max(sizes) < 64 * 512 * 16  # E * M * F; the largest are R * D and E * D * F
    assert many.cost_analysis()["flops"] < 1.2 * few.cost_analysis()["flops"]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_pick_of_no_expert_adds_nothing_and_gets_no_gradient(name):
    """As if its weight were 0, whatever its weight is: sorted behind the last group, it must not be read for it either."""
    x, ids, weights, *matrices = make(75, 2, 8)
    none = np.random.default_rng(1).random(ids.shape) < 0.3
    none[3] = True
    y, grads = program(name)(*float32((x, np.where(none, 8, ids), weights, *matrices)))
    without = (x, ids, np.where(none, 0, weights), *matrices)
    np.testing.assert_allclose(y, loop(*without), atol=1e-5)
    for what, got, want in zip(NAMES, grads, loop_gradients(*without)):
        want = np.where(none, 0, want) if what == "weights" else want
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=what)
