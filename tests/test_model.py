"""The whole network: layer groups, IndexShare, recomputation, query blocks, cache, padding, packing."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from conftest import forward
from glm5_jax.errors import UserError
from glm5_jax.layers.block import write
from glm5_jax.model import abstract, default_positions, empty_cache, layer_groups, layer_places, merge, split, unstack
from glm5_jax.sparse import xla

F, S, D = ("moe", True), ("moe", False), ("dense", True)


def run(model, *args, cache=None, **kwargs):
    if cache is None:
        return forward(model, *args, **kwargs)
    return model(*args, cache=cache, **kwargs)


# Groups of layers


@pytest.mark.parametrize("kinds, expected", [
    ([D, D, D] + [F] * 75, [("dense", (True,) * 3), ("moe", (True,) * 75)]),
    ([D] * 3 + [S, S, S, F] * 18 + [S] * 3, [("dense", (True,) * 3), ("moe", (False, False, False, True) * 18 + (False,) * 3)]),
    ([F], [("moe", (True,))]),
])  # fmt: skip
def test_neighbours_with_one_ffn_are_a_group(kinds, expected):
    assert layer_groups(tuple(kinds)) == expected


def test_every_layer_and_every_indexer_has_a_place_of_its_own():
    assert layer_places((D, F, S, S, F, S)) == [(0, 0, 0), (1, 0, 0), (1, 1, None), (1, 2, None), (1, 3, 1), (1, 4, None)]
    for kinds in itertools.product((D, F, S), repeat=6):
        groups, places = layer_groups(kinds), layer_places(kinds)
        assert [(groups[g][0], groups[g][1][i]) for g, i, _ in places] == list(kinds)
        indexers = [(g, at) for g, _, at in places if at is not None]
        assert indexers == [(g, at) for g, (_, owners) in enumerate(groups) for at in range(sum(owners))]


# IndexShare


@pytest.mark.parametrize("letters", ["FSFSS", "FFSSF", "FSSSS", "FSFSF", "FFSSFSS"])
def test_index_share_equals_loops(micro, tokens, letters):
    """Lists that no frequency gives; the first dense layer shares its selection across the border to the MoE layers."""
    full = [letter == "F" for letter in letters]
    types = tuple("full" if f else "shared" for f in full)
    model, w = micro(num_hidden_layers=len(letters), indexer_types=types, index_topk_freq=4)
    out = run(model, tokens)
    expected = reference.forward(w, model.cfg, tokens[0], full=full)
    np.testing.assert_allclose(out.logits[0], expected["logits"], rtol=0, atol=5e-4)
    for got, layer in zip(out.collected["selected"], expected["layers"]):
        np.testing.assert_array_equal(got[0], reference.padded(layer["selected"], 4))


def test_shared_layers_have_no_indexer_parameters(micro):
    names = micro(num_hidden_layers=5, indexer_types=("full", "shared", "full", "shared", "shared"))[1]
    owners = {name.split(".")[2] for name in names if "indexer" in name}
    assert owners == {"0", "2", "5"}  # 5 is the MTP layer, which always has its own


# Recomputation and query blocks


@pytest.fixture(scope="module")
def gradients(micro, tokens):
    """gradients(**settings) -> of the trunk's log-probabilities, with selected, load and max_logit per layer."""

    @functools.cache
    def run(**settings):
        graphdef, params = split(micro(**settings)[0])

        def loss(params):
            model = merge(graphdef, params)
            hidden, aux, _ = model.trunk(jnp.asarray(tokens), collect=frozenset({"selected"}))
            total = jnp.mean(jax.nn.log_softmax(model.logits(hidden))[..., 3])
            return total, {name: [layer.get(name) for layer in aux] for name in ("selected", "load", "max_logit")}

        (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return {"loss": value, "gradients": grads} | aux

    return run


SHARE = {"num_hidden_layers": 7, "indexer_types": ("full", "full", "shared", "shared") + ("full", "shared", "shared")}


@pytest.mark.parametrize("remat", ["block", pytest.param("offload", marks=pytest.mark.slow)])
def test_remat_gives_the_same_gradients_under_index_share(gradients, remat):
    plain, recomputed = gradients(**SHARE), gradients(**SHARE, remat=remat)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())
    for a, b in zip(jax.tree.leaves(plain["selected"]), jax.tree.leaves(recomputed["selected"]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation, sign, choices", [("reference", " top_k[", 3), ("xla", "bitcast_convert_type[", 2)])
def test_recomputation_never_selects_or_routes_again(micro, tokens, monkeypatch, implementation, sign, choices):
    """The backward pass holds no top-k: the choices of the forward pass are saved."""
    monkeypatch.setattr(xla, "_FEW_SCORES", 0)  # by bits, as where there are more
    counts = []
    for remat in ("none", "block"):
        graphdef, params = split(micro(remat=remat, sparse_implementation=implementation)[0])

        def loss(params, graphdef=graphdef):
            return jnp.sum(merge(graphdef, params).trunk(jnp.asarray(tokens))[0])

        counts.append(str(jax.make_jaxpr(jax.grad(loss))(params)).count(sign))
    # Dense layer: keys; scanned MoE layers: keys, and experts, which are always chosen by lax.top_k.
    assert counts[0] == counts[1] == choices


@pytest.mark.parametrize("settings", [{}, {"remat": "block"}], ids=str)
def test_every_token_counts_once_in_the_load(gradients, settings):
    dense, *moe = gradients(**SHARE, **settings)["load"]
    assert dense is None and [np.sum(load) for load in moe] == [2 * 20 * 2] * 6


@pytest.mark.parametrize("attention, chunks", [("sparse", (8, 13, 20)), ("dense", (7,))])
def test_query_blocks_of_any_size_give_the_same_values_and_selections(micro, tokens, attention, chunks):
    whole = run(micro(attention=attention)[0], tokens)
    for chunk in chunks:
        cut = run(micro(attention=attention, query_chunk=chunk)[0], tokens)
        np.testing.assert_allclose(cut.logits, whole.logits, rtol=0, atol=1e-5)
        for a, b in zip(cut.collected["selected"], whole.collected["selected"], strict=True):
            np.testing.assert_array_equal(a, b)


def test_gradients_in_query_blocks_are_the_same(gradients):
    whole, cut = gradients(**SHARE), gradients(**SHARE, query_chunk=7)
    for a, b in zip(whole["selected"], cut["selected"], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(whole["gradients"]), jax.tree.leaves(cut["gradients"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    np.testing.assert_allclose(cut["max_logit"], whole["max_logit"], rtol=1e-5)
    assert all(0 < top < 1e3 for top in whole["max_logit"])


# Sparse and dense


def test_rows_that_see_at_most_k_keys_equal_dense(micro, tokens):
    sparse, dense = (run(micro(attention=kind)[0], tokens).logits for kind in ("sparse", "dense"))
    np.testing.assert_allclose(sparse[:, :4], dense[:, :4], rtol=0, atol=1e-5)
    assert (np.abs(np.asarray(sparse - dense))[:, 4:].max((0, 2)) > 1e-3).all()


def test_k_of_the_whole_sequence_equals_dense(micro, tokens):
    all_keys = micro(index_topk=19)[0]
    dense = run(micro(attention="dense")[0], tokens[:, :19]).logits
    np.testing.assert_allclose(run(all_keys, tokens[:, :19]).logits, dense, rtol=0, atol=1e-6)
    almost = run(all_keys, tokens).logits  # sparse form: only the last row leaves one key out
    np.testing.assert_allclose(almost[:, :19], run(micro(attention="dense")[0], tokens).logits[:, :19], atol=1e-5)


# Cache


def feed(model, tokens, lengths, slots, cache_edit=lambda cache: cache, segment_ids=None, **kwargs):
    """(logits, collected per chunk, cache) of tokens fed in chunks."""
    cache, start, logits, collected = empty_cache(model.cfg, len(tokens), slots), 0, [], []
    for n in lengths:
        here = slice(start, start + n)
        given = {} if segment_ids is None else {"segment_ids": segment_ids[:, here]}
        out = run(model, tokens[:, here], cache=cache_edit(cache), **given, **kwargs)
        logits.append(np.asarray(out.logits))
        collected.append(out.collected)
        cache, start = out.cache, start + n
    return np.concatenate(logits, 1), collected, cache


@pytest.mark.parametrize("settings", [{}, SHARE], ids=["all full", "IndexShare"])
def test_decoding_in_chunks_equals_one_pass_and_selects_the_same(micro, tokens, settings):
    model, _ = micro(**settings)
    whole = run(model, tokens)
    logits, collected, _ = feed(model, tokens, (3, 5, 1, 1, 5, 5), 24, collect=("selected",))
    np.testing.assert_allclose(logits, whole.logits, rtol=0, atol=5e-5)
    for i, expected in enumerate(whole.collected["selected"]):
        np.testing.assert_array_equal(np.concatenate([np.asarray(c["selected"][i]) for c in collected], 1), expected)


def test_an_empty_chunk_changes_nothing(micro, tokens):
    model, _ = micro()
    expected = run(model, tokens[:, :10]).logits
    logits, _, cache = feed(model, tokens, (5, 0, 5), 12)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
    assert cache.length.tolist() == [10] * len(tokens)


def poison(value):
    """Overwrites every slot that holds no token, of latents and index keys."""

    def edit(cache):
        unused = jnp.arange(cache.segment.shape[1]) >= cache.length[:, None]
        return cache._replace(keys=jax.tree.map(lambda k: jnp.where(unused[..., None], value, k), cache.keys))

    return edit


@pytest.mark.parametrize("value", [1e4, np.nan])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_unused_cache_slots_are_never_read(micro, tokens, value, kind):
    model, _ = micro(attention=kind)
    clean, _, _ = feed(model, tokens, (3, 5, 5), 24)
    dirty, _, _ = feed(model, tokens, (3, 5, 5), 24, cache_edit=poison(value))
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("settings", [{}, SHARE, {"attention": "dense"}], ids=["all full", "IndexShare", "dense"])
def test_rows_of_different_lengths_and_layers_of_their_own_equal_one_pass(micro, tokens, settings):
    """The second row is 6 tokens ahead; layers that are not scanned compute the same."""
    model, _ = micro(**settings)
    whole = np.asarray(run(model, tokens).logits)
    graphdef, params = split(model)
    apart = merge(split(abstract(model.cfg, scanned=False))[0], unstack(params, model.cfg))
    cache = empty_cache(model.cfg, 2, 24, scanned=False)
    _, _, cache = jax.jit(lambda m, t, c: m.trunk(t, cache=c))(apart, tokens[:2, :9], cache)
    cache = cache._replace(length=jnp.array([3, 9]), segment=(jnp.arange(24) < jnp.array([[3], [9]])).astype(jnp.int32))
    cache = poison(np.nan)(cache)
    new = jnp.stack([tokens[0, 3:8], tokens[1, 9:14]])
    hidden, _, cache = jax.jit(lambda m, t, c: m.trunk(t, cache=c))(apart, new, cache)
    expected = np.stack([whole[0, 3:8], whole[1, 9:14]])
    np.testing.assert_allclose(apart.logits(hidden), expected, rtol=0, atol=5e-5)
    assert cache.length.tolist() == [8, 14]


def test_what_does_not_fit_into_a_row_of_the_cache_is_dropped():
    old = jnp.zeros((2, 4))
    new = write(old, jnp.ones((2, 3)), jnp.array([0, 3]))
    np.testing.assert_array_equal(new, [[1, 1, 1, 0], [0, 0, 0, 1]])


def test_decoding_past_k_is_sparse(micro, tokens):
    """The indexer's cache is really in use: dense attention gives something else, the full pass the same."""
    sparse, _, _ = feed(micro()[0], tokens, (3, 5, 5), 24)
    dense, _, _ = feed(micro(attention="dense")[0], tokens, (3, 5, 5), 24)
    assert np.abs(sparse[:, 12] - dense[:, 12]).max() > 1e-2
    np.testing.assert_allclose(sparse, run(micro()[0], tokens).logits[:, :13], rtol=0, atol=5e-5)


def test_only_layers_with_an_indexer_cache_index_keys(micro):
    cache = empty_cache(micro(**SHARE)[0].cfg, 2, 24)
    assert [keys.latent.shape for keys in cache.keys] == [(1, 2, 24, 14), (6, 2, 24, 14)]
    assert [keys.index.shape for keys in cache.keys] == [(1, 2, 24, 8), (2, 2, 24, 8)]
    assert empty_cache(micro(**SHARE)[0].cfg, 2, 24, scanned=False).keys[2].index is None


def test_left_padding_through_the_cache_equals_rows_alone(micro, tokens):
    model, _ = micro()
    segments = np.ones((2, 20), np.int32)
    segments[0, :6] = 0
    logits, _, _ = feed(model, tokens, (8, 1, 1, 5, 5), 20, segment_ids=segments)
    alone = run(model, tokens[:, 6:]).logits
    np.testing.assert_allclose(logits[0, 6:], alone[0], rtol=0, atol=5e-5)
    np.testing.assert_allclose(logits[1], run(model, tokens).logits[1], rtol=0, atol=5e-5)


def test_cropping_the_cache_and_going_on_equals_never_having_seen_more(micro, tokens):
    model, _ = micro()
    _, _, cache = feed(model, tokens, (8,), 24)
    kept = cache.segment * (jnp.arange(24) < 6)
    other = (tokens[:, 6:11] + 3) % 32
    out = run(model, other, cache=cache._replace(length=jnp.full(len(tokens), 6), segment=kept))
    expected = run(model, np.concatenate([tokens[:, :6], other], 1)).logits[:, 6:]
    np.testing.assert_allclose(out.logits, expected, rtol=0, atol=5e-5)


def test_calls_leave_nothing_behind_in_the_model(micro, tokens):
    model, _ = micro()
    first = run(model, tokens).logits
    feed(model, tokens, (3, 5, 5), 24)
    np.testing.assert_array_equal(run(model, tokens).logits, first)


# Padding and packing


def test_default_positions_count_each_document_from_zero():
    segment = jnp.array([[0, 0, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 5, 5, 5, 5]])
    expected = [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1, 2, 3]]
    np.testing.assert_array_equal(default_positions(segment, jnp.zeros(len(segment), jnp.int32), 8), expected)
    np.testing.assert_array_equal(default_positions(segment, jnp.full(len(segment), 3), 4), np.array(expected)[:, 3:7])


PACKED = np.array([[1] * 9 + [2] * 3 + [3] * 8, [0] * 4 + [1] * 13 + [0] * 3])


def test_packed_and_padded_rows_equal_each_document_alone(micro, tokens):
    model, w = micro()
    out = run(model, tokens, segment_ids=PACKED)
    for b in range(2):
        for document in set(PACKED[b]) - {0}:
            here = PACKED[b] == document
            expected = reference.forward(w, model.cfg, tokens[b][here])["logits"]
            np.testing.assert_allclose(np.asarray(out.logits)[b][here], expected, rtol=0, atol=2e-4)


def test_what_stands_in_the_padding_does_not_matter(micro, tokens):
    model, _ = micro()
    other = np.where(PACKED == 0, (tokens + 7) % 32, tokens)
    a, b = (np.asarray(run(model, t, segment_ids=PACKED).logits)[PACKED != 0] for t in (tokens, other))
    np.testing.assert_array_equal(a, b)


def test_a_pad_id_inside_the_text_is_not_padding(micro, tokens):
    model, w = micro()
    with_pads = tokens.copy()
    with_pads[:, [2, 7, 8]] = model.cfg.pad_token_id
    expected = reference.forward(w, model.cfg, with_pads[0])["logits"]
    np.testing.assert_allclose(run(model, with_pads).logits[0], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_row_of_only_padding_is_finite_and_changes_nothing(micro, tokens, kind):
    model, _ = micro(attention=kind)
    graphdef, params = split(model)
    segments = jnp.asarray(np.stack([np.ones(20, np.int32), np.zeros(20, np.int32)]))

    def loss(params, tokens):
        m = merge(graphdef, params)
        hidden, aux, _ = m.trunk(tokens, segment_ids=segments)
        steps = m.mtp_steps(hidden, tokens, segment_ids=segments, steps=1) if kind == "sparse" else []
        rows = [jax.nn.log_softmax(m.logits(h))[..., 3] for h in (hidden, *(s.hidden for s in steps))]
        balance = sum(layer["balance"] for layer in aux if "balance" in layer)
        return balance + sum(jnp.sum(jnp.where(segments != 0, r, 0)) for r in rows), rows

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, rows), grads = grad(params, jnp.asarray(tokens))
    other = np.stack([tokens[0], (tokens[1] + 5) % 32])
    (again, _), expected = grad(params, jnp.asarray(other))
    assert np.isfinite(value) and all(np.isfinite(r).all() for r in rows)
    alone = jax.nn.log_softmax(run(model, tokens).logits[0])[:, 3]
    np.testing.assert_allclose(rows[0][0], alone, rtol=0, atol=5e-5)
    assert value == again
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


# Refusals


@pytest.mark.parametrize("call, word", [
    (lambda m: m(np.zeros((1, 4), int), collect=("logit",)), "logit"),
    (lambda m: m(np.full((1, 4), 32)), "32"),
    (lambda m: m(np.full((1, 4), -1)), "-1"),
    (lambda m: m(np.zeros((1, 65), int)), "65"),
    (lambda m: m(np.zeros(4, int)), "(4,)"),
])  # fmt: skip
def test_bad_calls_are_refused_in_one_line(micro, call, word):
    with pytest.raises(UserError) as error:
        call(micro()[0])
    assert word in str(error.value) and "\n" not in str(error.value)


def test_mtp_cannot_be_collected_from_a_model_without_it(micro, tokens):
    with pytest.raises(UserError, match="no MTP layer"):
        micro(num_nextn_predict_layers=0)[0](tokens, collect=("mtp",))


def test_a_cache_without_room_is_refused(micro, tokens):
    model, _ = micro()
    cache = model(tokens[:1, :6], cache=empty_cache(model.cfg, 1, 8)).cache
    with pytest.raises(UserError, match="6 of 8 slots are in use, 4 more"):
        model(tokens[:1, :4], cache=cache)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(tokens=[[1.5, 2.5]]), r"tokens: dtype float64, need integers"),
        (dict(tokens=[[]]), r"tokens: no token in the rows"),
        (dict(tokens=[1, 2]), r"tokens: shape \(2,\), need \[B,T\]"),
        (dict(tokens=[[1, 32]]), r"token ids 1\.\.32: the vocabulary is 0\.\.31"),
        (dict(tokens=[[1, -1]]), r"token ids -1\.\.1: the vocabulary is 0\.\.31"),
        (dict(tokens=[[1, 2, 3]], positions=[0, 1, 2]), r"positions: shape \(3,\), tokens have \(1, 3\)"),
        (dict(tokens=[[1, 2, 3]], segment_ids=[[1, 1]]), r"segment_ids: shape \(1, 2\), tokens have \(1, 3\)"),
        (dict(tokens=[[1, 2]], collect="hiden"), r"collect=\['hiden'\]: allowed are hidden, selected, .*"),
    ],
)
def test_bad_arguments_of_a_call_are_one_line(micro, arguments, message):
    arguments = {k: v if k == "collect" else np.array(v) for k, v in arguments.items()}
    with pytest.raises(UserError, match=message) as error:
        micro()[0](**arguments)
    assert "\n" not in str(error.value)
