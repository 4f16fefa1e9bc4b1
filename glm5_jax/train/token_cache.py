"""The tokens of a source on disk: encoded once, memory-mapped by every later run.

Per source two files in the cache directory, named by a hash of everything their content depends on: `tokens-KEY.npy`,
all documents one after another without ends of document, and `tokens-KEY.json`, the ids and lengths.
"""

import dataclasses
import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from glm5_jax.config import check
from glm5_jax.errors import UserError
from glm5_jax.train.sources import File, read_documents

FORMAT = 1  # raise when the files' layout changes
CHARACTERS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class Documents:
    """n tokenised documents. tokens: uint16 or uint32 memmap of a whole source; arrays [n] int64; ids: n names.

    Document d is tokens[starts[d] : starts[d] + lengths[d]], without its end of document, from sizes[d] bytes of text.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, d: int) -> np.ndarray:
        """Tokens of document d, uint16 or uint32 [lengths[d]], a view."""
        return self.tokens[self.starts[d] : self.starts[d] + self.lengths[d]]

    def select(self, mask: np.ndarray) -> "Documents":
        """The documents where `mask` (bool [n]) holds, in order."""
        ids = tuple(name for name, chosen in zip(self.ids, mask, strict=True) if chosen)
        return Documents(self.tokens, self.starts[mask], self.lengths[mask], self.sizes[mask], ids)


def tokenised(
    files: Sequence[File], text_field: str, tokenizer, cache_dir: Path, progress: Callable[[File], None]
) -> tuple[Documents, dict[str, int]]:
    """All documents of `files`, and how many were skipped for which reason. Reads the cache if it has them.

    progress: called with each file once its text is read. UserError for unreadable files, for a cache that cannot be
    written or read back, and for a tokenizer that gives ids outside its own vocabulary.
    """
    stem = cache_dir / f"tokens-{_key(files, text_field, tokenizer)}"
    if not stem.with_suffix(".json").exists():
        _encode(files, text_field, tokenizer, stem, progress)
    try:
        meta = json.loads(stem.with_suffix(".json").read_text())
        tokens = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        lengths = np.array(meta["lengths"], np.int64)
        intact = tokens.size == lengths.sum() and len(meta["ids"]) == len(meta["sizes"]) == len(lengths)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{stem}.json, .npy: damaged token cache, delete both ({error})") from error
    check(intact, f"{stem}.json, .npy: damaged token cache, delete both (the lengths do not add up)")
    sizes = np.array(meta["sizes"], np.int64)
    return Documents(tokens, np.cumsum(lengths) - lengths, lengths, sizes, tuple(meta["ids"])), meta["skipped"]


def _key(files: Sequence[File], text_field: str, tokenizer) -> str:
    content = [(file.id, os.fspath(file.path), file.size, file.mtime_ns) for file in files]
    return hashlib.sha256(repr((FORMAT, tokenizer.fingerprint, text_field, content)).encode()).hexdigest()[:20]


def _encode(files: Sequence[File], text_field: str, tokenizer, stem: Path, progress: Callable[[File], None]) -> None:
    """Streams the tokens to disk, so that a corpus may exceed memory; the .json comes last and makes the pair valid."""
    meta = {"ids": [], "lengths": [], "sizes": []}
    skipped, dtype = Counter(), np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    unique = uuid.uuid4().hex[:8]  # processes of several machines may share the directory, and a process id
    partial = [stem.with_suffix(f".{unique}.partial{ending}") for ending in (".npy", ".json")]
    try:
        with partial[0].open("wb") as out:
            _write_header(out, 0, dtype)
            for names, texts in _chunks(files, text_field, skipped, progress):
                encoded = tokenizer.encode_batch(texts)
                flat = np.concatenate(encoded)
                low, high, last = flat.min(), flat.max(), tokenizer.vocab_size - 1
                check(0 <= low <= high <= last, f"tokenizer: gives ids {low}..{high}, its vocabulary is 0..{last}")
                flat.astype(dtype).tofile(out)
                meta["ids"] += names
                meta["lengths"] += [len(ids) for ids in encoded]
                meta["sizes"] += [len(text.encode()) for text in texts]
            check(bool(meta["ids"]), f"{files[0].path}: no document in it and {len(files) - 1} more files, all skipped")
            out.seek(0)
            _write_header(out, sum(meta["lengths"]), dtype)
        partial[1].write_text(json.dumps(meta | {"skipped": skipped}))
        partial[0].replace(stem.with_suffix(".npy"))
        partial[1].replace(stem.with_suffix(".json"))
    except OSError as error:
        raise UserError(f"{stem.parent}: the token cache cannot be written ({error.strerror})") from error
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


def _write_header(out, count: int, dtype: np.dtype) -> None:
    """The .npy header of `count` items. NumPy pads it for growth, so writing it again over the first keeps its size."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(out, header)


def _chunks(files: Sequence[File], text_field: str, skipped: Counter, progress: Callable[[File], None]):
    """(ids, texts) of consecutive documents, about CHARACTERS_AT_ONCE characters each time, never empty."""
    names, texts, size = [], [], 0
    for file in files:
        for name, text in read_documents(file, text_field, skipped):
            names.append(name)
            texts.append(text)
            size += len(text)
            if size >= CHARACTERS_AT_ONCE:
                yield names, texts
                names, texts, size = [], [], 0
        progress(file)
    if texts:
        yield names, texts
