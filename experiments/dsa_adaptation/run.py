"""Retrieval by length: dense, after indexer warm-up alone, after sparse adaptation (paper section 2.1.2, Table 6).

    python experiments/dsa_adaptation/run.py [--seeds 0 1 2 3 5] [--quick] [--out DIR]

A small model learns multi-key needles and associative recall under dense attention; then its indexer learns from that
attention, all else frozen; then everything trains under sparse attention. README.md beside this file is the protocol.
A finished seed lies in DIR/seed_N.json and is not run again; the tables and the plot are made from all seeds asked for.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from glm5_jax.compiling import jit
from glm5_jax.config import ModelConfig, tiny
from glm5_jax.layers.block import Block
from glm5_jax.layers.mla import Mla
from glm5_jax.model import Glm5, abstract, merge, split
from glm5_jax.sparse.indexer import index_scores
from glm5_jax.sparse.masks import visible
from glm5_jax.sparse.topk import MASKED
from glm5_jax.train import retrieval
from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.step import LossConfig, Rates, TrainState, flat, make_step, trainable_specs

HERE = pathlib.Path(__file__).parent
TASKS = ("multi_key", "recall")
NEEDED = {  # name in the results, one for each layer -> what a table calls it
    "key_selected": "layer 1: answer in the context selects its key",
    "needle_selected": "layer 2: question selects that answer",
}
TILES = (2, 4, 8, 16)  # consecutive queries whose selections are united; the Pallas kernel's tile is 8


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Every number of the experiment; README.md says why."""

    k: int = 8  # K
    lengths: tuple[int, ...] = (16, 32, 64, 128)  # 2K, 4K, 8K, 16K
    symbols: retrieval.Symbols = retrieval.Symbols(keys=48, values=16, noise=16)
    width: int = 64  # D, Q and R
    index_heads: int = 2  # I
    index_width: int = 24  # J
    tokens: int = 2048  # of every batch
    fetch_steps: int = 400  # at most, of the first layer alone on the token before, until it is learnt
    short_steps: int = 600  # at most, of short sequences with the answers as only targets, until they are learnt
    dense_steps: int = 800  # of sequences growing to the longest, all tokens targets
    warmup_steps: int = 80
    other_warmups: tuple[int, ...] = (40, 120, 160)  # from the same base, not adapted
    sparse_steps: int = 560
    eval_tokens: int = 16_384  # per task and length: 1,024 questions of multi_key, 2,048 of recall
    lr: float = 1e-3  # constant, of dense training
    lr_sparse: float = 1e-4  # constant, of sparse adaptation
    indexer_rate: float = 10.0  # multiples of lr_sparse at which the indexer adapts
    lr_warmup: tuple[float, float] = (5e-3, 2e-4)  # of the indexer's warm-up, linear

    def model(self, attention: str, layers: int = 2) -> ModelConfig:
        """The network: layers of one width, dense FFN, no MTP."""
        return tiny(
            vocab_size=self.symbols.vocab_size, hidden_size=self.width, num_hidden_layers=layers, first_k_dense_replace=layers,
            num_attention_heads=2, q_lora_rank=self.width, kv_lora_rank=self.width, qk_nope_head_dim=32,
            qk_rope_head_dim=16, v_head_dim=32, intermediate_size=64, num_nextn_predict_layers=0, rope_theta=100.0,
            initializer_range=self.width**-0.5, index_n_heads=self.index_heads, index_head_dim=self.index_width,
            index_topk=self.k, max_position_embeddings=self.lengths[-1], attention=attention,
        )  # fmt: skip


QUICK = Protocol(
    fetch_steps=2,
    short_steps=2,
    dense_steps=2,
    warmup_steps=2,
    other_warmups=(1,),
    sparse_steps=2,
    eval_tokens=64,
    lengths=(16, 32),
    tokens=64,
)


