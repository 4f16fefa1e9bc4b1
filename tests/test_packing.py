"""Packing: every token exactly once, whole documents stay whole, rows as a naive loop builds them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.train import packing as P

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
SEQ_LEN = st.integers(2, 24)


def tokens_of(layout):
    """Every (document, index) that the layout places, in row order."""
    return [(d, i) for row in range(len(layout)) for d, a, b in layout.pieces(row) for i in range(a, b)]


def row_sizes(layout):
    return [sum(b - a for _, a, b in layout.pieces(row)) for row in range(len(layout))]


def best_fit_by_search(sizes, seq_len):
    """Rows as lists of sizes: the definition, a search over all rows for each piece."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= seq_len]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            rows.append([size])
    return rows


def test_split_by_hand():
    layout = P.split_layout(np.array([3, 6, 1]), 4)
    assert [layout.pieces(row) for row in range(len(layout))] == [
        [(0, 0, 3), (1, 0, 1)],
        [(1, 1, 5)],
        [(1, 5, 6), (2, 0, 1)],
    ]


def test_split_has_no_empty_piece_where_documents_end_at_a_border():
    layout = P.split_layout(np.array([4, 4, 2]), 4)
    assert [layout.pieces(row) for row in range(len(layout))] == [[(0, 0, 4)], [(1, 0, 4)], [(2, 0, 2)]]


@settings(deadline=None)
@given(LENGTHS, SEQ_LEN)
def test_split_is_the_stream_cut_every_seq_len(lengths, seq_len):
    layout = P.split_layout(np.array(lengths), seq_len)
    stream = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    assert tokens_of(layout) == stream
    assert row_sizes(layout)[:-1] == [seq_len] * (len(layout) - 1)
    assert len(layout) == -(-len(stream) // seq_len)
    assert all(a < b for row in range(len(layout)) for _, a, b in layout.pieces(row))


def test_best_fit_by_hand():
    """5 leaves 3, 4 a row of its own with 4 left; 4 fills that; 3 fills the first, so nothing is wasted."""
    layout = P.best_fit_layout(np.array([3, 4, 5, 4]), 8)
    assert [layout.pieces(row) for row in range(len(layout))] == [[(2, 0, 5), (0, 0, 3)], [(1, 0, 4), (3, 0, 4)]]


def test_best_fit_cuts_only_what_exceeds_a_row():
    layout = P.best_fit_layout(np.array([9, 2]), 4)
    pieces = [layout.pieces(row) for row in range(len(layout))]
    assert pieces == [[(0, 0, 4)], [(0, 4, 8)], [(1, 0, 2), (0, 8, 9)]]


@settings(deadline=None)
@given(LENGTHS, SEQ_LEN)
def test_best_fit_keeps_documents_whole_and_loses_nothing(lengths, seq_len):
    layout = P.best_fit_layout(np.array(lengths), seq_len)
    assert Counter(tokens_of(layout)) == Counter((d, i) for d, length in enumerate(lengths) for i in range(length))
    assert max(row_sizes(layout)) <= seq_len
    for row in range(len(layout)):
        for d, a, b in layout.pieces(row):
            if lengths[d] <= seq_len:
                assert (a, b) == (0, lengths[d])
            else:
                assert a % seq_len == 0 and b == min(a + seq_len, lengths[d])


@settings(deadline=None)
@given(LENGTHS, SEQ_LEN)
def test_best_fit_fills_rows_like_a_search(lengths, seq_len):
    layout = P.best_fit_layout(np.array(lengths), seq_len)
    sizes = [min(seq_len, length - a) for length in lengths for a in range(0, length, seq_len)]
    expected = best_fit_by_search(sizes, seq_len)
    assert Counter(row_sizes(layout)) == Counter(map(sum, expected))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), max_size=5), st.integers(0, 5))
