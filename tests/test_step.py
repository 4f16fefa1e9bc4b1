"""The training step: accumulation, rows that count at each depth, balance, router bias, padding, non-finite losses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.layers.moe import balance_loss
from glm5_jax.model import abstract, merge, split
from glm5_jax.sparse import xla
from glm5_jax.train.step import (
    LossConfig,
    Rates,
    count_targets,
    flat,
    gradients,
    init_state,
    make_step,
    micro_loss,
    move_router_bias,
    target_weights,
)
from helpers_train import MOE_LAYERS, buffer_sizes, flat_specs, lively_model, log_softmax, packed_batch, step_config

T = 12
RATE = np.float32(0.125)
WEIGHT = 0.3
LOSS = LossConfig(mtp_steps=2, balance_weight=0.01, chunk=5)
# Four rows with 8, 3, 12 and 7 real tokens: micro-batches of one or two rows hold different numbers of targets.
ROWS = [[5, 3], [3], [7, 5], [1, 1, 5]]


@functools.cache
def compiled_step(network: ModelConfig, cfg: LossConfig, freeze: tuple):
    """(optimizer, compiled step): gradient descent of rate 1 with a trace, after one step the gradient itself."""
    optimizer = optax.sgd(1.0, momentum=0.9)
    rates = Rates(lambda step: jnp.where(step < 2, WEIGHT, 0.1), lambda step: jnp.where(step < 2, RATE, 0.0))
    return optimizer, jax.jit(make_step(abstract(network), optimizer, rates, cfg, freeze))


def start(model, cfg=LOSS, freeze=()):
    """(state before step 0, compiled step)."""
    optimizer, step = compiled_step(model.cfg, cfg, freeze)
    return init_state(model, optimizer, freeze), step


def one_step(model, batch, cfg=LOSS, freeze=()):
    """(new state, metrics, flat gradients) of the first step."""
    state, step = start(model, cfg, freeze)
    new, metrics = jax.device_get(step(state, batch))
    return new, metrics, new.opt_state[0].trace


def same_gradients(a: dict, b: dict, atol: float = 1e-6):
    assert a.keys() == b.keys()
    for path in a:
        size = max(1, np.abs(b[path]).max())
        np.testing.assert_allclose(a[path], b[path], atol=atol * size, rtol=0, err_msg=str(path))


@pytest.fixture(scope="module")
def model():
    return lively_model(step_config())


@pytest.fixture(scope="module")
def large_batch(model):
    """New state, metrics and gradients of four rows at once."""
    return one_step(model, packed_batch(ROWS, T))


def router_biases(state) -> dict:
    return {path: np.asarray(value) for path, value in flat(state.params).items() if path[-1] == "router_bias"}


# Accumulation


@pytest.mark.smoke
def test_accumulated_micro_batches_equal_the_large_batch(model, large_batch):
    new, metrics, grads = one_step(model, packed_batch(ROWS, T, micro=4))
    big, big_metrics, big_grads = large_batch
    for name in ("loss", "ce", "mtp", "balance", "load", "max_logit", "max_violation", "grad_norm", "update_norm"):
        np.testing.assert_allclose(metrics[name], big_metrics[name], rtol=2e-6, err_msg=name)
    same_gradients(grads, big_grads)
    assert all(np.abs(g).max() > 1e-5 for p, g in big_grads.items() if "indexer" not in p)  # every part takes part
    biases, big_biases = router_biases(new), router_biases(big)
    assert len(biases) == 2
    jax.tree.map(np.testing.assert_array_equal, biases, big_biases)


# Which rows count


def test_rows_of_two_documents_of_three_tokens_at_each_depth():
    """Row i predicts token i + ahead: positions 0 1 2 | 3 4 5 | padding."""
    batch = packed_batch([[3, 3]], 8)
    rows = {ahead: np.flatnonzero(target_weights(batch, ahead)[0, 0]).tolist() for ahead in (1, 2, 3, 4)}
    assert rows == {1: [0, 1, 3, 4], 2: [0, 3], 3: [], 4: []}


def test_loss_mask_marks_tokens_as_targets_at_every_depth():
    batch = packed_batch([[3, 3]], 8)
    mask = jnp.ones((1, 1, 8), bool).at[0, 0, jnp.array([2, 3])].set(False)  # token 3 opens a document: never a target
    rows = {a: np.flatnonzero(target_weights(batch | {"loss_mask": mask}, a)[0, 0]).tolist() for a in (1, 2)}
    assert rows == {1: [0, 3, 4], 2: [3]}


def test_the_mean_of_each_depth_is_over_its_own_targets_and_never_over_none():
    counts = count_targets(packed_batch([[3, 3], [4]], 8), 3)
    assert float(counts["next"]) == 4 + 3
    assert [float(c) for c in counts["mtp"]] == [2 + 2, 1, 1]  # the last depth has no target: divides by 1, not by 0
    assert float(counts["rows"]) == 2


def test_losses_are_means_over_rows_listed_by_hand(model):
    """Documents of 3 and 4 tokens; rows (i, target) for 1, 2 and 3 tokens ahead; then without token 5 as a target."""
    batch = {name: value[0] for name, value in packed_batch([[3, 4]], 8).items()}
    pairs = {1: [(0, 1), (1, 2), (3, 4), (4, 5), (5, 6)], 2: [(0, 2), (3, 5), (4, 6)], 3: [(3, 6)]}
    cfg = LossConfig(mtp_steps=2, balance_weight=0.01, chunk=3)

    @jax.jit
    def run(b):
        hidden, _, _ = model.trunk(b["tokens"], b["positions"], b["segment_ids"])
        steps = model.mtp_steps(hidden, b["tokens"], b["positions"], b["segment_ids"], 2)
        logits = [model.logits(h)[0] for h in (hidden, *(s.hidden for s in steps))]
        return micro_loss(model, b, count_targets(b, 2), jnp.float32(WEIGHT), cfg), logits

    tokens = np.asarray(batch["tokens"][0])
    for left_out in (None, 5):
        mask = jnp.arange(8)[None] != (-1 if left_out is None else left_out)
        (loss, parts), logits = run(batch | {"loss_mask": mask})
        means = [
            -np.mean([log_softmax(logits[ahead - 1])[i, tokens[t]] for i, t in rows if t != left_out])
            for ahead, rows in pairs.items()
        ]
        np.testing.assert_allclose(parts["ce"], means[0], rtol=1e-5)
        np.testing.assert_allclose(parts["mtp"], (means[1] + means[2]) / 2, rtol=1e-5)
        total = means[0] + WEIGHT * (means[1] + means[2]) / 2 + 0.01 * float(parts["balance"])
        np.testing.assert_allclose(loss, total, rtol=1e-5)


def test_without_mtp_the_loss_is_the_cross_entropy_and_mtp_has_no_load(model):
    batch = {name: value[0] for name, value in packed_batch(ROWS, T).items()}
    cfg = LossConfig(mtp_steps=0, balance_weight=0.0, chunk=5)
    loss, parts = jax.jit(lambda b: micro_loss(model, b, count_targets(b, 0), jnp.float32(WEIGHT), cfg))(batch)
    assert loss == parts["ce"] and parts["mtp"] == 0
    assert parts["load"].shape == (MOE_LAYERS, 5)


def test_train_loss_of_the_golden_checkpoint(golden):
    data = golden("glm5_tiny")
    tokens, labels = data.cases["train/input_ids"], data.cases["train/labels"]
    kept = labels != -100
    assert (tokens == labels)[kept].all() and not kept.all()  # some targets are left out
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "loss_mask": kept}
    batch["positions"] = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    batch = {name: jnp.asarray(value) for name, value in batch.items()}
    cfg = LossConfig(mtp_steps=0, balance_weight=0.0, chunk=7)
    model = data.model()
    loss, _ = jax.jit(lambda b: micro_loss(model, b, count_targets(b, 0), jnp.float32(0), cfg))(batch)
    np.testing.assert_allclose(loss, data.meta["cases"]["train"]["loss"], atol=2e-5)


def test_mtp_loss_without_an_mtp_layer_is_refused():
    with pytest.raises(UserError, match=r"^loss\.mtp_steps: [^\n]*no MTP layer"):
        make_step(abstract(step_config(num_nextn_predict_layers=0)), optax.sgd(1.0), None, LOSS, ())


# Padding and documents


def test_appended_padding_changes_nothing(model, large_batch):
    batch = {n: jnp.pad(v[0], ((0, 1), (0, 4))) for n, v in packed_batch(ROWS, T).items()}  # and a row of nothing
    batch["tokens"] = jnp.where(batch["segment_ids"] == 0, 7, batch["tokens"])
    loss, parts = jax.jit(lambda b: micro_loss(model, b, count_targets(b, 2), jnp.float32(WEIGHT), LOSS))(batch)
    _, metrics, _ = large_batch
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
    for name in ("ce", "mtp", "balance", "load"):
        np.testing.assert_allclose(parts[name], metrics[name], rtol=1e-6, err_msg=name)


def test_what_stands_in_the_padding_changes_no_gradient(model, large_batch):
    batch = packed_batch(ROWS, T)
    other = jnp.where(batch["segment_ids"] == 0, 7, batch["tokens"])
    assert (other != batch["tokens"]).any()
    _, metrics, grads = one_step(model, batch | {"tokens": other})
    same_gradients(grads, large_batch[2])
    np.testing.assert_allclose(metrics["loss"], large_batch[1]["loss"], rtol=1e-6)


def test_a_batch_of_only_padding_has_a_finite_loss_of_zero(model):
    _, metrics, grads = one_step(model, packed_batch([[]] * 4, T))
    assert metrics["loss"] == 0 and (metrics["load"] == 0).all() and metrics["finite"]
    assert all((g == 0).all() for g in grads.values())


# Balance loss and router bias


def test_balance_loss_of_a_balanced_row_is_one_and_of_two_favoured_experts_e_over_x():
    rng = np.random.default_rng(0)
    scores = rng.random((1, 6, 4))  # 6 tokens, 4 experts, 2 each: every expert three times
    ids = np.array([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]])[None]
    real = np.ones((1, 6), bool)
    loss, load = balance_loss(jnp.asarray(scores, jnp.float32), jnp.asarray(ids), jnp.asarray(real))
    np.testing.assert_allclose(loss, 1.0, rtol=1e-6)
    np.testing.assert_array_equal(load, [3, 3, 3, 3])
    sure = np.tile(np.array([1.0, 0, 1.0, 0]), (1, 6, 1))
    loss, load = balance_loss(jnp.asarray(sure, jnp.float32), jnp.full((1, 6, 2), jnp.array([0, 2])), jnp.asarray(real))
    np.testing.assert_allclose(loss, 4 / 2, rtol=1e-6)
    np.testing.assert_array_equal(load, [6, 0, 6, 0])


def test_gradient_of_the_balance_loss_passes_through_the_shares_and_not_through_the_counts():
    """d/d s_te = (f_e - sum_k f_k share_tk) / (T sum_k s_tk), float64 by hand."""
    rng = np.random.default_rng(1)
    scores, ids = rng.random((1, 6, 4)) + 0.1, np.sort(rng.permuted(np.tile(np.arange(4), (6, 1)), axis=1)[:, :2])[None]
    real = np.array([[True, True, True, True, False, True]])
    grad = jax.grad(lambda s: balance_loss(s, jnp.asarray(ids), jnp.asarray(real))[0])(jnp.asarray(scores, jnp.float32))
    f = np.bincount(ids[real].ravel(), minlength=4) * 4 / (2 * 5)
    total = scores.sum(-1, keepdims=True)
    expected = (f - (f * scores).sum(-1, keepdims=True) / total) / (5 * total) * real[..., None]
    np.testing.assert_allclose(grad, expected, atol=1e-6)


def test_balance_loss_is_a_mean_over_rows_and_a_sum_over_layers(model):
    """A router of zeros gives every expert the share 1/E: each MoE layer and MTP add exactly 1, however rows differ."""
    graphdef, params = split(model)
    zeroed = jax.tree_util.tree_map_with_path(lambda p, x: x * 0 if p[-1].key == "router" else x, params)
    _, metrics, _ = one_step(merge(graphdef, zeroed), packed_batch([[12], [7], [4, 4], [9]], T))
    np.testing.assert_allclose(metrics["balance"], MOE_LAYERS + 1, rtol=1e-6)


def loads_by_hand(model, batch) -> np.ndarray:
    """Tokens per expert [MoE layers + MTP, E], counted in numpy from the experts that each real token chose."""
    b = {name: value.reshape(-1, T) for name, value in batch.items()}
    segments = np.asarray(b["segment_ids"])

    @jax.jit
    def choices(b):
        hidden, aux, _ = model.trunk(b["tokens"], b["positions"], b["segment_ids"], None, frozenset({"router"}))
        args = (hidden, b["tokens"], b["positions"], b["segment_ids"], 2, frozenset({"router"}))
        mtp = [s.aux["router"].experts for s in model.mtp_steps(*args)]
        return [a["router"].experts for a in aux if "router" in a], mtp

    trunk, mtp = jax.device_get(choices(b))
    loads = [np.bincount(ids[segments > 0].ravel(), minlength=5) for ids in trunk]
    total = np.zeros(5, int)
    for depth, ids in enumerate(mtp, 1):
        ahead = np.pad(segments[:, depth:], ((0, 0), (0, depth)))
        total += np.bincount(ids[(segments > 0) & (segments == ahead)].ravel(), minlength=5)
    return np.stack([*loads, total])


def check_router_bias(before, new, metrics, load):
    np.testing.assert_array_equal(metrics["load"], load)
    np.testing.assert_allclose(metrics["max_violation"], load.max(1) / load.mean(1) - 1, rtol=1e-6)
    moves = RATE * np.sign(load.mean(axis=1, keepdims=True) - load).astype(np.float32)
    old, after = router_biases(before), router_biases(new)
    trunk, mtp = ("groups", 1, "layers", "ffn", "router_bias"), ("mtp", "block", "ffn", "router_bias")
    np.testing.assert_array_equal(after[trunk], old[trunk] + moves[:2])
    np.testing.assert_array_equal(after[mtp], old[mtp] + moves[2])


def test_router_bias_moves_by_exactly_the_rate_towards_balance(model, large_batch):
    load = loads_by_hand(model, packed_batch(ROWS, T))
    assert load[0].sum() == 2 * sum(map(sum, ROWS)) and (load.std(axis=1) > 0).all()
    check_router_bias(start(model)[0], *large_batch[:2], load)


def test_all_tokens_to_two_experts_lowers_their_bias_and_raises_the_others(model):
    graphdef, params = split(model)
    favour = jnp.array([9.0, 0, 0, 9.0, 0])
    params = jax.tree_util.tree_map_with_path(lambda p, x: x * 0 + favour if p[-1].key == "router_bias" else x, params)
    new, metrics, _ = one_step(merge(graphdef, params), packed_batch(ROWS, T))
    for bias in router_biases(new).values():
        expected = favour + RATE * np.array([-1, 1, 1, -1, 1], np.float32)
        np.testing.assert_array_equal(bias, np.broadcast_to(expected, bias.shape))
    real = sum(map(sum, ROWS))
    np.testing.assert_array_equal(metrics["load"][0], [real, 0, 0, real, 0])


def test_loads_find_their_layer_whether_it_owns_an_indexer_or_not():
    """A dense layer, then 7 MoE layers; each load peaks at an expert of its own."""
    cfg = step_config(num_hidden_layers=8, index_topk_pattern="FFSSFSSF", n_routed_experts=12)
    layers = 7
    params = {p: v for p, v in flat(split(abstract(cfg))[1]).items() if p[-1] == "router_bias"}
    params = {p: np.zeros(v.shape, np.float32) for p, v in params.items()}
    load = np.ones((layers + 1, 12), np.float32) + 11 * np.eye(12, dtype=np.float32)[: layers + 1]
    new = move_router_bias(params, jnp.asarray(load), jnp.float32(1))
    assert np.argmin(new["groups", 1, "layers", "ffn", "router_bias"], -1).tolist() == list(range(layers))
    assert int(np.argmin(new[("mtp", "block", "ffn", "router_bias")])) == layers


def test_a_model_with_mtp_trained_without_it_leaves_the_mtp_bias_alone():
    mtp, trunk = ("mtp", "block", "ffn", "router_bias"), ("groups", 0, "layers", "ffn", "router_bias")
    params = {mtp: np.zeros(5), trunk: np.zeros((1, 5))}
    new = move_router_bias(params, jnp.array([[4.0, 0, 0, 0, 0]]), jnp.float32(1))
    np.testing.assert_array_equal(new[mtp], np.zeros(5))
    np.testing.assert_array_equal(new[trunk], [[-1, 1, 1, 1, 1]])


# The indexer, recomputation, memory


@pytest.fixture(scope="module")
def sparse():
    """A model that selects 4 of up to 12 keys, and its first step on four rows."""
    model = lively_model(step_config(attention="sparse"))
    return model, one_step(model, packed_batch(ROWS, T))


def test_the_loss_gives_the_indexer_no_gradient_even_when_it_selects(sparse, large_batch):
    _, (_, metrics, grads) = sparse
    assert abs(metrics["loss"] - large_batch[1]["loss"]) > 1e-3  # the selection matters
    indexer = {p: g for p, g in grads.items() if "indexer" in p}
    assert len(indexer) == 3 * 5 and all((g == 0).all() for g in indexer.values())


def test_recomputation_neither_selects_again_nor_counts_again(sparse):
    """Two micro-batches in turn with remat="block" against one large batch without."""
    model, (_, plain_metrics, plain) = sparse
    batch = packed_batch(ROWS, T, micro=2)
    again = lively_model(step_config(attention="sparse", remat="block"))
    new, metrics, grads = one_step(again, batch)
    np.testing.assert_allclose(metrics["loss"], plain_metrics["loss"], rtol=1e-6)
    same_gradients(grads, plain)
    check_router_bias(start(model)[0], new, metrics, loads_by_hand(model, batch))


@pytest.mark.parametrize("stage", [("dense", 0.0), ("dense", 1.0), ("sparse", 1.0)])
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_no_buffer_of_a_step_grows_with_the_square_of_the_length_or_with_the_vocabulary(remat, stage, monkeypatch):
    monkeypatch.setattr(xla, "_KEY_BLOCK", 64)  # several blocks of keys, as in a long row
    b, t, w = 2, 256, 1024
    attention, index_weight = stage
    network = dict(vocab_size=w, query_chunk=16, max_position_embeddings=t, remat=remat, attention=attention)
    model = abstract(step_config(**network))
    graphdef, params = split(model)
    batch = {n: jax.ShapeDtypeStruct((1, b, t), jnp.int32) for n in ("tokens", "segment_ids", "positions")}
    cfg = LossConfig(mtp_steps=1, chunk=16, index_weight=index_weight)
    run = jax.jit(lambda params, batch: gradients(graphdef, params, {}, batch, jnp.float32(WEIGHT), cfg))
    program = run.lower(flat(params), batch).compile().as_text()
    sizes = buffer_sizes(program)
    assert b * 16 * w in sizes  # logits of one chunk
    assert max(sizes) < b * t * t < b * t * w


# The whole step


def test_frozen_parts_stay_as_they_are_to_the_bit_and_all_others_move(model):
    specs, freeze = flat_specs(step_config()), ("trunk", "indexer")
    new, _, grads = one_step(model, packed_batch(ROWS, T), freeze=freeze)
    for path, value in flat(new.params).items():
        same = np.array_equal(value, flat(split(model)[1])[path])
        assert same == (specs[path].part in freeze), path  # router biases too
    assert {specs[path].part for path in grads} == {"mtp"}


def test_norms_and_update_are_what_they_say(model, large_batch):
    new, metrics, grads = large_batch
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], norm, rtol=1e-5)  # descent of rate 1
    old = flat(split(model)[1])
    for path in (("head",), ("mtp", "project"), ("groups", 1, "layers", "ffn", "gate")):
        np.testing.assert_allclose(old[path] - flat(new.params)[path], grads[path], atol=1e-6)


def test_loss_is_the_weighted_sum_of_its_parts(large_batch):
    _, metrics, _ = large_batch
    total = metrics["ce"] + WEIGHT * metrics["mtp"] + 0.01 * metrics["balance"]
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-6)


def test_non_finite_batch_changes_nothing_but_the_counter_and_the_next_batch_trains(model):
    graphdef, params = split(model)
    poisoned = params | {"embedding": params["embedding"].at[39].set(jnp.nan)}
    state, step = start(merge(graphdef, poisoned))
    good = packed_batch(ROWS, T, vocab=39)
    bad = good | {"tokens": good["tokens"].at[0, 2, 4].set(39)}
    state, metrics = step(state, good)
    assert bool(metrics["finite"])
    kept, metrics = step(state, bad)
    assert not bool(metrics["finite"]) and not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, kept.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, kept.opt_state, state.opt_state)
    assert int(kept.step) == int(state.step) + 1 == 2
    after, metrics = step(kept, good)
    assert bool(metrics["finite"]) and not np.array_equal(after.params["head"], kept.params["head"])


def test_a_finite_loss_with_a_non_finite_gradient_is_noticed(model):
    graphdef, params = split(model)
    huge = params | {"head": params["head"] * jnp.float32(1e25)}
    new, metrics, _ = one_step(merge(graphdef, huge), packed_batch(ROWS, T))
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])  # its square overflows
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, new.params, jax.device_get(huge))


def test_scheduled_rates_follow_the_step_counter_and_steps_compile_once(model, large_batch):
    state, step = start(model)
    programs, weights, biases = step._cache_size(), [], [router_biases(state)]
    for seed in range(3):
        state, metrics = step(state, packed_batch(ROWS, T, seed=seed))
        weights.append(float(metrics["mtp_weight"]))
        biases.append(router_biases(state))
    assert int(state.step) == 3
    assert weights == [np.float32(0.3), np.float32(0.3), np.float32(0.1)]
    moved = [any(not np.array_equal(a[p], b[p]) for p in a) for a, b in zip(biases, biases[1:])]
    assert moved == [True, True, False]  # the rate is 0 from step 2 on
    assert programs >= 1 and step._cache_size() == programs


def test_an_update_that_is_not_finite_is_noticed(model):
    state, step = start(model)
    trace = jax.tree.map(lambda x: jnp.full_like(x, 3e38), state.opt_state[0].trace)  # momentum that overflows in a square
    state = state._replace(opt_state=(state.opt_state[0]._replace(trace=trace), *state.opt_state[1:]))
    new, metrics = step(state, packed_batch(ROWS, T))
    assert np.isfinite(metrics["grad_norm"]) and not np.isfinite(metrics["update_norm"])
    assert not metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, new.params, jax.device_get(split(model)[1]))


@pytest.mark.parametrize(
    "bad", [dict(mtp_steps=-1), dict(balance_weight=-0.1), dict(index_weight=math.inf), dict(chunk=0)]
)
def test_a_loss_setting_out_of_range_is_named(bad):
    ((name, value),) = bad.items()
    with pytest.raises(UserError, match=rf"^loss\.{name}={value}: must [^\n]+$"):
        LossConfig(**bad)