def fetch_back(rng: np.random.Generator, length: int, symbols: retrieval.Symbols) -> retrieval.Sample:
    """Any two tokens, then the first of them again: what attention to the previous token answers."""
    triples = rng.integers(retrieval.ASK + 1, symbols.vocab_size, (length // 3, 3))
    triples[:, 2] = triples[:, 0]
    start = length - triples.size
    tokens, answer = np.full(length, retrieval.START, np.int32), np.zeros(length, bool)
    tokens[start:], answer[start + 2 :: 3] = triples.ravel(), True
    return retrieval.Sample(tokens, answer)


def fresh(cfg: ModelConfig, seed: int) -> dict:
    """Initial parameters: the embedding 4 times as large, what a layer adds to the residual stream 4 times as small.

    At this width the first layer's output would otherwise bury the embedding that the second layer must compare.
    """
    params = flat(split(Glm5(cfg, nnx.Rngs(seed)))[1])
    factor = {"embedding": 4.0, "out": 0.25, "down": 0.25}
    return traverse_util.unflatten_dict({path: value * factor.get(path[-1], 1.0) for path, value in params.items()})


def grow(small: dict, large: dict) -> dict:
    """`large`, parameters of more layers, with all that `small` has in place of its own; layers are a leading axis."""
    return jax.tree.map(lambda a, b: a if a.shape == b.shape else b.at[: len(a)].set(a), small, large)


class Stage:
    """Trains with `glm5_jax.train.step`; compiled once for all seeds.

    Args:
      cfg: the network. lr: schedule. steps: of the schedule. freeze, index_weight, indexer_rate: as in TrainConfig.
    """

    def __init__(self, cfg: ModelConfig, lr: LearningRate, steps: int, freeze=(), index_weight=0.0, indexer_rate=1.0):
        model, zero = abstract(cfg), lambda step: jnp.float32(0)
        settings = OptimizerConfig(update_rms=1.0, weight_decay=0.0, indexer_rate=indexer_rate)
        self.specs = trainable_specs(model, freeze)
        self.optimizer = make_optimizer(settings, lr.schedule(steps), self.specs)
        loss = LossConfig(mtp_steps=0, balance_weight=0.0, index_weight=index_weight)
        self.step = jit(make_step(model, self.optimizer, Rates(zero, zero), loss, freeze), donate_argnums=0)

    def start(self, params: dict) -> TrainState:
        """State with fresh moments around a copy of `params`."""
        params = jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), params, self.optimizer.init({p: v for p, v in flat(params).items() if p in self.specs}))


