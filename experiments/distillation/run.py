"""Forgetting and recovery: skill A, then RL on skill B, then distillation from the checkpoints of both (paper section 3.5).

    python experiments/distillation/run.py [--seeds 3 4 5] [--quick] [--out DIR] [--runs DIR]

README.md beside this file is the protocol. All runs lie under --runs and are resumed by the same command; a finished seed lies
in DIR/seed_N.json and is not run again. The table and the plot are made from all seeds asked for.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import textwrap

import numpy as np

import glm5_jax as glm5
from glm5_jax.config import ModelConfig, tiny
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.rl.config import RlConfig, RolloutConfig, RowConfig
from glm5_jax.rl.distill import distill
from glm5_jax.rl.loop import reinforce
from glm5_jax.rl.rewards import Scorer
from glm5_jax.rl.rollout import Rollouts, evaluate
from glm5_jax.rl.tasks import is_held_out, mixture
from glm5_jax.serve.engine import Engine
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.loop import train
from glm5_jax.train.metrics import read as metrics_of
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import InitConfig, TrainConfig
from glm5_jax.train.step import LossConfig

HERE = pathlib.Path(__file__).parent
TOKENIZER = "chars:0123456789=+"
A, B = "reverse:4", "copy:4"
STAGES = {
    "a": "1. supervised",
    "b": f"2. RL on {B} alone",
    "distilled": "3. distilled from 1 and 2",
    "control": "control: RL on both in place of 3",
}
HOW = ("greedy", "sampled")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Every number of the experiment; README.md says why."""

    k: int = 8  # K; rows have 10 tokens
    width: int = 128  # D
    layers: int = 2
    steps_a: int = 400  # supervised, batches of 256 questions with their answers
    lr_a: float = 1e-3  # cosine to a tenth
    right_b: float = 0.5  # share of the digits of B's answers that are right in the supervised stage
    steps_b: int = 120  # RL, 32 prompts x 8 answers; at most, see `until_a_has_dropped`
    block_b: int = 10  # steps between two looks at both skills
    dropped: float = 0.5  # RL on B ends when fewer sampled answers to A than this are right, and more to B than `learnt`
    learnt: float = 0.95
    lr_b: float = 3e-4
    steps_distill: int = 100  # 512 prompts x 1 answer
    lr_distill: float = 3e-4  # cosine to a tenth
    eval_prompts: int = 1000  # of each task, held out, the same for all seeds and stages

    def model(self) -> ModelConfig:
        """A GLM-5 without an MTP layer, its indexer random and frozen throughout."""
        return tiny(
            vocab_size=13, hidden_size=self.width, num_hidden_layers=self.layers, intermediate_size=4 * self.width,
            moe_intermediate_size=self.width, n_routed_experts=4, num_experts_per_tok=2, num_nextn_predict_layers=0,
            index_topk=self.k, max_position_embeddings=64, attention="sparse",
        )  # fmt: skip

    def learn_a(self, seed: int, sources: tuple[str, ...]) -> TrainConfig:
        """Ordinary training on all questions that are not held out, with their answers; those of B are half wrong."""
        return TrainConfig(
            model=self.model(),
            data=DataConfig(sources=sources, tokenizer=TOKENIZER, seq_len=40, seed=seed),  # 4 questions a row
            optimizer=OptimizerConfig(name="adamw"),
            lr=LearningRate("cosine", peak=self.lr_a, final=self.lr_a / 10, warmup_steps=20),
            loss=LossConfig(mtp_steps=0, balance_weight=0.0),
            bias_rate=((0, 0.0),),
            batch_rows=((0, 64),),
            micro_rows=64,
            steps=self.steps_a,
            seed=seed,
        )

    def reinforce_b(self, seed: int, start: pathlib.Path, steps: int) -> RlConfig:
        """RL from the run `start` on skill B alone."""
        return RlConfig(
            model=self.model(),
            data=RowConfig(tokenizer=TOKENIZER, seq_len=10),
            rollout=RolloutConfig(tasks=(B,), prompts=32, group=8, max_new_tokens=5, slots=256),
            optimizer=OptimizerConfig(name="adamw"),
            lr=LearningRate("constant", peak=self.lr_b, warmup_steps=0),
            loss=LossConfig(mtp_steps=0, balance_weight=0.0),
            checkpoint=CheckpointConfig(every=25),
            init=InitConfig(run=str(start)),
            micro_rows=256,
            steps=steps,
            seed=seed,
            eval_every=20,
            eval_prompts=128,
        )

    def distill(self, seed: int, a: pathlib.Path, b: pathlib.Path) -> RlConfig:
        """From `b` on both skills, half of the prompts each, judged by `a` and `b`."""
        return dataclasses.replace(
            self.reinforce_b(seed, b, self.steps_distill),
            rollout=RolloutConfig(tasks=(A, B), prompts=512, group=1, max_new_tokens=5, slots=256),
            teachers=(f"{A}={a}", f"{B}={b}"),
            lr=LearningRate("cosine", peak=self.lr_distill, final=self.lr_distill / 10, warmup_steps=5),
        )

    def control(self, seed: int, b: pathlib.Path) -> RlConfig:
        """What distillation is compared with: rewards in place of teachers, as many answers, in groups of 8; all else equal."""
        both = self.distill(seed, b, b)
        return dataclasses.replace(both, teachers=(), rollout=dataclasses.replace(both.rollout, prompts=64, group=8))


