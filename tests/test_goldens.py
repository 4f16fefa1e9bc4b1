"""Every stored output of transformers: values within the goldens' tolerances, selections and experts exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.convert.published import tensor_table, to_published
from glm5_jax.model import empty_cache, merge, split

SHARED = ["one", "short", "exact", "plus1", "long", "leftpad"]
CASES = {
    "glm5_tiny": SHARED + ["rightpad", "packed"],
    "glm52_tiny": SHARED + ["rightpad", "packed", "far"],
    "glm5_fp8_tiny": SHARED,
    "glm5_eps_tiny": SHARED,
}
FULL = ["glm5_tiny", "glm52_tiny"]
EVERY = [(name, case) for name, cases in CASES.items() for case in cases]
every_case = pytest.mark.parametrize("name, case", EVERY)
full_models = pytest.mark.parametrize("name", FULL)


def far_apart(a, b):
    return np.abs(np.asarray(a) - b).max()


def close(actual, expected, valid, tolerance):
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual[valid], expected[valid], rtol=0, atol=tolerance)


def test_no_stored_case_is_left_out(golden):
    elsewhere = {"gen_short", "gen_long", "gen_stop", "train", "mtp"}  # generation: the serving tests; the others below
    for name, cases in CASES.items():
        assert {key.split("/")[0] for key in golden(name).cases} - elsewhere == set(cases)


@every_case
def test_logits(golden, name, case):
    g = golden(name)
    out = g.run(case)
    assert out.logits.dtype == jnp.float32
    close(out.logits, g.cases[f"{case}/logits"], g.valid(case), g.tolerance["logits_abs"])


@every_case
def test_selected_keys_are_the_same_sets(golden, name, case):
    g = golden(name)
    selected = g.run(case).collected["selected"]
    for i in g.full_layers:
        expected, valid = g.cases[f"{case}/topk.{i}"], g.valid(case)
        np.testing.assert_array_equal(np.asarray(selected[i])[valid], expected[valid])


@every_case
def test_router_experts_and_weights(golden, name, case):
    g = golden(name)
    router, layers = g.run(case).collected["router"], range(1, len(g.meta["indexer_types"]))
    assert router[0] is None
    for i in layers:
        expected, valid = g.cases[f"{case}/router.{i}.experts"], g.valid(case)
        np.testing.assert_array_equal(np.asarray(router[i].experts)[valid], expected[valid])
        close(router[i].weights, g.cases[f"{case}/router.{i}.weights"], valid, 1e-4)


@pytest.mark.parametrize("name, case", [(n, c) for n, c in EVERY if c == "long" or (c == "leftpad" and n in FULL)])
def test_hidden_states_and_index_scores(golden, name, case):
    g = golden(name)
    out, valid = g.run(case), g.valid(case)
    for i, hidden in enumerate(out.collected["hidden"]):
        close(hidden, g.cases[f"{case}/hidden.{i}"], valid, g.tolerance["hidden_abs"])
    if case == "long" and name in FULL:
        close(out.hidden, g.cases[f"{case}/hidden.final_norm"], valid, g.tolerance["hidden_abs"])
    for i in g.full_layers:
        expected = g.cases[f"{case}/index_scores.{i}"]
        close(out.collected["index_scores"][i], expected, valid, g.tolerance["index_scores_abs"])


@full_models
def test_embedding_is_not_scaled(golden, name):
    g = golden(name)
    embedded = g.model().embed(g.cases["long/input_ids"])
    np.testing.assert_array_equal(np.asarray(embedded), g.cases["long/hidden.embed"])


@pytest.mark.parametrize("name", CASES)
def test_latent_norms_use_rms_norm_eps_by_default(golden, name):
    g = golden(name)
    logits = g.model(latent_norm_eps=None)(g.cases["long/input_ids"]).logits[:1]
    expected = g.cases["long/logits_latent_eps_rms"]
    close(logits, expected, np.ones(expected.shape[:2], bool), g.tolerance["logits_abs"])
    if name == "glm5_eps_tiny":
        assert far_apart(logits, g.cases["long/logits"][:1]) > 1


def test_shared_layers_report_the_selection_they_use(golden):
    selected = golden("glm52_tiny").run("long").collected["selected"]
    for i in (3, 4, 5):
        np.testing.assert_array_equal(selected[i], selected[2])
    assert (np.asarray(selected[6]) != np.asarray(selected[2])).any()


@pytest.mark.parametrize("name", CASES)
def test_no_first_token_is_forced_into_the_selection(golden, name):
    rows = np.asarray(golden(name).run("long").collected["selected"][0])
    assert (rows[:, :, 0] > 0).any()


@pytest.mark.parametrize("name", ["glm5_tiny", "glm5_eps_tiny"])
def test_dense_attention_is_another_function_once_rows_exceed_k(golden, name):
    g = golden(name)
    dense = g.model(attention="dense")(g.cases["long/input_ids"]).logits
    k = g.model().cfg.index_topk
    sparse = g.cases["long/logits"]
    close(dense[:, :k], sparse[:, :k], np.ones((len(sparse), k), bool), g.tolerance["logits_abs"])
    assert far_apart(dense[:, k:], sparse[:, k:]) > 0.05


@full_models
def test_packed_documents_equal_each_document_alone(golden, name):
    g = golden(name)
    lengths = g.meta["cases"]["packed"]["doc_lengths"]
    width = g.cases["leftpad/input_ids"].shape[1]
    rows, real = np.zeros((3, width), np.int32), np.zeros((3, width), np.int32)
    starts = np.cumsum([0, *lengths])
    for i, n in enumerate(lengths):
        rows[i, :n] = g.cases["packed/input_ids"][0, starts[i] : starts[i] + n]
        real[i, :n] = 1
    collect = ("hidden", "selected", "index_scores", "router")
    alone = np.asarray(g.model()(rows, segment_ids=real, collect=collect).logits)
    packed = np.asarray(g.run("packed").logits)[0]
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(packed[starts[i] : starts[i] + n], alone[i, :n], rtol=0, atol=5e-5)


@full_models
def test_left_padded_positions_may_be_left_to_the_model(golden, name):
    g = golden(name)
    mask = g.cases["leftpad/attention_mask"]
    collect = ("hidden", "selected", "index_scores", "router")
    out = g.model()(g.cases["leftpad/input_ids"], segment_ids=mask, collect=collect)
    close(out.logits, g.cases["leftpad/logits"], g.valid("leftpad"), g.tolerance["logits_abs"])


def test_inverse_frequencies_are_the_reference_bits(golden):
    from glm5_jax.layers.rope import inverse_frequencies

    g = golden("glm52_tiny")
    np.testing.assert_array_equal(inverse_frequencies(8, g.model().cfg.rope_theta), g.cases["far/inv_freq"])
    assert far_apart(g.run("far").logits, g.cases["far/logits_if_angles_float64"]) > 5e-3


@pytest.mark.parametrize("name", CASES)
def test_chunked_decoding_equals_one_pass(golden, name):
    g = golden(name)
    model, tokens = g.model(), g.cases["long/input_ids"]
    cache, logits, start = empty_cache(model.cfg, len(tokens), tokens.shape[1]), [], 0
    lengths = g.meta["cases"]["chunked"]["chunk_lengths"]
    assert sum(lengths) == tokens.shape[1]
    for n in lengths:
        out = model(tokens[:, start : start + n], cache=cache)
        logits.append(np.asarray(out.logits))
        cache, start = out.cache, start + n
    assert cache.length.tolist() == [tokens.shape[1]] * len(tokens)
    close(np.concatenate(logits, 1), g.cases["long/logits"], g.valid("long"), g.tolerance["logits_abs"])


# Multi-token prediction


@full_models
def test_mtp_from_the_trunk(golden, name):
    g = golden(name)
    first, second = g.run("long").collected["mtp"]
    t = g.cases["mtp/input_ids"].shape[1]
    for key in ("logits", "hidden"):
        np.testing.assert_allclose(getattr(first, key)[:, : t - 1], g.cases[f"mtp/step1.{key}"], rtol=0, atol=5e-4)
    np.testing.assert_array_equal(first.selected[:, : t - 1], g.cases["mtp/step1.topk"])
    own = "logits_shared_topk" if name == "glm52_tiny" else "logits"  # index_share_for_mtp_iteration of the config
    np.testing.assert_allclose(second.logits[:, : t - 2], g.cases[f"mtp/step2.{own}"], rtol=0, atol=5e-4)


VARIANTS = {
    "logits": {"index_share_for_mtp_iteration": False},
    "logits_shared_topk": {"index_share_for_mtp_iteration": True},
    "logits_shared_kv_topk": {"mtp_share_kv": True},
}


@full_models
@pytest.mark.parametrize("variant", VARIANTS)
def test_mtp_second_step(golden, name, variant):
    g = golden(name)
    model = g.model(**VARIANTS[variant])
    graphdef, params = split(model)

    @jax.jit
    def run(params, hidden, tokens):
        model = merge(graphdef, params)
        steps = model.mtp_steps(hidden, tokens, steps=2, collect={"selected"})
        return [(model.logits(step.hidden), step.selected) for step in steps]

    (_, first), (second, selected) = run(params, g.cases["long/hidden.final_norm"], g.cases["mtp/input_ids"])
    second, selected = np.asarray(second)[:, :-2], np.asarray(selected)[:, :-2]
    np.testing.assert_allclose(second, g.cases[f"mtp/step2.{variant}"], rtol=0, atol=5e-4)
    expected = g.cases["mtp/step2.topk"] if variant == "logits" else np.asarray(first)[:, :-2]
    np.testing.assert_array_equal(selected, expected)
    for other in {*VARIANTS, "logits_if_prenorm_recycled"} - {variant}:
        assert far_apart(second[:1], g.cases[f"mtp/step2.{other}"][:1]) > 0.02, other


# Training


def cross_entropy(logits, labels):
    """Mean over the real labels of the next token's negative log-likelihood."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(labels >= 0, picked, 0)) / jnp.sum(labels >= 0)


