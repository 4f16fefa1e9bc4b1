"""Fine-tuning on conversations: lines to rows with their loss mask, what is skipped or cut, MTP without a gradient into the
trunk, and runs that resume to the bit."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import cli
from glm5_jax.convert.chat import marked
from glm5_jax.convert.tokenizer import ByteTokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import split
from glm5_jax.train import data as D
from glm5_jax.train import loop
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.conversations import ARITHMETIC, ChatConfig, arithmetic
from glm5_jax.train.evaluate import in_batches
from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import LossConfig, apart, count_targets, flat, gradients, target_weights, trainable_specs
from helpers_train import compile_cache, flat_specs, lively_model, packed_batch, recorded, step_config

TOKENIZER = ByteTokenizer(chat=True)


def ask(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text} | more


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config(*sources, **settings):
    fixed = dict(sources=sources, kind="chat", tokenizer="bytes:chat", packing="best_fit")
    return D.DataConfig(**fixed | dict(seq_len=32, held_out=0.0, shuffle=False) | settings)


def corpus(c, tmp_path):
    return D.load_corpus(c, tmp_path / "cache")


def rows(batch):
    """Each segment of each row, trained tokens in ⟦ ⟧."""
    found = []
    for tokens, segments, mask in zip(batch["tokens"], batch["segment_ids"], batch["loss_mask"], strict=True):
        wholes = [(tokens[segments == s], mask[segments == s]) for s in range(1, segments.max() + 1)]
        found.append([marked(*whole, TOKENIZER) for whole in wholes])
        assert not mask[segments == 0].any()
    return found


# From lines to rows


def test_rows_hold_whole_conversations_and_their_masks(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        {"messages": [ask("abc"), answer("de", loss=False), ask("f"), answer("g")]},
        {"messages": [ask("h"), answer("i", reasoning_content="j")], "chat": "other fields are passed over"},
        {"messages": [ask("k"), answer("", tool_calls=[{"name": "l", "arguments": {}}])], "thinking": False},
    )
    c = config(path)
    batch = next(D.batches(corpus(c, tmp_path), c, 2))
    short = "[gMASK]<sop><|user|>"
    assert rows(batch) == [
        [
            f"{short}abc<|assistant|></think>de<|user|>f<|assistant|></think>⟦g<|endoftext|>⟧",
            f"{short}k<|assistant|></think>⟦<tool_call>l</tool_call><|observation|>⟧<|endoftext|>",
        ],
        [f"{short}h<|assistant|><think>⟦j</think>i<|endoftext|>⟧"],
    ]
    assert batch["doc_ids"] == [("c.jsonl:1", "c.jsonl:3"), ("c.jsonl:2",)]
    assert batch["loss_mask"].dtype == bool and batch["loss_mask"].shape == (2, 32)


def test_the_first_token_of_an_answer_is_a_target_and_the_last_of_padding_is_not(tmp_path):
    """Padding has the id of the end of a conversation, which is one: the mask goes by place, not by id."""
    c = config(write(tmp_path / "c.jsonl", {"messages": [ask("x"), answer("y")]}))
    batch = next(D.batches(corpus(c, tmp_path), c, 1))
    row = {name: jnp.asarray(value) for name, value in batch.items() if name in D.ARRAYS}
    text = ["[gMASK]", "<sop>", "<|user|>", "x", "<|assistant|>", "</think>", "y", "<|endoftext|>"]
    expected = np.zeros(32)
    expected[[text.index("y") - 1, text.index("<|endoftext|>") - 1]] = 1
    np.testing.assert_array_equal(target_weights(row, 1)[0], expected)
    np.testing.assert_array_equal(target_weights(row, 2)[0], np.roll(expected, -1))
    assert count_targets(jax.tree.map(lambda x: x[None], row), 1)["next"] == 2
    np.testing.assert_array_equal(D.targets_of(batch)[0], expected[:-1])


def test_settings_of_a_line_go_before_those_of_the_run(tmp_path):
    turns = {"messages": [ask("a"), answer("b", reasoning_content="c"), ask("d"), answer("e", reasoning_content="f")]}
    path = write(tmp_path / "c.jsonl", turns | {"reasoning_effort": "high"}, turns | {"clear_thinking": False})
    c = config(path, seq_len=256, chat=ChatConfig(version="5.2"))
    whole = corpus(c, tmp_path)
    texts = [TOKENIZER.decode(whole.train[0][d]) for d in range(len(whole.train[0]))]
    assert whole.train[0].ids == ("c.jsonl:1", "c.jsonl:1", "c.jsonl:2")
    assert ["Effort: High" in text for text in texts] == [True, True, False]
    assert ["<think>c</think>" in text for text in texts] == [True, False, True]
    preserved = corpus(dataclasses.replace(c, chat=ChatConfig(clear_thinking=False)), tmp_path)
    assert len(preserved.train[0]) == 2  # and the cache of other settings is not taken for this


def test_the_same_tokens_come_from_the_cache_and_after_resuming(tmp_path):
    c = config(ARITHMETIC, seq_len=256, shuffle=True, held_out=0.1)
    first = corpus(c, tmp_path)
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    iterator = D.batches(first, c, 2)
    for _ in range(3):
        next(iterator)
    again = D.batches(corpus(c, tmp_path), c, 2)
    again.set_state(iterator.get_state())
    one, two = next(iterator), next(again)
    assert rows(one) == rows(two) and one["doc_ids"] == two["doc_ids"] and one["loss_mask"].any()
    assert files == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}


def test_held_out_conversations_are_whole_and_only_trained_tokens_count(tmp_path):
    c = config(ARITHMETIC, seq_len=1200, held_out=0.02)
    whole = corpus(c, tmp_path)
    (source,) = whole.held_out
    expected = sorted(marked(np.append(source[d], 0), source.mask(d), TOKENIZER) for d in range(len(source)))
    batches = list(D.held_out_batches(whole, c, 2))
    assert sorted(text for batch in batches for row in rows(batch) for text in row) == expected
    masks = [batch["loss_mask"] for batch in in_batches(iter(D.held_out_batches(whole, c, 1)), 3)]
    assert masks[0].shape == (3, 1200) and sum(int(mask.sum()) for mask in masks) == sum(
        int(source.mask(d).sum()) for d in range(len(source))
    )
    inside = [part.partition("⟧")[0] for text in expected for part in text.split("⟦")[1:]]
    for name in (*TOKENIZER.chat_ids, "<|endoftext|>"):
        inside = [text.replace(name, "") for text in inside]
    assert sum(batch["bytes"] for batch in batches) == sum(map(len, inside))


# What is skipped, cut or refused


def test_what_teaches_nothing_is_skipped_and_counted_and_what_is_long_is_cut(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        {"messages": []},
        {"messages": [ask("x")]},
        {"messages": [ask("x"), answer("y", loss=False)]},
        {"messages": [ask("x"), answer("  ")]},
        {"messages": [ask("x" * 40), answer("y")]},
        {"messages": [ask("x"), answer("y" * 25)]},
        {"messages": [ask("x"), answer("y" * 26)]},
        {"messages": [ask("x" * 26), answer("y")]},
        {"messages": [ask("x" * 25), answer("y")]},
    )
    c = config(path)
    whole = corpus(c, tmp_path)
    line = whole.summary
    assert "skipped 1 empty; skipped 1 with an empty answer; skipped 2 with nothing to train; " in f"{line}; "
    assert line.endswith("; skipped 2 without a trained token among the first 32; cut 1 to 32 tokens")
    assert "train 3 documents" in line
    found = [text for row in rows(next(D.batches(whole, c, 3))) for text in row]
    head = "[gMASK]<sop><|user|>"
    assert sorted(found) == sorted(
        [
            f"{head}x<|assistant|></think>⟦{'y' * 25}<|endoftext|>⟧",
            f"{head}x<|assistant|></think>⟦{'y' * 25}⟧<|endoftext|>",
            f"{head}{'x' * 25}<|assistant|></think>⟦y<|endoftext|>⟧",
        ]
    )


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": [{"role": "bot", "content": "x"}]}', r"messages\[0\]\.role='bot': one of .*"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', r"messages\[0\]: a tool result without a call before it"),
        ('{"messages": 3}', r"messages: not a list"),
        ('{"text": "x"}', r"not an object with the field messages"),
        ("[]", r"not an object with the field messages"),
        ('{"messages": [', r"not JSON \(.*\)"),
        ('{"messages": [], "thinking": 1}', r"thinking=1: true or false"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}], "reasoning_effort": "low"}', "reas.*"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', r"tools\[0\]: not a declaration .*"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": [ask("x"), answer("y")]}) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=rf"^\S+/c\.jsonl:? line 3: {message}$"):
        corpus(config(str(path)), tmp_path)
    assert not [path for path in (tmp_path / "cache").iterdir() if "tokens" in path.name]


def test_settings_that_do_not_fit_conversations_are_named(tmp_path):
    path = write(tmp_path / "c.jsonl", {"messages": [ask("x"), answer("y")]})
    for settings, message in (
        (dict(packing="split"), "packing=split: .*"),
        (dict(fim_rate=0.5), "fim_rate=0.5: .*"),
        (dict(tokenizer="bytes"), r"data\.tokenizer=bytes: lacks tokens of the chat template: \[gMASK\] .*"),
        (dict(tokenizer="bpe:300"), "tokenizer=bpe:300: none is trained on conversations; .*"),
        (dict(sources=("stdlib",)), "sources=stdlib: holds no conversations; .*"),
        (dict(seq_len=6), r"sources=\S+: 1 training documents .*, none with a trained token among its first seq_len=6"),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            corpus(config(path, **settings) if "sources" not in settings else config(**settings), tmp_path)
    write(tmp_path / "c.jsonl", {"messages": []}, {"messages": [ask("x")]})
    with pytest.raises(UserError, match=r"c\.jsonl: no document in it .* \(1 empty, 1 with nothing to train\)$"):
        corpus(config(path), tmp_path)


def test_sums_are_right():
    for i in range(30):
        record = arithmetic(i)
        a, b = (int(n) for n in record["messages"][0]["content"].removeprefix("What is ").removesuffix("?").split(" + "))
        assert record["messages"][-1]["content"] == f"{a} + {b} = {a + b}."
        if "tools" in record:
            _, asked, result, _ = record["messages"]
            assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"a": a, "b": b}
            assert result["content"] == str(a + b)
        else:
            steps = record["messages"][1]["reasoning_content"].removesuffix(".").split(", ")
            assert all(sum(map(int, left.split(" + "))) == int(right) for left, right in (s.split(" = ") for s in steps))


# MTP


def test_detached_mtp_leaves_the_gradient_of_the_policy_as_it_is_to_the_bit():
    """Whatever the weight of the MTP loss, 0 included, and whatever the MTP layer."""
    model = lively_model(step_config(num_hidden_layers=1, first_k_dense_replace=1))
    batch = packed_batch([[7, 5], [9]], 12)
    batch["loss_mask"] = jnp.asarray(np.random.default_rng(0).random((1, 2, 12)) < 0.5)
    graphdef, params = split(model)
    keep = trainable_specs(model, ("indexer",))
    train = {p: v for p, v in flat(params).items() if p in keep}
    frozen = {p: v for p, v in flat(params).items() if p not in keep}
    policy, mtp = ([p for p in train if (p[0] == "mtp") == inside] for inside in (False, True))

    cfg = LossConfig(mtp_steps=1, detach_mtp=True, chunk=5)
    grads = jax.jit(lambda train, weight: gradients(graphdef, train, frozen, batch, weight, cfg))
    loss, _, usual = grads(train, jnp.float32(0.3))
    lower, _, weightless = grads(train, jnp.float32(0))
    others = train | {p: 1.5 * train[p] for p in mtp}
    _, _, other = grads(others, jnp.float32(100))
    for p in policy:
        np.testing.assert_array_equal(usual[p], weightless[p], err_msg=str(p))
        np.testing.assert_array_equal(usual[p], other[p], err_msg=str(p))
    assert loss > lower and all((usual[p] != other[p]).any() for p in mtp)


def test_a_large_gradient_of_detached_mtp_does_not_shrink_the_step_of_the_trunk():
    every = flat_specs(step_config())
    specs = {p: every[p] for p in (("norm",), ("head",), ("mtp", "norm"))}
    params = {p: np.full((4,) if p[-1] == "norm" else (4, 5), 0.5, np.float32) for p in specs}

    def updates(factor, parts):
        optimizer = make_optimizer(OptimizerConfig(name="adamw", clip=0.1, eps=1e-3), lambda _: 0.1, specs, apart=parts)
        grads = {p: v * (factor if p[0] == "mtp" else 1) for p, v in params.items()}
        found, _ = optimizer.update(grads, optimizer.init(params), params)
        return {p: np.asarray(v) for p, v in found.items() if specs[p].part == "trunk"}

    parts = apart(LossConfig(detach_mtp=True))
    small, large = updates(1, parts), updates(1e4, parts)
    assert all((small[p] == large[p]).all() for p in small)
    together = updates(1, apart(LossConfig())), updates(1e4, apart(LossConfig()))
    assert any((together[0][p] != together[1][p]).any() for p in small)


# Runs


def run_config(path, steps):
    model = step_config(vocab_size=276, num_hidden_layers=1, first_k_dense_replace=1, eos_token_id=(0,))
    return TrainConfig(
        model=model, data=config(path, seq_len=48, shuffle=True),
        lr=LearningRate("constant", 0.01, warmup_steps=0), loss=LossConfig(mtp_steps=1, detach_mtp=True),
        checkpoint=CheckpointConfig(every=2), steps=steps, micro_rows=2,
        batch_rows=((0, 2),), eval_every=100, optimizer=OptimizerConfig(name="adamw"),
    )  # fmt: skip


def test_a_run_on_conversations_learns_and_resumes_to_the_bit(tmp_path):
    records = [{"messages": [ask(f"say {c}"), answer(c * 3, reasoning_content="hm")]} for c in "abcdefgh"]
    path = write(tmp_path / "c.jsonl", *records)
    with compile_cache(tmp_path / "compiled"):
        loop.train(run_config(path, 4), tmp_path / "run")
        whole = recorded(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if it had been killed before
        loop.train(run_config(path, 4), tmp_path / "run")
    assert recorded(tmp_path / "run") == whole and len(whole) == 4
    assert whole[-1][1] < whole[0][1]
    assert len(recorded(tmp_path / "run", "grad_norm_mtp")) == 4


def test_the_command_line_shows_what_is_trained(tmp_path, capsys):
    path = write(tmp_path / "c.jsonl", {"messages": [ask("x"), answer("y", reasoning_content="z"), ask("x"), answer("y")]})
    settings = ["--init.run", "", "--data.tokenizer", "bytes:chat", "--data.sources", path, "--show-mask"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["sft", *settings])
    assert not stop.value.code
    out = capsys.readouterr().out
    first = "[gMASK]<sop><|user|>x<|assistant|><think>⟦z</think>y<|user|>⟧<|endoftext|>"
    assert f"c.jsonl:1: 4 of 11 tokens trained\n{first}" in out
    assert "[gMASK]<sop><|user|>x<|assistant|></think>y<|user|>x<|assistant|></think>⟦y<|endoftext|>⟧" in out
    for arguments, message in (
        (["sft", "tiny"], "glm5: data.kind=text: glm5 sft trains on conversations; set it to chat\n"),
        (["train", "tiny", "--show-mask"], "glm5: unknown setting --show-mask"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2 and capsys.readouterr().err.startswith(message)
