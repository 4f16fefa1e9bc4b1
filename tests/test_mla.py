"""Multi-head latent attention: both forms, the whole layer against float64 loops, what is normed and rotated."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reference
from conftest import forward
from glm5_jax.layers import mla
from glm5_jax.layers.mla import Context, Keys, Mla, Selection
from glm5_jax.layers.rope import rotary_tables
from glm5_jax.model import merge, split
from glm5_jax.sparse.masks import Rows

T = 20


def attention_layer(model, dtype=jnp.float32, seed=3):
    """(attention of layer 0, inputs a [1,T,D], context)."""
    graphdef, stacked = split(model.groups[0].layers)
    layer = merge(graphdef, jax.tree.map(lambda x: x[0].astype(dtype), stacked)).attention
    a = jnp.asarray(np.random.default_rng(seed).standard_normal((1, T, model.cfg.hidden_size)), dtype)
    return layer, a, context(model.cfg, dtype)


def context(cfg, dtype=jnp.float32, t=T):
    cos, sin = rotary_tables(np.arange(t)[None], cfg.qk_rope_head_dim, cfg.rope_theta)
    segment = jnp.ones((1, t), jnp.int32)
    return Context(cos.astype(dtype), sin.astype(dtype), Rows(jnp.arange(t)[None], segment), segment)


def everything():
    return jnp.asarray([[[*range(t + 1)] + [-1] * (T - t - 1) for t in range(T)]])


@pytest.mark.parametrize("bits, tolerance", [(32, 1e-5), (64, 1e-12)])
def test_expanded_absorbed_and_gathered_forms_are_one_function(micro, bits, tolerance):
    with jax.enable_x64(bits == 64):
        layer, a, ctx = attention_layer(micro()[0], jnp.float64 if bits == 64 else jnp.float32)
        forms = ((None, False), (None, True), (everything(), False), (everything(), True))

        @jax.jit
        def every_form(a):
            cq, keys = layer.query_latent(a), layer.keys(a, ctx)
            return [layer.attend(cq, keys, Selection(chosen), ctx, absorbed=absorbed)[:2] for chosen, absorbed in forms]

        (expanded, top), *others = every_form(a)
        assert expanded.dtype == f"float{bits}"
        for other, other_top in others:
            np.testing.assert_allclose(other, expanded, rtol=0, atol=tolerance)
            np.testing.assert_allclose(other_top, top, rtol=tolerance)


def test_bfloat16_forms_agree_to_its_precision(micro):
    layer, a, ctx = attention_layer(micro()[0])

    @jax.jit
    def both_forms(a):
        cq, keys = layer.query_latent(a), layer.keys(a, ctx)
        return [layer.attend(cq, keys, Selection(), ctx, absorbed=flag).out for flag in (False, True)]

    exact, _ = both_forms(a)
    for rounded in both_forms(a.astype(jnp.bfloat16)):
        assert rounded.dtype == jnp.bfloat16
        assert 0 < np.abs(np.asarray(rounded.astype(jnp.float32) - exact)).max() < 0.1


@pytest.mark.parametrize("t, most", [(513, 512), (32_768, 29_127), (131_072, 3_640), (600, 0), (1024, 512), (5000, 700)])
def test_pieces_of_a_row_are_even(t, most):
    size = mla._piece(t, most)
    assert size % 512 == 0 and size < max(most, 512) + 512
    assert -t % size < 512 * -(-t // size)  # less than 512 rows a piece are computed in vain


@pytest.mark.parametrize("with_loss", [True, False])
def test_a_row_in_pieces_is_the_row(micro, with_loss, monkeypatch):
    t = 600
    model = micro()[0]
    layer, _, _ = attention_layer(model)
    ctx = context(model.cfg, t=t)
    a = jnp.asarray(np.random.default_rng(5).standard_normal((1, t, model.cfg.hidden_size)), jnp.float32)
    graphdef, params = split(layer)

    def loss(params, a):
        layer = merge(graphdef, params)
        cq, keys = layer.query_latent(a), layer.keys(a, ctx)
        index = layer.index(cq, a, keys, ctx)
        out = layer.attend(cq, keys, Selection(layer.select(index, ctx), index if with_loss else None), ctx, absorbed=False)
        kl = jnp.sum(out.index_kl) if with_loss else 0
        return jnp.sum(jnp.sin(3 * out.out)) + kl, (out.out, out.max_logit)

    def run():
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, a)

    whole = run()
    monkeypatch.setattr(mla, "_ABSORBED_BYTES", 0)
    for got, expected in zip(jax.tree.leaves(run()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_the_whole_trunk_equals_float64_loops(micro, tokens, attention):
    model, w = micro(attention=attention)
    out = forward(model, tokens)
    for b in range(2):
        expected = reference.forward(w, model.cfg, tokens[b])
        np.testing.assert_allclose(out.logits[b], expected["logits"], rtol=0, atol=2e-4)
        for i, layer in enumerate(expected["layers"]):
            np.testing.assert_allclose(out.collected["hidden"][i][b], np.stack(layer["hidden"]), rtol=0, atol=2e-4)


def test_a_float64_model_equals_float64_loops(micro, tokens):
    with jax.enable_x64(True):
        base, w = micro()
        wide = reference.random_model(reference.micro_config(dtype="float64"))
        graphdef, params = split(wide)
        wide = merge(graphdef, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), split(base)[1]))
        out = forward(wide, tokens[:1])
        assert out.logits.dtype == jnp.float64
        expected = reference.forward(w, base.cfg, tokens[0])["logits"]
        # The rotary tables are float32 by design, which is what the tolerance allows for.
        np.testing.assert_allclose(out.logits[0], expected, rtol=0, atol=2e-5)


def test_the_norm_covers_the_latent_only(micro):
    layer, a, ctx = attention_layer(micro()[0])
    r = layer.cfg.kv_lora_rank
    before = layer.keys(a, ctx).latent
    layer.kv_down[...] = layer.kv_down[...].at[:, r:].multiply(10.0)
    after = layer.keys(a, ctx).latent
    np.testing.assert_array_equal(after[..., :r], before[..., :r])
    np.testing.assert_allclose(after[..., r:], 10 * before[..., r:], rtol=1e-5)
    layer.kv_down[...] = layer.kv_down[...].at[:, :r].multiply(1e4)
    scaled = layer.keys(a, ctx).latent
    np.testing.assert_array_equal(scaled[..., r:], after[..., r:])
    x = np.asarray(a @ layer.kv_down[...], np.float64)[..., :r]
    expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-2) * np.asarray(layer.kv_norm[...])
    np.testing.assert_allclose(scaled[..., :r], expected, rtol=1e-4, atol=1e-5)


def test_the_softmax_scale_counts_nope_and_rope_width(micro):
    layer, a, ctx = attention_layer(micro()[0])
    cq, keys = layer.query_latent(a), layer.keys(a, ctx)
    q = np.asarray(layer.queries(cq, ctx), np.float64)[0]
    latent = np.asarray(keys.latent, np.float64)[0]
    k = np.einsum("sr,rnc->snc", latent[:, :10], np.asarray(layer.k_up[...], np.float64))
    logits = np.einsum("tnc,snc->nts", q[..., :6], k) + np.einsum("tnp,sp->nts", q[..., 6:], latent[:, 10:])
    visible = np.tril(np.ones((T, T), bool))
    top = layer.attend(cq, keys, Selection(), ctx, absorbed=False).max_logit
    np.testing.assert_allclose(top, logits[:, visible].max() / math.sqrt(6 + 4), rtol=1e-5)


def test_only_the_last_rope_dimensions_of_a_query_are_rotated(micro):
    layer, a, ctx = attention_layer(micro()[0])
    cq = layer.query_latent(a)
    still = Context(jnp.ones_like(ctx.cos), jnp.zeros_like(ctx.sin), ctx.rows, ctx.key_segment)
    turned, unturned = layer.queries(cq, ctx), layer.queries(cq, still)
    np.testing.assert_array_equal(turned[..., :6], unturned[..., :6])
    assert np.abs(np.asarray(turned[..., 6:] - unturned[..., 6:])).max() > 0.5


def test_the_query_latent_uses_the_latent_epsilon(micro):
    for eps in (1e-2, 10.0):
        layer, a, _ = attention_layer(micro(latent_norm_eps=eps)[0])
        x = np.asarray(a, np.float64) @ np.asarray(layer.q_down[...], np.float64)
        expected = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * np.asarray(layer.q_norm[...])
        np.testing.assert_allclose(layer.query_latent(a), expected, rtol=1e-4, atol=1e-5)


def test_kv_up_holds_per_head_key_rows_then_value_rows(micro):
    model, w = micro()
    layer, _, _ = attention_layer(model)
    kv_b = w["model.layers.0.self_attn.kv_b_proj.weight"].reshape(2, 6 + 5, 10)
    np.testing.assert_array_equal(np.einsum("rnc->ncr", layer.k_up[...]), kv_b[:, :6])
    np.testing.assert_array_equal(np.einsum("rnv->nvr", layer.v_up[...]), kv_b[:, 6:])


def test_a_layer_remembers_latent_rope_key_and_index_key(micro):
    model = micro(indexer_types=("full", "shared", "full"))[0]
    layer, a, ctx = attention_layer(model)
    keys = layer.keys(a, ctx)
    assert isinstance(keys, Keys) and keys.latent.shape == (1, T, 10 + 4) and keys.index.shape == (1, T, 8)
    shared = Mla(model.cfg, nnx.Rngs(0), indexers=None)
    assert shared.indexer is None and shared.keys(a, ctx).index is None


def test_a_shift_of_all_positions_changes_nothing(micro, tokens):
    model, _ = micro()
    near = np.tile(np.arange(20), (2, 1))
    logits = [forward(model, tokens, near + shift).logits for shift in (0, 37)]
    np.testing.assert_allclose(*logits, rtol=0, atol=3e-4)
