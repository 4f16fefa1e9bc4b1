"""The indexer's loss: its value, whom it reaches, and what its mean is taken over."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from glm5_jax.model import abstract, merge, split
from glm5_jax.sparse.loss import index_kl
from glm5_jax.train.step import LossConfig, count_targets, flat, gradients, micro_loss, served_shares, target_weights
from helpers_train import lively_model, packed_batch, step_config

T = 12
ROWS = [[5, 3], [3], [7, 5], [1, 1, 5]]
LOSS = LossConfig(mtp_steps=2, balance_weight=0.01, chunk=5, index_weight=1.0)
SHARED = dict(num_hidden_layers=4, index_topk_pattern="FSFS")


@functools.cache
def compiled(cfg, loss):
    graphdef = split(abstract(cfg))[0]
    return jax.jit(lambda params, batch: gradients(graphdef, params, {}, batch, jnp.float32(0.3), loss))


def loss_and_gradients(model, batch, loss=LOSS):
    """(parts, flat gradients of everything)."""
    _, parts, grads = jax.device_get(compiled(model.cfg, loss)(flat(split(model)[1]), batch))
    return parts, grads


def of_indexers(grads, wanted=True):
    return {path: g for path, g in grads.items() if ("indexer" in path) == wanted}


def bit_equal(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=str(path))


# The formula


def test_kl_equals_its_sum_and_its_gradient_is_chance_minus_target():
    rng = np.random.default_rng(0)
    target, scores = rng.random((3, 7)), 3 * rng.standard_normal((3, 7))
    mask = rng.random((3, 7)) < 0.7
    target[0, np.argmax(mask[0])] = 0  # 0 log 0 = 0
    target = np.where(mask, target, 0)
    target /= target.sum(1, keepdims=True)
    chance = np.where(mask, np.exp(scores), 0)
    chance /= chance.sum(1, keepdims=True)
    want = [sum(p * np.log(p / q) for p, q in zip(*row) if p > 0) for row in zip(target, chance)]
    dirty = jnp.asarray(np.where(mask, scores, np.nan), jnp.float32)
    value, pull = jax.vjp(lambda s: index_kl(jnp.asarray(np.where(mask, target, np.nan), jnp.float32), s, mask), dirty)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(pull(jnp.ones(3))[0], chance - target, atol=1e-6)


def test_kl_of_no_keys_is_zero_with_zero_gradient():
    none = np.zeros((1, 4), bool)
    value, grad = jax.value_and_grad(lambda s: index_kl(jnp.ones((1, 4)), s, none)[0])(jnp.full((1, 4), jnp.nan))
    assert value == 0 and (np.asarray(grad) == 0).all()


def test_kl_of_a_perfect_indexer_is_zero_and_survives_large_scores():
    scores = jnp.array([[1e4, 1e4 - 1, 1e4 - 3]])
    target = jax.nn.softmax(scores - 1e4)
    np.testing.assert_allclose(index_kl(target, scores, jnp.ones((1, 3), bool)), 0, atol=1e-6)


# In the network


@pytest.mark.parametrize("pattern", ["FFF", "FSF", "FSS"])
@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_every_layer_reports_the_kl_from_its_own_attention_to_its_indexer(micro, tokens, attention, pattern):
    model, w = micro(index_topk_pattern=pattern, attention=attention)
    segments = np.ones_like(tokens)
    segments[1, :2], segments[1, 11:] = 0, 2  # left padding, two documents
    graphdef, params = split(model)
    run = jax.jit(lambda p: merge(graphdef, p).trunk(tokens, None, segments, None, frozenset({"index_kl"}))[1])
    got = [np.asarray(layer["index_kl"]) for layer in run(params)]
    positions = [range(tokens.shape[1]), [0, 1, *range(9), *range(tokens.shape[1] - 11)]]
    for b in range(2):
        full = [letter == "F" for letter in pattern]
        layers = reference.forward(w, model.cfg, tokens[b], positions[b], segments[b], full)["layers"]
        want = np.array([layer["index_kl"] for layer in layers])
        assert (want[:, segments[b] != 0] > -1e-12).all() and want.max() > 0.01
        np.testing.assert_allclose(np.stack(got)[:, b], np.where(segments[b] != 0, want, 0), atol=2e-5)


def test_shares_are_one_over_the_layers_an_indexer_serves():
    cfg = step_config(num_hidden_layers=7, index_topk_pattern="FFFSSSF")
    assert served_shares(cfg) == [1, 1, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1]


def test_the_loss_is_the_mean_over_indexers_of_the_mean_over_layers_served():
    """Rows count where a next token is a target; the MTP layer's indexer counts as one more, its steps averaged."""
    model = lively_model(step_config(attention="sparse", **SHARED))
    batch = packed_batch(ROWS, T)
    one = jax.tree.map(lambda x: x[0], batch)
    counts = count_targets(batch, LOSS.mtp_steps)
    collect = frozenset({"index_kl"})
    hidden, aux, _ = model.trunk(one["tokens"], one["positions"], one["segment_ids"], collect=collect)
    steps = model.mtp_steps(hidden, one["tokens"], one["positions"], one["segment_ids"], 2, collect)
    parts = micro_loss(model, one, counts, jnp.float32(0.3), LOSS)[1]
    means = [np.mean(np.asarray(layer["index_kl"])[target_weights(one, 1) > 0]) for layer in aux]
    ahead = [np.mean(np.asarray(s.aux["index_kl"])[target_weights(one, d + 1) > 0]) for d, s in enumerate(steps, 1)]
    want = np.mean([np.mean(means[:2]), np.mean(means[2:]), np.mean(ahead)])
    np.testing.assert_allclose(parts["index_kl"], want, rtol=1e-5)


