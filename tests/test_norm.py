"""RMSNorm and LayerNorm against float64 formulas, at variances where the epsilon decides."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.layers.norm import layer_norm, rms_norm


def inputs(scale):
    rng = np.random.default_rng(0)
    x, weight, bias = scale * (rng.standard_normal((3, 16)) + 0.5), rng.standard_normal(16), rng.standard_normal(16)
    return [a.astype(np.float32) for a in (x, weight, bias)]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_is_the_formula(scale, eps):
    x, weight, _ = inputs(scale)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(rms_norm(x, weight, eps), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_layer_norm_is_the_formula_with_epsilon_1e_6(scale):
    x, weight, bias = inputs(scale)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt(wide.var(-1, keepdims=True) + 1e-6) * weight + bias
    np.testing.assert_allclose(layer_norm(x, weight, bias), expected, rtol=1e-4, atol=1e-4)


def test_layer_norm_epsilon_shows_at_small_variance():
    x, weight, bias = inputs(1e-3)
    assert np.abs(np.asarray(layer_norm(x, weight, bias) - layer_norm(x, weight, bias, 1e-5))).max() > 0.1


def test_layer_norm_of_a_constant_vector_is_the_bias():
    _, weight, bias = inputs(1.0)
    np.testing.assert_allclose(layer_norm(np.full((2, 16), 3.0, np.float32), weight, bias)[0], bias, atol=1e-6)


def test_layer_norm_ignores_a_shift():
    x, weight, bias = inputs(1.0)
    np.testing.assert_allclose(layer_norm(x + 5, weight, bias), layer_norm(x, weight, bias), atol=1e-4)


def test_rms_norm_weight_is_plain_and_the_mean_is_kept():
    ones = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(rms_norm(2 * ones, np.zeros(4, np.float32), 1e-5), 0 * ones)
    np.testing.assert_allclose(rms_norm(2 * ones, ones[0], 0.0), ones, rtol=1e-6)


def test_statistics_of_bfloat16_are_float32():
    x = np.full((1, 4096), 1.0, "bfloat16")
    x[0, :2048] = 3.0  # a bfloat16 sum of 4096 squares would stop growing at 256
    y = rms_norm(jnp.asarray(x), jnp.ones(4096), 1e-5)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y[0, -1], np.float32), 1 / np.sqrt(5), rtol=2**-8)
    z = layer_norm(jnp.asarray(x), jnp.ones(4096), jnp.zeros(4096))
    np.testing.assert_allclose(np.asarray(z[0, [0, -1]], np.float32), [1, -1], rtol=2**-8)


def test_zero_vector_gives_zero_not_nan():
    zero = np.zeros((1, 8), np.float32)
    np.testing.assert_array_equal(rms_norm(zero, np.ones(8, np.float32), 1e-5), zero)
