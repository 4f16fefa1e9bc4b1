"""Held-out bits per byte, a loss that does not depend on the tokenizer, and retrieval by length."""

import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.compiling import jit
from glm5_jax.config import check
from glm5_jax.layers.mtp import shift
from glm5_jax.model import Glm5, merge, split
from glm5_jax.sharding.context import own
from glm5_jax.sharding.mesh import AXES, ROWS, local, put_all_rows, total
from glm5_jax.sharding.rules import parameter_specs
from glm5_jax.train import retrieval
from glm5_jax.train.data import ARRAYS
from glm5_jax.train.loss import cross_entropy
from glm5_jax.train.metrics import plot_by_length
from glm5_jax.train.step import target_weights


def make_loss_sum(model: Glm5, chunk: int, mesh: Mesh | None = None) -> Callable[[dict, dict], jax.Array]:
    """Compiled function (params, batch [B,T]) -> sum over targets of the loss in nats, float32.

    Args:
      model: real or abstract; on a mesh one that `place_parameters` has placed. Rows of a batch are cut over `ROWS`.
    """
    graphdef = split(model)[0]

    def loss_sum(params, batch):
        model = merge(graphdef, params)
        hidden, _, _ = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])
        targets, weights = own(shift(batch["tokens"], 1)), own(target_weights(batch, 1))
        return total(cross_entropy(hidden, model.output_matrix(), targets, weights, chunk), *AXES)

    specs = (parameter_specs(model), PartitionSpec(ROWS)) if mesh else None
    compiled = jit(local(loss_sum, mesh, specs, PartitionSpec()))
    return lambda params, batch: compiled(params, put_all_rows(batch, mesh))


def in_batches(rows: Iterable[dict], size: int) -> Iterator[dict]:
    """Batches of one row each as batches of `size` rows, the last filled up with padding: any number of rows, one program.

    Args:
      rows: from `data.held_out_batches` with one row a batch.
    Yields:
      tokens, segment_ids, positions [size,T], of conversations loss_mask, and "bytes" of text in the targets.
    """
    rows = iter(rows)
    while part := list(itertools.islice(rows, size)):
        batch = {"bytes": sum(row["bytes"] for row in part)}
        for name in [name for name in ARRAYS if name in part[0]]:
            together = np.concatenate([row[name] for row in part])
            batch[name] = np.pad(together, ((0, size - len(part)), (0, 0)))  # segment 0: padding
        yield batch


def bits_per_byte(loss_sum, params: dict, batches: Iterable[dict], progress: Callable[[int], None] | None = None) -> float:
    """Bits the model needs per byte of UTF-8 text.

    Args:
      loss_sum: from `make_loss_sum`.
      batches: from `data.held_out_batches`: tokens, segment_ids, positions [B,T], and "bytes" of text in the targets.
      progress: called with the number of rows done, rows of padding not counted.
    Returns:
      Bits per byte, NaN if the targets stand for no byte at all.
    """
    nats, size, rows = 0.0, 0, 0
    for batch in batches:
        arrays = {name: batch[name] for name in ARRAYS if name in batch}
        nats += float(loss_sum(params, arrays))
        size += batch["bytes"]
        rows += int(np.any(batch["segment_ids"] != 0, axis=1).sum())
        if progress:
            progress(rows)
    return nats / (math.log(2) * size) if size else math.nan


def make_right(graphdef) -> Callable[..., jax.Array]:
    """Compiled function (params, tokens int32 [B,T], places int32 [B,A]) -> bool [B].

    True where each token at `places` (-1: none) is the likeliest one after the tokens before it: what greedy decoding says.
    """

    @jit
    def right(params, tokens, places):
        model = merge(graphdef, params)
        hidden, _, _ = model.trunk(tokens)
        before = jnp.take_along_axis(hidden, jnp.maximum(places - 1, 0)[..., None], axis=1)
        wanted = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
        return jnp.all((jnp.argmax(model.logits(before), axis=-1) == wanted) | (places < 0), axis=-1)

    return right


