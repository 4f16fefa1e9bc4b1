"""Objectives against their definitions token by token, against the enumeration of all sequences, and against garbage."""

import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.errors import UserError
from glm5_jax.rl.advantages import check_rollouts, group_advantages, token_weights
from glm5_jax.rl.objectives import (
    KL_LOSSES,
    DoubleSided,
    Grpo,
    IcePop,
    Tokens,
    Truncated,
    combine,
    distillation_advantage,
    finish,
    kl_loss,
    kl_terms,
)

OBJECTIVES = (IcePop(), DoubleSided(), Truncated(), Grpo())
NAMES = [type(objective).__name__ for objective in OBJECTIVES]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=NAMES)
COUNTS = ("tokens", "positive", "negative", "popped", "popped_positive", "popped_negative", "clipped_low", "clipped_high")
SUMS = ("rollout_k1", "rollout_k2", "rollout_k3", "rollout_ratio", "entropy")
f32 = np.float32
LOG2 = math.log(2)


@functools.partial(jax.jit, static_argnums=0)
def run(objective, logp, tokens, entropy=None):
    """(loss, metrics, gradient by logp)."""
    (loss, metrics), grad = jax.value_and_grad(objective.loss, has_aux=True)(logp, tokens, entropy)
    return loss, metrics, grad


@jax.jit
def run_all(logp, tokens, entropy):
    """`run` of every objective by one compiled program a shape."""
    return [run(objective, logp, tokens, entropy) for objective in OBJECTIVES]


def run_few(objective, logp, tokens, entropy=None):
    """`run` of up to 16 tokens in a row of 16, filled up by masked NaN, so that all share a program."""
    fill = lambda x: np.pad(x, (0, 16 - len(x)), constant_values=0 if x.dtype == bool else np.nan)  # noqa: E731
    loss, metrics, grad = run(objective, *jax.tree.map(fill, (logp, tokens, entropy)))
    return loss, metrics, np.asarray(grad)[: len(logp)]


def single(log_ratio, advantage, *, by="rollout"):
    """Tokens of weight 1 and no mask whose ratio to the policy is given, exactly: pi has log-probability 0 or the other has."""
    log_ratio = np.asarray(log_ratio, np.result_type(log_ratio, f32) if isinstance(log_ratio, np.ndarray) else f32)
    logp, other = np.minimum(log_ratio, 0), np.minimum(-log_ratio, 0)
    advantage = np.broadcast_to(np.asarray(advantage, logp.dtype), logp.shape)
    tokens = Tokens(None, other, advantage, np.ones(logp.shape, bool), np.ones_like(logp))
    return logp, tokens if by == "rollout" else tokens._replace(old=other, rollout=other)


def definition(objective, logp, old, mu, advantage):
    """(weight-free loss, its derivative by logp, popped, clipped below, clipped above) of one token, from the paper's lines."""
    rho, r, q = math.exp(old - mu), math.exp(logp - old), math.exp(logp - mu)
    if isinstance(objective, DoubleSided):
        low, high = 1 - objective.low, 1 + objective.high
        popped = not low < q < high
        return (0, 0, True, q <= low, q >= high) if popped else (-q * advantage * logp, -q * advantage, False, False, False)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    clipped = min(max(r, low), high) * advantage < r * advantage
    value, slope = min(r * advantage, min(max(r, low), high) * advantage), 0 if clipped else r * advantage
    popped = isinstance(objective, IcePop) and not 1 / objective.beta <= rho <= objective.beta
    factor = {"IcePop": 0 if popped else rho, "Truncated": min(rho, getattr(objective, "cap", 0)), "Grpo": 1}
    factor, clipped = factor[type(objective).__name__], clipped and not popped
    return -factor * value, -factor * slope, popped, clipped and r < 1, clipped and r > 1


