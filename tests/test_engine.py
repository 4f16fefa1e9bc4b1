"""The rollout engine against the network's own full passes: log-probabilities, guesses, neighbours, updates.

The engine is compared with a loop over full forward passes that draws each token by the definition of `sampling.choose`.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from glm5_jax.bench.generate import Options, run
from glm5_jax.errors import UserError
from glm5_jax.model import split
from glm5_jax.serve import engine as engine_module
from glm5_jax.serve.engine import Engine, Request
from glm5_jax.serve.sampling import Draw, choose, log_probs
from helpers_train import lively_model, step_config

CONTEXT, SLOTS, DRAFTS = 32, 4, 2  # the same everywhere, so that few programs are compiled
SHARED = dict(indexer_types=("full", "shared"), index_share_for_mtp_iteration=True, mtp_share_kv=True)


def make_model(**overrides):
    """Selects 4 keys of up to 32; token 0 ends a document, which no request here asks for unless it says so."""
    settings = {"attention": "sparse", "eos_token_id": (39,), "num_hidden_layers": 2}
    return lively_model(step_config(**(settings | overrides)))


@pytest.fixture(scope="module")
def model():
    return make_model()


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 39, n) for n in lengths]


@pytest.fixture(scope="module")
def full_pass(model):
    """tokens [n] -> logits float32 [n,W] of one pass over all of them; rows of one length, so that it compiles once."""
    run = jax.jit(lambda t, s: model.logits(model.trunk(t, segment_ids=s)[0]))

    def logits(tokens):
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(run(row, (np.arange(CONTEXT) < len(tokens)).astype(np.int32)[None]))[0, : len(tokens)]

    return logits


def as_draw(request: Request) -> Draw:
    return Draw(*(jnp.asarray([x]) for x in (request.temperature, request.top_p, request.top_k, np.uint32(request.seed))))


@jax.jit
def draw_one(logits, draw: Draw, position):
    """(log-probabilities [W], token) from logits [W]."""
    log_p = log_probs(logits[None, None], draw)
    return log_p[0, 0], choose(log_p, draw, jnp.reshape(position, (1, 1)))[0, 0]


def by_full_passes(full_pass, request: Request, stop=(39,)):
    """(tokens, log-probabilities) by one full pass a token."""
    tokens, made, scores = list(request.tokens), [], []
    for _ in range(min(request.max_new_tokens, CONTEXT - len(tokens))):
        log_p, token = map(np.asarray, draw_one(full_pass(tokens)[-1], as_draw(request), len(tokens)))
        made.append(int(token))
        scores.append(float(log_p[token]))
        tokens.append(token)
        if token in (stop if request.stop is None else request.stop):
            break
    return made, scores


MIXED = [
    dict(temperature=0.0),
    dict(temperature=1.0, seed=1),
    dict(temperature=0.7, seed=2, top_p=0.8),
    dict(temperature=1.3, seed=3, top_k=5),
    dict(temperature=1.0, seed=4, stop=tuple(range(8))),
    dict(temperature=1.0, seed=4, top_k=6, top_p=0.5),
    dict(temperature=1.0, seed=2**32 - 1),
]


@pytest.fixture(scope="module")
def mixed():
    lengths = (5, 1, 17, 9, 2, 20, 31)
    return [Request(p, max_new_tokens=14, **kw) for p, kw in zip(prompts(*lengths), MIXED)]


@pytest.fixture(scope="module")
def expected(full_pass, mixed):
    return [by_full_passes(full_pass, request) for request in mixed]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.smoke
def test_tokens_and_log_probabilities_are_those_of_full_passes(model, mixed, expected, drafts):
    """More requests than slots, prompts of 1 to 31 tokens, greedy and sampled, cut and not, far past K."""
    engine = Engine(model, SLOTS, CONTEXT, drafts)
    for completion, (tokens, scores), request in zip(engine.generate(mixed), expected, mixed):
        assert completion.tokens.tolist() == tokens
        np.testing.assert_allclose(completion.logprobs, scores, rtol=0, atol=1e-5)
        ended = tokens[-1] in ((39,) if request.stop is None else request.stop)
        assert completion.finish == ("stop" if ended else "length")
        assert completion.logprobs.dtype == np.float32 and set(completion.versions) == {0}
    assert len(expected[-1][0]) == 1  # the prompt of 31 tokens leaves room for one
    assert any(len(tokens) + len(r.tokens) > 4 * 4 for (tokens, _), r in zip(expected, mixed))


def test_neighbours_and_slots_change_nothing(model, mixed, expected):
    """Each request alone, then all in the reverse order through two slots."""
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    for i in (1, 3):
        assert engine.generate([mixed[i]])[0].tokens.tolist() == expected[i][0]
    back = engine.generate(mixed[::-1])[::-1]
    assert [c.tokens.tolist() for c in back] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("settings", [{}, SHARED], ids=["own keys", "IndexShare, shared keys"])
def test_guesses_are_those_of_the_unrolled_layer(settings):
    """The first greedy guess is always the unrolled MTP layer's prediction; where training shares the selection and the keys
    of step 1, so are the later ones, since then decoding computes what training does."""
    model = make_model(**settings)
    steps = jax.jit(lambda t: [model.logits(s.hidden) for s in model.mtp_steps(model.trunk(t)[0], t, steps=DRAFTS)])
    for cut in (6, 9, 11):  # past K
        tokens = prompts(cut, seed=cut)[0]
        engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
        engine.submit(Request(tokens, max_new_tokens=9, temperature=0.0))
        engine.submit(Request(tokens[:3], max_new_tokens=1, temperature=0.0))
        engine.submit(Request(tokens[:3], max_new_tokens=9))
        engine._waiting.append(waits := engine._waiting.pop())
        engine._jobs[2:] = [waits] * (SLOTS - 2)  # no free slot: one pass, after which the second slot is idle
        engine.step()
        row = [*tokens, *engine._jobs[0].tokens]
        assert len(row) == cut + 1
        guesses = []
        for depth in range(DRAFTS if settings else 1):
            logits = steps(np.asarray(row + [0] * (CONTEXT - len(row)))[None])[depth]
            guesses.append(int(np.argmax(logits[0, cut - 1])))
            row.append(guesses[-1])
        assert engine._state.drafts[0, : len(guesses)].tolist() == guesses


def test_any_guess_gives_the_same_tokens_and_right_ones_save_passes(model, full_pass):
    """Guesses that are all right, all wrong, or mixed, one pattern a slot: wrong ones leave no keys behind."""
    requests = [Request(p, max_new_tokens=18, temperature=1.0, seed=9) for p in prompts(7, 9, 11, seed=5)]
    expected = [by_full_passes(full_pass, request) for request in requests]
    texts = [[*r.tokens, *tokens, *[39] * DRAFTS] for r, (tokens, _) in zip(requests, expected)]
    right = [[1] * 6, [0] * 6, [1, 1, 0, 1, 0, 0]]
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    for request in requests:
        engine.submit(request)
        engine._admit(engine._waiting.popleft())
    while engine._reading:
        engine._read(*engine._reading[0])
    keys, state, made, passes = engine._keys, engine._state, [[], [], []], [0, 0, 0]
    while state.left[:3].any():
        for slot, (text, pattern) in enumerate(zip(texts, right)):
            for d in range(DRAFTS):
                at = state.length[slot] + 1 + d
                guess = text[min(at, len(text) - 1)]
                state.drafts[slot, d] = guess if pattern[at % 6] else (guess + 1) % 39
        state.left[3] = 1  # a slot that becomes idle while others wait ends the call: one pass
        before = state.left[:3].copy()
        keys, after, result = engine_module._decode(engine._graphdef, engine.params, keys, state, True, DRAFTS)
        assert int(result.number) == 1
        for slot in np.flatnonzero(before):
            n = int(result.made[0, slot])
            made[slot] += zip(*(np.asarray(x[0, slot, :n]).tolist() for x in (result.tokens, result.logprobs)))
            passes[slot] += 1
        state = jax.tree.map(np.array, after)
    for got, (tokens, scores) in zip(made, expected):
        assert [token for token, _ in got] == tokens and len(tokens) == 18
        np.testing.assert_allclose([score for _, score in got], scores, rtol=0, atol=1e-5)
    assert passes[0] == 6 and passes[1] == 18 and 6 < passes[2] < 18  # 3 tokens a pass, one, and something between


def test_guesses_leave_the_distribution_alone(model, full_pass):
    """Chi-square of three tokens behind a prompt against their exact joint distribution, 1,000 seeds, with guesses."""
    prompt, few = prompts(6, seed=8)[0], dict(top_k=3, temperature=1.0, stop=())

    def then(text):
        log_p = np.asarray(draw_one(full_pass(text)[-1], as_draw(Request(prompt, **few)), len(text))[0])
        return {int(token): float(np.exp(log_p[token])) for token in np.flatnonzero(np.isfinite(log_p))}

    chance = {(): 1.0}
    for _ in range(3):
        chance = {(*seq, token): p * q for seq, p in chance.items() for token, q in then([*prompt, *seq]).items()}
    assert len(chance) == 27
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    completions = engine.generate([Request(prompt, max_new_tokens=3, seed=s, **few) for s in range(1000)])
    seen = collections.Counter(tuple(c.tokens.tolist()) for c in completions)
    assert set(seen) <= set(chance)
    common = [seq for seq, p in chance.items() if 1000 * p >= 5]
    cells = [(seen[seq], 1000 * chance[seq]) for seq in common]
    cells.append((1000 - sum(n for n, _ in cells), 1000 - sum(n for _, n in cells)))
    assert len(cells) > 10
    chi2 = sum((n - want) ** 2 / want for n, want in cells)
    assert chi2 < scipy.stats.chi2.isf(0.001, len(cells) - 1)
    assert engine.counts["accepted_1"] > 20  # guesses were really taken


def test_a_group_reads_its_prompt_once(model):
    prompt = prompts(21, seed=2)[0]
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    alone = [Engine(model, SLOTS, CONTEXT, DRAFTS).generate([Request(prompt, 6, seed=s)])[0] for s in range(3)]
    group = engine.generate([Request(prompt, 6, seed=s) for s in range(3)])
    assert engine.counts["read"] == 20 and engine.counts["copied"] == 40
    assert [c.tokens.tolist() for c in group] == [c.tokens.tolist() for c in alone]
    again = engine.generate([Request([*prompt, *group[0].tokens, 5], 4, seed=1)])[0]  # the next turn of a conversation
    assert engine.counts["read"] == 20 + 1
    expected = Engine(model, SLOTS, CONTEXT, DRAFTS).generate([Request([*prompt, *group[0].tokens, 5], 4, seed=1)])[0]
    np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-5)


def test_an_update_reaches_running_requests_whole(model, full_pass):
    """Tokens behind the update are those of the new weights over the whole text: nothing of old keys is left."""
    other = lively_model(model.cfg, seed=7)
    request = Request(prompts(5, seed=4)[0], max_new_tokens=20, seed=3)
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS, version=4)
    i = engine.submit(request)
    engine.step()
    engine.update(6, split(other)[1])
    while (completion := engine.take(i)) is None:
        engine.step()
    old = int((completion.versions == 4).sum())
    assert 0 < old < 20 and completion.versions.tolist() == [4] * old + [6] * (20 - old)
    text = [*request.tokens, *completion.tokens]
    logits = jax.jit(lambda t: other.logits(other.trunk(t)[0]))(np.asarray(text)[None])
    expected = jax.nn.log_softmax(logits[0], axis=-1)[np.arange(5 + old - 1, len(text) - 1), text[5 + old :]]
    np.testing.assert_allclose(completion.logprobs[old:], expected, rtol=0, atol=1e-5)
    assert engine.health()["version"] == 6
    for version in (6, 5):
        with pytest.raises(UserError, match=f"version={version}: the engine has version 6"):
            engine.update(version, split(other)[1])


def test_abort_returns_what_was_made_and_frees_the_slot(model):
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    first, second, *_ = (engine.submit(Request(p, max_new_tokens=20)) for p in prompts(4, 6, 4, 4, 4))
    engine.step()
    engine.abort(first)
    engine.abort(first)
    done = engine.take(first)
    assert done.finish == "abort" and 0 < len(done.tokens) < 20
    assert engine.take(first) is None
    waiting = engine.submit(Request(prompts(3)[0]))
    engine.abort(waiting)
    assert engine.take(waiting).tokens.size == 0
    while (completion := engine.take(second)) is None:
        engine.step()
    alone = Engine(model, SLOTS, CONTEXT, DRAFTS).generate([Request(prompts(4, 6, 4)[1], 20)])[0]
    assert completion.tokens.tolist() == alone.tokens.tolist()


def test_garbage_of_broken_weights_does_not_outlive_them(model, mixed, expected):
    """Weights that are not finite fill the caches with NaN; good ones then give what they always gave."""
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    engine.update(1, jax.tree.map(lambda x: x * np.nan, split(model)[1]))
    engine.generate([Request(p, max_new_tokens=25) for p in prompts(6, 6, 6)])
    engine.update(2, split(model)[1])
    assert [c.tokens.tolist() for c in engine.generate(mixed)] == [tokens for tokens, _ in expected]


def test_nothing_compiles_once_all_programs_have_run(model, mixed):
    compiled = []
    listen = lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    Engine(model, SLOTS, CONTEXT, DRAFTS).generate(mixed)
    before = len(compiled)
    engine = Engine(model, SLOTS, CONTEXT, DRAFTS)
    engine.generate([Request(p, max_new_tokens=3, top_p=0.9) for p in prompts(2, 3, 11, 16, 11)])
    engine.update(1, split(model)[1])
    engine.generate([Request(prompts(4)[0], temperature=0.0)])
    assert len(compiled) == before
    jax.jit(lambda x: x + 41)(1)
    assert len(compiled) == before + 1  # that this was counted at all


def test_the_benchmark_counts_what_it_generates(model, capsys):
    options = Options(prompt=20, new=12, requests=(SLOTS,), draft_steps=DRAFTS, prefill=0, rounds=1, transformers=False)
    (row,) = run(model, options)["rows"]
    assert row["engine"] > 0 and row["guessing"] > 0
    assert 1 <= row["accepted_length"] <= 1 + DRAFTS and 0 <= row["acceptance_2"] <= row["acceptance_1"] <= 1
    assert row["accepted_length"] == pytest.approx(1 + row["acceptance_1"] + row["acceptance_2"])
    assert f"{row['engine']:,.0f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(tokens=np.zeros(0, np.int32)), "at least one token"),
        (dict(tokens=np.ones(32, np.int32)), "prompt of 32 tokens: the engine's context is 32"),
        (dict(tokens=np.array([40])), "token ids 40..40"),
        (dict(tokens=np.array([1.5])), "need integers"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(temperature=np.nan), "temperature=nan"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(seed=-1), "seed=-1"),
        (dict(stop=tuple(range(9))), "stop: 9 ids, at most 8"),
    ],
)
def test_bad_requests_are_refused(model, wrong, words):
    with pytest.raises(UserError, match=words):
        Engine(model, SLOTS, CONTEXT).submit(Request(**({"tokens": np.array([1])} | wrong)))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(slots=0), "slots=0"),
        (dict(context=65), "context=65: must lie in 2..64"),
        (dict(draft_steps=-1), "draft_steps=-1"),
    ],
)
def test_bad_engines_are_refused(model, wrong, words):
    with pytest.raises(UserError, match=words):
        Engine(model, **({"slots": 1, "context": 8} | wrong))


def test_guessing_needs_an_mtp_layer():
    with pytest.raises(UserError, match="no MTP layer"):
        Engine(make_model(num_nextn_predict_layers=0), 1, CONTEXT, 2)
