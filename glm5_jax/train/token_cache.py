"""The tokens of a source on disk: encoded once, memory-mapped by every later run.

Per source two files in the cache directory, named by a hash of everything their content depends on: `tokens-KEY.npy`,
all documents one after another without ends of document, and `tokens-KEY.json`, the ids and lengths; of conversations also
`tokens-KEY.trained.npy`, which tokens are trained.
"""

import contextlib
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
from glm5_jax.train.conversations import ChatConfig, Encoded, encoded_conversations
from glm5_jax.train.sources import File, read_documents

FORMAT = 1  # raise when the files' layout changes, or what is rendered of a conversation
CHARACTERS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class Documents:
    """n tokenised documents. tokens: uint16 or uint32 memmap of a whole source; arrays [n] int64; ids: n names.

    Document d is tokens[starts[d] : starts[d] + lengths[d]], without its end of document, from sizes[d] bytes of text.
    Of conversations some tokens are trained, of text all: then there is no trained, bool memmap beside tokens, nor ends,
    bool [n], whether the end of document is, nor firsts, int64 [n], the place of the first trained token in the document.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sizes: np.ndarray
    ids: tuple[str, ...]
    trained: np.ndarray | None = None
    ends: np.ndarray | None = None
    firsts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, d: int) -> np.ndarray:
        """Tokens of document d, uint16 or uint32 [lengths[d]], a view."""
        return self.tokens[self.starts[d] : self.starts[d] + self.lengths[d]]

    def select(self, mask: np.ndarray) -> "Documents":
        """The documents where `mask` (bool [n]) holds, in order."""
        ids = tuple(name for name, chosen in zip(self.ids, mask, strict=True) if chosen)
        arrays = {name: getattr(self, name) for name in ("starts", "lengths", "sizes", "ends", "firsts")}
        arrays = {name: array if array is None else array[mask] for name, array in arrays.items()}
        return dataclasses.replace(self, ids=ids, **arrays)

    def in_memory(self) -> "Documents":
        """The same without files behind it."""
        trained = None if self.trained is None else np.array(self.trained)
        return dataclasses.replace(self, tokens=np.array(self.tokens), trained=trained)

    def mask(self, d: int) -> np.ndarray:
        """Which tokens of conversation d are trained, bool [lengths[d] + 1]: the last is its end of document."""
        return np.append(self.trained[self.starts[d] : self.starts[d] + self.lengths[d]], self.ends[d])

    def cut(self, seq_len: int) -> "Documents":
        """Conversations of at most `seq_len` tokens with their end; text as it is, it may go on in another row.

        A longer one keeps its first seq_len - 1 tokens and gets an end that is not trained; it is left out if none of those is.
        """
        if self.trained is None:
            return self
        long = self.lengths >= seq_len
        cut = dataclasses.replace(self, lengths=np.minimum(self.lengths, seq_len - 1), ends=self.ends & ~long)
        return cut.select(~long | (self.firsts < seq_len - 1))


def tokenised(
    files: Sequence[File],
    text_field: str,
    tokenizer,
    cache_dir: Path,
    progress: Callable[[File], None],
    chat: ChatConfig | None = None,
) -> tuple[Documents, dict[str, int]]:
    """All documents of `files`, and how many were skipped for which reason. Reads the cache if it has them.

    chat: the files hold conversations, rendered by these settings. progress: called with each file once its text is read.
    UserError for unreadable files, for a cache that cannot be written or read back, and for a tokenizer that gives ids
    outside its own vocabulary.
    """
    stem = cache_dir / f"tokens-{_key(files, text_field, tokenizer, chat)}"
    if not stem.with_suffix(".json").exists():
        if chat is None:
            chunks = lambda skipped: _encoded_texts(files, text_field, tokenizer, skipped, progress)  # noqa: E731
        else:
            chunks = lambda skipped: encoded_conversations(files, chat, tokenizer, skipped, progress)  # noqa: E731
        _write(files, chunks, tokenizer, stem, chat is not None)
    try:
        meta = json.loads(stem.with_suffix(".json").read_text())
        tokens = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        lengths = np.array(meta["lengths"], np.int64)
        intact = tokens.size == lengths.sum() and len(meta["ids"]) == len(meta["sizes"]) == len(lengths)
        masks = {}
        if chat is not None:
            masks["trained"] = np.load(stem.with_suffix(".trained.npy"), mmap_mode="r")
            masks |= {"ends": np.array(meta["ends"], bool), "firsts": np.array(meta["firsts"], np.int64)}
            intact &= masks["trained"].size == tokens.size and len(masks["ends"]) == len(masks["firsts"]) == len(lengths)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{stem}.json, .npy: damaged token cache, delete both ({error})") from error
    check(intact, f"{stem}.json, .npy: damaged token cache, delete both (the lengths do not add up)")
    sizes = np.array(meta["sizes"], np.int64)
    starts = np.cumsum(lengths) - lengths
    return Documents(tokens, starts, lengths, sizes, tuple(meta["ids"]), **masks), meta["skipped"]


def _key(files: Sequence[File], text_field: str, tokenizer, chat: ChatConfig | None) -> str:
    content = [(file.id, os.fspath(file.path), file.size, file.mtime_ns) for file in files]
    how = text_field if chat is None else chat
    return hashlib.sha256(repr((FORMAT, tokenizer.fingerprint, how, content)).encode()).hexdigest()[:20]


def _write(files: Sequence[File], chunks: Callable, tokenizer, stem: Path, masked: bool) -> None:
    """Streams the tokens to disk, so that a corpus may exceed memory; the .json comes last and makes the files valid.

    chunks(skipped): an iterator over `Encoded`. masked: write which tokens are trained.
    """
    meta = {"ids": [], "lengths": [], "sizes": []} | ({"ends": [], "firsts": []} if masked else {})
    skipped, dtype = Counter(), np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    unique = uuid.uuid4().hex[:8]  # processes of several machines may share the directory, and a process id
    types = {".npy": dtype} | ({".trained.npy": np.dtype(bool)} if masked else {})
    partial = {ending: stem.with_suffix(f".{unique}.partial{ending}") for ending in (*types, ".json")}
    try:
        with contextlib.ExitStack() as stack:
            outs = [stack.enter_context(contextlib.closing(_Array(partial[e], kind))) for e, kind in types.items()]
            for chunk in chunks(skipped):
                flat = np.concatenate(chunk.ids)
                low, high, last = flat.min(), flat.max(), tokenizer.vocab_size - 1
                check(0 <= low <= high <= last, f"tokenizer: gives ids {low}..{high}, its vocabulary is 0..{last}")
                for out, arrays in zip(outs, (chunk.ids, chunk.trained)):
                    out.append(np.concatenate(arrays))
                meta["ids"] += chunk.names
                meta["lengths"] += [len(ids) for ids in chunk.ids]
                meta["sizes"] += chunk.sizes
                if masked:
                    meta["ends"] += chunk.ends
                    meta["firsts"] += [int(np.argmax(trained)) for trained in chunk.trained]
            why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
            where = f"{files[0].path}: no document in it and {len(files) - 1} more files, all skipped"
            check(bool(meta["ids"]), f"{where} ({why})" if why else where)
        partial[".json"].write_text(json.dumps(meta | {"skipped": skipped}))
        for ending, path in partial.items():
            path.replace(stem.with_suffix(ending))
    except OSError as error:
        raise UserError(f"{stem.parent}: the token cache cannot be written ({error.strerror})") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


class _Array:
    """A .npy file of one dimension that grows. NumPy pads its header for that: written again, it keeps its size."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._out, self._dtype, self._count = path.open("wb"), dtype, 0
        self._write_header()

    def append(self, array: np.ndarray) -> None:
        array.astype(self._dtype).tofile(self._out)
        self._count += len(array)

    def close(self) -> None:
        self._out.seek(0)
        self._write_header()
        self._out.close()

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self._count,)}
        np.lib.format.write_array_header_1_0(self._out, header)


def _encoded_texts(files: Sequence[File], text_field: str, tokenizer, skipped: Counter, progress: Callable[[File], None]):
    """The documents of `files`, in order; all of their tokens are trained, which `Encoded` does not say."""
    for names, texts in _chunks(files, text_field, skipped, progress):
        sizes = [len(text.encode()) for text in texts]
        yield Encoded(names, tokenizer.encode_batch(texts), [], [], sizes)


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