def test_row_like_a_naive_loop(pieces, spare):
    seq_len = sum(map(len, pieces)) + spare
    tokens, segments, positions = [], [], []
    for number, piece in enumerate(pieces):
        for position, token in enumerate(piece):
            tokens.append(token)
            segments.append(number + 1)
            positions.append(position)
    row = P.fill_row([np.array(piece) for piece in pieces], seq_len, 7)
    assert row["tokens"].tolist() == tokens + [7] * spare
    assert row["segment_ids"].tolist() == segments + [0] * spare
    assert row["positions"].tolist() == positions + [0] * spare
    assert {array.dtype for array in row.values()} == {np.dtype(np.int32)}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60_000), max_size=5), min_size=1, max_size=6), st.data())
def test_take_is_a_slice_of_the_concatenation(parts, data):
    whole = sum(parts, [])
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    taken = P.take([np.array(part, np.uint16) for part in parts], start, stop)
    assert taken.tolist() == whole[start:stop] and taken.dtype == np.int32


@settings(deadline=None)
@given(st.lists(st.integers(10, 99), min_size=1, max_size=20), st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2))
def test_fim_reassembles_to_the_document(document, cuts):
    parts = P.document_parts(np.array(document), 0, (1, 2, 3), sorted(cuts))
    flat = np.concatenate(parts).tolist()
    suffix, middle = flat.index(2), flat.index(3)
    assert flat[0] == 1 and flat[-1] == 0 and len(flat) == len(document) + 4
    assert flat[1:suffix] + flat[middle + 1 : -1] + flat[suffix + 1 : middle] == document


def test_fim_reaches_every_pair_of_cuts():
    """A document of 2 tokens has 3 places to cut, 6 ordered pairs."""
    rng = np.random.default_rng(0)
    document = np.array([10, 11])
    draws = (P.document_parts(document, 0, (1, 2, 3), np.sort(rng.random(2))) for _ in range(300))
    assert {tuple(len(part) for part in parts[1:6:2]) for parts in draws} == {
        (a, 2 - b, b - a) for a in range(3) for b in range(a, 3)
    }


def test_plain_document_ends_in_eos():
    assert np.concatenate(P.document_parts(np.array([5, 6]), 9)).tolist() == [5, 6, 9]


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_epoch_depends_on_the_seed_alone(packing):
    lengths = np.arange(1, 200)
    same = [P.make_epoch(lengths, 64, packing, 0.5, True, [3, 0, 1]) for _ in range(2)]
    other = P.make_epoch(lengths, 64, packing, 0.5, True, [3, 0, 2])
    for name in ("order", "fim", "cuts", "row_order"):
        first, second = (getattr(epoch, name) for epoch in same)
        assert np.array_equal(first, second)
        assert not np.array_equal(first, getattr(other, name))
    assert sorted(other.order) == list(range(199)) and sorted(other.row_order) == list(range(len(other.layout)))


def test_epoch_without_shuffle_is_in_order():
    epoch = P.make_epoch(np.array([3, 6, 1]), 4, "split", 0.0, False, [0])
    assert epoch.order.tolist() == [0, 1, 2] and epoch.row_order.tolist() == [0, 1, 2, 3]
    assert not epoch.fim.any()


def test_fim_choice_belongs_to_the_document_not_to_its_place():
    lengths = np.arange(1, 200)
    shuffled = P.make_epoch(lengths, 64, "split", 0.5, True, [3])
    in_order = P.make_epoch(lengths, 64, "split", 0.5, False, [3])
    assert np.array_equal(shuffled.fim, in_order.fim[shuffled.order])
    assert np.array_equal(shuffled.cuts, in_order.cuts[shuffled.order])


def test_fim_rate_is_the_share_of_documents_and_costs_three_tokens():
    lengths = np.full(20_000, 5)
    epoch = P.make_epoch(lengths, 64, "split", 0.3, True, [0])
    assert abs(epoch.fim.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 20_000)
    assert len(tokens_of(epoch.layout)) == 20_000 * 6 + 3 * epoch.fim.sum()
    assert P.make_epoch(lengths, 64, "split", 1.0, True, [0]).fim.all()