@pytest.fixture(scope="module")
def train(golden):
    """train(name) -> (loss, HF name -> gradient in the published layout)."""

    @functools.cache
    def run(name):
        g = golden(name)
        graphdef, params = split(g.model())
        tokens, labels = g.cases["train/input_ids"], g.cases["train/labels"]

        def loss(params):
            model = merge(graphdef, params)
            return cross_entropy(model.logits(model.trunk(tokens)[0]), labels)

        value, grads = jax.jit(jax.value_and_grad(loss))(params)

        def at(path):
            node = grads
            for key in path:
                node = node[key]
            return np.asarray(node)

        table = tensor_table(g.model().cfg)
        return value, {name: to_published([at(p.path)[p.index] for p in table[name]], table[name]) for name in table}

    return run


@full_models
def test_train_loss(golden, train, name):
    loss, _ = train(name)
    np.testing.assert_allclose(loss, golden(name).cases["train/loss"][0], rtol=1e-5)


@full_models
def test_train_gradients(golden, train, name):
    g, (_, grads) = golden(name), train(name)
    stored = [key for key in g.cases if key.startswith("train/grad/")]
    assert len(stored) == 9
    for key in stored:
        expected = g.cases[key]
        actual = grads[key.removeprefix("train/grad/")]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3 * np.abs(expected).max(), err_msg=key)