class Experiment:
    """Compiled programs and data of one protocol."""

    def __init__(self, p: Protocol):
        self.p = p
        dense, sparse = p.model("dense"), p.model("sparse")
        self.graphs = {a: split(abstract(cfg))[0] for a, cfg in (("dense", dense), ("sparse", sparse))}
        constant, slow = (LearningRate("constant", peak=lr, warmup_steps=20) for lr in (p.lr, p.lr_sparse))
        falling = LearningRate("linear", peak=p.lr_warmup[0], final=p.lr_warmup[1], warmup_steps=0)
        self.first_layer = Stage(p.model("dense", 1), constant, p.fetch_steps, ("indexer",))
        self.dense = Stage(dense, constant, p.dense_steps, ("indexer",))
        warmups = (p.warmup_steps, p.warmup_steps + p.sparse_steps, *p.other_warmups)
        self.warmups = {steps: Stage(dense, falling, steps, ("trunk",), 1.0) for steps in warmups}
        self.dense_on = Stage(dense, slow, p.sparse_steps, ("indexer",))
        self.adaptations = {
            "adapted": Stage(sparse, slow, p.sparse_steps, (), 1.0, p.indexer_rate),
            "one_rate": Stage(sparse, slow, p.sparse_steps, (), 1.0),
            "frozen_indexer": Stage(sparse, slow, p.sparse_steps, ("indexer",)),
        }

    def batch(self, seed: int, stage: int, step: int, tasks, lengths, masked: bool, t: int = 0) -> dict:
        """Batch [1,b,T] of a step, T the longest of `lengths` or `t`; masked: only answers are targets."""
        t = t or max(lengths)
        rng = retrieval.stream(seed, "train", stage, step)
        batch = retrieval.packed_batch(rng, tasks, lengths, self.p.tokens // t, t, self.p.symbols)
        if not masked:
            del batch["loss_mask"]
        return {name: jnp.asarray(array)[None] for name, array in batch.items()}

    def train(self, stage: Stage, params: dict, steps: int, batches) -> dict:
        """Parameters after `steps` steps on batches(step)."""
        state = stage.start(params)
        for step in range(steps):
            state, metrics = stage.step(state, batches(step))
        assert bool(metrics["finite"])
        return state.params

    @functools.cached_property
    def tasks(self):
        return tuple(retrieval.TASKS[name] for name in TASKS)

    def base(self, seed: int, say) -> tuple[dict, dict]:
        """Dense parameters from scratch, and the steps that the first layer and the short sequences took."""
        p, short = self.p, tuple(n for n in (8, 16, 32) if n <= self.p.lengths[-1])
        state = self.first_layer.start(fresh(p.model("dense", 1), seed))
        for fetched in range(p.fetch_steps):
            state, metrics = self.first_layer.step(state, self.batch(seed, 4, fetched, (fetch_back,), short, True))
            if float(metrics["ce"]) < 0.02:
                break
        state = self.dense.start(grow(state.params, fresh(p.model("dense"), seed)))
        asked_more = functools.partial(retrieval.recall, every=5)
        for step in range(p.short_steps):
            state, _ = self.dense.step(state, self.batch(seed, 0, step, (asked_more,), short, True))
            if (step + 1) % 50 == 0:
                score = self.accuracy(state.params, "dense", "recall", 32)
                say(f"first layer {fetched + 1} steps; short sequences, step {step + 1}: recall at 32 tokens {score:.3f}")
                if score > 0.97:
                    break
        lengths, longest = (8, *p.lengths), p.lengths[-1]

        def batches(i):
            grown = min(len(lengths), 3 + 2 * i * (len(lengths) - 2) // p.dense_steps)  # all from half way on
            return self.batch(seed, 1, i, self.tasks, lengths[:grown], False, longest)

        return self.train(self.dense, state.params, p.dense_steps, batches), {"first_layer": fetched + 1, "short": step + 1}

    @functools.cached_property
    def _hits(self):
        def hits(params, batch, attention):
            model = merge(self.graphs[attention], params)
            hidden, _, _ = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])
            right = jnp.argmax(model.logits(hidden), -1)[:, :-1] == batch["tokens"][:, 1:]
            return jnp.sum(right & batch["loss_mask"][:, 1:])

        return jit(hits, static_argnums=2)

    def questions(self, task: str, length: int, tokens: int) -> dict:
        """Evaluation batch [b,T], the same for every seed and state: sequences of one length in rows of the longest."""
        rng = retrieval.stream(0, "eval", TASKS.index(task), length)
        t = self.p.lengths[-1]
        return retrieval.packed_batch(rng, (retrieval.TASKS[task],), (length,), tokens // t, t, self.p.symbols)

    def accuracy(self, params, attention: str, task: str, length: int) -> float:
        """Share of answers that are the likeliest token."""
        batch = self.questions(task, length, self.p.eval_tokens)
        return int(self._hits(params, batch, attention)) / int(batch["loss_mask"].sum())

    def scores(self, params, attention: str) -> dict:
        """Accuracy by task and length."""
        return {task: {str(n): self.accuracy(params, attention, task, n) for n in self.p.lengths} for task in TASKS}

    def full_batches(self, seed: int, stage: int):
        """Step -> batch of all tasks and lengths, every token a target."""
        return lambda step: self.batch(seed, stage, step, self.tasks, self.p.lengths, False)

    def needed_selected(self, params, task: str, length: int) -> list[float]:
        """Share of questions whose needed keys are selected, for each of the two layers.

        In the last layer the question must select the answer in the context; in the first, that answer must select the
        token before it, the key it belongs to.
        """
        batch = self.questions(task, length, self.p.eval_tokens)
        first, last = np.asarray(self._selected(params, batch))
        found = []
        for row, t in zip(*np.nonzero(batch["loss_mask"])):
            same = batch["segment_ids"][row] == batch["segment_ids"][row, t]
            key = int(np.argmax(same & (batch["tokens"][row] == batch["tokens"][row, t - 1])))
            found.append((key in first[row, key + 1], key + 1 in last[row, t - 1]))
        return np.mean(found, axis=0).tolist()

    def overlap(self, params, task: str) -> dict[str, list[float]]:
        """Tile size n -> per layer the mean of |union of the selections of n consecutive queries| / (n K).

        The longest sequences, one to a row; tiles start at multiples of n and hold only queries that see more than K keys.
        """
        selected = np.asarray(self._selected(params, self.questions(task, self.p.lengths[-1], self.p.eval_tokens)))
        layers, rows, length, k = selected.shape
        shares = {}
        for n in TILES:
            tiles = selected.reshape(layers, rows, length // n, n * k)[:, :, -(-k // n) :]
            ordered = np.sort(tiles, axis=-1)
            unions = 1 + np.sum(ordered[..., 1:] != ordered[..., :-1], axis=-1)
            shares[str(n)] = (unions.mean((1, 2)) / (n * k)).tolist()
        return shares

    @functools.cached_property
    def _selected(self):
        def selected(params, batch):
            model = merge(self.graphs["sparse"], params)
            rows = (batch["tokens"], batch["positions"], batch["segment_ids"])
            layers = model.trunk(*rows, collect=frozenset({"selected"}))[1]
            return jnp.stack([layer["selected"] for layer in layers])  # [L,B,T,K]

        return jit(selected)

    def ties(self, params, draws: int = 3) -> dict:
        """What random instead of lowest-position tie-breaking does to log-probabilities at the longest sequences."""
        batch = self.questions("recall", self.p.lengths[-1], self.p.tokens)
        exact, tied = self._log_probs(params, batch, None)
        again, _ = self._log_probs(params, batch, None)
        moved = [np.abs(self._log_probs(params, batch, jax.random.key(draw))[0] - exact) for draw in range(draws)]
        return {
            "queries_with_a_tie_at_k": [float(share) for share in tied],
            "deterministic_again_max": float(np.max(np.abs(again - exact))),
            "random_mean": float(np.mean(moved)),
            "random_max": float(np.max(moved)),
        }

    @functools.cached_property
    def _log_probs(self):
        k, cfg = self.p.k, self.p.model("sparse")

        def log_probs(params, batch, key):
            """(log-probability of each next token [B,T-1], per layer the share of queries with a tie at the K-th place)."""
            model = merge(split(abstract(cfg, Glm5 if key is None else _random_ties(key)))[0], params)
            rows = (batch["tokens"], batch["positions"], batch["segment_ids"])
            hidden, aux, _ = model.trunk(*rows, collect=frozenset({"index_scores"}))
            log_p = jax.nn.log_softmax(model.logits(hidden))[:, :-1]
            log_p = jnp.take_along_axis(log_p, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
            ranked = [-jnp.sort(-layer["index_scores"], axis=-1)[:, k:] for layer in aux]  # queries that see more than K keys
            return log_p, jnp.stack([jnp.mean(r[..., k - 1] == r[..., k]) for r in ranked])

        return jit(log_probs)


def chance_overlap(k: int, length: int, n: int) -> float:
    """What `Experiment.overlap` would find if every query selected k of its visible keys by chance."""
    unions = []
    for start in range(-(-k // n) * n, length - n + 1, n):
        skipped = 1 - k / np.arange(start + 1, start + n + 1)  # of each query: chance that it does not select a given key
        old, new = start * (1 - np.prod(skipped)), sum(1 - np.prod(skipped[i:]) for i in range(n))
        unions.append(old + new)
    return float(np.mean(unions)) / (n * k)


def _random_ties(key: jax.Array) -> type[Glm5]:
    """The network whose selection breaks exact ties by chance."""

    class RandomTies(Mla):
        def select(self, index, ctx):
            scores = index_scores(*index, visible(ctx.rows, ctx.key_segment))
            chance = jax.random.uniform(key, scores.shape)
            best = jnp.lexsort((chance, -scores), axis=-1)[..., : self.cfg.index_topk]
            found = jnp.take_along_axis(scores, best, axis=-1) > MASKED
            ascending = jnp.sort(jnp.where(found, best, scores.shape[-1]), axis=-1)
            return jnp.where(ascending < scores.shape[-1], ascending, -1).astype(jnp.int32)

    class RandomBlock(Block):
        attention_class = RandomTies

    class RandomGlm5(Glm5):
        block_class = RandomBlock

    return RandomGlm5


STATES = {  # name in the results -> what a table calls it
    "dense": "dense",
    "dense_on": "dense, trained on for the steps of adaptation",
    "untrained": "sparse, indexer untrained",
    "warmup": "sparse, indexer warm-up only",
    "adapted": "sparse, adapted",
    "one_rate": "sparse, adapted at one rate",
    "frozen_indexer": "sparse, adapted with the indexer frozen",
    "long_warmup": "sparse, warm-up for the steps of both",
}
SPARSE = ("warmup", "adapted", "one_rate", "frozen_indexer", "long_warmup")
PLOTTED = ("dense", "warmup", "adapted", "one_rate", "frozen_indexer")


def run_seed(experiment: Experiment, seed: int, say) -> dict:
    """Everything about one seed: accuracy by state, task and length, needed keys selected, ties, overlap."""
    e, p, start = experiment, experiment.p, time.perf_counter()
    base, steps = e.base(seed, say)
    result = {"seed": seed, "steps": steps}
    result |= {name: {} for name in ("accuracy", "key_selected", "needle_selected", "ties", "overlap")}

    def record(name, params, attention):
        result["accuracy"][name] = e.scores(params, attention)
        if attention == "sparse":
            pairs = ((task, n) for task in TASKS for n in p.lengths)
            needed = {f"{task} {n}": e.needed_selected(params, task, n) for task, n in pairs}
            for layer, measure in enumerate(NEEDED):
                result[measure][name] = {place: shares[layer] for place, shares in needed.items()}
            result["ties"][name] = e.ties(params)
            result["overlap"][name] = {task: e.overlap(params, task) for task in TASKS}
        by_length = {n: f"{100 * v:.1f}" for n, v in result["accuracy"][name]["recall"].items()}
        say(f"{time.perf_counter() - start:.0f} s, {name}: recall {by_length}")

    record("dense", base, "dense")
    record("dense_on", e.train(e.dense_on, base, p.sparse_steps, e.full_batches(seed, 3)), "dense")
    record("untrained", base, "sparse")
    warm = {steps: e.train(stage, base, steps, e.full_batches(seed, 2)) for steps, stage in e.warmups.items()}
    result["warmup_steps"] = {str(steps): e.scores(params, "sparse") for steps, params in sorted(warm.items())}
    record("warmup", warm[p.warmup_steps], "sparse")
    for name, stage in e.adaptations.items():
        record(name, e.train(stage, warm[p.warmup_steps], p.sparse_steps, e.full_batches(seed, 3)), "sparse")
    record("long_warmup", warm[p.warmup_steps + p.sparse_steps], "sparse")
    result["seconds"] = round(time.perf_counter() - start)
    return result


def summary(results: list[dict], p: Protocol) -> str:
    """Tables in Markdown: mean and sample standard deviation over seeds."""
    head = "| " + " | ".join(f"{n} ({n // p.k}K)" for n in p.lengths) + " |"
    lines = [f"Seeds {', '.join(str(r['seed']) for r in results)}; percent, mean ± standard deviation over seeds."]
    lines += ["In brackets: dense itself is below 95%, so that this length of this seed shows nothing."]
    for task in TASKS:
        lines += ["", f"**{task}**", "", "| state " + head, "|---" * (len(p.lengths) + 1) + "|"]
        for state, title in STATES.items():
            values = [[100 * r["accuracy"][state][task][str(n)] for r in results] for n in p.lengths]
            lines.append(f"| {title} | " + " | ".join(map(cell, values)) + " |")
        for state in SPARSE:
            cells = (" / ".join(minus_dense(r, state, task, str(n)) for r in results) for n in p.lengths)
            lines.append(f"| {STATES[state]} minus dense, by seed | " + " | ".join(cells) + " |")
        for state, (measure, title) in itertools.product(SPARSE, NEEDED.items()):
            values = [[100 * r[measure][state][f"{task} {n}"] for r in results] for n in p.lengths]
            lines.append(f"| {state}, {title} | " + " | ".join(map(cell, values)) + " |")
    lines += ["", "**How much warm-up, without adaptation**", "", "| task, steps " + head, "|---" * (len(p.lengths) + 1) + "|"]
    for task in TASKS:
        for steps in results[0]["warmup_steps"]:
            values = [[100 * r["warmup_steps"][steps][task][str(n)] for r in results] for n in p.lengths]
            lines.append(f"| {task}, {steps} | " + " | ".join(map(cell, values)) + " |")
    lines += ["", f"**Ties** (recall, {p.lengths[-1]} tokens)", ""]
    lines += ["| state | queries with a tie at place K, layer 1 / 2 | mean abs. change of log p | largest | exact again |"]
    lines += ["|---" * 5 + "|"]
    for state in ("untrained", "warmup", "adapted"):
        ties = [r["ties"][state] for r in results]
        shares = " / ".join(cell([100 * t["queries_with_a_tie_at_k"][layer] for t in ties]) + "%" for layer in range(2))
        moved = f"{np.mean([t['random_mean'] for t in ties]):.4f} | {max(t['random_max'] for t in ties):.2f}"
        again = max(t["deterministic_again_max"] for t in ties)
        lines.append(f"| {STATES[state]} | {shares} | {moved} | {again:g} |")
    return "\n".join(lines + overlap_table(results, p)) + "\n"


def minus_dense(result: dict, state: str, task: str, length: str) -> str:
    """Points of one seed by which a state differs from dense, in brackets where dense is below 95%."""
    dense = result["accuracy"]["dense"][task][length]
    points = f"{100 * (result['accuracy'][state][task][length] - dense):+.1f}"
    return points if dense >= 0.95 else f"({points})"


def cell(values) -> str:
    """Mean and sample standard deviation."""
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def overlap_table(results: list[dict], p: Protocol) -> list[str]:
    """Lines of the table of `Experiment.overlap`."""
    seeds = ", ".join(str(r["seed"]) for r in results)
    lines = ["", f"**Overlap of neighbouring queries' selections** ({p.lengths[-1]} tokens, seeds {seeds})", ""]
    lines += ["Union of n consecutive queries' selections, percent of n K; in brackets the union / K.", ""]
    lines += ["| state, layer, task | " + " | ".join(f"n = {n}" for n in TILES) + " |", "|---" * (len(TILES) + 1) + "|"]
    for state, layer, task in itertools.product(("untrained", "warmup", "adapted"), range(2), TASKS):
        values = {n: [100 * r["overlap"][state][task][str(n)][layer] for r in results] for n in TILES}
        cells = (f"{cell(v)} ({np.mean(v) * n / 100:.1f})" for n, v in values.items())
        lines.append(f"| {STATES[state]}, {layer + 1}, {task} | " + " | ".join(cells) + " |")
    chance = {n: chance_overlap(p.k, p.lengths[-1], n) for n in TILES}
    cells = (f"{100 * share:.1f} ({share * n:.1f})" for n, share in chance.items())
    return [*lines, "| any K visible keys, by chance | " + " | ".join(cells) + " |"]


def plot(results: list[dict], p: Protocol, path: pathlib.Path) -> None:
    """Accuracy against length, one panel per task: lines are means, bars the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(9, 4.4), sharey=True)
    for panel, task in zip(panels, TASKS):
        for state, mark in zip(PLOTTED, "os^Dv"):
            values = np.array([[100 * r["accuracy"][state][task][str(n)] for n in p.lengths] for r in results])
            mean = values.mean(0)
            spread = np.stack([mean - values.min(0), values.max(0) - mean])
            panel.errorbar(p.lengths, mean, spread, marker=mark, capsize=3, label=STATES[state])
        panel.set_xscale("log", base=2)
        panel.set_xticks(p.lengths, [f"{n}\n{n // p.k}K" for n in p.lengths])
        panel.set(title=task, xlabel="tokens")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("answers right, %")
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs the seeds that are not done yet, then writes the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 5])
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="where results go")
    arguments = parser.parse_args()
    p = QUICK if arguments.quick else Protocol()
    arguments.out.mkdir(parents=True, exist_ok=True)
    experiment, results = Experiment(p), []
    for seed in arguments.seeds:
        path = arguments.out / f"seed_{seed}.json"
        if not path.exists():
            result = run_seed(experiment, seed, lambda text, seed=seed: print(f"seed {seed}: {text}", flush=True))
            path.write_text(json.dumps({"protocol": dataclasses.asdict(p), **result}, indent=1) + "\n")
        results.append(json.loads(path.read_text()))
        if results[-1]["protocol"] != json.loads(json.dumps(dataclasses.asdict(p))):
            parser.error(f"{path} is of another protocol: delete it, or give another --out")
    table = summary(results, p)
    (arguments.out / "summary.md").write_text(table)
    plot(results, p, arguments.out / "accuracy.png")
    print(table + f"written: {arguments.out / 'summary.md'}, {arguments.out / 'accuracy.png'}")


if __name__ == "__main__":
    main()
