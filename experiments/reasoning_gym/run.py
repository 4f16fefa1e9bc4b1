"""A reasoning-gym task with a binary reward: a short supervised warm start, then GRPO with IcePop (paper sections 3.1, 3.2).

    pip install -e '.[rl,plot]'
    python experiments/reasoning_gym/run.py [--seeds 0 1 2] [--quick] [--out DIR] [--runs DIR]

README.md beside this file is the protocol. All runs lie under --runs and are resumed by the same command; a finished seed lies
in DIR/seed_N.json and is not run again. The table and the plot are made from all seeds asked for.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import numpy as np

import glm5_jax as glm5
from glm5_jax.config import ModelConfig, tiny
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.rl.config import RlConfig, RolloutConfig, RowConfig
from glm5_jax.rl.loop import reinforce
from glm5_jax.rl.rewards import Scorer
from glm5_jax.rl.rollout import Rollouts, evaluate
from glm5_jax.rl.tasks import mixture, task
from glm5_jax.serve.engine import Engine
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.conversations import ChatConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.loop import train
from glm5_jax.train.metrics import read as metrics_of
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import InitConfig, TrainConfig
from glm5_jax.train.step import LossConfig

HERE = pathlib.Path(__file__).parent
TASK = "gym:spell_backward"  # "Spell this word backward (example: sun -> nus): gauge"; right or wrong, nothing between
TOKENIZER = "bytes:chat"
TEMPLATE = "5.1"  # where a model that thinks of nothing says so itself: <think></think>
ROW = 96  # tokens of a row: question, template, answer


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Every number of the experiment; README.md says why."""

    k: int = 32  # K; a question and its answer take 65 to 78 tokens
    width: int = 192  # D
    layers: int = 2
    words: int = 2000  # conversations of the warm start
    steps_warm: int = 300  # of 64 rows, a conversation each; at most, see `until_it_answers`
    shortest_warm: int = 60  # steps before the first look
    block_warm: int = 10  # steps between two looks
    looked: int = 200  # held-out questions of a look
    answered: float = 0.1  # the warm start ends when more sampled answers than this are right
    lr_warm: float = 0.005  # constant, after 20 steps of warm-up
    steps_rl: int = 120  # 32 questions x 8 answers
    lr_rl: float = 3e-4  # constant
    eval_prompts: int = 500  # held out, the same for all seeds

    def model(self) -> ModelConfig:
        """A GLM-5 without an MTP layer."""
        return tiny(
            vocab_size=276, hidden_size=self.width, num_hidden_layers=self.layers, intermediate_size=4 * self.width,
            moe_intermediate_size=self.width, n_routed_experts=4, num_experts_per_tok=2, num_nextn_predict_layers=0,
            index_topk=self.k, max_position_embeddings=128, attention="sparse",
        )  # fmt: skip

    def warm_start(self, seed: int, source: str, steps: int) -> TrainConfig:
        """Supervised, from random weights: network and indexer together."""
        return TrainConfig(
            model=self.model(),
            data=DataConfig(
                sources=(source,),
                kind="chat",
                chat=ChatConfig(version=TEMPLATE),
                tokenizer=TOKENIZER,
                seq_len=ROW,
                packing="best_fit",
                seed=seed,
            ),
            lr=LearningRate("constant", peak=self.lr_warm, warmup_steps=20),
            loss=LossConfig(mtp_steps=0, balance_weight=0.0, index_weight=1.0),
            bias_rate=((0, 0.0),),
            batch_rows=((0, 64),),
            micro_rows=64,
            steps=steps,
            freeze=(),
            seed=seed,
        )

    def reinforce(self, seed: int, start: pathlib.Path) -> RlConfig:
        """RL from the run `start`, the indexer frozen."""
        return RlConfig(
            model=self.model(),
            data=RowConfig(tokenizer=TOKENIZER, seq_len=ROW, template=TEMPLATE),
            rollout=RolloutConfig(tasks=(TASK,), prompts=32, group=8, max_new_tokens=16, slots=256, truncated="zero"),
            lr=LearningRate("constant", peak=self.lr_rl, warmup_steps=0),
            loss=LossConfig(mtp_steps=0, balance_weight=0.0),
            checkpoint=CheckpointConfig(every=20),
            init=InitConfig(run=str(start)),
            micro_rows=64,
            steps=self.steps_rl,
            seed=seed,
            eval_every=20,
            eval_prompts=self.eval_prompts,
        )


QUICK = Protocol(steps_warm=2, shortest_warm=1, block_warm=1, looked=8, steps_rl=2, eval_prompts=8)


