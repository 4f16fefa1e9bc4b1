"""The training loop: everything with a side effect. The mathematics is in `step.py`.

A run can be stopped at any moment, kill -9 included, and started again by the same command: the losses that follow are
bit-identical to those of a run that was never stopped.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import rich.progress
from jax.experimental import multihost_utils

from glm5_jax import processes
from glm5_jax.compiling import compiler_options
from glm5_jax.config import check
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, split
from glm5_jax.sharding.mesh import check_rows, make_mesh, put_rows, readers, shardings_of
from glm5_jax.sharding.rules import parameter_specs, place_parameters
from glm5_jax.sparse import attention
from glm5_jax.train import flops
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.data import ARRAYS, Corpus, batches, held_out_batches, load_corpus, targets_of
from glm5_jax.train.evaluate import bits_per_byte, in_batches, make_loss_sum
from glm5_jax.train.inherit import Source, bring_tokenizer, first_state, first_state_on, open_source
from glm5_jax.train.metrics import INDEX_KL, Metrics, Progress
from glm5_jax.train.metrics import read as metrics_of
from glm5_jax.train.optimizer import make_optimizer
from glm5_jax.train.schedule import by_step
from glm5_jax.train.session import Stopped, only_one, signals, start_over, write_config
from glm5_jax.train.stages import InitConfig, TrainConfig
from glm5_jax.train.step import Rates, TrainState, apart, flat, make_step, state_specs, trainable_specs


@dataclasses.dataclass
class Result:
    """What a finished run reports: held-out bits per byte, the corpus, and the final parameters."""

    bits_per_byte: float
    corpus: Corpus
    params: dict
    already_done: bool


@dataclasses.dataclass
class _Pending:
    """A step that was dispatched and whose metrics have not been read yet."""

    step: int
    metrics: dict
    batch: dict
    doc_ids: list


def train(config: TrainConfig, run_dir: str | pathlib.Path, resume: bool = True) -> Result:
    """Trains until `config.steps`, or goes on where an earlier call stopped.

    Raises:
      UserError: bad settings or data, a non-finite loss under nonfinite="stop", unusable checkpoints.
      Stopped: after a signal.
    """
    run_dir = pathlib.Path(run_dir)
    with processes.watched(settings_text(config, run_dir, resume)), only_one(run_dir):
        attention.implementation_of(config.model, config.micro_rows, config.data.seq_len)  # refuses what this machine cannot do
        fresh = bool(processes.from_first("" if resume and (run_dir / "config.json").exists() else "fresh"))
        if not fresh:
            runs.check_same(runs.read_config(run_dir), config, run_dir)
        # A mistake in the settings or the data is found before anything of an earlier run is touched.
        data = run_dir / ("data.new" if fresh else "data")
        try:
            source = open_source(config, run_dir) if fresh and config.init.run else None
            corpus = processes.first_alone(lambda: _load_corpus(config, data, fresh and processes.is_first(), source))
            run = Run(config, run_dir, corpus)
            first = run.init() if fresh else None
        except BaseException:
            if fresh and processes.is_first():
                shutil.rmtree(data, ignore_errors=True)
                with contextlib.suppress(OSError):  # not empty: it holds an earlier run
                    run_dir.rmdir()
            raise
        if fresh and processes.is_first():
            start_over(run_dir)
            data.rename(run_dir / "data")
        processes.from_first("")  # nobody goes on before process 0 is here
        print(run.header())
        return run.train(first)


def settings_text(config: TrainConfig, run_dir: pathlib.Path, resume: bool) -> str:
    """What has to be the same in all processes of a run, one setting a line."""
    return json.dumps(dataclasses.asdict(config) | {"resume": resume, "run_dir": str(run_dir)}, indent=0)


def _load_corpus(config: TrainConfig, data: pathlib.Path, fresh: bool, source: Source | None) -> Corpus:
    """The corpus, its tokens and tokenizer kept in `data`; checked against the model. The tokenizer is the source's."""
    if fresh:
        shutil.rmtree(data, ignore_errors=True)  # of an attempt that was killed
    if fresh and source is not None:
        bring_tokenizer(source, config.data.tokenizer, data)
    with rich.progress.Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("reading the corpus", total=None)
        corpus = load_corpus(config.data, data, lambda done, total: bar.update(task, completed=done, total=total))
    name, tokenizer, model = config.data.tokenizer, corpus.tokenizer, config.model
    check(
        tokenizer.vocab_size <= model.vocab_size,
        f"data.tokenizer={name}: has {tokenizer.vocab_size} ids, model.vocab_size={model.vocab_size}",
    )
    check(
        tokenizer.eos_id in model.eos_token_id,
        f"data.tokenizer={name}: ends documents in id {tokenizer.eos_id}, but model.eos_token_id={model.eos_token_id}",
    )
    return corpus