def example(seed, shape=(4, 12)):
    """logp, Tokens, entropy with ratios on all sides of every bound, a third of the tokens masked."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(3, *shape)).astype(f32)
    logp = noise[0] - 3
    old, mu = logp + f32(0.9) * noise[1], logp + f32(0.9) * noise[2]
    advantage = rng.choice([-1.5, -0.25, 0, 0.5, 2], shape).astype(f32)
    mask, weight = rng.random(shape) < 2 / 3, rng.random(shape).astype(f32)
    return logp, Tokens(old, mu, advantage, mask, weight), rng.random(shape).astype(f32)


@pytest.mark.smoke
@pytest.mark.parametrize("on_policy", [False, True])
def test_every_token_is_the_definition(on_policy):
    logp, tokens, entropy = example(0)
    if on_policy:
        tokens = tokens._replace(old=None)
    old = logp if on_policy else tokens.old
    for objective, (loss, metrics, grad) in zip(OBJECTIVES, run_all(logp, tokens, entropy)):
        expected, slopes = 0.0, np.zeros(logp.shape)
        tally = dict.fromkeys(COUNTS + SUMS, 0)
        largest = 0.0
        for i in zip(*np.nonzero(tokens.mask)):
            a, w = float(tokens.advantage[i]), float(tokens.weight[i])
            p, o, m = float(logp[i]), float(old[i]), float(tokens.rollout[i])
            value, slope, popped, low, high = definition(objective, p, o, m, a)
            expected, slopes[i] = expected + w * value, w * slope
            d = p - m
            largest = max(largest, abs(d))
            tally["tokens"] += 1
            tally["positive"] += a > 0
            tally["negative"] += a < 0
            tally["popped"] += popped
            tally["popped_positive"] += popped and a > 0
            tally["popped_negative"] += popped and a < 0
            tally["clipped_low"] += low
            tally["clipped_high"] += high
            tally["rollout_k1"] -= d
            tally["rollout_k2"] += d * d / 2
            tally["rollout_k3"] += math.exp(d) - 1 - d
            tally["rollout_ratio"] += math.exp(d)
            tally["entropy"] += float(entropy[i])
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(grad, slopes, rtol=1e-5, atol=1e-7)
        assert {name: int(metrics[name]) for name in COUNTS} == {name: tally[name] for name in COUNTS}
        for name in SUMS:
            np.testing.assert_allclose(metrics[name], tally[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(metrics["max_abs_log_ratio"], largest, rtol=1e-6)
        assert set(metrics) == {*COUNTS, *SUMS, "max_abs_log_ratio"}
        expect_popped = isinstance(objective, IcePop | DoubleSided)
        assert (tally["popped"] > 2) == expect_popped  # the example reaches every branch
        if not on_policy or isinstance(objective, DoubleSided):
            assert tally["clipped_low"] > 1 and tally["clipped_high"] > 1


def step(x, up):
    return np.nextafter(x, x.dtype.type(np.inf if up else -np.inf))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_icepop_keeps_its_bounds(dtype, advantage):
    """rho = 1/2 and 2 exactly and the next number on both sides, whatever the sign of the advantage."""
    with jax.enable_x64(dtype == "float64"):
        two = np.array(LOG2, dtype)
        log_rho = np.array([-two, two, step(-two, True), step(two, False), step(-two, False), step(two, True)])
        _, metrics, grad = run_few(IcePop(beta=2.0), *single(log_rho, advantage))
        assert grad.dtype == dtype
        np.testing.assert_allclose(grad, -advantage * np.array([0.5, 2, 0.5, 2, 0, 0]), rtol=1e-6)
        assert np.asarray(grad)[4:].tolist() == [0, 0] and int(metrics["popped"]) == 2
        _, _, grad = run_few(IcePop(beta=1.0), *single(np.array([0, 1e-7, -1e-7], dtype), advantage))
        assert np.asarray(grad).tolist() == [-advantage, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_double_sided_drops_its_bounds(dtype, advantage):
    """q = 1/2 and 2 exactly: out. The next numbers inside: weight q, for both signs of the advantage."""
    with jax.enable_x64(dtype == "float64"):
        two = np.array(LOG2, dtype)
        log_q = np.array([-two, two, step(-two, True), step(two, False), step(-two, False), step(two, True), 0 * two])
        _, metrics, grad = run_few(DoubleSided(low=0.5, high=1.0), *single(log_q, advantage))
        np.testing.assert_allclose(grad, -advantage * np.array([0, 0, 0.5, 2, 0, 0, 1]), rtol=1e-6)
        assert np.asarray(grad)[[0, 1, 4, 5]].tolist() == [0] * 4
        assert [int(metrics[name]) for name in ("popped", "clipped_low", "clipped_high")] == [4, 2, 2]


@pytest.mark.parametrize("objective", [IcePop(2.0, 0.5, 1.0), Truncated(2.0, 0.5, 1.0), Grpo(0.5, 1.0)], ids=repr)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clip_higher_and_its_minimum(objective, advantage):
    """r at, inside and outside of 1/2 and 2: the gradient goes only where the step already went too far in its direction."""
    two = f32(LOG2)
    log_r = np.array([-3, step(-two, False), -two, 0, two, step(two, True), 3], f32)
    loss, metrics, grad = run_few(objective, *single(log_r, advantage, by="old"))
    r = np.exp(log_r.astype(np.float64))
    kept = np.arange(7) <= 4 if advantage > 0 else np.arange(7) >= 2
    np.testing.assert_allclose(grad, np.where(kept, -r * advantage, 0), rtol=1e-6)
    np.testing.assert_allclose(loss, -(advantage * np.where(kept, r, 2 if advantage > 0 else 0.5)).sum(), rtol=1e-6)
    assert (int(metrics["clipped_low"]), int(metrics["clipped_high"])) == ((0, 2) if advantage > 0 else (2, 0))


def test_icepop_pops_on_both_sides_by_default():
    """rho = 0.1 too: the lower bound is 1 / beta, not 0. And of 0.6065, 12.18, 0.8187 the one in the middle."""
    _, metrics, grad = run_few(IcePop(), *single(np.log(np.array([0.1, 0.6065, 12.18, 0.8187], f32)), 1.0))
    np.testing.assert_allclose(grad, [0, -0.6065, 0, -0.8187], rtol=1e-6)
    assert int(metrics["popped"]) == 2


def test_truncated_caps_without_a_lower_bound():
    _, metrics, grad = run_few(Truncated(cap=2.0), *single(np.log(np.array([0.01, 1, 2, 30], f32)), -1.0))
    np.testing.assert_allclose(grad, [0.01, 1, 2, 2], rtol=1e-6)
    assert int(metrics["popped"]) == 0


def test_double_sided_is_not_cispo():
    """q = 1.5, A = 1: zeroed, where a clamped weight would still push with 1.28."""
    logp, tokens = single(np.log(f32([1.5])), 1.0)

    def cispo(logp):
        return -jnp.sum(jax.lax.stop_gradient(jnp.clip(jnp.exp(logp - tokens.rollout), 0.8, 1.28)) * tokens.advantage * logp)

    assert np.asarray(jax.grad(cispo)(logp)) == pytest.approx([-1.28])
    _, metrics, grad = run_few(DoubleSided(), logp, tokens)
    assert np.asarray(grad).tolist() == [0] and int(metrics["popped"]) == 1


def test_double_sided_looks_at_the_engine_and_not_at_the_old_policy():
    logp, tokens, entropy = example(1)
    outcomes = [run(DoubleSided(), logp, tokens._replace(old=old), entropy) for old in (tokens.old, logp, np.nan * logp)]
    assert int(outcomes[1][1]["popped"]) > 2  # data of an earlier policy, though pi_old = pi
    for other in outcomes[1:]:
        jax.tree.map(np.testing.assert_array_equal, outcomes[0], other)


def test_token_ratios_do_not_grow_with_the_length():
    logp, tokens = single(np.full(100, 0.012, f32), 1.0)  # the ratio of the sequence would be 3.3
    for objective in (IcePop(), DoubleSided()):
        _, metrics, grad = run(objective, logp, tokens)
        np.testing.assert_allclose(grad, -np.full(100, math.exp(0.012)), rtol=1e-6)
        assert int(metrics["popped"]) == 0


@every_objective
def test_gradient_goes_through_logp_only(objective):
    logp, tokens, entropy = example(2)
    floats = {name: x for name, x in tokens._asdict().items() if name != "mask"}

    def loss(floats, entropy, policy):  # all other inputs computed from the same parameters
        others = {name: x + policy - policy for name, x in floats.items()}
        return objective.loss(logp, Tokens(mask=tokens.mask, **others), entropy + policy)[0]

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(floats, entropy, jnp.zeros_like(logp))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


@every_objective
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(objective, shape):
    loss, metrics, grad = run(objective, *single(np.full(shape, 0.1, f32), -1.0))
    assert loss.shape == () and grad.shape == shape and int(metrics["tokens"]) == math.prod(shape)
    np.testing.assert_allclose(grad, 1 if isinstance(objective, Grpo) else math.exp(0.1), rtol=1e-6)


@every_objective
def test_dtypes(objective):
    logp, tokens = single(np.full((2, 3), 0.125, f32), 1.0)
    loss, metrics, grad = run(objective, jnp.asarray(logp, jnp.bfloat16), tokens)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert {metrics[name].dtype for name in COUNTS} == {np.dtype("int32")} and metrics["rollout_k3"].dtype == jnp.float32
    with jax.enable_x64(True):
        loss, metrics, grad = run(objective, logp.astype(np.float64), tokens)
        assert loss.dtype == grad.dtype == metrics["rollout_k3"].dtype == jnp.float64
        loss, *_ = run(objective, logp, tokens._replace(weight=np.ones((2, 3))))
        assert loss.dtype == jnp.float32 and metrics["popped"].dtype == jnp.int32


# Masks and numbers that are not.


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4, -1e4, -1e10])
@pytest.mark.parametrize("field", ["logp", "old", "rollout", "advantage", "weight", "entropy", "all"])
def test_garbage_outside_of_the_mask_changes_no_bit(field, garbage):
    logp, tokens, entropy = example(3)
    inputs = {"logp": logp, "entropy": entropy} | tokens._asdict()
    names = [name for name in inputs if name != "mask"] if field == "all" else [field]
    dirty = inputs | {name: np.where(tokens.mask, inputs[name], f32(garbage)) for name in names}
    expected = run_all(logp, tokens, entropy)
    actual = run_all(dirty.pop("logp"), Tokens(**{k: dirty[k] for k in Tokens._fields}), dirty["entropy"])
    jax.tree.map(np.testing.assert_array_equal, expected, actual)
    assert all(not np.asarray(grad)[~tokens.mask].any() and np.isfinite(grad).all() for _, _, grad in actual)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e4, -1e10])
def test_a_batch_of_padding_is_zero(garbage):
    filled = np.full((4, 12), garbage, f32)
    tokens = Tokens(filled, filled, filled, np.zeros((4, 12), bool), filled)
    for loss, metrics, grad in run_all(filled, tokens, filled):
        assert float(loss) == 0 and not np.asarray(grad).any()
        assert not any(np.asarray(x).any() for x in metrics.values())
        assert set(finish(metrics).values()) == {0.0}


def test_an_empty_batch_is_zero():
    for objective in OBJECTIVES:
        loss, metrics, _ = run(objective, *single(np.zeros((0, 5), f32), 1.0))
        assert float(loss) == 0 and set(finish(metrics).values()) == {0.0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "logp, mu", [(-2, -91), (-91, -2), (-2, -1e4), (-np.inf, -2), (-2, -np.inf), (-2, np.nan), (-np.inf, -np.inf)]
)
def test_extreme_ratios_are_popped_without_a_trace(logp, mu, advantage):
    """Trained tokens whose ratio overflows, or is no number: weight 0, and the token beside them is as before."""
    logp, mu, ones = f32([logp, -1]), f32([mu, -1]), np.ones(2, f32)
    for objective in (IcePop(), DoubleSided()):
        loss, metrics, grad = run_few(objective, logp, Tokens(None, mu, advantage * ones, ones > 0, ones))
        assert np.asarray(grad).tolist() == [0, -advantage] and int(metrics["popped"]) == 1
        assert float(loss) == (-advantage if isinstance(objective, IcePop) else advantage)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [89, -89, 1e4, -1e4])
def test_extreme_ratios_that_stay_are_cut_but_reported_as_they_are(log_ratio, advantage):
    _, metrics, grad = run_few(Truncated(), *single(f32([log_ratio]), advantage))
    expected = 2 if log_ratio > 0 else math.exp(-20)
    np.testing.assert_allclose(grad, [-advantage * expected], rtol=1e-5)
    np.testing.assert_allclose(metrics["max_abs_log_ratio"], abs(log_ratio))
    np.testing.assert_allclose(metrics["rollout_k1"], -log_ratio)
    for objective in (Grpo(), IcePop(), Truncated()):
        loss, _, grad = run_few(objective, *single(f32([log_ratio]), advantage, by="old"))
        assert np.isfinite(loss) and not np.asarray(grad).any()


@every_objective
def test_bad_shapes_and_masks_are_one_line(objective):
    logp, tokens = single(np.zeros((2, 3), f32), 1.0)
    with pytest.raises(UserError, match=r"^mask must be bool, not float32$"):
        objective.loss(logp, tokens._replace(mask=np.ones((2, 3), f32)))
    for name in Tokens._fields:
        with pytest.raises(UserError, match=rf"^{name} has shape \(2, 1\), logp \(2, 3\)$"):
            objective.loss(logp, tokens._replace(**{name: np.ones((2, 1), bool if name == "mask" else f32)}))


@pytest.mark.parametrize(
    "kind, settings, message",
    [
        (IcePop, dict(beta=0.5), "beta must be at least 1, not 0.5"),
        (IcePop, dict(beta=math.nan), "beta must be at least 1, not nan"),
        (Truncated, dict(cap=0.0), "cap must be positive, not 0.0"),
        (DoubleSided, dict(low=0.0), "low must be between 0 and 1, not 0.0"),
        (DoubleSided, dict(low=1.0), "low must be between 0 and 1, not 1.0"),
        (DoubleSided, dict(high=0.0), "high must be positive, not 0.0"),
        *((k, dict(clip_low=1.0), "clip_low must be from 0 to below 1, not 1.0") for k in (IcePop, Truncated, Grpo)),
        *((k, dict(clip_high=-0.1), "clip_high must be a number from 0, not -0.1") for k in (IcePop, Truncated, Grpo)),
        *((k, dict(clip_high=math.inf), "clip_high must be a number from 0, not inf") for k in (IcePop, Truncated, Grpo)),
    ],
)
def test_bad_settings_are_one_line(kind, settings, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        kind(**settings)


def test_defaults_are_those_of_the_paper():
    assert IcePop() == IcePop(beta=2.0, clip_low=0.2, clip_high=0.28)


# Denominators: the loss does not depend on how the tokens of a step are laid out.


def make_step(seed):
    """Flat tokens of 6 rollouts in 2 groups: logp, old, rollout, advantage, entropy [n] and the rollout of each."""
    rng = np.random.default_rng(seed)
    rollout_of = np.repeat(np.arange(6), rng.integers(0, 6, 6))
    n = len(rollout_of)
    logp, old, mu = (-2 + rng.normal(size=(3, n)) * [[1], [0], [0]]).astype(f32)
    old, mu = (logp + rng.normal(size=n) * 0.4).astype(f32), (logp + rng.normal(size=n) * 0.4).astype(f32)
    rewards = rng.choice([0.0, 0.5, 1.0], 6)
    return rng, logp, old, mu, rewards, rng.random(n).astype(f32), rollout_of


def samples_of(rng, rollout_of, fork):
    """Tokens as samples: (token indices of each sample, its rollout). A forked rollout is cut into up to 3."""
    samples = []
    for rollout in range(6):
        indices = np.flatnonzero(rollout_of == rollout)
        parts = np.array_split(rng.permutation(indices), rng.integers(1, 4)) if fork else [indices]
        samples += [(part, rollout) for part in parts]
    return samples


def weights_and_advantages(samples, rewards, n):
    """float32 [n] twice, computed as a trainer would: from samples."""
    rollouts = [rollout for _, rollout in samples]
    sample_rewards = [rewards[rollout] for rollout in rollouts]
    first, index = check_rollouts(rollouts, sample_rewards)
    groups = [rollouts[i] % 2 for i in first]
    values = group_advantages([sample_rewards[i] for i in first], groups).values[index]
    weight, advantage = np.zeros((2, n), f32)
    for (part, _), w, value in zip(samples, token_weights([np.ones(len(p), bool) for p, _ in samples], rollouts), values):
        weight[part], advantage[part] = w, value
    return weight, advantage


def lay_out(rng, shape, flat, keep=None):
    """The tokens at random places of arrays of `shape` whose other places hold garbage; `keep`: only these tokens."""
    logp, old, mu, advantage, weight, entropy = flat
    slots = rng.permutation(math.prod(shape))[: len(logp)]
    keep = np.ones(len(logp), bool) if keep is None else keep
    mask = np.zeros(math.prod(shape), bool)
    mask[slots[keep]] = True

    def place(x):
        out = rng.choice(f32([np.nan, np.inf, 1e4]), math.prod(shape))
        out[slots] = x
        return out.reshape(shape)

    mask = mask.reshape(shape)
    return slots, place(logp), Tokens(place(old), place(mu), place(advantage), mask, place(weight)), place(entropy)


def same(parts, slots, reference, n):
    """Sums over `parts` (outputs of run_all with the slots of their tokens) equal `reference`: loss, gradient, metrics."""
    for kind, (loss, metrics, grad) in enumerate(reference):
        outcomes = [part[kind] for part in parts]
        np.testing.assert_allclose(sum(float(o[0]) for o in outcomes), loss, rtol=2e-5, atol=1e-6)
        total = sum(np.asarray(o[2]).ravel()[s] for o, s in zip(outcomes, slots))
        np.testing.assert_allclose(total, grad, rtol=1e-5, atol=1e-7)
        combined = functools.reduce(combine, (o[1] for o in outcomes))
        for name, value in metrics.items():
            np.testing.assert_allclose(combined[name], value, rtol=2e-5, atol=1e-5, err_msg=name)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_layout_does_not_matter(seed):
    """Micro-batches, order, packing, padding to double width, forked rollouts, shards: loss, gradient, metrics are the same."""
    rng, logp, old, mu, rewards, entropy, rollout_of = make_step(seed)
    n = len(logp)
    weight, advantage = weights_and_advantages(samples_of(rng, rollout_of, fork=False), rewards, n)
    flat = logp, old, mu, advantage, weight, entropy
    slots, *inputs = lay_out(rng, (4, 12), flat)
    reference = [(loss, metrics, np.asarray(grad).ravel()[slots]) for loss, metrics, grad in run_all(*inputs)]

    for shape in ((4, 12), (4, 24)):  # other order and other rows; double width
        slots, *inputs = lay_out(rng, shape, flat)
        same([run_all(*inputs)], [slots], reference, n)

    forked = weights_and_advantages(samples_of(rng, rollout_of, fork=True), rewards, n)
    np.testing.assert_allclose(forked, [weight, advantage], rtol=1e-6)
    slots, *inputs = lay_out(rng, (4, 12), (logp, old, mu, forked[1], forked[0], entropy))
    same([run_all(*inputs)], [slots], reference, n)

    batch_of = rng.integers(0, 4, n)  # of 4 micro-batches, some may be empty
    parts = [lay_out(rng, (4, 12), flat, keep=batch_of == i) for i in range(4)]
    same([run_all(*inputs) for _, *inputs in parts], [slots for slots, *_ in parts], reference, n)


def test_shards_add_up():
    """Rows split between two devices, one shard nearly empty: sums of the shards are those of the whole."""
    logp, tokens, entropy = example(5)
    tokens.mask[2:] = False
    tokens.mask[3, 4] = True
    whole = run_all(logp, tokens, entropy)
    outcomes = [
        run_all(*jax.tree.map(lambda x, rows=rows: x[rows], (logp, tokens, entropy))) for rows in np.array([[0, 1], [2, 3]])
    ]
    for kind, (loss, metrics, grad) in enumerate(whole):
        np.testing.assert_allclose(sum(o[kind][0] for o in outcomes), loss, rtol=1e-5)
        np.testing.assert_allclose(np.concatenate([o[kind][2] for o in outcomes]), grad, rtol=1e-6)
        combined = combine(*(o[kind][1] for o in outcomes))
        for name, value in metrics.items():
            np.testing.assert_allclose(combined[name], value, rtol=1e-5, err_msg=name)
        assert int(outcomes[1][kind][1]["tokens"]) == 1


def loss_of(masks, rollout_ids, losses):
    """IcePop's loss of samples whose tokens, on-policy and without mismatch, have the given loss each."""
    weight = np.concatenate(token_weights(masks, rollout_ids)).astype(f32)
    zeros, advantage = np.zeros_like(weight), -np.repeat(f32(losses), [len(mask) for mask in masks])
    return float(run_few(IcePop(), zeros, Tokens(None, zeros, advantage, np.concatenate(masks), weight))[0])


