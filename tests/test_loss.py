"""Chunked cross entropy against log-softmax in numpy float64, and compiled programs without logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.train.loss import cross_entropies, cross_entropy, token_log_probs
from helpers_train import buffer_sizes, log_softmax

B, T, D, W = 2, 12, 5, 31


def example(seed: int = 0):
    rng = np.random.default_rng(seed)
    weights = (rng.random((B, T)) < 0.7).astype(np.float32)
    weights[0, :3] = 0
    weights[1, 0] = 0.25
    hidden, head = rng.standard_normal((B, T, D)), rng.standard_normal((D, W))
    return hidden.astype(np.float32), head.astype(np.float32), rng.integers(0, W, (B, T)), weights


def reference(hidden, head, targets, weights):
    """(loss, d loss/d hidden, d loss/d head) in float64, by the formula softmax - onehot."""
    hidden, head, weights = (np.asarray(a, np.float64) for a in (hidden, head, weights))
    logp = log_softmax(hidden @ head)
    onehot = np.eye(head.shape[1])[targets]
    d_logits = (np.exp(logp) - onehot) * weights[..., None]
    loss = -((logp * onehot).sum(-1) * weights).sum()
    return loss, d_logits @ head.T, np.einsum("btd,btw->dw", hidden, d_logits)


def loss_and_grads(hidden, head, targets, weights, chunk):
    return jax.value_and_grad(cross_entropy, argnums=(0, 1))(hidden, head, targets, weights, chunk)


@pytest.mark.smoke
@pytest.mark.parametrize("chunk", [1, 4, 5, 7, 12, 100])
def test_value_and_gradients_for_chunks_that_divide_the_row_and_that_do_not(chunk):
    args = example()
    loss, (d_hidden, d_head) = loss_and_grads(*args, chunk)
    expected = reference(*args)
    assert loss.dtype == jnp.float32 and loss.shape == ()
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(d_hidden, expected[1], atol=2e-6)
    np.testing.assert_allclose(d_head, expected[2], atol=5e-6)
    np.testing.assert_allclose(cross_entropy(*args, chunk), expected[0], rtol=1e-6)  # without gradients: another path


@pytest.mark.parametrize("chunk", [5, 12])
def test_several_sums_of_one_head(chunk):
    """Each sum by itself, without a gradient; the gradient is that of their scaled sum, whatever else is done to the sums."""
    parts, scales = [example(seed) for seed in range(3)], np.array([1.0, 0.0, 0.3], np.float32)
    head = parts[0][1]
    hidden, targets, weights = (np.stack([part[i] for part in parts]) for i in (0, 2, 3))

    def run(hidden, head):
        total, sums = cross_entropies(hidden, head, targets, weights, scales, chunk)
        return total + jnp.sum(7 * sums), (total, sums)

    (_, (total, sums)), (d_hidden, d_head) = jax.value_and_grad(run, (0, 1), has_aux=True)(hidden, head)
    expected = [reference(h, head, t, w) for h, t, w in zip(hidden, targets, weights)]
    np.testing.assert_allclose(sums, [loss for loss, _, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(total, sum(s * loss for s, (loss, _, _) in zip(scales, expected)), rtol=1e-6)
    np.testing.assert_allclose(d_hidden, [s * d for s, (_, d, _) in zip(scales, expected)], atol=2e-6)
    np.testing.assert_allclose(d_head, sum(s * d for s, (_, _, d) in zip(scales, expected)), atol=5e-6)


def test_gradients_scale_with_the_cotangent():
    args = example()
    grad = jax.grad(lambda h: 3.0 * cross_entropy(h, *args[1:], 5))(args[0])
    np.testing.assert_allclose(grad, 3 * reference(*args)[1], atol=1e-5)


def test_rows_of_weight_zero_leave_no_trace():
    hidden, head, targets, weights = example()
    dead = weights == 0
    noisy = hidden.copy()
    noisy[dead] = 1e3
    other_targets = np.where(dead, (targets + 1) % W, targets)
    a = loss_and_grads(hidden, head, targets, weights, 5)
    b = loss_and_grads(noisy, head, other_targets, weights, 5)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert (np.asarray(a[1][0])[dead] == 0).all()


def test_huge_logits_neither_overflow_nor_underflow():
    hidden, head, targets, weights = example()
    loss, grads = loss_and_grads(hidden * 1e4, head, targets, weights, 5)
    np.testing.assert_allclose(loss, reference(hidden * np.float32(1e4), head, targets, weights)[0], rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)


def test_bfloat16_hidden_states_give_a_float32_loss_of_the_rounded_inputs():
    hidden, head, targets, weights = example()
    hidden16 = jnp.asarray(hidden, jnp.bfloat16)
    loss, (d_hidden, d_head) = loss_and_grads(hidden16, head, targets, weights, 5)
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (hidden, head)]
    expected = reference(*rounded, targets, weights)
    assert loss.dtype == jnp.float32 and d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)  # products are accumulated and kept in float32
    np.testing.assert_allclose(d_hidden.astype(np.float32), expected[1], atol=0.03)
    np.testing.assert_allclose(d_head, expected[2], atol=0.05)


@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_no_buffer_of_the_compiled_program_holds_the_logits(what):
    b, t, d, w, chunk = 2, 64, 4, 512, 16
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [((b, t, d), "float32"), ((d, w), "float32"), ((b, t), "int32"), ((b, t), "float32")]
    ]

    def program(chunk):
        fn = lambda *args: cross_entropy(*args, chunk)  # noqa: E731
        fn = fn if what == "forward" else jax.value_and_grad(fn, argnums=(0, 1))
        return buffer_sizes(jax.jit(fn).lower(*shapes).compile().as_text())

    assert max(program(chunk)) == b * chunk * w
    assert max(program(t)) == b * t * w  # the test would see them


@pytest.mark.parametrize("chunk", [3, 8, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.3])
def test_token_log_probs_and_entropy_in_float64(chunk, temperature):
    rng = np.random.default_rng(0)
    hidden, head, targets = rng.standard_normal((2, 8, 5)), rng.standard_normal((5, 7)), rng.integers(0, 7, (2, 8))
    logits = hidden @ head / temperature
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    logp, entropy = token_log_probs(*(jnp.asarray(x, jnp.float32) for x in (hidden, head)), targets, temperature, chunk)
    chosen = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(logp, np.log(chosen), atol=2e-6)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=2e-6)
    # d logp / d logits = (one-hot - p) / temperature
    weight = rng.standard_normal((2, 8))
    loss = lambda h, w: jnp.sum(weight * token_log_probs(h, w, targets, temperature, chunk)[0])  # noqa: E731
    d_hidden, d_head = jax.grad(loss, (0, 1))(*(jnp.asarray(x, jnp.float32) for x in (hidden, head)))
    d_logits = weight[..., None] * (np.eye(7)[targets] - p) / temperature
    np.testing.assert_allclose(d_hidden, d_logits @ head.T, atol=2e-5)
    np.testing.assert_allclose(d_head, np.einsum("btd,btw->dw", hidden, d_logits), atol=5e-5)
