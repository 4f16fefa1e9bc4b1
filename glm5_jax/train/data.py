"""The data pipeline: sources -> tokens -> packed rows -> batches (paper sections 2.2 and 2.3).

    config = DataConfig(sources=("code@2", "books.jsonl"), tokenizer="bpe:2048", seq_len=512)
    corpus = load_corpus(config, cache_dir)
    iterator = batches(corpus, config, batch_rows=8)
    batch = next(iterator)          # tokens, segment_ids, positions [8, 512]; doc_ids names the documents
    state = iterator.get_state()    # JSON-able; iterator.set_state(state) goes on at the same next batch

Rows are addressable at random: row i is a function of (corpus, config, seed, i), so a resumed run reads nothing twice
and process p of n reads only its own rows. grain does the mixing, slicing, batching, reading ahead and the iterator's
state.
"""

import bisect
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import grain
import numpy as np

from glm5_jax.config import check
from glm5_jax.convert.chat import check_chat_tokens
from glm5_jax.convert.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    bpe_size,
    load_tokenizer,
    train_bpe,
    trained_tokenizer,
)
from glm5_jax.errors import UserError
from glm5_jax.train.conversations import ChatConfig, list_conversations
from glm5_jax.train.packing import (
    LAYOUTS,
    Epoch,
    best_fit_layout,
    document_parts,
    fill_row,
    make_epoch,
    split_layout,
    take,
)
from glm5_jax.train.sources import STDLIB, TEXT_ENDINGS, File, list_files, parse_source, read_documents
from glm5_jax.train.token_cache import Documents, tokenised

BPE_SAMPLE_BYTES = 8_000_000  # text that a BPE is trained on, seconds of work
ENDLESS = 2**53  # rows; grain computes lengths in float64, where sys.maxsize would round up and overflow
ARRAYS = ("tokens", "segment_ids", "positions", "loss_mask")  # of a batch, the last one of conversations alone
READ_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on and how to cut it into rows (paper sections 2.2 and 2.3)."""

    sources: tuple[str, ...] = (STDLIB,)  # PATH or PATH@WEIGHT: folder, text, jsonl, parquet, array_record; or stdlib
    extensions: tuple[str, ...] = TEXT_ENDINGS  # endings of the text files that a folder contributes
    text_field: str = "text"  # field of JSONL and JSON records, column of Parquet, that holds the text
    kind: Literal["text", "chat"] = "text"  # chat = conversations of JSONL files (train/conversations.py), for SFT
    chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
    tokenizer: str = "bytes"  # bytes, bytes:chat, path of a tokenizer.json, or bpe:VOCAB to train VOCAB ids on the sources
    seq_len: int = 512  # T, tokens per row
    packing: Literal["split", "best_fit"] = "split"  # split = join and cut every T; best_fit = whole documents
    fim_rate: float = 0.0  # share of documents rewritten as prefix, suffix, middle
    held_out: float = 0.05  # share of documents kept out of training, chosen by a hash of their ids
    seed: int = 0  # of the order of documents and rows and of the FIM cuts
    shuffle: bool = True  # permute documents and rows, differently in each epoch; False = in order of their ids

    def __post_init__(self):
        for name in ("sources", "extensions"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.chat, dict):
            object.__setattr__(self, "chat", ChatConfig(**self.chat))
        for entry in self.sources:
            parse_source(entry)
        bpe_size(self.tokenizer)
        check(self.seq_len >= 2, f"seq_len={self.seq_len}: must be at least 2, one token predicts the next")
        check(self.packing in LAYOUTS, f"packing={self.packing}: must be one of {', '.join(LAYOUTS)}")
        check(0 <= self.fim_rate <= 1, f"fim_rate={self.fim_rate}: must lie in 0..1")
        if self.kind == "chat":
            check(self.packing == "best_fit", f"packing={self.packing}: a conversation is never cut in two; must be best_fit")
            check(self.fim_rate == 0, f"fim_rate={self.fim_rate}: conversations have no fill-in-the-middle; must be 0")
        check(0 <= self.held_out < 1, f"held_out={self.held_out}: must lie in 0..1, below 1")
        check(self.seed >= 0, f"seed={self.seed}: must not be negative")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenised documents, all of each. train, held_out, weights: one entry per source. summary: lines for people."""

    train: tuple[Documents, ...]
    held_out: tuple[Documents, ...]
    weights: tuple[float, ...]
    tokenizer: ByteTokenizer | BpeTokenizer
    summary: str