def test_means_by_hand():
    on, tail = np.ones(2, bool), np.array([1, 1, 0, 0, 0, 0], bool)
    assert loss_of([tail], ["a"], [1]) == 1  # not 1/3
    assert loss_of([np.ones(1, bool)], ["a"], [3]) == 3  # an answer of one token is trained
    assert loss_of([on, np.ones(8, bool)], ["a", "b"], [1, 3]) == pytest.approx(2)  # mean over y, then over rollouts
    assert loss_of([np.ones(1, bool), np.ones(9, bool)], ["a", "a"], [1, 3]) == pytest.approx(2.8)  # shards of 1 and 9 tokens


def test_rows_that_fill_up_a_batch_do_not_dilute_it():
    """5 samples on 4 devices, filled up to 8 by masked copies."""
    logp, tokens, entropy = example(6, (5, 12))
    filled = np.minimum(np.arange(8), 4)
    more = jax.tree.map(lambda x: x[filled], tokens)
    more = more._replace(mask=more.mask & (np.arange(8) < 5)[:, None])
    a, b = run_all(logp, tokens, entropy), run_all(logp[filled], more, entropy[filled])
    for (loss, metrics, grad), (loss8, metrics8, grad8) in zip(a, b):
        np.testing.assert_allclose(loss8, loss, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(grad8)[:5], grad, rtol=1e-6)
        assert not np.asarray(grad8)[5:].any()
        for name in metrics:
            np.testing.assert_allclose(metrics8[name], metrics[name], rtol=1e-6)


