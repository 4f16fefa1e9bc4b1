"""The router and the mixture of experts: what bias, groups, normalisation and precision may and may not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from glm5_jax.convert.hf import load_hf, save_hf
from glm5_jax.layers.moe import Moe, balance_loss, route
from glm5_jax.model import merge, split


def config(**overrides):
    return reference.micro_config(**overrides)


def by_loops(scores, bias, cfg):
    """(ids, weights) of one token: every choice spelled out."""
    choice = scores + bias
    size = cfg.n_routed_experts // cfg.n_group
    strength = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(cfg.n_group)]
    groups = sorted(range(cfg.n_group), key=lambda g: (-strength[g], g))[: cfg.topk_group]
    candidates = [e for e in range(cfg.n_routed_experts) if e // size in groups]
    ids = sorted(sorted(candidates, key=lambda e: (-choice[e], e))[: cfg.num_experts_per_tok])
    weights = scores[ids]
    if cfg.norm_topk_prob:
        weights = weights / weights.sum()
    return ids, weights * cfg.routed_scaling_factor


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (3, 2), (3, 1), (6, 4)])
@pytest.mark.parametrize("offset", [0.0, -1.2, 7.0])
@pytest.mark.parametrize("normalise", [True, False])
def test_route_equals_loops(n_group, topk_group, offset, normalise):
    cfg = config(n_group=n_group, topk_group=topk_group, norm_topk_prob=normalise, routed_scaling_factor=2.5)
    rng = np.random.default_rng(0)
    scores = rng.random((40, 6)).astype(np.float32)
    bias = (offset + 0.3 * rng.standard_normal(6)).astype(np.float32)
    ids, weights = route(jnp.asarray(scores), jnp.asarray(bias), cfg)
    for token in range(40):
        expected = by_loops(scores[token], bias, cfg)
        np.testing.assert_array_equal(ids[token], expected[0])
        np.testing.assert_allclose(weights[token], expected[1], rtol=1e-6)


def test_dropped_groups_stay_dropped_when_biases_are_negative():
    cfg = config(n_group=3, topk_group=2, num_experts_per_tok=4)
    scores = jnp.array([[0.9, 0.8, 0.7, 0.6, 0.1, 0.2]])
    ids, _ = route(scores, jnp.full(6, -1.2), cfg)  # all choices negative: a mask value of 0 would choose 4 and 5
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])


def test_a_group_counts_its_two_best_experts():
    cfg = config(n_group=2, topk_group=1)
    scores = jnp.array([[0.9, 0.0, 0.0, 0.5, 0.5, 0.0]])
    np.testing.assert_array_equal(route(scores, jnp.zeros(6), cfg).experts, [[3, 4]])


def test_bias_steers_the_choice_and_not_the_weight():
    cfg = config(routed_scaling_factor=2.5)
    scores = jnp.array([[0.1, 0.6, 0.5, 0.4, 0.3, 0.2]])
    ids, weights = route(scores, jnp.array([5.0, 0, 0, 0, 0, 0]), cfg)
    np.testing.assert_array_equal(ids, [[0, 1]])
    np.testing.assert_allclose(weights, [[2.5 * 0.1 / 0.7, 2.5 * 0.6 / 0.7]], rtol=1e-6)
    cfg = config(norm_topk_prob=False, routed_scaling_factor=2.5)
    raw = route(scores, jnp.array([5.0, 0, 0, 0, 0, 0]), cfg).weights
    assert np.asarray(raw).max() <= 2.5


def test_tiny_scores_behind_a_large_bias_keep_their_weights():
    scores = jnp.full((3, 6), 2e-7)
    _, weights = route(scores, jnp.full(6, 12.0), config(routed_scaling_factor=2.5))
    np.testing.assert_allclose(weights, 1.25, rtol=1e-6)  # (score + bias) - bias would be 0


def test_underflown_scores_give_zero_weights_not_nan():
    np.testing.assert_array_equal(route(jnp.zeros((1, 6)), jnp.zeros(6), config()).weights, [[0.0, 0.0]])


def test_tied_experts_choose_the_lowest_numbers():
    np.testing.assert_array_equal(route(jnp.full((1, 6), 0.5), jnp.zeros(6), config()).experts, [[0, 1]])


def test_gradient_flows_through_weights_and_not_through_the_bias():
    cfg = config()
    scores = jnp.array([[0.1, 0.6, 0.5, 0.4, 0.3, 0.2]])

    def first_weight(scores, bias):
        return route(scores, bias, cfg).weights[0, 0]

    by_score, by_bias = jax.grad(first_weight, (0, 1))(scores, jnp.zeros(6))
    scale = cfg.routed_scaling_factor
    np.testing.assert_allclose(by_score, [[0, scale * 0.5 / 1.1**2, -scale * 0.6 / 1.1**2, 0, 0, 0]], rtol=1e-5)
    assert not np.asarray(by_bias).any()


def ffn(micro, **overrides):
    """(Moe of the MTP layer, its published tensors under "mlp", cfg); the MTP layer is the one that is not stacked."""
    model, w = micro(**overrides)
    prefix = f"model.layers.{model.cfg.num_hidden_layers}."
    return model.mtp.block.ffn, {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}, model.cfg


@pytest.mark.parametrize("settings", [{}, {"norm_topk_prob": False}, {"n_group": 3, "topk_group": 2}], ids=str)
def test_the_mixture_equals_loops_with_an_unscaled_shared_expert(micro, settings):
    layer, w, cfg = ffn(micro, **settings)
    assert isinstance(layer, Moe)
    x = np.random.default_rng(0).standard_normal((2, 7, cfg.hidden_size))
    y, routing, _ = layer(jnp.asarray(x, jnp.float32), jnp.ones((2, 7), bool))
    for b, t in np.ndindex(2, 7):
        expected, ids, weights = reference.mixture(w, "mlp", x[b, t], cfg)
        np.testing.assert_array_equal(routing.experts[b, t], ids)
        np.testing.assert_allclose(routing.weights[b, t], weights, rtol=1e-4)
        np.testing.assert_allclose(y[b, t], expected, rtol=0, atol=5e-5)


def test_the_scaling_factor_acts_once_and_on_routed_experts_only(micro):
    layer, _, cfg = ffn(micro)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, cfg.hidden_size)), jnp.float32)
    real = jnp.ones((1, 5), bool)
    shared = layer.shared(x)
    outputs = {}
    for factor in (1.0, 2.5):
        other = ffn(micro, routed_scaling_factor=factor)[0]
        y, routing, _ = other(x, real)
        np.testing.assert_allclose(jnp.sum(routing.weights, -1), factor, rtol=1e-5)
        outputs[factor] = y - shared
    np.testing.assert_allclose(outputs[2.5], 2.5 * outputs[1.0], rtol=0, atol=2e-5)


def test_router_logits_are_float32_in_a_bfloat16_model(micro):
    """Logits near 4 that differ by 1e-3 are one bfloat16 number; their order decides."""
    layer, _, cfg = ffn(micro)
    graphdef, params = split(layer)
    x = jnp.zeros((1, 1, cfg.hidden_size), jnp.bfloat16).at[..., :2].set(jnp.array([4.0, 1.0], jnp.bfloat16))
    router = jnp.zeros_like(params["router"]).at[0].set(jnp.array([1.0, 1, 1, 1, 0, 0]))
    router = router.at[1].set(jnp.array([0.0, 1e-3, 2e-3, -1e-3, 0, 0]))
    layer = merge(graphdef, params | {"router": router, "router_bias": jnp.zeros(6)})
    _, routing, _ = layer(x, jnp.ones((1, 1), bool))
    np.testing.assert_array_equal(routing.experts, [[[1, 2]]])
    assert routing.weights.dtype == jnp.float32


def test_balance_loss_by_hand():
    scores = jnp.array([[[0.2, 0.6], [0.4, 0.4], [0.9, 0.1]]])
    ids, real = jnp.array([[[1], [0], [0]]]), jnp.array([[True, True, False]])
    loss, load = balance_loss(scores, ids, real)
    # f = E/(X T) * counts = [1, 1]; P = mean of [0.25, 0.75] and [0.5, 0.5].
    np.testing.assert_allclose(loss, 1 * 0.375 + 1 * 0.625, rtol=1e-6)
    np.testing.assert_array_equal(load, [1.0, 1.0])


def test_balance_loss_of_everything_on_one_expert():
    scores, ids = jnp.full((2, 5, 4), 0.1).at[..., 0].set(0.7), jnp.zeros((2, 5, 1), jnp.int32)
    loss, load = balance_loss(scores, ids, jnp.ones((2, 5), bool))
    np.testing.assert_allclose(loss, 2 * 4 * 0.7, rtol=1e-6)
    np.testing.assert_array_equal(load, [10, 0, 0, 0])


def test_rows_are_balanced_one_by_one():
    ids = jnp.array([[[0], [0]], [[1], [1]]])
    scores = jnp.where(jax.nn.one_hot(ids[..., 0], 2) == 1, 0.9, 0.1)
    loss, _ = balance_loss(scores, ids, jnp.ones((2, 2), bool))
    np.testing.assert_allclose(loss, 2 * (2 * 0.9), rtol=1e-6)  # over the whole batch it would be balanced


def test_a_row_of_padding_has_no_balance_loss_and_no_load():
    loss, load = balance_loss(jnp.full((1, 3, 4), 0.5), jnp.zeros((1, 3, 2), jnp.int32), jnp.zeros((1, 3), bool))
    assert loss == 0 and not np.asarray(load).any()


def test_load_counts_real_tokens_only(micro):
    layer, _, cfg = ffn(micro)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, cfg.hidden_size)), jnp.float32)
    real = jnp.asarray(np.arange(6)[None] < np.array([[4], [1]]))
    _, routing, aux = layer(x, real)
    expected = np.bincount(np.asarray(routing.experts)[np.asarray(real)].ravel(), minlength=6)
    np.testing.assert_array_equal(aux["load"], expected)
    assert expected.sum() == 5 * 2


# Rounding of the router bias (the published 5.2 bias lies in 6.8 .. 7.1)


def biases(model):
    flat = jax.tree_util.tree_leaves_with_path(split(model)[1])
    found = {jax.tree_util.keystr(at): np.asarray(x) for at, x in flat if "router_bias" in jax.tree_util.keystr(at)}
    assert found
    return found


def test_rounding_the_bias_to_bfloat16_changes_experts(golden):
    g = golden("glm52_tiny")
    graphdef, params = split(g.model())

    def rounded(at, x):
        return x.astype(jnp.bfloat16).astype(jnp.float32) if at[-1].key == "router_bias" else x

    model = merge(graphdef, jax.tree_util.tree_map_with_path(rounded, params))
    experts = model(g.cases["long/input_ids"], collect=("hidden", "selected", "index_scores", "router", "mtp"))
    pairs = zip(experts.collected["router"][1:], g.run("long").collected["router"][1:])
    changed = [(np.asarray(now.experts) != np.asarray(right.experts)).any(-1).mean() for now, right in pairs]
    assert np.max(changed) > 0.05 and np.mean(np.array(changed) > 0) > 0.5


def test_the_bias_stays_float32_through_bfloat16_load_and_save(golden, tmp_path):
    g = golden("glm52_tiny")
    exact = biases(g.model())
    model = load_hf(g.path, dtype="bfloat16")
    save_hf(model, tmp_path / "saved")
    for again in (model, load_hf(tmp_path / "saved", dtype="bfloat16"), load_hf(tmp_path / "saved")):
        for at, bias in biases(again).items():
            assert bias.dtype == np.float32
            np.testing.assert_array_equal(bias, exact[at])


def test_a_bfloat16_layer_adds_the_bias_in_float32(micro):
    layer, _, cfg = ffn(micro)
    graphdef, params = split(layer)
    rng = np.random.default_rng(0)
    bias = (6.93 + 0.003 * rng.standard_normal(6)).astype(np.float32)  # one step of bfloat16 is 0.031 here
    params = {k: v if k == "router" else jax.tree.map(lambda a: a.astype(jnp.bfloat16), v) for k, v in params.items()}
    router = (0.01 * params["router"]).astype(jnp.bfloat16)
    layer = merge(graphdef, params | {"router": router, "router_bias": jnp.asarray(bias)})
    x = jnp.asarray(rng.standard_normal((1, 200, cfg.hidden_size)), jnp.bfloat16)
    _, routing, _ = layer(x, jnp.ones((1, 200), bool))
    scores = 1 / (1 + np.exp(-(np.asarray(x, np.float64)[0] @ np.asarray(router, np.float64))))
    exact = [by_loops(row, bias.astype(np.float64), cfg)[0] for row in scores]
    rounded = [by_loops(row, bias.astype("bfloat16").astype(np.float64), cfg)[0] for row in scores]
    got = np.asarray(routing.experts[0])
    assert (got == exact).all(-1).mean() > 0.99
    assert (got == rounded).all(-1).mean() < 0.9
