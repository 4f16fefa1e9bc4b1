"""Reasoning RL: generate -> score -> advantage -> update, on-policy, one update for each batch of answers (paper section 3.2).

Everything with a side effect is here; the objective is `objectives`, the step `train.step` with `policy`. As in training, a run
can be stopped at any moment and started again by the same command: what follows is bit-identical to a run never stopped.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.compiling import compiler_options
from glm5_jax.config import check
from glm5_jax.model import abstract, merge, split
from glm5_jax.rl.config import OBJECTIVES, RlConfig
from glm5_jax.rl.objectives import finish
from glm5_jax.rl.policy import policy_loss
from glm5_jax.rl.rewards import Scorer
from glm5_jax.rl.rollout import Rollouts, Sample, assemble, encode, evaluate, summary, write_samples
from glm5_jax.rl.tasks import mixture
from glm5_jax.rl.teachers import Teachers, reverse_kl
from glm5_jax.serve.engine import Engine
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.inherit import bring_tokenizer, first_state, open_source
from glm5_jax.train.metrics import Metrics, Progress
from glm5_jax.train.metrics import read as metrics_of
from glm5_jax.train.optimizer import make_optimizer
from glm5_jax.train.session import Stopped, only_one, signals, start_over, write_config
from glm5_jax.train.stages import InitConfig
from glm5_jax.train.step import Rates, TrainState, apart, make_step, trainable_specs


@dataclasses.dataclass
class Result:
    """What a finished run reports: its last evaluation (see `rollout.evaluate`), and the final parameters."""

    evaluation: dict[str, float]
    params: dict
    already_done: bool


def reinforce(
    config: RlConfig, run_dir: str | pathlib.Path, resume: bool = True, perturb: Callable[[dict, int], dict] | None = None
) -> Result:
    """Runs until `config.steps`, or goes on where an earlier call stopped.

    Args:
      perturb: maps the parameters that the engine gets, and the step, to those that it answers with: an engine whose numerics
        differ from the trainer's, for experiments.
    Raises:
      UserError: bad settings, a loss that is not finite, unusable checkpoints. Stopped: after a signal.
    """
    alone = config.rollout.group == 1 and not config.teachers
    check(not alone, "rollout.group=1: an answer alone has no advantage; must be at least 2")
    run_dir = pathlib.Path(run_dir)
    with only_one(run_dir):
        fresh = not (resume and (run_dir / "config.json").exists())
        if not fresh:
            runs.check_same(runs.read_config(run_dir), config, run_dir)
        data = run_dir / ("data.new" if fresh else "data")
        try:
            if fresh:
                shutil.rmtree(data, ignore_errors=True)
                data.mkdir(parents=True)
                if config.init.run:
                    bring_tokenizer(open_source(config, run_dir), config.data.tokenizer, data)
            run = Run(config, run_dir, runs.tokenizer_of(config.data.tokenizer, data), data, perturb)
            first = run.init() if fresh else None
        except BaseException:
            if fresh:
                shutil.rmtree(data, ignore_errors=True)
                with contextlib.suppress(OSError):  # not empty: it holds an earlier run
                    run_dir.rmdir()
            raise
        if fresh:
            start_over(run_dir)
            data.rename(run_dir / "data")
        print(run.header())
        return run.run(first)


class Run:
    """One call of `reinforce`: compiled functions and open files."""

    def __init__(self, config: RlConfig, run_dir: pathlib.Path, tokenizer, data: pathlib.Path, perturb):
        self.config, self.run_dir, self.tokenizer = config, run_dir, tokenizer
        self.perturb = perturb or (lambda params, step: params)
        check(
            tokenizer.vocab_size <= config.model.vocab_size,
            f"data.tokenizer={config.data.tokenizer}: has {tokenizer.vocab_size} ids, "
            f"model.vocab_size={config.model.vocab_size}",
        )
        ends = tokenizer.eos_id in config.model.eos_token_id
        check(ends, f"data.tokenizer={config.data.tokenizer}: ends in id {tokenizer.eos_id}, not in model.eos_token_id")
        self.prompts = mixture(config.rollout.tasks, config.seed)
        for i in range(len(self.prompts.tasks)):  # a first few, so that a mistake is known before anything is touched
            encode(self.prompts.prompt(i), tokenizer, config.data)
        tasks = [task.name for task in self.prompts.tasks]
        self.teachers = Teachers(config, tokenizer, tasks, data) if config.teachers else None
        self.model = abstract(config.model, runs.network_class(config))
        self.lr = config.lr.schedule(config.steps)
        trainable = trainable_specs(self.model, config.freeze)
        optimizer = make_optimizer(config.optimizer, self.lr, trainable, apart=apart(config.loss))
        objective = OBJECTIVES[config.objective]()
        policy = policy_loss(objective, config.rollout.temperature, config.loss.chunk)
        rates = Rates(lambda _: jnp.float32(config.mtp_weight), lambda _: jnp.float32(0))
        step = make_step(self.model, optimizer, rates, config.loss, config.freeze, policy=policy)
        self.step_fn = jax.jit(step, donate_argnums=0, compiler_options=compiler_options())
        self.init = lambda: first_state(config, optimizer)
        self.template = jax.eval_shape(lambda: first_state(dataclasses.replace(config, init=InitConfig()), optimizer))
        self.say, self.signal = print, None

    def header(self) -> str:
        """What is about to happen, for people."""
        c, r = self.config, self.config.rollout
        teachers = f"\nteachers: {', '.join(c.teachers)}" if c.teachers else ""
        tasks = f"tasks: {', '.join(r.tasks)}{teachers}"
        size = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(split(self.model)[1]))
        return (
            f"model: {size / 1e6:,.2f}M parameters; {c.steps:,} updates by {c.objective}, each from {r.prompts} prompts x "
            f"{r.group} answers of at most {r.max_new_tokens:,} tokens; {c.optimizer.name}\n{tasks}"
        )

    def run(self, first: TrainState | None) -> Result:
        """The remaining steps. first: the state before step 0, if it has been made already."""
        config = self.config
        self.checkpoints = Checkpoints(self.run_dir, config.checkpoint, self._say, runs.stacked_dimensions(self.model))
        restored = self.checkpoints.restore(self.template)
        if restored is None:
            start, state, ordinal = 0, self.init() if first is None else first, 0
            if config.init.run:  # from here on the run needs its source no more
                self.checkpoints.save(0, state, {"ordinal": 0}, wait=True)
        else:
            start, state, data = restored
            ordinal = data["ordinal"]
        check(start <= config.steps, f"{self.run_dir}: stands at step {start}, past steps={config.steps}")
        write_config(self.run_dir, config)
        self.metrics = Metrics(self.run_dir, start or -1, say=self._say)  # the evaluation of step 0 is done again
        progress = Progress(config.steps, start)
        try:
            with progress, signals(self), Scorer(self.prompts.tasks, seconds=config.rollout.timeout) as scorer:
                self.progress, self.say = progress, progress.say
                if 0 < start < config.steps:
                    self.say(f"resuming at step {start}")
                model = merge(split(self.model)[0], self.perturb(state.params, start))
                r = config.rollout
                engine = Engine(model, r.slots, config.data.seq_len, r.draft_steps, version=start)
                rollouts = Rollouts(config, self.tokenizer, engine, scorer, self.prompts)
                result = self._steps(state, start, ordinal, rollouts)
        finally:
            self.say = print
            self.checkpoints.close()
            self.metrics.close()
        return result

    def _say(self, text: str) -> None:
        self.say(text)

    def _steps(self, state: TrainState, start: int, ordinal: int, rollouts: Rollouts) -> Result:
        config = self.config
        if start == config.steps:
            last = [line for line in metrics_of(self.run_dir) if line["step"] == start and "eval_greedy" in line]
            return Result(last[-1] if last else self._evaluate(start, rollouts), state.params, already_done=True)
        evaluation = self._evaluate(0, rollouts) if start == 0 else {}
        for done in range(start + 1, config.steps + 1):
            began = time.perf_counter()
            rollouts.engine.forget()  # as after a new start, to the bit
            samples, ordinal, asked = rollouts.collect(ordinal)
            scored = time.perf_counter()
            state, line, advantages = self._update(state, samples)
            new = self.perturb(state.params, done)
            rollouts.engine.update(done, new)
            line |= asked | {"generate_seconds": scored - began, "update_seconds": time.perf_counter() - scored}
            line |= rollouts.engine.acceptance() if config.rollout.draft_steps else {}
            line["lr"] = float(self.lr(done - 1))
            self.metrics.write(done, line)
            self._write_samples(done, samples, advantages)
            made = sum(len(s.completion.tokens) for s in samples)
            words = f"reward {line['reward']:.3f}  entropy {line.get('entropy', 0):.2f}"
            words += f"  KL to teacher {line['teacher_k1']:.3f}" if self.teachers else ""
            self.progress.show(done, f"{words}  {made / (time.perf_counter() - began):,.0f} tokens/s")
            if done % config.eval_every == 0 or done == config.steps:
                evaluation = self._evaluate(done, rollouts)
            stop = self.signal  # read once: it may arrive between two lines
            if done % config.checkpoint.every == 0 or done == config.steps or stop:
                self.checkpoints.save(done, state, {"ordinal": ordinal}, wait=bool(stop))
            if stop and done < config.steps:
                raise Stopped(stop, saved=self.checkpoints.last_good == done)
        return Result(evaluation, state.params, already_done=False)

    def _update(self, state: TrainState, samples: list[Sample]):
        """(state, metrics, advantages) after the update of one batch of answers."""
        c = self.config
        rows = c.rollout.prompts * c.rollout.group
        flat, advantages = assemble(samples, rows, c.data.seq_len, c.rollout.advantage)
        told = {}
        if self.teachers:
            tasks = [sample.prompt.task for sample in samples]
            flat["teacher"] = self.teachers.score(tasks, flat)
            told = reverse_kl(tasks, flat)
        batch = {name: x.reshape(rows // c.micro_rows, c.micro_rows, -1) for name, x in flat.items()}
        step = int(state.step) + 1
        state, metrics = self.step_fn(state, batch)
        values = jax.device_get(metrics)
        check(bool(values.pop("finite")), f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}")
        kept = ("loss", "mtp", "max_logit", "grad_norm", "update_norm", "grad_norm_mtp", "update_norm_mtp")
        line = {name: float(values.pop(name)) for name in kept if name in values}
        for name in ("balance", "mtp_weight", "load", "max_violation"):
            values.pop(name, None)
        return state, line | finish(values) | told | summary(samples, advantages), advantages

    def _write_samples(self, step: int, samples: list[Sample], advantages) -> None:
        """As with metrics, a disk that refuses does not stop the run."""
        try:
            write_samples(self.run_dir / "samples" / f"{step}.jsonl", samples, advantages)
        except OSError as error:
            self.say(f"samples of step {step} cannot be written ({error.strerror or error}); the run goes on")

    def _evaluate(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        scores = evaluate(rollouts, self.config.eval_prompts)
        self.metrics.write(step, scores)
        words = ", ".join(
            f"{how} reward {scores[f'eval_{how}']:.3f}, right {scores[f'eval_{how}_exact']:.1%}"
            for how in ("greedy", "sampled")
            if f"eval_{how}" in scores
        )
        self.say(f"step {step}: held-out prompts: {words or 'no answer could be scored'}")
        return scores
