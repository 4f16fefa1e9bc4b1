"""The routed experts compiled for TPUs: each selected row meets its own expert only, forward and backward."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.layers.experts import experts
from helpers_tpu import TOPOLOGIES, compile_for

M, X, E, D, F = 512, 4, 16, 256, 384


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_expert_is_multiplied_with_rows_of_another(topology):
    """2 products of D x F forward and 1 of F x D, each again by its rows and by its matrix: 9 of 2 R D F FLOPs."""

    def gradients(x, ids, weights, gate, up, down, dy):
        y, vjp = jax.vjp(lambda x, weights, *m: experts(x, ids, weights, *m), x, weights, gate, up, down)
        return y, vjp(dy)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, matrices = array(M, D), (array(E, D, F), array(E, D, F), array(E, F, D))
    shapes = rows, array(M, X, dtype=jnp.int32), array(M, X, dtype=jnp.float32), *matrices, rows
    flops = compile_for(gradients, *shapes, topology=topology).cost_analysis()["flops"]
    assert flops == pytest.approx(9 * 2 * M * X * D * F, rel=0.05)
