"""The Pallas attention and its gradients compile for real TPUs at GLM-5's widths, and plan no array of all selected rows."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels import tiles
from glm5_jax.sparse.kernels.attend import _attend, attend, make_plan
from glm5_jax.sparse.kernels.parts import Queries
from helpers_tpu import TOPOLOGIES, compile_for

pytestmark = pytest.mark.tpu_compile

T, S, N, R, P, K, I, J = 2048, 4096, 64, 512, 64, 2048, 32, 128
bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("topology", [*(pytest.param(t, marks=pytest.mark.slow) for t in TOPOLOGIES[:-1]), TOPOLOGIES[-1]])
def test_both_kernels_at_the_widths_of_glm5(topology):
    """Without the sorts that make the lists, which take longer to compile than the kernels."""
    index = Index(struct(bf16, 1, T, I, J), struct(bf16, 1, S, J), struct(f32, 1, T, I))
    plan = make_plan(struct(bf16, 1, T, N, R + P), index, R, 0.1)
    n, g = T // plan.tile, plan.tile
    queries = Queries(struct(bf16, 1, N, n, g, R + P), struct(bf16, 1, I, n, g, J), struct(f32, 1, n, g, I))
    length = n * tiles.list_length(g, K, plan.block)
    lists = tiles.Lists(struct(i32, length), struct(i32, 1, n, 1, 1))

    def gradients(queries, latent, keys, lists, d_out, d_stats):
        return jax.vjp(lambda *a: _attend(plan, *a, lists), queries, latent, keys)[1]((d_out, d_stats))

    cotangents = struct(bf16, 1, N, n, g, R), struct(f32, 1, n, g, plan.stats)
    compiled = compile_for(gradients, queries, struct(bf16, 1, S, R + P), index.k, lists, *cotangents, topology=topology)
    assert compiled.as_text().count("tpu_custom_call") == 2


def compile_whole(topology, dtype, t, s, n, r, p, k, i, j):
    """`attend` with its lists and gradients between the products that make queries and take outputs: they decide how the
    arrays lie in memory, which a kernel must accept without copies."""

    def loss(nope, rope, w_k, w_v, latent, index, selected):
        q = jnp.concatenate([jnp.einsum("btnc,nrc->btnr", nope, w_k), rope], axis=-1)
        attended = attend(q, latent, selected, r, 0.1, 1024, index)
        v = jnp.einsum("btnr,nrv->btnv", attended.out, w_v)
        return jnp.sum(v.astype(f32) ** 2) + jnp.sum(attended.kl), attended.max_logit

    index = Index(struct(dtype, 1, t, i, j), struct(dtype, 1, s, j), struct(f32, 1, t, i))
    sides = struct(dtype, 1, t, n, 192), struct(dtype, 1, t, n, p), struct(dtype, n, r, 192), struct(dtype, n, r, 256)
    arrays = *sides, struct(dtype, 1, s, r + p), index, struct(i32, 1, t, k)
    return compile_for(jax.grad(loss, range(6), has_aux=True), *arrays, topology=topology)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", pytest.param("tpu7x:2x2x1", marks=pytest.mark.slow)])
def test_the_whole_with_its_lists(topology):
    """K is small: the sorts of 8 K entries are what takes long to compile."""
    t = 4096
    compiled = compile_whole(topology, bf16, t, t, N, R, P, 256, I, J)
    query_sized = t * N * (R + P) * 2
    # Queries (their gradients take their place), outputs, their cotangents, and what is small; no copies.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * query_sized


def test_widths_that_fit_no_tile():
    compile_whole("v6e:2x2", f32, 28, 29, 3, 8, 4, 5, 2, 8)
    compile_whole("tpu7x:2x2x1", bf16, 5, 100, 5, 96, 32, 33, 3, 72)