QUICK = Protocol(steps_a=2, steps_b=2, block_b=1, steps_distill=1, eval_prompts=16)


def write_corpus(folder: pathlib.Path, share: float) -> tuple[str, ...]:
    """The sources of `learn_a`: one JSON line for each question that is not held out, with its answer.

    Of the answers of B only a `share` of the digits is right, the others are drawn at random.
    """
    digits = ["".join(d) for d in itertools.product("0123456789", repeat=4)]
    rng = np.random.default_rng(0)
    kept, drawn = rng.random((len(digits), 4)) < share, rng.integers(0, 10, (len(digits), 4))
    noisy = ["".join(c if k else str(n) for c, k, n in zip(*line)) for line in zip(digits, kept, drawn)]
    texts = {
        "a": [f"{d}={d[::-1]}" for d in digits if not is_held_out(f"{d}=")],
        "b": [f"{d}+{answer}" for d, answer in zip(digits, noisy) if not is_held_out(f"{d}+")],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return tuple(str(folder / f"{name}.jsonl") for name in texts)


def accuracy(p: Protocol, run: pathlib.Path) -> dict:
    """{task: {"greedy", "sampled": {"right": share of held-out questions answered, "places": share of places right}}}."""
    config, engine, result = p.reinforce_b(0, run, 1), Engine(glm5.load(run), 256, 10), {}
    for task in (A, B):
        prompts = mixture((task,), seed=0)
        with Scorer(prompts.tasks) as scorer:
            scores = evaluate(Rollouts(config, load_tokenizer(TOKENIZER), engine, scorer, prompts), p.eval_prompts)
        result[task] = {how: {"right": scores[f"eval_{how}_exact"], "places": scores[f"eval_{how}"]} for how in HOW}
    return result


def until_a_has_dropped(p: Protocol, seed: int, start: pathlib.Path, run: pathlib.Path) -> None:
    """RL on B in blocks of steps, until held-out questions say that A has dropped and B is learnt."""
    reached = max((int(path.name) for path in run.glob("checkpoints/[0-9]*")), default=0)  # by an earlier call
    for steps in range(p.block_b, p.steps_b + 1, p.block_b):
        if steps < reached:
            continue
        reinforce(p.reinforce_b(seed, start, steps), run)
        right = {task: of_task["sampled"]["right"] for task, of_task in accuracy(p, run).items()}
        print(f"step {steps}: {right}")
        if right[A] < p.dropped and right[B] > p.learnt:
            return


def run_seed(p: Protocol, seed: int, runs: pathlib.Path) -> dict:
    """All stages of a seed, as far as they are not there yet, and what is measured after each."""
    folders = {stage: runs / f"seed_{seed}" / stage for stage in STAGES}
    sources = write_corpus(runs, p.right_b)
    train(p.learn_a(seed, sources), folders["a"])
    until_a_has_dropped(p, seed, folders["a"], folders["b"])
    distill(p.distill(seed, folders["a"], folders["b"]), folders["distilled"])
    reinforce(p.control(seed, folders["b"]), folders["control"])
    kept = ("step", "teacher_k1", f"teacher_k1/{A}", f"teacher_k1/{B}", f"reward/{A}", f"reward/{B}", "reward", "entropy")
    curves = {stage: steps_of(folders[stage], kept) for stage in STAGES if stage != "a"}
    return {"seed": seed, "accuracy": {stage: accuracy(p, folder) for stage, folder in folders.items()}, "curves": curves}


def steps_of(run: pathlib.Path, names: tuple[str, ...]) -> list[dict]:
    """The named metrics of every step of a run."""
    lines = (line for line in metrics_of(run) if "reward" in line)
    return [{name: round(line[name], 5) for name in names if name in line} for line in lines]


def summary(results: list[dict]) -> str:
    """Tables in Markdown: each seed by itself, and what distillation has kept of its teachers."""
    lines = [f"Percent of {results[0]['protocol']['eval_prompts']:,} held-out questions of each skill answered right."]
    seeds = " | ".join(f"seed {r['seed']}" for r in results)
    for how in HOW:
        lines += ["", f"**{how}**", "", f"| after | skill | {seeds} | mean |", "|---" * (len(results) + 3) + "|"]
        for stage, task in itertools.product(STAGES, (A, B)):
            values = [100 * r["accuracy"][stage][task][how]["right"] for r in results]
            cells = " | ".join(f"{v:.1f}" for v in [*values, np.mean(values)])
            lines.append(f"| {STAGES[stage]} | {task} | {cells} |")
    lines += ["", "**Points by which a skill differs from its teacher's** (after 1 for A, after 2 for B)", ""]
    lines += [f"| after | skill, answers | {seeds} |", "|---" * (len(results) + 2) + "|"]
    for stage, (task, teacher), how in itertools.product(("distilled", "control"), ((A, "a"), (B, "b")), HOW):
        gaps = [100 * (r["accuracy"][stage][task][how]["right"] - r["accuracy"][teacher][task][how]["right"]) for r in results]
        lines.append(f"| {STAGES[stage]} | {task}, {how} | {' | '.join(f'{gap:+.1f}' for gap in gaps)} |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Left: sampled accuracy after every stage, bars are means, dots seeds. Right: the training answers of the last stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), gridspec_kw={"width_ratios": (3, 2)})
    for shift, task, colour in ((-0.2, A, "tab:blue"), (0.2, B, "tab:orange")):
        values = 100 * np.array([[r["accuracy"][stage][task]["sampled"]["right"] for stage in STAGES] for r in results])
        at = np.arange(len(STAGES)) + shift
        left.bar(at, values.mean(0), 0.36, color=colour, alpha=0.6, label=task)
        left.plot(at, values.T, "k.", markersize=4)
        for stage, style in (("distilled", "-"), ("control", ":")):
            for r in results:
                curve = r["curves"][stage]
                label = f"{task}, {stage}" if r is results[0] else None
                steps, places = [line["step"] for line in curve], [100 * line[f"reward/{task}"] for line in curve]
                right.plot(steps, places, style, color=colour, linewidth=1, label=label)
    left.set_xticks(range(len(STAGES)), [textwrap.fill(title, 16) for title in STAGES.values()], fontsize=8)
    left.set(ylabel="held-out questions, sampled answers right, %", ylim=(0, 103))
    right.set(xlabel="step of the last stage", ylabel="places right in the step's answers, %", ylim=(0, 103))
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs the seeds that are not done yet, then writes the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="where results go")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/distillation"), help="where the runs lie")
    arguments = parser.parse_args()
    p, results = QUICK if arguments.quick else Protocol(), []
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        path = arguments.out / f"seed_{seed}.json"
        if not path.exists():
            result = run_seed(p, seed, arguments.runs)
            path.write_text(json.dumps({"protocol": dataclasses.asdict(p), **result}) + "\n")
        results.append(json.loads(path.read_text()))
        if results[-1]["protocol"] != json.loads(json.dumps(dataclasses.asdict(p))):
            parser.error(f"{path} is of another protocol: delete it, or give another --out")
    table = summary(results)
    (arguments.out / "summary.md").write_text(table)
    plot(results, arguments.out / "accuracy.png")
    print(table + f"written: {arguments.out / 'summary.md'}, {arguments.out / 'accuracy.png'}")


if __name__ == "__main__":
    main()