@pytest.mark.parametrize("objective", [IcePop(), DoubleSided()], ids=["IcePop", "DoubleSided"])
def test_popped_tokens_stay_in_the_denominator(objective):
    log_ratio = np.array([0, 3, -3, 0], f32)
    logp, tokens = single(log_ratio, 1.0)
    _, _, grad = run_few(objective, logp, tokens._replace(weight=np.full(4, 0.25, f32)))
    assert np.asarray(grad).tolist() == [-0.25, 0, 0, -0.25]


# Metrics.


def test_finished_metrics_are_means_over_all_tokens():
    """Two ranks with 1 and 9 tokens: the mean of their means would be another number."""
    one = run_few(IcePop(), *single(f32([1.0]), 1.0), entropy=f32([2.0]))[1]
    nine = run_few(IcePop(), *single(np.zeros(9, f32), [-1.0] * 8 + [0.0]), entropy=np.ones(9, f32))[1]
    result = finish(combine(one, nine))
    expected = {
        "tokens": 10, "positive": 1, "negative": 8, "popped": 0.1, "popped_positive": 1, "popped_negative": 0,
        "clipped_low": 0, "clipped_high": 0, "rollout_k1": -0.1, "rollout_k2": 0.05, "rollout_k3": (math.e - 2) / 10,
        "rollout_ratio": (9 + math.e) / 10, "max_abs_log_ratio": 1, "entropy": 1.1,
    }  # fmt: skip
    assert result == pytest.approx(expected, rel=1e-6)
    assert all(type(value) is float for value in result.values())