@full_models
def test_all_gradient_norms(golden, train, name):
    g, (_, grads) = golden(name), train(name)
    norms = g.meta["cases"]["train"]["grad_norms"]
    seen = set()
    for key, expected in norms.items():
        if expected is None:
            continue
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix, leaf = key.rsplit(".", 1)
            leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            names = [n for n in grads if n.startswith(prefix + ".") and n.split(".")[-2] in leaves]
            assert len(names) == 8 * len(leaves)
        else:
            names = [key]
        seen |= set(names)
        actual = np.sqrt(sum(np.sum(grads[n].astype(np.float64) ** 2) for n in names))
        np.testing.assert_allclose(actual, expected, rtol=2e-3, err_msg=key)
    mtp = f"model.layers.{g.model().cfg.num_hidden_layers}."
    left = {n for n in grads if n not in seen and not n.startswith(mtp)}
    assert all("indexer" in n or n.endswith("e_score_correction_bias") for n in left)


@full_models
def test_indexer_router_bias_and_mtp_get_no_gradient(golden, train, name):
    g, (_, grads) = golden(name), train(name)
    mtp = f"model.layers.{g.model().cfg.num_hidden_layers}."
    still = [n for n in grads if "indexer" in n or "e_score_correction_bias" in n or n.startswith(mtp)]
    assert sum("indexer" in n for n in still) == 5 * (len(g.full_layers) + 1)
    for n in still:
        assert not grads[n].any(), n