def write_conversations(p: Protocol, path: pathlib.Path) -> str:
    """The path as text, to which one conversation for each of the first questions of the training part is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = [task(TASK).prompt(i) for i in range(p.words)]
    said = [
        [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": prompt.metadata["answer"]}]
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    return str(path)


def right(p: Protocol, run: pathlib.Path) -> float:
    """Share of sampled answers to `looked` held-out questions that are right."""
    config, prompts = p.reinforce(0, run), mixture((TASK,), seed=0)
    with Scorer(prompts.tasks) as scorer:
        rollouts = Rollouts(config, load_tokenizer(TOKENIZER), Engine(glm5.load(run), 256, ROW), scorer, prompts)
        return evaluate(rollouts, p.looked)["eval_sampled_exact"]


def until_it_answers(p: Protocol, seed: int, source: str, run: pathlib.Path) -> int:
    """Warm start in blocks of steps, until some held-out questions are answered; the number of steps."""
    reached = max((int(path.name) for path in run.glob("checkpoints/[0-9]*")), default=0)  # by an earlier call
    for steps in range(p.shortest_warm, p.steps_warm + 1, p.block_warm):
        if steps < reached:
            continue
        train(p.warm_start(seed, source, steps), run)
        share = right(p, run)
        print(f"step {steps}: {share:.1%} of {p.looked} held-out questions answered right")
        if share > p.answered:
            break
    return steps


def run_seed(p: Protocol, seed: int, runs: pathlib.Path) -> dict:
    """Both stages of a seed, as far as they are not there yet, and what RL's run has measured, before its first update too."""
    warm, rl = runs / f"seed_{seed}" / "warm", runs / f"seed_{seed}" / "rl"
    began = time.perf_counter()
    steps = until_it_answers(p, seed, write_conversations(p, runs / "conversations.jsonl"), warm)
    warmed = time.perf_counter()
    reinforce(p.reinforce(seed, warm), rl)
    lines = metrics_of(rl)
    evaluations = [
        {"step": line["step"], "greedy": line["eval_greedy_exact"], "sampled": line["eval_sampled_exact"]}
        for line in lines
        if "eval_greedy" in line
    ]
    rewards = [round(line["reward"], 4) for line in lines if "reward" in line]
    seconds = {"warm start": warmed - began, "RL": time.perf_counter() - warmed}
    return {"seed": seed, "steps_warm": steps, "evaluations": evaluations, "rewards": rewards, "seconds": seconds}


def summary(p: Protocol, results: list[dict]) -> str:
    """A table in Markdown, a row a seed."""
    steps = [line["step"] for line in results[0]["evaluations"]]
    lines = [
        f"Percent of {p.eval_prompts} held-out questions answered right, greedily / at temperature 1, after updates of RL:",
        "",
        f"| seed | {' | '.join(f'{n}' for n in steps)} | points won, sampled | steps of warm start | seconds: warm start, RL |",
        "|---" * (len(steps) + 4) + "|",
    ]
    for r in results:
        cells = " | ".join(f"{100 * line['greedy']:.1f} / {100 * line['sampled']:.1f}" for line in r["evaluations"])
        won = 100 * (r["evaluations"][-1]["sampled"] - r["evaluations"][0]["sampled"])
        seconds = ", ".join(f"{r['seconds'][stage]:.0f}" for stage in ("warm start", "RL"))
        lines.append(f"| {r['seed']} | {cells} | {won:+.1f} | {r['steps_warm']} | {seconds} |")
    return "\n".join(lines) + "\n"


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Held-out accuracy against the updates of RL, and the share of the updates' own answers that are right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4))
    for r, colour in zip(results, ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")):
        steps = [line["step"] for line in r["evaluations"]]
        axis.plot(range(1, len(r["rewards"]) + 1), 100 * np.array(r["rewards"]), color=colour, alpha=0.25, linewidth=1)
        for how, style in (("sampled", "o-"), ("greedy", "x--")):
            values = [100 * line[how] for line in r["evaluations"]]
            axis.plot(steps, values, style, color=colour, markersize=4, label=f"seed {r['seed']}, {how}")
    axis.set(xlabel="update of RL", ylabel="held-out words spelled backward, %", ylim=(0, 100))
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs the seeds that are not done yet, then writes the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="two steps of everything, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="where results go")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/reasoning_gym"), help="where the runs lie")
    arguments = parser.parse_args()
    p, results = QUICK if arguments.quick else Protocol(), []
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        path = arguments.out / f"seed_{seed}.json"
        if not path.exists():
            result = run_seed(p, seed, arguments.runs)
            path.write_text(json.dumps({"protocol": dataclasses.asdict(p), **result}) + "\n")
        results.append(json.loads(path.read_text()))
        if results[-1]["protocol"] != dataclasses.asdict(p):
            parser.error(f"{path} is of another protocol: delete it, or give another --out")
    table = summary(p, results)
    (arguments.out / "summary.md").write_text(table)
    plot(results, arguments.out / "accuracy.png")
    print(table + f"written: {arguments.out / 'summary.md'}, {arguments.out / 'accuracy.png'}")


if __name__ == "__main__":
    main()