def test_entropy_is_reported_only_if_given():
    assert "entropy" not in run_few(Grpo(), *single(f32([0.0]), 1.0))[1]


def test_the_docs_define_every_metric():
    docs = (pathlib.Path(__file__).parent.parent / "docs" / "rl_objectives.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", docs.partition("## Metrics")[2], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted([*COUNTS, *SUMS, "max_abs_log_ratio"])


def test_truncated_sampling_shows_in_the_mean_ratio():
    """An engine that renormalises over a nucleus of mass 0.9 reports log-probabilities too large by -log 0.9."""
    logp = np.log(np.random.default_rng(0).random(16)).astype(f32)
    ones = np.ones(16, f32)
    tokens = Tokens(None, logp - f32(math.log(0.9)), ones, ones > 0, ones)
    assert finish(run_few(IcePop(), logp, tokens)[1])["rollout_ratio"] == pytest.approx(0.9, rel=1e-6)


# Expected gradients, by enumeration of all 27 sequences of 3 tokens of a vocabulary of 3, in float64.

SEQUENCES = np.array(np.unravel_index(np.arange(27), (3, 3, 3))).T  # [27,3]
PREFIX = np.stack([np.zeros(27, int), 1 + SEQUENCES[:, 0], 4 + 3 * SEQUENCES[:, 0] + SEQUENCES[:, 1]], axis=1)  # [27,3] rows
TABLES = np.random.default_rng(8).normal(size=(3, 13, 3))  # a policy is a table: logits of the next token by prefix
POLICY, ENGINE, TEACHER = TABLES[0], TABLES[0] + 1.2 * TABLES[1], TABLES[2]


@jax.jit
def log_probs(logits):
    """log pi of every token of every sequence, [27,3]."""
    return jax.nn.log_softmax(logits)[PREFIX, SEQUENCES]


def probabilities(logits):
    """numpy [13,3]."""
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def chance(logits):
    """Probability of every sequence, numpy [27]."""
    return probabilities(logits)[PREFIX, SEQUENCES].prod(1)


def ratios():
    """POLICY / ENGINE of every token, numpy [27,3]."""
    return (probabilities(POLICY) / probabilities(ENGINE))[PREFIX, SEQUENCES]


def gradient_by_hand(factor):
    """sum over sequences and tokens of factor [27,3] * d log pi(token) / d logits, [13,3]: onehot - softmax."""
    result = np.zeros((13, 3))
    np.add.at(result, PREFIX, factor[..., None] * (np.eye(3)[SEQUENCES] - probabilities(POLICY)[PREFIX]))
    return result


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(objective, logits, index, rollout, advantage, weight):
    """d loss / d logits [13,3] of the sequences `index` [...]; rollout, advantage, weight [...,3]."""

    def loss(logits):
        mask = jnp.ones(weight.shape, bool)
        return objective.loss(log_probs(logits)[index], Tokens(None, rollout, advantage, mask, weight))[0]

    return jax.grad(loss)(logits)


def expected_gradient(objective, engine, advantage):
    """Gradient [13,3] by POLICY's logits of the expected loss of one sequence sampled from `engine`. advantage: [27,3]."""
    weight = per_sequence(chance(engine)) / 3
    with jax.enable_x64(True):
        mu = np.log(probabilities(engine))[PREFIX, SEQUENCES]
        return np.asarray(gradient_of(objective, POLICY, np.arange(27), mu, advantage, weight))


def per_sequence(values):
    return np.repeat(np.asarray(values)[:, None], 3, 1)


REWARD = np.random.default_rng(9).normal(size=27)


@every_objective
def test_on_policy_gradient_is_the_policy_gradient(objective):
    """E[grad loss] = -1/|y| grad of sum over y of pi(y) A(y), for any advantages of sequences."""
    expected = gradient_by_hand(per_sequence(chance(POLICY) * REWARD))
    actual = expected_gradient(objective, POLICY, per_sequence(REWARD))
    np.testing.assert_allclose(actual, -expected / 3, atol=1e-14)
    assert abs(expected).max() > 0.05


@every_objective
def test_group_mean_baseline_scales_the_policy_gradient(objective):
    """All 729 groups of 2, without std: the mean contains the sample itself, so (1 - 1/G) of the gradient of E[reward]."""
    pairs = np.array(np.unravel_index(np.arange(729), (27, 27))).T  # [729,2]
    values = group_advantages(REWARD[pairs].ravel(), np.repeat(np.arange(729), 2), scale="none").values.reshape(729, 2)
    likely = chance(POLICY)[pairs].prod(1)  # of a group
    weight = np.broadcast_to((likely / 2 / 3)[:, None, None], (729, 2, 3))
    mu = np.log(probabilities(POLICY))[PREFIX, SEQUENCES][pairs]
    with jax.enable_x64(True):
        actual = gradient_of(objective, POLICY, pairs, mu, np.repeat(values[..., None], 3, 2), weight)
    expected = gradient_by_hand(per_sequence(chance(POLICY) * REWARD))
    np.testing.assert_allclose(actual, -(1 - 1 / 2) * expected / 3, atol=1e-14)


@pytest.mark.parametrize("low, high", [(0.05, 0.05), (0.2, 0.28), (0.3, 5.0), (0.8, 3.0), (0.999, 1e6)])
def test_bias_of_double_sided_is_what_its_interval_leaves_out(low, high):
    """Sampled from another policy: each token has its own ratio as weight, and those outside of the interval are missing."""
    q = ratios()
    inside = (q > 1 - low) & (q < 1 + high)
    actual = expected_gradient(DoubleSided(low, high), ENGINE, per_sequence(REWARD))
    everything = gradient_by_hand(per_sequence(chance(ENGINE) * REWARD) * q)
    left_out = gradient_by_hand(per_sequence(chance(ENGINE) * REWARD) * q * ~inside)
    np.testing.assert_allclose(actual, -(everything - left_out) / 3, atol=1e-14)
    assert (abs(left_out).max() > 1e-3) == (low < 0.999)
    # For the first token alone, and an advantage that is its own, the whole is the policy gradient: no bias but the interval's.
    first = np.zeros((27, 3))
    first[:, 0] = np.array([1.0, -0.5, 2.0])[SEQUENCES[:, 0]]
    exact = gradient_by_hand(per_sequence(chance(POLICY)) * first)
    missing = gradient_by_hand(per_sequence(chance(ENGINE)) * first * q * ~inside)
    actual = expected_gradient(DoubleSided(low, high), ENGINE, first)
    np.testing.assert_allclose(actual, -(exact - missing) / 3, atol=1e-14)


@pytest.mark.parametrize("beta", [1.1, 2.0, 1e6])
def test_bias_of_icepop_is_what_it_pops(beta):
    rho = ratios()
    weight = np.where((rho >= 1 / beta) & (rho <= beta), rho, 0)
    expected = gradient_by_hand(per_sequence(chance(ENGINE) * REWARD) * weight)
    np.testing.assert_allclose(expected_gradient(IcePop(beta), ENGINE, per_sequence(REWARD)), -expected / 3, atol=1e-14)
    assert (weight == 0).any() == (beta < 1e6)


def reach():
    """Probability under POLICY that each of the 13 prefixes is reached, numpy."""
    result = np.zeros(13)
    for t in range(3):
        np.add.at(result, PREFIX[:, t], chance(POLICY))
    return result


def kl_by_hand():
    """KL(POLICY || TEACHER) of the next token by prefix, [13], and its gradient by POLICY's logits, [13,3]."""
    p, log_ratio = probabilities(POLICY), np.log(probabilities(POLICY) / probabilities(TEACHER))
    kl = (p * log_ratio).sum(-1)
    return kl, p * (log_ratio - kl[:, None])


def test_distillation_is_minus_the_gradient_of_the_kl_to_the_teacher():
    """Token by token, given what came before; a first token alone is the whole KL(pi || teacher)."""
    teacher = np.log(probabilities(TEACHER))[PREFIX, SEQUENCES]
    mu = np.log(probabilities(POLICY))[PREFIX, SEQUENCES]
    on = np.ones((27, 3), bool)

    def loss(logits, weight):
        logp = log_probs(logits)
        advantage = distillation_advantage(teacher, logp, on)
        return IcePop().loss(logp, Tokens(None, mu, advantage, on, weight))[0]

    kl_grad = kl_by_hand()[1]
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss))
        every = gradient(POLICY, per_sequence(chance(POLICY)))
        first = gradient(POLICY, per_sequence(chance(POLICY)) * (np.arange(3) == 0))
    np.testing.assert_allclose(every, reach()[:, None] * kl_grad, atol=1e-14)
    np.testing.assert_allclose(first[0], kl_grad[0], atol=1e-14)
    assert not first[1:].any() and abs(kl_grad).max() > 0.1


