"""From files to tokens on disk: formats, ids, what is skipped, the cache, the BPE's training text, bad files."""

import json
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from glm5_jax.convert.tokenizer import ByteTokenizer
from glm5_jax.errors import UserError
from glm5_jax.train import data as D
from glm5_jax.train import sources, token_cache
from helpers_data import TEXTS, config, documents_of, load

# --- sources ---------------------------------------------------------------------------------------------------------


def write_shards(path, texts):
    """The texts as jsonl, parquet, array_record of text and array_record of JSON."""
    (path / "a.jsonl").write_text("\n\n".join(json.dumps({"body": t, "other": 1}) for t in texts) + "\n")
    parquet.write_table(pyarrow.table({"other": list(range(len(texts))), "body": texts}), path / "a.parquet")
    for name, encode in (("text", str.encode), ("json", lambda t: json.dumps({"body": t}).encode())):
        writer = ArrayRecordWriter(str(path / f"{name}.array_record"), "group_size:1")
        for text in texts:
            writer.write(encode(text))
        writer.close()


def test_every_format_gives_the_same_documents(tmp_path, folder):
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, list(TEXTS.values()))
    for name in ("a.jsonl", "a.parquet", "text.array_record", "json.array_record"):
        corpus, _ = load(tmp_path, str(shards / name), text_field="body", held_out=0.0)
        assert list(documents_of(corpus.train[0]).values()) == list(TEXTS.values())
    corpus, _ = load(tmp_path, folder, held_out=0.0)
    assert documents_of(corpus.train[0]) == {f"texts/{name}": text for name, text in TEXTS.items()}
    corpus, _ = load(tmp_path, str(shards), text_field="body", held_out=0.0)
    assert Counter(documents_of(corpus.train[0]).values()) == Counter(list(TEXTS.values()) * 4)


def test_ids_of_shard_documents(tmp_path):
    write_shards(tmp_path, ["first " * 9, "second " * 9])
    ids = {name: load(tmp_path, str(tmp_path / name), text_field="body", held_out=0.0)[0].train[0].ids
           for name in ("a.jsonl", "a.parquet", "text.array_record")}  # fmt: skip
    assert ids["a.jsonl"] == ("a.jsonl:1", "a.jsonl:3")  # line 2 is blank
    assert ids["a.parquet"] == ("a.parquet:0", "a.parquet:1")
    assert ids["text.array_record"] == ("text.array_record:0", "text.array_record:1")


def test_folder_takes_the_given_endings_below_it(tmp_path):
    root = tmp_path / "code"
    (root / "deep").mkdir(parents=True)
    for name in ("a.py", "b.bin", "deep/c.py", "deep/d.md"):
        (root / name).write_text(name)
    assert [f.id for f in sources.list_files(str(root), (".py",))] == ["code/a.py", "code/deep/c.py"]
    assert [f.id for f in sources.list_files(str(root / "b.bin"), (".py",))] == ["b.bin"]


def test_stdlib_is_the_standard_library_without_installed_packages():
    files = sources.list_files("stdlib", sources.TEXT_ENDINGS)
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts)}
    assert {file.path for file in files} == expected
    assert {"stdlib/json/decoder.py", "stdlib/ast.py"} <= {file.id for file in files}


def test_what_is_skipped_is_counted_in_the_summary(tmp_path, folder):
    (Path(folder) / "latin.txt").write_bytes("\u00e9t\u00e9".encode("latin-1"))
    (Path(folder) / "empty.txt").write_bytes(b"")
    (Path(folder) / "pairs.jsonl").write_text('{"text": "\\ud800"}\n{"text": "fine"}\n')
    corpus, _ = load(tmp_path, folder, held_out=0.0)
    size = sum(len(text.encode()) for text in TEXTS.values()) + 4
    assert corpus.summary == (
        f"{folder}: 43 files; train 41 documents {size:,} bytes {size:,} tokens; "
        "held out 0 documents 0 bytes 0 tokens; skipped 1 empty; skipped 2 not UTF-8"
    )


@pytest.mark.parametrize(
    "entry, expected",
    [("a/b", ("a/b", 1.0)), ("a@2.5", ("a", 2.5)), ("me@home/x", ("me@home/x", 1.0)), ("me@home@3", ("me@home", 3.0))],
)
def test_weights(entry, expected):
    assert sources.parse_source(entry) == expected


# --- tokens on disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_second_load_reads_the_cache(tmp_path, folder, tokenizer, monkeypatch):
    first, _ = load(tmp_path, folder, tokenizer=tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "read_documents", None)  # any reading of text fails
        patch.setattr(D, "read_documents", None)
        second, _ = load(tmp_path, folder, tokenizer=tokenizer)
    for part in ("train", "held_out"):
        (before,), (after,) = getattr(first, part), getattr(second, part)
        assert after.ids == before.ids and len(after) > 0
        assert all(np.array_equal(before[d], after[d]) for d in range(len(after)))
    assert second.summary == first.summary
    assert not list((tmp_path / "cache").glob("*partial*"))


def test_a_changed_file_is_read_again(tmp_path, folder):
    load(tmp_path, folder)
    (Path(folder) / "file00.txt").write_text("changed")
    corpus, _ = load(tmp_path, folder, held_out=0.0)
    assert documents_of(corpus.train[0])["texts/file00.txt"] == "changed"