def load_corpus(
    config: DataConfig, cache_dir: str | Path, progress: Callable[[int, int], None] | None = None
) -> Corpus:
    """Reads, tokenises and splits every source.

    cache_dir: keeps the tokens (`tokens-*`) and a trained BPE (`tokenizer.json`); a second call with the same inputs
    reads them back instead. progress(done, total): bytes of files read so far.
    Raises UserError for whatever is wrong with the settings or the files, and when a source has fewer training tokens
    than one row.
    """
    cache_dir = Path(cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{cache_dir}: no directory can be made here for the token cache ({error.strerror})") from error
    check(len(config.sources) > 0, "sources: names no source")
    paths, weights = zip(*map(parse_source, config.sources), strict=True)
    files = [source_files(config, path) for path in paths]
    tokenizer = _tokenizer(config, files, cache_dir)
    chat = config.chat if config.kind == "chat" else None
    if chat is not None:
        check_chat_tokens(tokenizer, config.tokenizer)
    check(
        config.fim_rate == 0 or tokenizer.fim_ids is not None,
        f"fim_rate={config.fim_rate}: tokenizer={config.tokenizer} has no FIM markers",
    )
    report = _Progress(progress, sum(file.size for source in files for file in source))
    loaded = [tokenised(source, config.text_field, tokenizer, cache_dir, report, chat) for source in files]
    masks = held_out_masks([documents.ids for documents, _ in loaded], config.held_out)
    train = tuple(documents.select(~mask) for (documents, _), mask in zip(loaded, masks, strict=True))
    held_out = tuple(documents.select(mask) for (documents, _), mask in zip(loaded, masks, strict=True))
    for path, documents in zip(paths, train, strict=True):
        _check_enough(config, path, documents)
    skipped = [skipped for _, skipped in loaded]
    lines = [_describe(config.seq_len, *source) for source in zip(paths, files, train, held_out, skipped, strict=True)]
    return Corpus(train, held_out, weights, tokenizer, "\n".join(lines))


def source_files(config: DataConfig, path: str) -> tuple[File, ...]:
    """The files of one source that hold documents of the config's kind."""
    return list_conversations(path) if config.kind == "chat" else list_files(path, config.extensions)


def _check_enough(config: DataConfig, path: str, documents: Documents) -> None:
    """Text fills a row at least; of conversations one has to fit, the rest of a row is padding."""
    tokens = documents.lengths.sum() + len(documents)
    given = f"sources={path}: {len(documents)} training documents (held_out={config.held_out})"
    if config.kind == "chat":
        fit = len(documents.cut(config.seq_len))
        check(fit > 0, f"{given}, none with a trained token among its first seq_len={config.seq_len}")
    else:
        check(tokens >= config.seq_len, f"{given} have {tokens} tokens, fewer than one row of seq_len={config.seq_len}")


class _Progress:
    """Turns "this file is done" into (bytes done, bytes in all)."""

    def __init__(self, report: Callable[[int, int], None] | None, total: int):
        self.report, self.total, self.done = report, total, 0

    def __call__(self, file: File) -> None:
        self.done += file.size
        if self.report is not None:
            self.report(self.done, self.total)


def _describe(seq_len: int, path: str, files, train: Documents, held_out: Documents, skipped: dict[str, int]) -> str:
    fit = [train.cut(seq_len), held_out.cut(seq_len)]
    late = len(train) + len(held_out) - sum(map(len, fit))
    long = 0 if train.trained is None else sum(int(np.sum(part.lengths >= seq_len)) for part in (train, held_out)) - late
    line = f"{path}: {len(files):,} files; train {_size(fit[0])}; held out {_size(fit[1])}"
    line += "".join(f"; skipped {count:,} {reason}" for reason, count in sorted(skipped.items()))
    line += f"; skipped {late:,} without a trained token among the first {seq_len:,}" if late else ""
    return line + (f"; cut {long:,} to {seq_len:,} tokens" if long else "")


def _size(documents: Documents) -> str:
    line = f"{len(documents):,} documents {documents.sizes.sum():,} bytes {documents.lengths.sum():,} tokens"
    if documents.trained is None:
        return line
    return f"{line}, {sum(int(documents.mask(d).sum()) for d in range(len(documents))):,} of them trained"


def _hash(name: str) -> float:
    """A number in 0..1 that depends on the document's id alone."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def held_out_masks(ids: list[tuple[str, ...]], share: float) -> list[np.ndarray]:
    """Per source, bool [n]: which of its documents are held out.

    A document is held out when the hash of its id is below `share`, whatever other documents there are. Two exceptions
    for tiny corpora: where that leaves nothing to evaluate on, the document with the smallest hash is held out; but an
    only document is for training. The examples of one conversation share its id, and so its side.
    """
    hashes = [np.array([_hash(name) for name in names]) for names in ids]
    every = np.concatenate(hashes)
    limit = share if len(np.unique(every)) > 1 else 0.0
    if limit > 0 and every.min() >= share:
        limit = np.nextafter(every.min(), 1)
    return [values < limit for values in hashes]


def _tokenizer(config: DataConfig, files: list[tuple[File, ...]], cache_dir: Path) -> ByteTokenizer | BpeTokenizer:
    size = bpe_size(config.tokenizer)
    if size is None:
        return load_tokenizer(config.tokenizer)
    path = cache_dir / "tokenizer.json"
    tokenizer = trained_tokenizer(config.tokenizer, path)
    if tokenizer is None:
        check(
            config.kind == "text",
            f"tokenizer={config.tokenizer}: none is trained on conversations; start from a run that has one (init.run)",
        )
        tokenizer = train_bpe(_bpe_sample(config, files), size)
        tokenizer.save(path)
    return tokenizer


def _bpe_sample(config: DataConfig, files: list[tuple[File, ...]]) -> list[str]:
    """About BPE_SAMPLE_BYTES of training text: the same share of every document, from a place given by its id."""
    every_file = [file for source in files for file in source]
    share = min(1.0, BPE_SAMPLE_BYTES / max(1, sum(file.size for file in every_file)))
    names, slices = [], []
    for file in every_file:
        for name, text in read_documents(file, config.text_field, Counter()):
            size = max(1, int(share * len(text)))
            start = int(_hash(name + " sample") * (len(text) - size + 1))
            names.append(name)
            slices.append(text[start : start + size])
    check(bool(names), f"sources={' '.join(config.sources)}: no file holds a document")
    (mask,) = held_out_masks([tuple(names)], config.held_out)
    return [text for text, held_out in zip(slices, mask, strict=True) if not held_out]


class _Rows:
    """All rows of one source, epoch after epoch without end, for random access: what grain calls a data source.

    The rows of an epoch are counted, not assumed: FIM markers make epochs differ in length. grain's own shuffle would
    need one length, and gives epoch e of seed s the order of epoch e - 1 of seed s + 1.
    """

    def __init__(self, documents: Documents, tokenizer, config: DataConfig, seed: int, source: int):
        self._documents, self._tokenizer, self._config = documents.cut(config.seq_len), tokenizer, config
        check(len(self._documents) > 0, f"seq_len={config.seq_len}: no conversation has a trained token among so many")
        self._seed = [seed, source]
        self._first_row = [0]  # of each epoch so far, and of the next
        self._epochs: dict[int, Epoch] = {}  # the latest two, for reads on both sides of a border
        self._lock = threading.Lock()  # grain reads ahead on threads

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict:
        """Row `index`: tokens, segment_ids, positions int32 [T], of conversations loss_mask bool [T], and doc_ids, the name
        behind each segment."""
        with self._lock:
            epoch, row = self._locate(index)
        pieces = epoch.layout.pieces(epoch.row_order[row])
        masks = None
        if self._documents.trained is not None:
            masks = [self._documents.mask(epoch.order[d])[start:stop] for d, start, stop in pieces]
        filled = fill_row(
            [take(self._parts(epoch, d), start, stop) for d, start, stop in pieces],
            self._config.seq_len,
            self._tokenizer.eos_id,
            masks,
        )
        return filled | {"doc_ids": tuple(self._documents.ids[epoch.order[d]] for d, _, _ in pieces)}

    def _locate(self, index: int) -> tuple[Epoch, int]:
        while index >= self._first_row[-1]:
            last = len(self._first_row) - 1
            self._first_row.append(self._first_row[-1] + len(self._epoch(last).layout))
        number = bisect.bisect_right(self._first_row, index) - 1
        return self._epoch(number), index - self._first_row[number]

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            c = self._config
            seed = [*self._seed, number]
            epoch = make_epoch(self._documents.lengths, c.seq_len, c.packing, c.fim_rate, c.shuffle, seed)
            kept = list(self._epochs.items())[-1:]
            self._epochs = dict(kept) | {number: epoch}
        return self._epochs[number]

    def _parts(self, epoch: Epoch, d: int) -> list[np.ndarray]:
        fim_ids = self._tokenizer.fim_ids if epoch.fim[d] else None
        return document_parts(self._documents[epoch.order[d]], self._tokenizer.eos_id, fim_ids, epoch.cuts[d])


def _stack(rows: list[dict]) -> dict:
    batch = {name: np.stack([row[name] for row in rows]) for name in ARRAYS if name in rows[0]}
    return batch | {"doc_ids": [row["doc_ids"] for row in rows]}


def batches(
    corpus: Corpus,
    config: DataConfig,
    batch_rows: int,
    seed: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator:
    """The endless iterator over training batches of this process.

    batch_rows: B, rows of one batch of this process; the global batch is batch_rows * process_count rows, the same set
    of rows for every split of that product. seed: None = config.seed. With several sources a fixed pattern takes rows
    from each in proportion to the weights (to 1%, as grain rounds them).

    Each batch: tokens, segment_ids, positions int32 [B, T], of conversations loss_mask bool [B, T], the tokens that are
    trained, and doc_ids, a list of B tuples: doc_ids[b][s - 1] names the document of segment s in row b. Segments count
    from 1 in a row, 0 is padding; positions restart at 0 in each; each document ends in eos_id. `get_state()` is a small
    JSON-able dict, the number of batches handed out; after `set_state(state)` on a fresh iterator the next batch is the
    same as it would have been.
    Raises UserError for batch_rows < 1 and for a process_index outside 0..process_count-1.
    """
    check(batch_rows >= 1, f"batch_rows={batch_rows}: must be at least 1")
    check(
        0 <= process_index < process_count,
        f"process_index={process_index}: must lie in 0..process_count-1={process_count - 1}",
    )
    seed = config.seed if seed is None else seed
    check(seed >= 0, f"seed={seed}: must not be negative")
    rows = [
        grain.MapDataset.source(_Rows(documents, corpus.tokenizer, config, seed, source))
        for source, documents in enumerate(corpus.train)
    ]
    mixed = grain.MapDataset.mix(rows, corpus.weights) if len(rows) > 1 else rows[0]
    mine = mixed.slice(slice(process_index, None, process_count)).batch(batch_rows, batch_fn=_stack)
    return iter(mine.to_iter_dataset(READ_AHEAD))


def held_out_batches(corpus: Corpus, config: DataConfig, batch_rows: int, limit: int | None = None) -> Iterator[dict]:
    """One pass over the held-out documents of all sources: text in order, joined and cut every T tokens, no FIM;
    conversations packed whole.

    limit: at most so many batches. Each batch is as in `batches`, the last one filled up with rows of segment 0, and
    has "bytes": int, the UTF-8 bytes of text that its targets stand for. A target is a token whose predecessor in the
    row has the same segment, so neither the first token of a piece nor padding, and that is trained; an end of document is
    a target of 0 bytes. So bits per byte = sum of the targets' losses in nats / (ln 2 * sum of bytes), with ends of
    document charged to the text.
    Raises UserError when no document is held out.
    """
    check(batch_rows >= 1, f"batch_rows={batch_rows}: must be at least 1")
    sources = [source.cut(config.seq_len) for source in corpus.held_out]
    documents = [(source, d) for source in sources for d in range(len(source))]
    check(bool(documents), f"held_out={config.held_out}: no document is held out, there is nothing to evaluate on")
    layout = best_fit_layout if config.kind == "chat" else split_layout
    layout = layout(np.array([source.lengths[d] + 1 for source, d in documents]), config.seq_len)
    first_rows = range(0, len(layout), batch_rows)[:limit]
    return (
        _held_out_batch(corpus.tokenizer, documents, layout, config.seq_len, range(row, row + batch_rows))
        for row in first_rows
    )


def _held_out_batch(tokenizer, documents, layout, seq_len: int, rows: range) -> dict:
    filled = []
    for row in rows:
        pieces = [(*documents[d], start, stop) for d, start, stop in (layout.pieces(row) if row < len(layout) else [])]
        arrays = [take(document_parts(source[d], tokenizer.eos_id), start, stop) for source, d, start, stop in pieces]
        masks = None
        if documents[0][0].trained is not None:
            masks = [source.mask(d)[start:stop] for source, d, start, stop in pieces]
        names = tuple(source.ids[d] for source, d, _, _ in pieces)
        filled.append(fill_row(arrays, seq_len, tokenizer.eos_id, masks) | {"doc_ids": names})
    batch = _stack(filled)
    size = tokenizer.token_bytes[batch["tokens"][:, 1:]][targets_of(batch)].sum()
    return batch | {"bytes": int(size)}


def targets_of(batch: dict) -> np.ndarray:
    """bool [...,T-1]: whether token i + 1 of a batch is a target of token i."""
    after = batch["segment_ids"][..., 1:]
    targets = (after == batch["segment_ids"][..., :-1]) & (after > 0)
    return targets & batch["loss_mask"][..., 1:] if "loss_mask" in batch else targets