def retrieval_by_length(
    model: Glm5,
    encode: Callable[[str], np.ndarray],
    tasks: Iterable[str],
    lengths: Iterable[int],
    samples: int,
    seed: int = 0,
    batch_rows: int = 8,
    progress: Callable[[int], None] | None = None,
) -> dict[str, dict[int, float]]:
    """Share of samples whose whole answer is right, by task and length.

    Args:
      encode: text -> ids. tasks: of `retrieval.TASKS`. lengths: tokens of a sample, answer included.
      samples: per task and length. progress: called with the number of samples done.
    """
    check(samples >= 1, f"samples={samples}: must be at least 1")
    check(batch_rows >= 1, f"batch_rows={batch_rows}: must be at least 1")
    check(seed >= 0, f"seed={seed}: must not be negative")
    for task in tasks:
        check(task in retrieval.TASKS, f"retrieval={task}: one of {', '.join(retrieval.TASKS)}, or all")
    streams = {task: functools.partial(_streams, seed, task, samples) for task in tasks}
    _check_lengths(lengths, model.cfg.max_position_embeddings, streams, encode)
    graphdef, params = split(model)
    right, done = make_right(graphdef), 0
    shares: dict[str, dict[int, float]] = {}
    for task in tasks:
        shares[task] = {}
        for length in lengths:
            made = [retrieval.text_sample(rng, task, length, encode) for rng in streams[task]()]
            most = max(int(sample.answer.sum()) for sample in made)
            hits = 0
            for start in range(0, samples, batch_rows):
                part = made[start : start + batch_rows]
                part += [made[0]] * (batch_rows - len(part))  # one shape for every batch; what repeats is not counted
                places = np.full((batch_rows, most), -1, np.int32)
                for row, sample in enumerate(part):
                    at = np.flatnonzero(sample.answer)
                    places[row, : len(at)] = at
                good = right(params, np.stack([sample.tokens for sample in part]), places)
                hits += int(np.sum(np.asarray(good)[: samples - start]))
                done += min(batch_rows, samples - start)
                if progress:
                    progress(done)
            shares[task][length] = hits / samples
    return shares


def _streams(seed: int, task: str, samples: int) -> list[np.random.Generator]:
    """The random numbers of each sample of a task; not of its length, so every length asks the same questions."""
    return [retrieval.stream(seed, "eval", list(retrieval.TASKS).index(task), i) for i in range(samples)]


def _check_lengths(lengths: Iterable[int], limit: int, streams: dict[str, Callable], encode) -> None:
    """Raises UserError for a length that not every sample of every task fits into, or that the model cannot take."""
    needs = {task: max(retrieval.least_length(rng, task, encode) for rng in make()) for task, make in streams.items()}
    longest = max(needs, key=needs.get)
    for length in lengths:
        check(length <= limit, f"lengths={length}: the position limit is {limit}")
        check(
            length >= needs[longest],
            f"lengths={length}: too short for {longest}, whose samples take {needs[longest]} tokens at least",
        )


def default_lengths(limit: int) -> tuple[int, ...]:
    """Powers of two from 256 to 4,096 that the position limit allows, else the limit itself."""
    return tuple(n for n in (256, 512, 1024, 2048, 4096) if n <= limit) or (limit,)


def evaluate_retrieval(model, tokenizer, options) -> int:
    """Prints, by task and length, the share of retrieval questions that a model answers."""
    every = not options.retrieval or options.retrieval == ("all",)
    tasks = tuple(retrieval.TASKS) if every else options.retrieval
    lengths = options.lengths or default_lengths(model.cfg.max_position_embeddings)
    with rich.progress.Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("evaluating", total=len(tasks) * len(lengths) * options.samples)
        shares = retrieval_by_length(
            model, tokenizer.encode, tasks, lengths, options.samples, options.seed, options.batch_rows,
            lambda done: bar.update(task, completed=done),
        )  # fmt: skip
    print(f"answers right, percent of {options.samples} samples, by tokens\n{'':13}" + "".join(f"{n:>8}" for n in lengths))
    for name, by_length in shares.items():
        print(f"{name:13}" + "".join(f"{100 * by_length[n]:>8.1f}" for n in lengths))
    if options.plot:
        plot_by_length(shares, options.samples, options.plot)
        print(f"plot: {options.plot}")
    if options.json:
        print(json.dumps({"retrieval": shares}))
    return 0
