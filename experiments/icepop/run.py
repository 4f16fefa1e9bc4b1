"""A rollout engine whose numerics differ from the trainer's: GRPO, IcePop and truncated importance sampling (paper Eq. 1).

    python experiments/icepop/run.py [--seeds 0 1 2 3 4] [--quick] [--out DIR] [--runs DIR]

README.md beside this file is the protocol. All runs lie under --runs and are resumed by the same command; a finished run lies
in DIR/ARM_SEED.json and is not run again. The table and the plot are made from all seeds asked for.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.rl.config import RlConfig, reverse
from glm5_jax.rl.loop import reinforce
from glm5_jax.train.metrics import read as metrics_of

HERE = pathlib.Path(__file__).parent
OBJECTIVES = ("grpo", "icepop", "truncated")
NAMES = {"exact": "same weights", "noise": "noisy weights"}
CURVES = ("step", "reward", "entropy", "rollout_k3", "popped", "max_abs_log_ratio")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What every run of the experiment has in common."""

    steps: int = 60
    noise: float = 0.6  # of a weight of the engine, as a share of the weight's own size; drawn anew at every update
    last: int = 10  # steps at the end whose mean is reported

    def config(self, objective: str, seed: int) -> RlConfig:
        """The recipe `reverse` with another objective."""
        return dataclasses.replace(reverse(), objective=objective, steps=self.steps, seed=seed, eval_every=self.steps)


QUICK = Protocol(steps=2, last=1)


def noisy(scale: float, seed: int) -> Callable[[dict, int], dict]:
    """The engine's matrices w (1 + scale n), n standard normal, drawn anew at each step, the same for each objective."""

    @jax.jit
    def perturb(params, step):
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), len(leaves))
        draw = lambda key, w: w * (1 + scale * jax.random.normal(key, w.shape)) if w.ndim > 2 else w  # noqa: E731
        return jax.tree.unflatten(tree, [draw(key, w) for key, w in zip(keys, leaves)])

    return lambda params, step: perturb(params, jnp.int32(step))


def run_one(p: Protocol, engine: str, objective: str, seed: int, folder: pathlib.Path) -> dict:
    """One run, as far as it is not there yet, and what it reached."""
    perturb = noisy(p.noise, seed) if engine == "noise" else None
    result = reinforce(p.config(objective, seed), folder, perturb=perturb)
    lines = [line for line in metrics_of(folder) if "reward" in line]
    curve = [{name: round(float(line[name]), 5) for name in CURVES if name in line} for line in lines]
    return {"engine": engine, "objective": objective, "seed": seed, "evaluation": result.evaluation, "curve": curve}


def arms() -> list[tuple[str, str]]:
    """(engine, objective): what is compared, and GRPO without noise beside it."""
    return [("exact", "grpo"), *(("noise", objective) for objective in OBJECTIVES)]


def figures(p: Protocol, result: dict) -> dict[str, float]:
    """What the table holds of a run: means over its last steps, and the trainer's own answers to held-out prompts."""
    end = result["curve"][-p.last :]
    mean = {name: float(np.mean([line[name] for line in end])) for name in ("reward", "rollout_k3", "popped", "entropy")}
    return mean | {"greedy": result["evaluation"]["eval_greedy"], "right": result["evaluation"]["eval_greedy_exact"]}


def summary(p: Protocol, results: dict) -> str:
    """Tables in Markdown: mean and standard deviation over seeds, then each seed."""
    seeds = sorted({seed for _, _, seed in results})
    lines = [
        f"Means over the last {p.last} of {p.steps} updates; held-out prompts at the end. Mean +- standard deviation over "
        f"{len(seeds)} seeds.",
        "",
        "| engine | objective | reward of the engine's answers | k3 | popped | entropy | held out: greedy reward | all right |",
        "|---" * 8 + "|",
    ]
    for engine, objective in arms():
        rows = [figures(p, results[engine, objective, seed]) for seed in seeds]
        cells = [f"{np.mean(v):.3f} +- {np.std(v, ddof=1):.3f}" if len(v) > 1 else f"{v[0]:.3f}" for v in _columns(rows)]
        lines.append(f"| {NAMES[engine]} | {objective} | {' | '.join(cells)} |")
    lines += ["", "Held-out greedy reward of each seed:", ""]
    lines += [f"| engine | objective | {' | '.join(f'seed {s}' for s in seeds)} |", "|---" * (len(seeds) + 2) + "|"]
    for engine, objective in arms():
        each = [figures(p, results[engine, objective, seed])["greedy"] for seed in seeds]
        lines.append(f"| {NAMES[engine]} | {objective} | {' | '.join(f'{v:.3f}' for v in each)} |")
    return "\n".join(lines) + "\n"


def _columns(rows: list[dict]) -> list[list[float]]:
    return [[row[name] for row in rows] for name in ("reward", "rollout_k3", "popped", "entropy", "greedy", "right")]


def plot(results: dict, path: pathlib.Path) -> None:
    """Curves over the updates: mean over seeds, and between the lowest and the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"reward": "reward of the engine's answers", "rollout_k3": "k3, engine to trainer", "popped": "share popped"}
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.8))
    for (engine, objective), colour in zip(arms(), ("tab:grey", "tab:red", "tab:blue", "tab:green")):
        curves = [r["curve"] for (e, o, _), r in results.items() if (e, o) == (engine, objective)]
        for axis, (name, label) in zip(axes, panels.items()):
            values = np.array([[line[name] for line in curve] for curve in curves])
            steps = [line["step"] for line in curves[0]]
            axis.plot(steps, values.mean(0), color=colour, label=f"{objective}, {NAMES[engine]}")
            axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)
            axis.set(xlabel="update", ylabel=label)
    axes[1].set_yscale("symlog", linthresh=1e-3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs what is not done yet, then writes the tables and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="two updates of everything, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="where results go")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/icepop"), help="where the runs lie")
    arguments = parser.parse_args()
    p, results = QUICK if arguments.quick else Protocol(), {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed, (engine, objective) in itertools.product(arguments.seeds, arms()):
        name = f"{engine}_{objective}_{seed}"
        path = arguments.out / f"{name}.json"
        if not path.exists():
            result = run_one(p, engine, objective, seed, arguments.runs / name)
            path.write_text(json.dumps({"protocol": dataclasses.asdict(p), **result}) + "\n")
        results[engine, objective, seed] = json.loads(path.read_text())
        if results[engine, objective, seed]["protocol"] != dataclasses.asdict(p):
            parser.error(f"{path} is of another protocol: delete it, or give another --out")
    table = summary(p, results)
    (arguments.out / "summary.md").write_text(table)
    plot(results, arguments.out / "curves.png")
    print(table + f"written: {arguments.out / 'summary.md'}, {arguments.out / 'curves.png'}")


if __name__ == "__main__":
    main()