def test_chunks_of_any_size_give_the_same_tokens(tmp_path, folder, monkeypatch):
    corpus, _ = load(tmp_path, folder)
    monkeypatch.setattr(token_cache, "CHARACTERS_AT_ONCE", 100)
    again = D.load_corpus(config(folder), tmp_path / "other")
    assert documents_of(again.train[0]) == documents_of(corpus.train[0])


def test_bpe_learns_from_training_documents_only(tmp_path, folder):
    """"qzqz" fills the held-out documents alone, so no token may contain it."""
    held_out = load(tmp_path, folder)[0].held_out[0].ids
    for name in held_out:
        (Path(folder) / name.removeprefix("texts/")).write_text("qzqz" * 500)
    corpus, _ = load(tmp_path, folder, tokenizer="bpe:300")
    assert corpus.held_out[0].ids == held_out
    assert len(corpus.tokenizer.encode("qzqz")) == 4


def test_bpe_sample_takes_the_same_share_of_each_document(tmp_path, folder, monkeypatch):
    total = sum(len(text.encode()) for text in TEXTS.values())
    monkeypatch.setattr(D, "BPE_SAMPLE_BYTES", total / 2)
    sample = D._bpe_sample(config(folder, held_out=0.0), [sources.list_files(folder, (".txt",))])
    assert [len(text) for text in sample] == [len(text) // 2 for text in TEXTS.values()]
    assert all(part in text for part, text in zip(sample, TEXTS.values(), strict=True))


def test_progress_reaches_the_total(tmp_path, folder):
    calls = []
    D.load_corpus(config(folder), tmp_path / "cache", lambda done, total: calls.append((done, total)))
    total = sum(len(text.encode()) for text in TEXTS.values())
    assert calls[-1] == (total, total) and len(calls) == len(TEXTS)


# --- bad input -------------------------------------------------------------------------------------------------------


BAD_FILES = {
    "bad.jsonl": (b'{"text": "a"}\nnot json\n', "bad.jsonl line 2: not JSON"),
    "field.jsonl": (b'{"text": "a"}\n\n{"body": "a"}\n', "field.jsonl line 3: has no field text_field='text'"),
    "list.jsonl": (b"[1]\n", "list.jsonl line 1: has no field"),
    "number.jsonl": (b'{"text": 3}\n', "number.jsonl line 1: the field text_field='text' is not a string"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "latin.jsonl line 1: not JSON"),
    "bad.parquet": (b"no parquet", "bad.parquet: not a readable Parquet file"),
    "bad.array_record": (b"no records", "bad.array_record: not a readable ArrayRecord file"),
    "latin.txt": (b"\xe9", "latin.txt: no document in it and 0 more files, all skipped"),
    "short.txt": (b"short", "short.txt: 1 training documents .* 6 tokens, fewer than one row of seq_len=64"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_name_the_file_and_the_place(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*partial*"))


def test_bad_columns_and_records(tmp_path):
    parquet.write_table(pyarrow.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "p.parquet")
    writer = ArrayRecordWriter(str(tmp_path / "r.array_record"), "group_size:1")
    writer.write(b"fine")
    writer.write(b'{"body": "a"}')
    writer.close()
    for name, field, message in (
        ("p.parquet", "text", "p.parquet: the column text_field='text' holds int64, not strings"),
        ("p.parquet", "other", "p.parquet: has no column text_field='other', only text, body"),
        ("r.array_record", "text", "r.array_record record 1: has no field"),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path, str(tmp_path / name), text_field=field)


def test_bad_paths(tmp_path, folder):
    (tmp_path / "hollow").mkdir()
    for path, message in (
        (tmp_path / "missing", "missing: no such file or folder"),
        (tmp_path / "hollow", "hollow: no file in this folder ends in any of"),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path, str(path))
    with pytest.raises(UserError, match="no directory can be made here"):
        D.load_corpus(config(folder), Path(folder) / "file00.txt" / "cache")


def test_a_file_without_permission(tmp_path, folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the suite may run as root, whom no mode bit stops
    with pytest.raises(UserError, match="file00.txt: cannot be read .Permission denied."):
        load(tmp_path, folder)


def test_a_tokenizer_that_leaves_its_vocabulary(tmp_path, folder):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 100
    files = sources.list_files(folder, (".txt",))
    with pytest.raises(UserError, match=r"tokenizer: gives ids 11\.\.196, its vocabulary is 0\.\.99"):
        token_cache.tokenised(files, "text", tokenizer, tmp_path, lambda file: None)


def test_a_damaged_cache_is_named(tmp_path, folder):
    load(tmp_path, folder)
    (tokens,) = (tmp_path / "cache").glob("tokens-*.npy")
    np.save(tokens, np.load(tokens)[:-1])
    with pytest.raises(UserError, match="damaged token cache, delete both"):
        load(tmp_path, folder)


def test_a_link_to_nothing_is_passed_over(tmp_path, folder):
    before = documents_of(load(tmp_path, str(folder))[0].train[0])
    (Path(folder) / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (Path(folder) / "loop.txt").symlink_to(Path(folder) / "loop.txt")
    assert len(before) > 1 and documents_of(load(tmp_path, str(folder))[0].train[0]) == before
