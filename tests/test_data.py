"""Batches: the held-out split, packed rows over epochs, resumption, sharding, mixing, FIM, settings and their help."""

import dataclasses
import io
import json
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import tyro

from glm5_jax.convert.tokenizer import ByteTokenizer
from glm5_jax.errors import UserError
from glm5_jax.train import data as D
from glm5_jax.train.packing import make_epoch
from helpers_data import TEXTS, documents_of, load, write_folder


def rows_of(batch):
    """Each row as a hashable value."""
    names = ("tokens", "segment_ids", "positions")
    return [(*(batch[n][b].tobytes() for n in names), batch["doc_ids"][b]) for b in range(len(batch["tokens"]))]


def draw(iterator, count):
    return [row for _ in range(count) for row in rows_of(next(iterator))]


def epoch_rows(corpus, c):
    """Rows of one epoch without FIM: the stream cut every T tokens."""
    return sum(-(-int(source.lengths.sum() + len(source)) // c.seq_len) for source in corpus.train)


# --- held-out part ---------------------------------------------------------------------------------------------------


def test_held_out_split_is_disjoint_complete_and_stable(tmp_path, folder):
    before, _ = load(tmp_path, folder)
    (Path(folder) / "more.txt").write_text("another document")
    after, _ = load(tmp_path, folder)
    train, held_out = set(before.train[0].ids), set(before.held_out[0].ids)
    assert not train & held_out and train | held_out == {f"texts/{name}" for name in TEXTS}
    assert set(after.train[0].ids) - {"texts/more.txt"} == train
    assert set(after.held_out[0].ids) - {"texts/more.txt"} == held_out


def test_held_out_share():
    (mask,) = D.held_out_masks([tuple(f"d{i}" for i in range(20_000))], 0.1)
    assert abs(mask.mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / 20_000)


def test_tiny_corpora_keep_something_on_each_side():
    masks = D.held_out_masks([("a", "b"), ("c",)], 1e-9)
    assert sum(mask.sum() for mask in masks) == 1
    assert not D.held_out_masks([("only",)], 0.999)[0].any()
    assert not D.held_out_masks([("a", "b")], 0.0)[0].any()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_held_out_pass_is_in_order_and_counts_its_bytes(tmp_path, folder, tokenizer):
    corpus, c = load(tmp_path, folder, tokenizer=tokenizer, packing="best_fit", fim_rate=0.5)
    batches = list(D.held_out_batches(corpus, c, 3))
    (source,), t = corpus.held_out, corpus.tokenizer
    stream = [i for d in range(len(source)) for i in [*source[d], t.eos_id]]
    tokens = np.concatenate([b["tokens"].ravel() for b in batches])
    segments = np.concatenate([b["segment_ids"] for b in batches])
    positions = np.concatenate([b["positions"] for b in batches])
    assert tokens[: len(stream)].tolist() == stream and not segments.ravel()[len(stream) :].any()
    assert len(segments) % 3 == 0 and len(segments) - 3 < -(-len(stream) // c.seq_len) <= len(segments)
    first = (positions == 0) & (segments > 0)  # never a target
    unpredicted = t.token_bytes[tokens.reshape(segments.shape)[first]].sum()
    assert sum(b["bytes"] for b in batches) == source.sizes.sum() - unpredicted
    assert source.sizes.sum() == sum(len(TEXTS[name.removeprefix("texts/")].encode()) for name in source.ids)


def test_held_out_limit_and_two_sources(tmp_path, folder):
    corpus, c = load(tmp_path, folder, write_folder(tmp_path / "copy"))
    batches = list(D.held_out_batches(corpus, c, 2))
    assert [rows_of(b) for b in D.held_out_batches(corpus, c, 2, limit=1)] == [rows_of(batches[0])]
    seen = {name for b in batches for names in b["doc_ids"] for name in names}
    assert seen == {*corpus.held_out[0].ids, *corpus.held_out[1].ids} and len(corpus.held_out[1]) > 0


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("fim_rate", [0.0, 0.5])
def test_every_epoch_holds_every_token_of_every_document_once(tmp_path, folder, packing, shuffle, fim_rate):
    """With FIM, epochs differ in their number of rows, which the border between them must follow."""
    corpus, c = load(tmp_path, folder, packing=packing, shuffle=shuffle, fim_rate=fim_rate, seq_len=32)
    texts = documents_of(corpus.train[0])
    once = Counter((name, b + 1) for name, text in texts.items() for b in text.encode())
    once += Counter((name, 0) for name in texts)
    iterator = D.batches(corpus, c, 1)
    rows = []
    for epoch in range(4):
        rows.append(len(make_epoch(corpus.train[0].lengths, 32, packing, fim_rate, shuffle, [0, 0, epoch]).layout))
        seen = Counter()
        for _ in range(rows[-1]):
            batch = next(iterator)
            for token, segment in zip(batch["tokens"][0].tolist(), batch["segment_ids"][0].tolist(), strict=True):
                if segment and token < 257:
                    seen[batch["doc_ids"][0][segment - 1], token] += 1
        assert seen == once
    if packing == "split":
        assert (len(set(rows)) > 1) == (fim_rate > 0)


def test_unshuffled_split_is_the_documents_in_order(tmp_path, folder):
    corpus, c = load(tmp_path, folder, shuffle=False)
    batch = next(D.batches(corpus, c, 5))
    stream = [i for d in range(len(corpus.train[0])) for i in [*corpus.train[0][d], 0]][: 5 * 64]
    assert batch["tokens"].ravel().tolist() == stream
    for tokens, segments, positions, names in zip(*(batch[k] for k in batch), strict=True):
        ends = np.flatnonzero(tokens == 0)
        assert segments.tolist() == [1 + int((ends < i).sum()) for i in range(64)]
        for i, position in enumerate(positions):
            assert position == (0 if i == 0 or tokens[i - 1] == 0 else positions[i - 1] + 1)
        assert len(names) == segments.max()


def test_batch_shapes_and_dtypes(tmp_path, folder):
    corpus, c = load(tmp_path, folder)
    batch = next(D.batches(corpus, c, 3))
    assert list(batch) == ["tokens", "segment_ids", "positions", "doc_ids"]
    assert all(batch[k].shape == (3, 64) and batch[k].dtype == np.int32 for k in list(batch)[:3])
    assert len(batch["doc_ids"]) == 3


def test_order_depends_on_seed_and_epoch(tmp_path, folder):
    corpus, c = load(tmp_path, folder)
    n = epoch_rows(corpus, c)
    first, second = (draw(D.batches(corpus, c, 1), 2 * n) for _ in range(2))
    other = draw(D.batches(corpus, c, 1, seed=1), 2 * n)
    assert first == second == draw(D.batches(corpus, dataclasses.replace(c, seed=5), 1, seed=0), 2 * n)
    assert first[:n] != first[n:] and first[:n] != other[:n]
    assert first[n:] != other[:n]  # epoch 1 of seed 0 is not epoch 0 of seed 1
    assert other == draw(D.batches(corpus, dataclasses.replace(c, seed=1), 1), 2 * n)


@pytest.mark.parametrize("settings", [{}, {"packing": "best_fit", "fim_rate": 0.5}])
def test_resumes_at_the_exact_next_batch_also_across_epochs(tmp_path, folder, settings):
    corpus, c = load(tmp_path, folder, **settings)
    steps = 2 * (epoch_rows(corpus, c) // 3) + 4
    iterator, states, expected = D.batches(corpus, c, 3), [], []
    for _ in range(steps):
        states.append(json.loads(json.dumps(iterator.get_state())))
        expected.append(rows_of(next(iterator)))
    border = epoch_rows(corpus, c) // 3
    for step in (0, 1, border - 1, border, border + 1, steps - 2):
        resumed = D.batches(corpus, c, 3)
        resumed.set_state(states[step])
        assert [rows_of(next(resumed)) for _ in range(2)] == expected[step : step + 2]


def test_processes_share_the_global_batch(tmp_path, folder):
    corpus, c = load(tmp_path, folder, f"{write_folder(tmp_path / 'copy')}@2", fim_rate=0.3)
    whole = D.batches(corpus, c, 6)
    for count in (2, 3):
        parts = [D.batches(corpus, c, 6 // count, process_index=p, process_count=count) for p in range(count)]
        whole.set_state({"next_index": 0})
        for _ in range(8):
            assert Counter(rows_of(next(whole))) == Counter(row for part in parts for row in rows_of(next(part)))


def test_state_carries_over_to_another_number_of_processes(tmp_path, folder):
    corpus, c = load(tmp_path, folder)
    whole = D.batches(corpus, c, 4)
    draw(whole, 3)
    parts = [D.batches(corpus, c, 2, process_index=p, process_count=2) for p in range(2)]
    for part in parts:
        part.set_state(whole.get_state())
    assert Counter(rows_of(next(whole))) == Counter(row for part in parts for row in rows_of(next(part)))


def test_mixture_follows_the_weights(tmp_path, folder):
    other = write_folder(tmp_path / "other", {f"o{i}.py": "x = 1\n" * 40 for i in range(3)})
    corpus, c = load(tmp_path, f"{folder}@3", f"{other}@1", held_out=0.0)
    iterator = D.batches(corpus, c, 8)
    names = [row[-1][0].split("/")[0] for row in draw(iterator, 50)]
    assert Counter(names) == {"texts": 300, "other": 100}
    assert all(Counter(names[i : i + 8]) == {"texts": 6, "other": 2} for i in range(0, 400, 8))


def test_fim_documents_reassemble(tmp_path, folder):
    corpus, c = load(tmp_path, folder, fim_rate=0.5, packing="best_fit", seq_len=512)
    iterator, texts, forms = D.batches(corpus, c, 1), documents_of(corpus.train[0]), Counter()
    decode = corpus.tokenizer.decode
    for _ in range(20):
        batch = next(iterator)
        for s, name in enumerate(batch["doc_ids"][0], start=1):
            ids = batch["tokens"][0][batch["segment_ids"][0] == s].tolist()
            rewritten = ids[0] == 257
            forms[rewritten] += 1
            if rewritten:
                suffix, middle = ids.index(258), ids.index(259)
                ids = ids[1:suffix] + ids[middle + 1 : -1] + ids[suffix + 1 : middle] + ids[-1:]
            assert ids[-1] == 0 and decode(ids[:-1]) == texts[name]
    assert 0.3 < forms[True] / forms.total() < 0.7


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sources": ("a@0",)}, "sources=a@0: the weight must be a positive number"),
        ({"sources": ("a@-1",)}, "sources=a@-1: the weight"),
        ({"sources": ("a@nan",)}, "sources=a@nan: the weight"),
        ({"sources": ("@2",)}, "names no path"),
        ({"seq_len": 1}, "seq_len=1: must be at least 2"),
        ({"packing": "first_fit"}, "packing=first_fit: must be one of split, best_fit"),
        ({"fim_rate": 1.5}, "fim_rate=1.5"),
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"tokenizer": "bpe:100"}, "tokenizer=bpe:100"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        D.DataConfig(**settings)


def test_fim_needs_markers(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "fim_ids", None)
    with pytest.raises(UserError, match="fim_rate=0.5: tokenizer=bytes has no FIM markers"):
        load(tmp_path, folder, fim_rate=0.5)


def test_bad_arguments(tmp_path, folder):
    corpus, c = load(tmp_path, folder, held_out=0.0)
    for arguments, message in (
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"batch_rows": 1, "process_index": 2, "process_count": 2}, "process_index=2"),
        ({"batch_rows": 1, "seed": -1}, "seed=-1"),
    ):
        with pytest.raises(UserError, match=message):
            D.batches(corpus, c, **arguments)
    with pytest.raises(UserError, match="held_out=0.0: no document is held out"):
        D.held_out_batches(corpus, c, 1)
    with pytest.raises(UserError, match="sources: names no source"):
        D.load_corpus(dataclasses.replace(c, sources=()), tmp_path / "cache")


# --- the command line ------------------------------------------------------------------------------------------------


def test_help_explains_every_setting():
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit):
        tyro.cli(D.DataConfig, args=["--help"])
    words = " ".join(out.getvalue().replace("│", " ").split())
    for line in Path(D.__file__).read_text().split("class DataConfig")[1].split("def ")[0].splitlines():
        if ": " in line and "  # " in line:
            assert line.split("  # ")[1][:20] in words
    assert words.count("(default:") == len(dataclasses.fields(D.DataConfig)) - 1 + len(dataclasses.fields(D.ChatConfig))


def test_command_line_and_json_give_the_same_config():
    given = ["--sources", "a@2", "b", "--packing", "best_fit", "--seq-len", "128"]
    parsed = tyro.cli(D.DataConfig, args=given)
    assert parsed == D.DataConfig(sources=("a@2", "b"), packing="best_fit", seq_len=128)
    assert D.DataConfig(**json.loads(json.dumps(dataclasses.asdict(parsed)))) == parsed
