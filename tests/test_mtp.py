"""Multi-token prediction against float64 loops: order of halves, what is recycled, what is shared, documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from glm5_jax.layers.mtp import same_document, shift
from glm5_jax.model import merge, split


@functools.cache
def compiled(graphdef):
    def run(params, hidden, tokens, segments):
        model = merge(graphdef, params)
        out = model.mtp_steps(hidden, tokens, segment_ids=segments, steps=3, collect={"selected"})
        return [(model.logits(s.hidden), s.hidden, s.selected) for s in out]

    return jax.jit(run)


def unroll(model, hidden, tokens, segments=None):
    """(logits, hidden, selected) of three steps."""
    graphdef, params = split(model)
    segments = np.ones(tokens.shape, np.int32) if segments is None else segments
    return compiled(graphdef)(params, np.asarray(hidden, np.float32), np.asarray(tokens), np.asarray(segments))


SHARING = {
    "own selection": ({}, {}),
    "shared selection": ({"index_share_for_mtp_iteration": True}, {"share_selection": True}),
    "shared keys": ({"mtp_share_kv": True}, {"share_selection": True, "share_kv": True}),
}


@pytest.mark.parametrize("sharing", SHARING)
def test_three_steps_equal_loops(micro, tokens, sharing):
    settings, expected_settings = SHARING[sharing]
    model, w = micro(**settings)
    hidden = np.random.default_rng(0).standard_normal((1, 20, 24))
    got = unroll(model, hidden, tokens[:1])
    expected = reference.mtp(w, model.cfg, hidden[0], tokens[0], 3, **expected_settings)
    for d, (step, want) in enumerate(zip(got, expected, strict=True), 1):
        logits, state, selected = (np.asarray(x)[0, : 20 - d] for x in step)
        np.testing.assert_array_equal(selected, reference.padded(want["selected"], 4)[: 20 - d])
        np.testing.assert_allclose(state, want["hidden"], rtol=0, atol=2e-4)
        np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=2e-4)


def test_the_three_ways_to_share_differ(micro, tokens):
    hidden = np.random.default_rng(0).standard_normal((1, 20, 24))
    second = [np.asarray(unroll(micro(**s)[0], hidden, tokens[:1])[1][0])[:, :18] for s, _ in SHARING.values()]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(second[i] - second[j]).max() > 0.05


@pytest.mark.parametrize("sharing", SHARING)
def test_shared_selection_is_computed_once(micro, tokens, sharing):
    """Later steps are a loop; it selects only where each step has a selection of its own."""
    model, _ = micro(**SHARING[sharing][0])
    steps = lambda h: [s.hidden for s in model.mtp_steps(h, jnp.asarray(tokens), steps=3)]  # noqa: E731
    program = jax.make_jaxpr(steps)(jnp.zeros((2, 20, 24)))
    later = [equation for equation in program.eqns if equation.primitive.name == "scan"][-1]
    assert later.params["length"] == (3 if sharing == "own selection" else 2)
    assert ("name=selected" in str(later.params["jaxpr"])) == (sharing == "own selection")
    assert str(program).count("name=selected") == 1


def test_the_embedding_is_the_first_half(micro, tokens):
    """With zeroed rows of eh_proj for one half, the other half alone decides."""
    model, _ = micro()
    graphdef, params = split(model)
    hidden = np.random.default_rng(0).standard_normal((2, 1, 20, 24))

    def without(rows):
        mtp = params["mtp"] | {"project": params["mtp"]["project"].at[rows].set(0)}
        return merge(graphdef, params | {"mtp": mtp})

    no_embedding, no_hidden = without(slice(0, 24)), without(slice(24, 48))
    other_tokens = (tokens[:1] + 1) % 32

    def first(model, h, tokens):
        return np.asarray(unroll(model, h, tokens)[0][0])[:, :19]

    same = (first(no_embedding, hidden[0], t) for t in (tokens[:1], other_tokens))
    np.testing.assert_array_equal(*same)
    same = (first(no_hidden, h, tokens[:1]) for h in hidden)
    np.testing.assert_array_equal(*same)
    assert np.abs(first(no_hidden, hidden[0], tokens[:1]) - first(no_hidden, hidden[0], other_tokens)).max() > 0.1


def test_documents_do_not_see_each_other(micro, tokens):
    model, w = micro()
    lengths = [9, 4, 7]
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths))[None]
    hidden = np.random.default_rng(1).standard_normal((1, 20, 24))
    got = unroll(model, hidden, tokens[:1], segments)
    start = 0
    for n in lengths:
        here = slice(start, start + n)
        expected = reference.mtp(w, model.cfg, hidden[0, here], tokens[0, here], 3)
        for d, (step, want) in enumerate(zip(got, expected, strict=True), 1):
            rows = slice(start, start + n - d)
            np.testing.assert_allclose(np.asarray(step[0])[0, rows], want["logits"], rtol=0, atol=2e-4)
        start += n


def test_rows_that_count_end_with_their_document():
    segments = jnp.array([[1, 1, 1, 2, 2, 2]])
    expected = {1: [1, 1, 0, 1, 1, 0], 2: [1, 0, 0, 1, 0, 0], 3: [0] * 6, 7: [0] * 6}
    for d, rows in expected.items():
        np.testing.assert_array_equal(same_document(segments, d), np.array([rows], bool))


def test_padding_never_counts():
    np.testing.assert_array_equal(same_document(jnp.array([[0, 0, 3, 3, 0, 0]]), 1), [[0, 0, 1, 0, 0, 0]])


def test_shift_moves_the_future_here():
    np.testing.assert_array_equal(shift(jnp.array([[1, 2, 3]]), 1), [[2, 3, 0]])
    np.testing.assert_array_equal(shift(jnp.array([[1, 2, 3]]), 3), [[0, 0, 0]])
    np.testing.assert_array_equal(shift(jnp.array([[1, 2, 3]]), 5), [[0, 0, 0]])


def test_more_steps_than_tokens_stay_finite(micro):
    model, _ = micro()
    steps = unroll(model, np.ones((1, 2, 24)), np.array([[3, 4]]))
    assert len(steps) == 3 and all(np.isfinite(step[0]).all() for step in steps)


def test_what_happens_at_position_0_counts(micro, tokens):
    model, _ = micro()
    hidden = np.random.default_rng(0).standard_normal((1, 20, 24))
    changed = tokens[:1].copy()
    changed[0, 1] = (changed[0, 1] + 1) % 32
    before, after = (np.asarray(unroll(model, hidden, t)[0][0])[0, 0] for t in (tokens[:1], changed))
    assert np.abs(before - after).max() > 0.1


def test_head_and_embedding_are_those_of_the_trunk(micro):
    names = set(micro()[1])
    layer = {n.removeprefix("model.layers.3.") for n in names if n.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= layer
    assert not any("embed_tokens" in n or "shared_head.head" in n for n in layer)