@pytest.mark.parametrize("network", [dict(attention="dense"), dict(attention="sparse", **SHARED)])
def test_the_two_losses_never_meet(network):
    """Trunk gradients are those of the program without the KL; without it the indexer has none, to the bit."""
    model, batch = lively_model(step_config(**network)), packed_batch(ROWS, T)
    _, both = loss_and_gradients(model, batch)
    _, no_kl = loss_and_gradients(model, batch, dataclasses.replace(LOSS, index_weight=0.0))
    for path, g in of_indexers(no_kl, False).items():
        np.testing.assert_allclose(both[path], g, rtol=1e-5, atol=1e-6 * np.abs(g).max(), err_msg=str(path))
    assert all((g == 0).all() for g in of_indexers(no_kl).values())
    assert all(np.abs(g).max() > 1e-4 for g in of_indexers(both).values())


def test_the_weight_of_the_kl_scales_the_indexers_gradient_and_no_other():
    model, batch = lively_model(step_config(attention="sparse", **SHARED)), packed_batch(ROWS, T)
    _, both = loss_and_gradients(model, batch)
    _, hundred = loss_and_gradients(model, batch, dataclasses.replace(LOSS, index_weight=100.0))
    bit_equal(of_indexers(both, False), of_indexers(hundred, False))
    for path, g in of_indexers(both).items():
        np.testing.assert_allclose(hundred[path], 100 * g, rtol=1e-4, atol=1e-4)


def test_an_indexer_learns_from_the_attention_of_every_layer_it_serves():
    model, batch = lively_model(step_config(attention="sparse", **SHARED)), packed_batch(ROWS, T)
    _, before = loss_and_gradients(model, batch)
    other = lively_model(model.cfg)
    assert model.cfg.layer_kinds[-1] == ("moe", False)
    q_up = other.groups[-1].layers.attention.q_up  # of the last layer, which shares: nothing but attention reads it
    q_up[...] = q_up[...].at[-1].multiply(2.0)
    _, after = loss_and_gradients(other, batch)
    owner = [path for path in of_indexers(before) if path[:2] == ("groups", len(model.groups) - 1)]
    assert len(owner) == 5 and all(np.abs(after[path] - before[path])[-1].max() > 1e-4 for path in owner)
    first = [path for path in of_indexers(before) if path[:2] == ("groups", 0)]
    bit_equal({p: before[p] for p in first}, {p: after[p] for p in first})


def test_shares_and_micro_batches_and_recomputation_do_not_change_the_gradient():
    network = step_config(attention="sparse", **SHARED)
    model = lively_model(network)
    parts, whole = loss_and_gradients(model, packed_batch(ROWS, T))
    again = lively_model(dataclasses.replace(network, remat="block"))
    cut_parts, cut = loss_and_gradients(again, packed_batch(ROWS, T, micro=2))
    np.testing.assert_allclose(cut_parts["index_kl"], parts["index_kl"], rtol=1e-5)
    for path, g in whole.items():
        np.testing.assert_allclose(cut[path], g, rtol=0, atol=2e-5, err_msg=str(path))


def test_padding_and_masked_targets_do_not_count():
    model = lively_model(step_config(attention="sparse", index_topk=3))
    batch = packed_batch(ROWS, T) | {"loss_mask": jnp.ones((1, len(ROWS), T), bool)}
    parts, grads = loss_and_gradients(model, batch)
    longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 3))), batch)
    longer["tokens"] = longer["tokens"].at[..., T:].set(7)
    more_parts, more = loss_and_gradients(model, longer)
    np.testing.assert_allclose(more_parts["index_kl"], parts["index_kl"], rtol=1e-5)
    for path, g in of_indexers(grads).items():
        np.testing.assert_allclose(more[path], g, rtol=0, atol=1e-5)
    # Nothing of the last two rows is a target: as if they were not there, that is, padding.
    masked, _ = loss_and_gradients(model, batch | {"loss_mask": batch["loss_mask"].at[:, 2:].set(False)})
    alone, _ = loss_and_gradients(model, batch | {"segment_ids": batch["segment_ids"].at[:, 2:].set(0)})
    np.testing.assert_allclose(masked["index_kl"], alone["index_kl"], rtol=1e-5)
