"""Which implementation of sparse attention a call takes, and that it is never a silent change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.compiling import target_platform
from glm5_jax.config import ModelConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.layers import experts
from glm5_jax.sparse import attention, xla
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows
from helpers_tpu import tpu_sharding

RNG = np.random.default_rng(0)
B, T, N, R, P, I, J, K = 2, 21, 3, 8, 4, 2, 8, 5
SEGMENT = jnp.asarray([[1] * 9 + [2] * 12, [0] * 4 + [3] * 17])
ROWS = Rows(jnp.tile(jnp.arange(T), (B, 1)), SEGMENT)


def inputs(dtype=jnp.float32):
    """(q, latent, index); small integers, so that scores are exact and ties common."""

    def draw(*shape):
        return jnp.asarray(RNG.integers(-2, 3, shape), dtype)

    return draw(B, T, N, R + P), draw(B, T, R + P), Index(draw(B, T, I, J), draw(B, T, J), draw(B, T, I))


def test_without_a_tpu_auto_takes_xla_without_a_word(recwarn):
    assert attention.implementation() == attention.implementation("auto", lambda: "too wide") == "xla"
    assert [attention.implementation(name) for name in ("reference", "xla")] == ["reference", "xla"]
    assert not recwarn


NO_TPU = "^sparse_implementation=pallas: the kernels are for TPUs, this is cpu; use xla or auto$"


def test_pallas_without_a_tpu_is_refused_in_one_line():
    q, latent, index = inputs()
    for call in (
        lambda: attention.select(index, ROWS, SEGMENT, K, 8, "pallas"),
        lambda: attention.attend(q, latent, jnp.zeros((B, T, K), jnp.int32), R, 0.3, 8, None, "pallas"),
    ):
        with pytest.raises(UserError, match=NO_TPU):
            call()


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="sparse_implementation=cuda: auto, reference, xla, pallas"):
        attention.implementation("cuda")


def test_more_keys_than_positions_are_refused():
    with pytest.raises(UserError, match="index_topk=65: more than the position limit max_position_embeddings=64"):
        ModelConfig(index_topk=65, max_position_embeddings=64)
    assert tiny(index_topk=64, max_position_embeddings=64).index_topk == 64


@pytest.mark.tpu_compile
def test_for_a_described_tpu_auto_takes_pallas_or_says_why_not():
    with jax.sharding.use_abstract_mesh(tpu_sharding("v5p:2x2x1").mesh.abstract_mesh):
        assert attention.implementation() == attention.implementation("pallas") == "pallas"
        with pytest.warns(UserWarning, match="takes the xla implementation: too wide"):
            assert attention.implementation("auto", lambda: "too wide") == "xla"
        with pytest.raises(UserError, match="sparse_implementation=pallas: too wide; use xla or auto"):
            attention.implementation("pallas", lambda: "too wide")
        tpu = platform_choices()
    cpu = platform_choices()
    assert attention.implementation() == "xla"
    assert (tpu, cpu) == (("tpu", "megablox", 256 << 20), ("cpu", "blocked", 4 << 20))


def platform_choices():
    """Of code without kernels: the platform, the experts' implementation, bytes of index scores at once."""
    rows = xla._queries_at_once(1 << 30, (1, 1 << 30), 1, xla._SCORE_BYTES)
    return target_platform(), experts._choose(None), rows


def test_what_a_network_takes_is_known_before_anything_is_traced(monkeypatch):
    narrow, wide = tiny(dtype="bfloat16"), tiny(dtype="bfloat16", kv_lora_rank=1024)
    assert attention.implementation_of(narrow, 2, 512) == "xla"
    monkeypatch.setattr(attention, "target_platform", lambda: "tpu")
    assert attention.implementation_of(narrow, 2, 512) == "pallas"
    with pytest.warns(UserWarning, match="takes the xla implementation: 4 heads of width 1040 are more than there is room for"):
        assert attention.implementation_of(wide, 2, 512) == "xla"
    with pytest.raises(UserError, match="sparse_implementation=pallas: 4 heads of width 1040 .*; use xla or auto"):
        attention.implementation_of(tiny(kv_lora_rank=1024, sparse_implementation="pallas"), 2, 512)


def test_a_jax_without_what_the_kernels_need_is_named(monkeypatch):
    def lacking(name):
        raise ImportError("no module named pallas")

    monkeypatch.setattr(attention, "_kernels", lacking)
    monkeypatch.setattr(attention, "target_platform", lambda: "tpu")
    with pytest.raises(UserError, match=rf"JAX {jax.__version__} lacks what the kernels need \(no module named pallas\)"):
        attention.implementation("pallas")


@pytest.mark.parametrize("k", [1, K, T + 7])
def test_reference_and_xla_choose_the_same_keys_in_any_chunk_jitted_or_not(k):
    _, _, index = inputs()
    want = attention.select(index, ROWS, SEGMENT, k, 8, "reference")
    assert want.shape == (B, T, min(k, T))
    np.testing.assert_array_equal(attention.select(index, ROWS, SEGMENT, k, 8, "xla"), want)
    for chunk in (1, 100):
        run = jax.jit(lambda index, chunk=chunk: attention.select(index, ROWS, SEGMENT, k, chunk, "xla"))
        np.testing.assert_array_equal(run(index), want)


def test_the_whole_operation_equals_its_definition_and_keeps_gradients_apart():
    q, latent, index = inputs()
    weight = jnp.asarray(RNG.standard_normal((B, T, N, R)), jnp.float32)

    def both(q, latent, index, asked):
        """(values of the two losses, pulled back one by one, selection)."""

        def losses(q, latent, index):
            out = attention.sparse_attention(
                q, latent, index, ROWS, SEGMENT, k=K, rank=R, scale=0.1, chunk=8, loss=True, asked=asked
            )
            return (jnp.sum(weight * out.attended.out), jnp.sum(out.attended.kl)), out.selected

        values, pull, selected = jax.vjp(losses, q, latent, index, has_aux=True)
        return values, pull((1.0, 0.0)), pull((0.0, 1.0)), selected

    want, got = (jax.jit(both, static_argnums=3)(q, latent, index, name) for name in ("reference", "xla"))
    np.testing.assert_array_equal(got[3], want[3])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for _, lm, kl, _ in (want, got):
        assert all(np.asarray(g).any() for g in (*lm[:2], *kl[2]))
        assert not any(np.asarray(g).any() for g in (*kl[:2], *lm[2]))
