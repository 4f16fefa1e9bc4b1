"""Held-out bits per byte against log-softmax in numpy, from the logits of the model."""

import math

import numpy as np
import pytest

from glm5_jax.model import split
from glm5_jax.train.evaluate import bits_per_byte, in_batches, make_loss_sum
from helpers_train import lively_model, log_softmax, packed_batch, step_config


@pytest.fixture(scope="module")
def model():
    return lively_model(step_config())


def batch_of(rows, seed, size):
    return {k: np.asarray(v[0]) for k, v in packed_batch(rows, 12, seed=seed).items()} | {"bytes": size}


def nats(model, batch) -> float:
    """Sum over targets: tokens whose predecessor in the row is of the same document."""
    out = model(batch["tokens"], batch["positions"], batch["segment_ids"])
    logp, total = log_softmax(out.logits), 0.0
    for r, row in enumerate(batch["segment_ids"]):
        for t in range(1, len(row)):
            if row[t] == row[t - 1] > 0:
                total -= logp[r, t - 1, batch["tokens"][r, t]]
    return total


@pytest.mark.smoke
def test_bits_per_byte_sum_over_all_batches_before_they_divide(model):
    """The second batch holds fewer targets and a row of nothing: a mean of means would be another number."""
    held_out = [batch_of([[5, 7], [12]], 0, 31), batch_of([[3], []], 1, 2)]
    params = split(model)[1]
    seen = []
    score = bits_per_byte(make_loss_sum(model, 5), params, held_out, seen.append)
    expected = sum(nats(model, b) for b in held_out) / (math.log(2) * 33)
    assert score == pytest.approx(expected, rel=1e-5)
    assert seen == [2, 3]  # rows; one of the second batch is padding


def test_the_chunk_does_not_matter(model):
    params = split(model)[1]
    held_out = [batch_of([[5, 7], [12]], 0, 31)]
    scores = [bits_per_byte(make_loss_sum(model, chunk), params, held_out) for chunk in (3, 100)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_rows_in_batches_of_one_shape_are_the_same_rows(model):
    """Five rows two at a time: the sixth is padding, which is no row and adds nothing."""
    rows = [batch_of([[4, 6]], seed, 10 + seed) for seed in range(5)]
    batches = list(in_batches(iter(rows), 2))
    assert [b["tokens"].shape for b in batches] == [(2, 12)] * 3 and [b["bytes"] for b in batches] == [21, 25, 14]
    for name in ("tokens", "segment_ids", "positions"):
        together = np.concatenate([b[name] for b in batches])
        np.testing.assert_array_equal(together[:5], np.concatenate([r[name] for r in rows]))
    assert not batches[-1]["segment_ids"][1].any()
    params = split(model)[1]
    seen = []
    score = bits_per_byte(make_loss_sum(model, 5), params, batches, seen.append)
    expected = sum(nats(model, r) for r in rows) / (math.log(2) * 60)
    assert score == pytest.approx(expected, rel=1e-5) and seen == [2, 4, 5]