def _attention_words(config: TrainConfig) -> str:
    model = config.model
    if model.attention == "dense":
        return "dense attention"
    taken = attention.implementation_of(model, config.micro_rows, config.data.seq_len)
    return f"sparse attention, {model.index_topk:,} keys a query, implementation {taken}"


def _rate_words(config: TrainConfig) -> str:
    """The learning rate over the run, that of the indexer too where it is another."""
    lr, times = config.lr, config.optimizer.indexer_rate
    span = f"{lr.peak:g}" if lr.kind == "constant" else f"{lr.peak:g} to {lr.final:g}"
    warm = f" after {lr.warmup_steps:,} steps of warm-up" if lr.warmup_steps else ""
    indexer = f", {times:g} times that for the indexer" if times != 1 and "indexer" not in config.freeze else ""
    return f"learning rate {span}, {lr.kind}{warm}{indexer}"


class Run:
    """One call of `train`: compiled functions, iterators and open files."""

    def __init__(self, config: TrainConfig, run_dir: pathlib.Path, corpus: Corpus):
        self.config, self.run_dir, self.corpus = config, run_dir, corpus
        self.plan = config.plan()
        self.mesh = make_mesh(config.mesh)
        for start in self.plan.phases(config.steps):
            check_rows(self.mesh, self.plan.micro_rows_at(start), self.plan.length_at(start))
        self.reader, self.readers = readers(self.mesh)
        self.model = abstract(config.model, runs.network_class(config))
        if self.mesh:
            self.model = place_parameters(self.model, dict(self.mesh.shape))
        specs = trainable_specs(self.model, config.freeze)
        cuts = flat(parameter_specs(self.model)) if self.mesh else None
        lr = config.lr.schedule(config.steps)
        optimizer = make_optimizer(config.optimizer, lr, specs, cuts, self.mesh, apart(config.loss))
        rates = Rates(
            by_step(config.mtp_weight, self.plan, "mtp_weight"), by_step(config.bias_rate, self.plan, "bias_rate")
        )
        step = make_step(self.model, optimizer, rates, config.loss, config.freeze, self.mesh)
        self.programs: dict[tuple, Callable] = {}  # the compiled step, by the shape of its batch
        fresh = dataclasses.replace(config, init=InitConfig())
        self.template = jax.eval_shape(lambda: first_state(fresh, optimizer))
        self.init = functools.partial(first_state, config, optimizer)
        shardings = None
        if self.mesh:
            shardings = shardings_of(self.mesh, state_specs(self.template, self.model))
            self.template = jax.tree.map(lambda leaf, s: leaf.update(sharding=s), self.template, shardings)
            self.init = functools.partial(first_state_on, self.mesh, shardings, config, optimizer)
        self.step_fn = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options())
        self.lr = config.lr.schedule(config.steps)
        self.loss_sum = make_loss_sum(self.model, config.loss.chunk, self.mesh)
        self.flops = functools.cache(lambda length: flops.flops_per_token(self.model, length, config.loss.mtp_steps))
        self._open_data(0)
        self.say = print
        self.signal: int | None = None
        self.tracing = False

    def header(self) -> str:
        """What is about to happen, for people."""
        c, devices = self.config, jax.devices()
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split(self.model)[1]))
        rows = [f"{self.plan.rows_at(s)} x {self.plan.length_at(s)}" for s in self.plan.phases(c.steps)]
        mesh = ", " + " x ".join(f"{name} {n}" for name, n in self.mesh.shape.items()) if self.mesh else ""
        lines = [
            self.corpus.summary,
            f"model: {size / 1e6:,.2f}M parameters; {c.steps:,} steps of {', then '.join(rows)} tokens, "
            f"{self.plan.tokens_before(c.steps):,} in all; {len(devices)} x {devices[0].device_kind}{mesh}; {c.optimizer.name}",
            f"trains: {', '.join(self._trained())}; {_attention_words(c)}; {_rate_words(c)}",
        ]
        if c.model.attention == "sparse" and c.data.seq_len <= c.model.index_topk:
            lines.append(
                f"note: every key is selected and the indexer decides nothing: "
                f"data.seq_len={c.data.seq_len}, model.index_topk={c.model.index_topk}"
            )
        return "\n".join(lines)

    def _trained(self) -> list[str]:
        """The parts of the model that change."""
        words = {"trunk": "trunk", "indexer": "indexer", "mtp": "MTP layer"}
        has = {spec.part for spec in trainable_specs(self.model, self.config.freeze).values()}
        return [word for part, word in words.items() if part in has]

    def train(self, first: TrainState | None = None) -> Result:
        """Runs the remaining steps. first: the state before step 0, if it has been made already."""
        say = lambda text: self.say(text)  # noqa: E731
        self.checkpoints = Checkpoints(self.run_dir, self.config.checkpoint, say, runs.stacked_dimensions(self.model))
        restored = self.checkpoints.restore(self.template)
        if restored is None:
            start, state = 0, self.init() if first is None else first
            if self.config.init.run:  # from here on the run needs its source no more
                self.checkpoints.save(0, state, self.data.get_state(), wait=True)
        else:
            start, state, data_state = restored
            self._open_data(max(start - 1, 0))
            self.data.set_state(data_state)
        if start > self.config.steps:
            raise UserError(f"{self.run_dir}: stands at step {start}, past steps={self.config.steps}")
        if processes.is_first():
            write_config(self.run_dir, self.config)
            self.metrics = Metrics(self.run_dir, start, say=lambda text: self.say(text))
        progress = Progress(self.config.steps, start)
        try:
            with progress, signals(self):
                self.progress, self.say = progress, progress.say
                if start and start < self.config.steps:
                    self.say(f"resuming at step {start}")
                score, state = self._steps(state, start)
        finally:
            self.say = print
            if self.tracing:
                jax.profiler.stop_trace()
            self.checkpoints.close()
            if processes.is_first():
                self.metrics.close()
        return Result(score, self.corpus, state.params, already_done=start == self.config.steps)

    def _steps(self, state: TrainState, start: int) -> tuple[float, TrainState]:
        config, pending = self.config, None
        self.last_time = time.perf_counter()
        for step in range(start, config.steps):
            self._trace(step, state)
            batch, read, doc_ids = self._next_batch(step)
            shape = batch["tokens"].shape
            if shape not in self.programs:
                if pending:  # before the compiler takes its time, which is not that step's
                    self._report(pending)
                    pending = None
                self._compile(state, batch)
            state, metrics = self.programs[shape](state, batch)
            done = step + 1
            if pending:
                self._report(pending)
            pending = _Pending(done, metrics, read, doc_ids)
            evaluate = done % config.eval_every == 0 and done < config.steps
            save = done % config.checkpoint.every == 0 or done == config.steps
            stop = self._stop(step)  # read once: it may arrive between two lines
            if evaluate or save or stop:
                self._report(pending)
                pending = None
            if evaluate:
                self._evaluate(done, state, config.eval_rows)
            # After the record of the step: what a kill in between loses is run again.
            if save or stop:
                self.checkpoints.save(done, state, self.data.get_state(), wait=bool(stop))
            if stop and done < config.steps:
                raise Stopped(stop, saved=self.checkpoints.last_good == done)
        self._trace(config.steps, state)
        return self._final_score(state, start), state

    def _stop(self, step: int) -> int | None:
        """The signal that ends the run after this step; processes agree on the step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            return signal.SIGTERM
        return self.signal

    def _compile(self, state: TrainState, batch: dict) -> None:
        """Compiles the step for batches of this shape [A,b,T]; the time counts neither as a step's nor for the time left."""
        shape = batch["tokens"].shape
        self.say(f"compiling the step for {shape[0] * shape[1]} x {shape[2]} tokens")
        began = time.perf_counter()
        self.programs[shape] = self.step_fn.lower(state, batch).compile()
        seconds = time.perf_counter() - began
        self.last_time += seconds
        self.progress.leave_out(seconds)

    def _final_score(self, state: TrainState, start: int) -> float:
        """Bits per byte over all held-out text; read from the record when the run was finished before."""
        lines = metrics_of(self.run_dir) if start == self.config.steps else []
        known = [line["bits_per_byte"] for line in lines if line["step"] == start and line.get("held_out_rows") == 0]
        return known[-1] if known else self._evaluate(self.config.steps, state, 0)

    def _open_data(self, step: int) -> None:
        """Starts the batches of the row length in force at `step`.

        Each length makes passes of its own over the corpus, in an order of its own, so that long documents come whole: the
        rest of a pass in shorter rows would be the rest of nearly every long document.
        """
        plan, data = self.plan, self.config.data
        self.phase = plan.phase_at(step)
        self.data = batches(
            self.corpus, dataclasses.replace(data, seq_len=plan.length_at(step)), plan.micro_rows_at(step) // self.readers,
            seed=data.seed + self.phase, process_index=self.reader, process_count=self.readers,
        )  # fmt: skip

    def _next_batch(self, step: int):
        """Device batch [A,b,T] of a step, the part of it that this process read, and what names its documents."""
        if self.plan.phase_at(step) != self.phase:
            self.data.close()
            self._open_data(step)
        micro = [next(self.data) for _ in range(self.plan.micro_batches_at(step))]
        batch = {name: np.stack([m[name] for m in micro]) for name in ARRAYS if name in micro[0]}
        ids = [ids for m in micro for row in m["doc_ids"] for ids in row]
        return put_rows(batch, self.mesh), batch, ids

    def _report(self, pending: _Pending) -> None:
        """Reads the metrics of a step, writes them, and stops the run if the loss is not finite."""
        values = jax.device_get(pending.metrics)
        now = time.perf_counter()
        seconds, self.last_time = now - max(self.last_time, 0), now
        finite = bool(values.pop("finite"))
        load = values.pop("load", None)
        count, length = pending.batch["tokens"].size * self.readers, pending.batch["tokens"].shape[-1]
        line = {name: (value if np.ndim(value) else float(value)) for name, value in values.items()}
        line |= {
            "lr": float(self.lr(pending.step - 1)),
            "train_bits_per_byte": line["ce"] * self._targets_per_byte(pending) / math.log(2),
            "tokens": self.plan.tokens_before(pending.step),
            "seq_len": length,
            "step_seconds": seconds,
            "tokens_per_s": count / seconds,
            "model_tflops_per_s": self.flops(length) * count / seconds / 1e12,
        }
        peak = flops.peak_flops()
        if peak:
            line["utilisation"] = self.flops(length) * count / seconds / peak
        if load is not None and pending.step % self.config.eval_every == 0:
            line["load"] = load
        if processes.is_first():
            self.metrics.write(pending.step, line)
        kl = f"  index KL {line[INDEX_KL]:.4g}" if INDEX_KL in line else ""
        self.progress.show(pending.step, f"loss {line['loss']:.4f}{kl}  {line['tokens_per_s']:,.0f} tokens/s")
        if not finite:
            self._not_finite(pending, line)

    def _targets_per_byte(self, pending: _Pending) -> float:
        """Target tokens of a batch per byte of text that they stand for."""
        targets = targets_of(pending.batch)
        size = self.corpus.tokenizer.token_bytes[pending.batch["tokens"][..., 1:]][targets].sum()
        return float(targets.sum() / max(size, 1))

    def _not_finite(self, pending: _Pending, line: dict) -> None:
        names = ", ".join(dict.fromkeys(pending.doc_ids))
        norms = {
            "grad_norm": "gradient norm",
            "grad_norm_indexer": "gradient norm of the indexer",
            "grad_norm_mtp": "gradient norm of MTP",
            "update_norm": "update norm",
            "update_norm_indexer": "update norm of the indexer",
            "update_norm_mtp": "update norm of MTP",
        }
        norms = ", ".join(f"{words} {line[name]}" for name, words in norms.items() if name in line)
        what = f"step {pending.step}: loss {line['loss']}, {norms}; documents: {names[:500]}"
        if self.config.nonfinite == "skip":
            self.say(f"{what}; the update is skipped")
            return
        self.checkpoints.wait()
        good = self.checkpoints.last_good
        kept = "no checkpoint yet" if good is None else f"last good checkpoint: {self.run_dir / 'checkpoints' / str(good)}"
        raise UserError(f"{what}; {kept}")

    def _evaluate(self, step: int, state: TrainState, rows: int) -> float:
        """Held-out bits per byte over `rows` rows, 0 = all; written and said. NaN where nothing is held out."""
        if not any(len(documents) for documents in self.corpus.held_out):
            self.say(f"step {step}: no document is held out, there is nothing to evaluate on")
            return math.nan
        single, done = held_out_batches(self.corpus, self.config.data, 1, rows or None), []
        score = bits_per_byte(self.loss_sum, state.params, in_batches(single, self.config.micro_rows), done.append)
        if math.isnan(score):
            self.say(f"step {step}: the held-out text is too short, there is no byte to predict")
            return score
        if processes.is_first():
            self.metrics.write(step, {"bits_per_byte": score, "held_out_rows": rows})
        self.say(f"step {step}: held-out bits per byte {score:.4f} ({'first' if rows else 'all'} {done[-1]:,} rows)")
        self.last_time = time.perf_counter()
        return score

    def _trace(self, step: int, state: TrainState) -> None:
        """Starts or stops the profiler before `step`; a run resumed inside the range traces the rest of it."""
        first, last = self.config.profile
        if not self.tracing and first <= step < min(last, self.config.steps):
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self.tracing = True
        elif self.tracing and step >= last:
            jax.block_until_ready(state)  # the traced steps have only been dispatched
            jax.profiler.stop_trace()
            self.tracing = False
