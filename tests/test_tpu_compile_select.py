"""The Pallas selection compiles for real TPUs at GLM-5's widths, and plans no buffer of scores."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels.select import select
from glm5_jax.sparse.masks import Rows
from helpers_tpu import TOPOLOGIES, compile_for

pytestmark = pytest.mark.tpu_compile


def plan(t: int, s: int, topology: str, heads=32, width=128, dtype=jnp.bfloat16):
    """Compiles for one row of t queries and s keys, K 2048."""
    struct = jax.ShapeDtypeStruct
    index = Index(struct((1, t, heads, width), dtype), struct((1, s, width), dtype), struct((1, t, heads), jnp.float32))
    rows = Rows(*[struct((1, t), jnp.int32)] * 2)
    call = lambda index, rows, key_segment: select(index, rows, key_segment, 2048)  # noqa: E731
    return compile_for(call, index, rows, struct((1, s), jnp.int32), topology=topology)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_selection_at_the_widths_of_glm5(topology):
    compiled = plan(4096, 4096, topology)
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 * 4 / 8  # float32 scores would be 64 MiB


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_selection_in_float32_with_ragged_shapes(topology):
    plan(5, 3001, topology, heads=3, width=72, dtype=jnp.float32)
