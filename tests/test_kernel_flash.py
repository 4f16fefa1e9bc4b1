"""The Pallas kernels of attention to all visible keys in TPU interpret mode, against stored scores in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from test_dense import whole

from glm5_jax.sparse.kernels.flash import flash, why_not
from glm5_jax.sparse.masks import Rows

B, N, H, V = 2, 2, 10, 5
# Slots and segments of queries, segments of keys: packed documents, padding on the left, and two pieces of a longer row.
PACKED = np.array([[1] * 8 + [2] * 11, [1] * 3 + [2] * 16])
PADDED = np.array([[0] * 7 + [1] * 12, [0] + [3] * 18])
PIECES = np.r_[4:11, 23:30]
LONG = np.array([[0] * 2 + [1] * 13 + [2] * 19, [1] * 25 + [3] * 9])
ROWS = {
    "packed": (np.tile(np.arange(19), (2, 1)), PACKED, PACKED),
    "padded on the left": (np.tile(np.arange(19), (2, 1)), PADDED, PADDED),
    "pieces of a row": (np.tile(PIECES, (2, 1)), LONG[:, PIECES], LONG),
    "its end": (np.tile(np.arange(26, 34), (2, 1)), LONG[:, 26:], LONG),
}


def inputs(name, dtype=jnp.float32):
    """((q, k, v, cotangent), rows, segments of the keys); the cotangent of padding is NaN."""
    slot, segment, keys = ROWS[name]
    rng, t, s = np.random.default_rng(0), slot.shape[1], keys.shape[1]
    arrays = [np.array(rng.standard_normal(shape), dtype) for shape in ((B, t, N, H), (B, s, N, H), (B, s, N, V), (B, t, N, V))]
    arrays[3][segment == 0] = np.nan
    return arrays, Rows(jnp.asarray(slot), jnp.asarray(segment)), jnp.asarray(keys)


def results(function, arrays, rows, keys):
    """(out, logarithms of sums, largest logit, gradients by q, k, v)."""

    def run(q, k, v):
        out, *others = function(q, k, v, rows, keys, 0.3)
        return out, others

    out, vjp, others = jax.vjp(run, *arrays[:3], has_aux=True)
    return out, *others, *vjp(arrays[3])


CASES = [(name, block, jnp.float32) for name in ROWS for block in ((4, 8), (8, 4))]
CASES += [("packed", (32, 64), jnp.float32), ("pieces of a row", (4, 8), jnp.bfloat16)]


@pytest.mark.parametrize("name, block, dtype", CASES)
def test_values_and_gradients_are_those_of_stored_scores_in_float64(name, block, dtype):
    arrays, rows, keys = inputs(name, dtype)
    error = 1e-6 if dtype == jnp.float32 else 1e-2
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    call = functools.partial(flash, block=block, interpret=params)
    got = jax.jit(functools.partial(results, call))(arrays, rows, keys)
    with jax.enable_x64(True):
        wide = [np.nan_to_num(x).astype(np.float64) for x in arrays]
        expected = results(whole, [jnp.asarray(x) for x in wide], rows, keys)
    real = np.asarray(rows.segment) != 0
    np.testing.assert_allclose(got[1][real], expected[1][real], rtol=0, atol=error)
    for a, b in zip((got[0], *got[2:]), (expected[0], *expected[2:])):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=2 * error * np.abs(b).max())


def test_two_cores_write_nothing_that_the_other_reads():
    arrays, rows, keys = inputs("packed")
    params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2)
    call = functools.partial(flash, block=(4, 8), interpret=params)
    jax.block_until_ready(jax.jit(functools.partial(results, call))(arrays, rows, keys))
    assert not interpret_pallas_call.races.races_found


def test_what_the_kernels_do_not_take_is_said():
    shape = lambda *s, dtype="bfloat16": jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    q, v = shape(1, 4096, 64, 256), shape(1, 4096, 64, 256)
    assert why_not(q, v) is None
    assert "width 192 and 256" in why_not(shape(1, 4096, 64, 192), v)
    assert "float64" in why_not(shape(1, 4096, 64, 256, dtype="float64"), v)
    assert "65536 tokens" in why_not(shape(1, 65536, 64, 256), v) and "8 tokens" in why_not(shape(1, 8, 64, 256), v)
