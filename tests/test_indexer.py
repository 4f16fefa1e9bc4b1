"""The lightning indexer against float64 loops: ReLU, head layout, RoPE layout, norms, masks, precision, no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from conftest import forward
from glm5_jax.convert.hf import load_hf
from glm5_jax.layers.mla import Context
from glm5_jax.layers.rope import rotary_tables
from glm5_jax.model import merge, split
from glm5_jax.sparse.indexer import index_scores
from glm5_jax.sparse.masks import Rows, visible
from glm5_jax.sparse.topk import MASKED

EVERYTHING = np.ones((1, 1, 1), bool)


def test_negative_head_scores_count_nothing():
    q = np.array([[[[1.0, 0.0], [0.0, 1.0]]]], np.float32)  # two heads of one query
    k = np.array([[[-3.0, 2.0], [-3.0, -2.0], [3.0, -2.0]]], np.float32)
    w = np.array([[[10.0, -1.0]]], np.float32)
    # Head 0 sees -3, -3, 3; head 1 sees 2, -2, -2; only what is positive counts, then the signed weights.
    expected = np.array([-2.0, 0.0, 30.0]) / np.sqrt(2)
    np.testing.assert_allclose(index_scores(q, k, w, EVERYTHING)[0, 0], expected, rtol=1e-6)


def test_scores_equal_loops_over_heads():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 5, 3, 8)), rng.standard_normal((2, 7, 8))
    w, mask = rng.standard_normal((2, 5, 3)), rng.random((2, 5, 7)) < 0.7
    got = index_scores(*(a.astype(np.float32) for a in (q, k, w)), mask)
    for b, t, s in np.ndindex(2, 5, 7):
        expected = sum(w[b, t, h] * max(0.0, q[b, t, h] @ k[b, s] / np.sqrt(8)) for h in range(3))
        expected = expected if mask[b, t, s] else MASKED
        np.testing.assert_allclose(got[b, t, s], expected, rtol=1e-4, atol=1e-5)


def test_scores_of_bfloat16_inputs_are_float32():
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(s).astype("bfloat16") for s in ((1, 4, 3, 8), (1, 64, 8)))
    w = rng.standard_normal((1, 4, 3)).astype(np.float32)
    got = index_scores(q, k, w, EVERYTHING)
    dots = np.einsum("btij,bsj->btis", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(8)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.einsum("btis,bti->bts", np.maximum(dots, 0), w), rtol=1e-5, atol=1e-5)


def outputs(micro, tokens, **overrides):
    model, w = micro(**overrides)
    return model, w, forward(model, tokens).collected


def check_against_reference(micro, tokens, **overrides):
    model, w, collected = outputs(micro, tokens, **overrides)
    for b in range(len(tokens)):
        layers = reference.forward(w, model.cfg, tokens[b])["layers"]
        for i, layer in enumerate(layers):
            np.testing.assert_array_equal(collected["selected"][i][b], reference.padded(layer["selected"], 4))
            for t, row in enumerate(layer["scores"]):
                got = np.asarray(collected["index_scores"][i][b, t])
                np.testing.assert_allclose(got[list(row)], list(row.values()), rtol=0, atol=1e-4)
                assert (np.delete(got, list(row)) == MASKED).all()


@pytest.mark.parametrize("interleave", [True, False])
def test_selections_and_scores_of_every_layer(micro, tokens, interleave):
    check_against_reference(micro, tokens, indexer_rope_interleave=interleave)


def test_the_two_rope_layouts_select_differently(micro, tokens):
    chosen = [outputs(micro, tokens, indexer_rope_interleave=flag)[2]["selected"][0] for flag in (True, False)]
    assert (np.asarray(chosen[0]) != np.asarray(chosen[1])).any(-1).mean() > 0.2


def layer_inputs(model, seed=3, t=20):
    """(attention of layer 0, a [1,t,D], context) of a micro model."""
    rng = np.random.default_rng(seed)
    a = jnp.asarray(rng.standard_normal((1, t, model.cfg.hidden_size)), jnp.float32)
    cos, sin = rotary_tables(np.arange(t)[None], model.cfg.qk_rope_head_dim, model.cfg.rope_theta)
    segment = jnp.ones((1, t), jnp.int32)
    ctx = Context(cos, sin, Rows(jnp.arange(t)[None], segment), segment)
    group = model.groups[0].layers
    graphdef, stacked = split(group)
    return merge(graphdef, jax.tree.map(lambda x: x[0], stacked)).attention, a, ctx


def test_a_constant_key_projection_leaves_only_the_bias(micro):
    attention, a, ctx = layer_inputs(micro()[0])
    indexer = attention.indexer
    indexer.k[...] = jnp.broadcast_to(indexer.k[...][:, :1], indexer.k[...].shape)
    keys = indexer.keys(a, ctx.cos, ctx.sin)
    np.testing.assert_allclose(keys[0, 0], indexer.k_bias[...], atol=2e-3)  # position 0: no rotation
    np.testing.assert_allclose(keys[0, :, 4:], np.tile(indexer.k_bias[...][4:], (20, 1)), atol=2e-3)


def test_only_the_first_rope_dimensions_are_rotated(micro):
    attention, a, ctx = layer_inputs(micro()[0])
    still = Context(jnp.ones_like(ctx.cos), jnp.zeros_like(ctx.sin), ctx.rows, ctx.key_segment)
    for make in (lambda c: attention.indexer.keys(a, c.cos, c.sin), lambda c: attention.indexer.queries(
        attention.query_latent(a), a, c.cos, c.sin)[0]):  # fmt: skip
        turned, unturned = make(ctx), make(still)
        np.testing.assert_array_equal(turned[..., 4:], unturned[..., 4:])
        assert np.abs(np.asarray(turned[..., :4] - unturned[..., :4])).max() > 0.5


def test_the_indexer_reads_the_normalised_query_latent(micro, tokens):
    model, w = micro()
    graphdef, params = split(model)
    stacked = params["groups"][0]["layers"]["attention"]
    changed = stacked | {"q_norm": stacked["q_norm"] * jnp.linspace(0.2, 3.0, stacked["q_norm"].shape[-1])}
    other = jax.tree.map(lambda x: x, params)
    other["groups"][0]["layers"]["attention"] = changed
    before, after = (forward(m, tokens).collected["index_scores"][0] for m in (model, merge(graphdef, other)))
    real = np.asarray(before) > MASKED
    assert np.abs(np.asarray(before) - np.asarray(after))[real].max() > 0.1


def test_head_weights_of_zero_select_the_first_keys(micro, tokens):
    model, _ = micro()
    graphdef, params = split(model)
    zero = jax.tree_util.tree_map_with_path(lambda at, x: 0 * x if at[-1].key == "head_weights" else x, params)
    first, second = (forward(merge(graphdef, zero), tokens).collected["selected"] for _ in range(2))
    for layer, again in zip(first, second):
        np.testing.assert_array_equal(layer[:, 3:], np.broadcast_to(np.arange(4), (2, 17, 4)))
        np.testing.assert_array_equal(layer[:, 1], [[0, 1, -1, -1]] * 2)
        np.testing.assert_array_equal(layer, again)


def test_documents_and_padding_are_masked_in_the_indexer(micro, tokens):
    model, w = micro()
    segments = np.array([[0] * 2 + [1] * 7 + [2] * 3 + [3] * 8, [5] * 9 + [6] * 6 + [0] * 5])
    positions = np.array([[0] * 2 + [*range(7)] + [*range(3)] + [*range(8)], [*range(9)] + [*range(6)] + [0] * 5])
    collected = forward(model, tokens, positions, segments).collected
    for b in range(2):
        expected = reference.forward(w, model.cfg, tokens[b], positions[b], segments[b])["layers"]
        real = segments[b] != 0
        for i, layer in enumerate(expected):
            want = reference.padded(layer["selected"], 4)
            np.testing.assert_array_equal(np.asarray(collected["selected"][i][b])[real], want[real])
            assert (np.asarray(collected["selected"][i][b])[~real] == -1).all()


def test_visible_is_causal_within_a_document():
    segments = jnp.array([[0, 1, 1, 2, 2, 0]])
    got = visible(Rows(jnp.arange(6)[None], segments), segments)[0]
    expected = np.zeros((6, 6), bool)
    for t, s in [(1, 1), (2, 1), (2, 2), (3, 3), (4, 3), (4, 4)]:
        expected[t, s] = True
    np.testing.assert_array_equal(got, expected)


def test_the_language_model_loss_never_reaches_the_indexer(micro, tokens):
    model, _ = micro()
    graphdef, params = split(model)

    def loss(params):
        m = merge(graphdef, params)
        hidden, _, _ = m.trunk(tokens)
        (step,) = m.mtp_steps(hidden, jnp.asarray(tokens), steps=1)
        return sum(jnp.sum(jax.nn.log_softmax(m.logits(h))[..., 0]) for h in (hidden, step.hidden))

    grads = jax.jit(jax.grad(loss))(params)
    flat = {jax.tree_util.keystr(at): np.asarray(g) for at, g in jax.tree_util.tree_leaves_with_path(grads)}
    still = {at for at, g in flat.items() if not g.any()}
    assert still == {at for at in flat if "indexer" in at or "router_bias" in at}
    assert sum("indexer" in at for at in still) == 5 * 3  # two groups of the trunk, and MTP


def test_scores_train_the_indexer_and_nothing_that_feeds_it(micro):
    attention, a, ctx = layer_inputs(micro()[0])
    graphdef, params = split(attention.indexer)
    cq = attention.query_latent(a)

    def total(params, a, cq):
        indexer = merge(graphdef, params)
        q, w = indexer.queries(cq, a, ctx.cos, ctx.sin)
        return jnp.sum(index_scores(q, indexer.keys(a, ctx.cos, ctx.sin), w, EVERYTHING) ** 2)

    own, *inputs = jax.jit(jax.grad(total, (0, 1, 2)))(params, a, cq)
    assert all(np.asarray(g).any() for g in own.values()) and len(own) == 5
    assert not any(np.asarray(g).any() for g in inputs)


def test_head_weights_are_a_float32_product_in_a_bfloat16_model(golden):
    """The same bfloat16 tensors scored exactly from the model's own bfloat16 activations: nearly every set agrees."""
    g = golden("glm5_tiny")
    model = load_hf(g.path, dtype="bfloat16")
    attention, _, _ = layer_inputs(model)
    a = jax.random.normal(jax.random.key(0), (1, 256, 64), jnp.bfloat16)
    cos, sin = rotary_tables(np.arange(256)[None], 8, model.cfg.rope_theta)
    cq = attention.query_latent(a)
    _, w = attention.indexer.queries(cq, a, cos, sin)
    assert w.dtype == jnp.float32
    exact = np.asarray(a, np.float64)[0] @ np.asarray(attention.indexer.head_weights[...], np.float64) / np.sqrt(8)
    np.testing.assert_allclose(w[0], exact, rtol=1e-5, atol=1e-5)
    q, _ = attention.indexer.queries(cq, a, cos, sin)
    k = attention.indexer.keys(a, cos, sin)
    segment = jnp.ones((1, 256), jnp.int32)
    ctx = Context(cos, sin, Rows(jnp.arange(256)[None], segment), segment)
    selected = attention.select(attention.index(cq, a, attention.keys(a, ctx), ctx), ctx)
    dots = np.einsum("tij,sj->tis", np.asarray(q, np.float64)[0], np.asarray(k, np.float64)[0])
    scores = np.einsum("tis,ti->ts", np.maximum(dots, 0), exact)
    shared = 0
    for t in range(256):
        best = sorted(range(t + 1), key=lambda s: (-scores[t, s], s))[:8]
        shared += len(set(best) & set(np.asarray(selected[0, t]).tolist())) / len(best)
    assert shared / 256 > 0.995