def expected_kl_gradient(value):
    """Gradient of the expected loss value(logp, logp_ref, weight) of all tokens sampled from POLICY, towards TEACHER."""
    ref, weight = np.log(probabilities(TEACHER))[PREFIX, SEQUENCES], per_sequence(chance(POLICY))
    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.grad(lambda logits: jnp.sum(value(log_probs(logits), ref, weight))))(POLICY))


@pytest.mark.parametrize("kind", KL_LOSSES)
def test_kl_losses_have_the_gradient_of_the_kl(kind):
    actual = expected_kl_gradient(lambda p, ref, w: kl_loss(p, ref, np.ones((27, 3), bool), w, kind))
    np.testing.assert_allclose(actual, reach()[:, None] * kl_by_hand()[1], atol=1e-14)


def test_estimators_differentiated_as_they_stand():
    """k1: nothing. k2: KL(pi || ref). k3: the other direction, KL(ref || pi), whose gradient is pi - ref."""
    forward, backward = kl_by_hand()[1], probabilities(POLICY) - probabilities(TEACHER)
    for i, expected in enumerate((0 * forward, forward, backward)):
        grad = expected_kl_gradient(lambda p, ref, w, i=i: w * kl_terms(p, ref)[i])
        np.testing.assert_allclose(grad, reach()[:, None] * expected, atol=1e-14)
    assert abs(forward - backward).max() > 0.1


