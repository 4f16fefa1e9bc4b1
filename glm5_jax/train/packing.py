"""Documents into rows of one length, as plain functions on lengths and arrays.

Pre-training (paper section 2.2, GLM-4.5 section 2.3) concatenates shuffled documents and cuts the stream every T
tokens: "split"; the random cuts act as augmentation. Mid-training (section 2.3) keeps documents whole: "best_fit". In
both, documents of a row never see each other: each piece has its own segment id and its own positions from 0. Code is
rewritten prefix-suffix-middle at a rate (fill in the middle, FIM).
"""

import bisect
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which piece of which document lies in which row. P pieces, R rows; all arrays int64.

    doc, start, stop [P]: piece p is tokens start..stop-1 of document doc. row_start [R+1]: row r holds the pieces
    row_start[r]..row_start[r+1]-1 in that order.
    """

    doc: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    row_start: np.ndarray

    def __len__(self) -> int:
        return len(self.row_start) - 1

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """(doc, start, stop) of each piece of `row`."""
        span = slice(self.row_start[row], self.row_start[row + 1])
        return list(zip(self.doc[span].tolist(), self.start[span].tolist(), self.stop[span].tolist(), strict=True))


def split_layout(lengths: np.ndarray, seq_len: int) -> Layout:
    """Joins documents of `lengths` [n] (each >= 1) in order and cuts every T = `seq_len` tokens; R = ceil(sum / T)."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    row_starts = np.arange(0, ends[-1], seq_len)
    borders = np.union1d(row_starts, ends)
    starts, stops = borders[:-1], borders[1:]
    doc = np.searchsorted(ends, starts, side="right")
    offset = ends[doc] - lengths[doc]
    row_start = np.append(np.searchsorted(starts, row_starts), len(starts))
    return Layout(doc, starts - offset, stops - offset, row_start)


def best_fit_layout(lengths: np.ndarray, seq_len: int) -> Layout:
    """Best-fit decreasing: no document of `lengths` [n] that fits into a row is ever cut.

    A document longer than `seq_len` is first cut into pieces of `seq_len` and a rest, each a segment of its own. Pieces
    are placed from the longest to the shortest, ties in the given order, into the fullest row that still has room (any
    of several equally full ones), else into a new row.
    """
    lengths = np.asarray(lengths, np.int64)
    count = -(-lengths // seq_len)
    doc = np.repeat(np.arange(len(lengths)), count)
    start = (np.arange(len(doc)) - np.repeat(np.cumsum(count) - count, count)) * seq_len
    stop = np.minimum(start + seq_len, lengths[doc])
    row = np.empty(len(doc), np.int64)
    order = np.argsort(start - stop, kind="stable")
    row[order] = _best_fit_rows((stop - start)[order].tolist(), seq_len)
    order = order[np.argsort(row[order], kind="stable")]
    row_start = np.searchsorted(row[order], np.arange(row.max() + 2))
    return Layout(doc[order], start[order], stop[order], row_start)


def _best_fit_rows(sizes: list[int], seq_len: int) -> list[int]:
    """Row of each size, given in decreasing order. Rows wait in one queue per amount of room left."""
    rows_with_room = {}
    rooms = []  # sorted amounts of room that some row has left
    placed, rows = [], 0
    for size in sizes:
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                del rooms[at], rows_with_room[room]
        else:
            room, row, rows = seq_len, rows, rows + 1
        placed.append(row)
        left = room - size
        if left and left not in rows_with_room:
            rows_with_room[left] = []
            bisect.insort(rooms, left)
        if left:
            rows_with_room[left].append(row)
    return placed


LAYOUTS = {"split": split_layout, "best_fit": best_fit_layout}


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over n documents: every random choice and the rows that follow from them.

    order int64 [n]: layout document d is document order[d]. fim bool [n], cuts float64 [n, 2]: for each document in
    that order, whether it is rewritten and the two cut points as fractions of its length. row_order int64 [R].
    """

    order: np.ndarray
    fim: np.ndarray
    cuts: np.ndarray
    layout: Layout
    row_order: np.ndarray


def make_epoch(
    lengths: np.ndarray, seq_len: int, packing: str, fim_rate: float, shuffle: bool, seed: list[int]
) -> Epoch:
    """Draws an epoch over documents of `lengths` [n] tokens (without end of document) from `seed` alone.

    A document takes one token more for its end and three for the FIM markers. With `shuffle` documents are permuted
    before packing, and rows after it, so that the rows of a long document do not follow one another.
    """
    rng = np.random.default_rng(seed)
    draws = rng.random((len(lengths), 3))
    order = rng.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    fim = draws[order, 0] < fim_rate
    layout = LAYOUTS[packing](lengths[order] + 1 + 3 * fim, seq_len)
    row_order = rng.permutation(len(layout)) if shuffle else np.arange(len(layout))
    return Epoch(order, fim, np.sort(draws[order, 1:], axis=1), layout, row_order)


def document_parts(tokens: np.ndarray, eos_id: int, fim_ids=None, cuts=(0.0, 0.0)) -> list[np.ndarray]:
    """The arrays whose concatenation is a document as trained on: tokens [n] and its end, or its FIM form.

    With fim_ids = (prefix, suffix, middle) and cuts 0 <= a <= b < 1 of the n+1 places to cut, the document P M S
    becomes <prefix> P <suffix> S <middle> M <end>: n + 4 tokens. Cuts lie between tokens, so a model sees the same
    tokens in both forms. Views: nothing is read or copied yet.
    """
    end = np.array([eos_id])
    if fim_ids is None:
        return [tokens, end]
    prefix, suffix, middle = (np.array([i]) for i in fim_ids)
    a, b = (int(cut * (len(tokens) + 1)) for cut in cuts)
    return [prefix, tokens[:a], suffix, tokens[b:], middle, tokens[a:b], end]


def take(parts: list[np.ndarray], start: int, stop: int) -> np.ndarray:
    """int32 [stop - start]: that span of the concatenation of `parts`, without building the rest."""
    spans, at = [], 0
    for part in parts:
        spans.append(part[max(start - at, 0) : max(stop - at, 0)])
        at += len(part)
    return np.concatenate(spans).astype(np.int32)


def fill_row(
    pieces: list[np.ndarray], seq_len: int, pad_id: int, masks: list[np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """tokens, segment_ids, positions, each int32 [T]: segments 1, 2, 3.. and positions from 0 per piece.

    masks: bool like each piece, the trained tokens; then the row has loss_mask, bool [T], too.

    The unused tail has tokens `pad_id`, segment 0 and position 0. (pad_id may also be a real token: segment 0, not the
    id, marks padding.)
    """
    row = {name: np.zeros(seq_len, np.int32) for name in ("tokens", "segment_ids", "positions")}
    row["tokens"][:] = pad_id
    at = 0
    for segment, piece in enumerate(pieces, start=1):
        span = slice(at, at + len(piece))
        row["tokens"][span] = piece
        row["segment_ids"][span] = segment
        row["positions"][span] = np.arange(len(piece))
        at += len(piece)
    if masks is not None:
        row["loss_mask"] = np.zeros(seq_len, bool)
        row["loss_mask"][:at] = np.concatenate([*masks, np.zeros(0, bool)])
    return row
