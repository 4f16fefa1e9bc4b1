"""RoPE against complex multiplication in float64, in both pair layouts, near and far."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.layers.rope import inverse_frequencies, rotary_tables, rotate

WIDTH, THETA = 8, 1000.0


def by_complex_numbers(x, positions, interleave):
    """x [B,T,...,P] float64: pair j times exp(i * position * theta^(-2j/P))."""
    half = x.shape[-1] // 2
    z = x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., :half] + 1j * x[..., half:]
    angle = positions[..., None] * THETA ** (-np.arange(half) / half)
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), half)
    z = z * np.exp(1j * angle)
    if not interleave:
        return np.concatenate([z.real, z.imag], axis=-1)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (2, 5, 3, WIDTH)])
def test_rotation_is_complex_multiplication(interleave, shape):
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal(shape), rng.integers(0, 300, shape[:2])
    cos, sin = rotary_tables(positions, WIDTH, THETA)
    turned = rotate(np.asarray(x, np.float32), cos, sin, interleave)
    np.testing.assert_allclose(turned, by_complex_numbers(x, positions, interleave), rtol=0, atol=2e-4)


def test_the_two_layouts_differ():
    x = np.random.default_rng(0).standard_normal((1, 3, WIDTH)).astype(np.float32)
    cos, sin = rotary_tables(np.arange(3)[None], WIDTH, THETA)
    difference = np.abs(np.asarray(rotate(x, cos, sin, True) - rotate(x, cos, sin, False)))
    assert difference[0, 0].max() == 0 and difference[0, 1].max() > 0.1


def test_interleaving_is_the_default():
    x = np.arange(8, dtype=np.float32)[None, None]
    cos, sin = rotary_tables(np.array([[1]]), WIDTH, THETA)
    np.testing.assert_array_equal(rotate(x, cos, sin), rotate(x, cos, sin, True))


def test_frequencies_by_hand():
    np.testing.assert_allclose(inverse_frequencies(4, 100.0), [1.0, 0.1], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(64, 1e6), 1e6 ** (-np.arange(32) / 32), rtol=2e-7)
    assert inverse_frequencies(64, 1e6).dtype == np.float32


def test_theta_changes_angles_from_the_first_positions_on():
    near, _ = rotary_tables(np.arange(4)[None], WIDTH, 1e6)
    other, _ = rotary_tables(np.arange(4)[None], WIDTH, 1e4)
    assert np.abs(np.asarray(near - other)).max() > 1e-3


def test_tables_are_float32_with_exact_positions_near_two_to_the_twentieth():
    positions = 2**20 + np.arange(-3, 4)
    cos, sin = rotary_tables(positions[None].astype(np.int32), WIDTH, THETA)
    assert cos.dtype == sin.dtype == np.float32
    # The angle is the float32 product of an exact position and a float32 frequency; its cosine is then exact.
    angle = np.float32(positions)[:, None] * inverse_frequencies(WIDTH, THETA)
    assert angle.dtype == np.float32
    np.testing.assert_allclose(cos[0], np.cos(angle.astype(np.float64)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(sin[0], np.sin(angle.astype(np.float64)), rtol=0, atol=1e-5)
    assert len(np.unique(np.asarray(sin[0, :, 0]))) == len(positions)


@pytest.mark.parametrize("interleave", [True, False])
def test_scores_depend_on_distance_only(interleave):
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, WIDTH)).astype(np.float32)

    def score(at_q, at_k):
        a, b = (rotary_tables(np.array([[p]]), WIDTH, THETA) for p in (at_q, at_k))
        return float(jnp.sum(rotate(q, *a, interleave) * rotate(k, *b, interleave)))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-2


def test_bfloat16_input_is_rotated_in_float32():
    x = np.random.default_rng(2).standard_normal((1, 4, WIDTH)).astype(np.float32)
    cos, sin = rotary_tables(np.array([[0, 9, 99, 999]]), WIDTH, THETA)
    rounded = rotate(x.astype("bfloat16"), cos, sin)
    assert rounded.dtype == "bfloat16"
    expected = by_complex_numbers(x.astype("bfloat16").astype(np.float64), np.array([[0, 9, 99, 999]]), True)
    np.testing.assert_allclose(rounded.astype(np.float32), expected, rtol=2**-8, atol=1e-4)