def test_k1_and_k3_estimate_the_kl():
    p, ref = (np.log(probabilities(table))[PREFIX, SEQUENCES] for table in (POLICY, TEACHER))
    with jax.enable_x64(True):
        terms = kl_terms(jnp.asarray(p), jnp.asarray(ref))
    assert (np.asarray(terms.k3) >= 0).all()
    for value in (terms.k1, terms.k3):
        mean = np.sum(per_sequence(chance(POLICY)) * np.asarray(value))
        np.testing.assert_allclose(mean, np.sum(reach() * kl_by_hand()[0]), rtol=1e-12)


@pytest.mark.parametrize("kind", KL_LOSSES)
def test_kl_loss_by_hand(kind):
    """Values, masked garbage, and a gradient that grows with k1 where exp overflows."""
    logp, ref = f32([-1, -2, np.nan, -2, -95]), f32([-2, -1, -np.inf, np.inf, -1])
    mask, weight = np.array([1, 1, 0, 0, 1], bool), f32([0.5, 2, np.nan, 1e4, 0])
    value, grad = jax.value_and_grad(kl_loss)(logp, ref, mask, weight, kind)
    expected = 0.5 * 0.5 + 2 * 0.5 if kind == "k2" else 0.5 / math.e + 2 * (math.e - 2)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, [0.5, -2, 0, 0, 0], rtol=1e-6)
    constants = jax.grad(lambda ref, weight: kl_loss(logp, ref, mask, weight, kind), (0, 1))(ref, weight)
    assert not np.any(constants)
    far, slope = jax.value_and_grad(kl_loss)(f32([-95]), f32([-1]), np.ones(1, bool), f32([1]), kind)
    assert np.isfinite(far) and float(slope[0]) == -94


@pytest.mark.parametrize("kind", ["k1", "k3+", "kl", "", None])
def test_other_kl_losses_are_refused(kind):
    with pytest.raises(UserError, match=r"^KL as a loss must be k2 or k3 \(with its score term\), not "):
        kl_loss(np.zeros(2, f32), np.zeros(2, f32), np.ones(2, bool), np.ones(2, f32), kind)


def test_distillation_advantage_by_hand():
    teacher, student = f32([-1, np.nan, -3]), f32([-2, -1, -1])
    advantage = distillation_advantage(teacher, student, np.array([1, 0, 1], bool))
    assert np.asarray(advantage).tolist() == [1, 0, -2]
    grads = jax.grad(lambda t, s: jnp.sum(distillation_advantage(t, s, t > -np.inf)), (0, 1))(teacher, student)
    assert not np.any(grads)
