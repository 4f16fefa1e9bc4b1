"""What a run of RL shows: the answers of a step with their rewards and log-probabilities, its curves, its last words."""

import dataclasses
import json
import pathlib
import shlex

import rich.console
import rich.table
import rich.text

from glm5_jax.config import check
from glm5_jax.errors import UserError
from glm5_jax.train import run_dir as runs
from glm5_jax.train.metrics import plot

CURVES = {
    "reward": {"reward": ("training", "#1f4e9c"), "eval_greedy": ("greedy", "#b3541e"), "eval_sampled": ("sampled", "#2e7d4f")},
    "entropy of the policy (nats)": {"entropy": ("", "#1f4e9c")},
    "share of tokens popped": {"popped": ("", "#b3541e")},
    "k3 of engine and trainer (nats)": {"rollout_k3": ("", "#2e7d4f")},
    "KL to the teacher (nats)": {"teacher_k1": ("", "#7a3e9d")},
}  # panels of RUN/rl.png; those without a record are left out


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """Settings of `glm5 rl --inspect`."""

    inspect: str = ""  # run directory
    step: int | None = None  # whose answers; default: the newest
    rows: int = 8  # answers to show at most, 0 = all
    task: str = ""  # only those to this task's prompts
    worst: bool = False  # by reward, lowest first, in place of the order in which they were asked
    best: bool = False  # by reward, highest first; answers without a reward come last either way


def show_samples(options: InspectOptions, console: rich.console.Console | None = None) -> None:
    """Prints answers of a step.

    Raises:
      UserError: no such run, step or task.
    """
    check(options.rows >= 0, f"rows={options.rows}: must not be negative")
    check(not (options.worst and options.best), "--worst, --best: only one of them")
    run_dir = pathlib.Path(options.inspect)
    step, samples = read_samples(run_dir, options.step)
    tokenizer = runs.run_tokenizer(run_dir)
    asked = sorted({sample["task"] for sample in samples})
    check(options.task in ("", *asked), f"task={options.task}: step {step} asked {', '.join(asked)}")
    samples = [sample for sample in samples if options.task in ("", sample["task"])]
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    if options.worst or options.best:
        sign = 1 if options.worst else -1
        samples.sort(key=lambda sample: (sample["reward"] is None, sign * (sample["reward"] or 0)))
    shown = samples[: options.rows or None]
    console = console or rich.console.Console(highlight=False)
    spread = f", reward {sum(rewards) / len(rewards):.3f} ({min(rewards):.3f} to {max(rewards):.3f})" if rewards else ""
    console.print(
        f"{run_dir}, step {step}: {len(samples):,} answers{spread}; {len(shown):,} shown", markup=False, soft_wrap=True
    )
    for sample in shown:
        console.print()
        console.print(_card(sample, tokenizer))


def read_samples(run_dir: pathlib.Path, step: int | None = None) -> tuple[int, list[dict]]:
    """(step, samples) as `rollout.write_samples` wrote them; the newest step by default.

    Raises:
      UserError: no samples of this run or step, or a file that does not hold any.
    """
    steps = sorted(int(path.stem) for path in (run_dir / "samples").glob("*.jsonl") if path.stem.isdecimal())
    check(bool(steps), f"{run_dir}: has no samples; is it the directory of a run of glm5 rl?")
    step = steps[-1] if step is None else step
    check(step in steps, f"{run_dir}: has no samples of step {step}; there are {len(steps):,} steps, {steps[0]} to {steps[-1]}")
    path = run_dir / "samples" / f"{step}.jsonl"
    try:
        # By newlines only: text may hold other characters that end a line for str.splitlines.
        return step, [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _card(sample: dict, tokenizer) -> rich.table.Table:
    """One sample: a line of numbers, the texts, and each token with its log-probability, the unlikeliest marked."""
    reward = "none" if sample["reward"] is None else f"{sample['reward']:.3f}"
    first = f"{sample['task']}, prompt {sample['ordinal']}: reward {reward}, advantage {sample['advantage']:+.3f}"
    first += f", finish {sample['finish']}, weights of step {sample['version']}"
    rows = {"": rich.text.Text(first, "bold"), "prompt": _visible(sample["prompt"]), "answer": _visible(sample["answer"])}
    if sample["parts"]:
        rows["parts"] = ", ".join(f"{name} {value:.3f}" for name, value in sample["parts"].items())
    if sample["error"]:
        rows["error"] = _visible(sample["error"])
    tokens = rich.text.Text()
    for token, logprob in zip(sample["tokens"], sample["logprobs"]):
        piece = tokenizer.decode([token]) if token < tokenizer.vocab_size else f"<{token}>"
        piece = _visible(piece).replace("\n", "\\n").replace(" ", "·")  # rich breaks lines at spaces only
        tokens.append(f"{piece}({logprob:.2f})", "red" if logprob < -3 else "")
        tokens.append(" ")
    rows["tokens"] = tokens
    table = rich.table.Table.grid(padding=(0, 1))
    table.add_column(style="dim", min_width=6)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, rich.text.Text) else rich.text.Text(value))
    return table


def _visible(text: str) -> str:
    """The text with what a terminal would act on, or not show, written out."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def final_words(run_dir: pathlib.Path, evaluation: dict[str, float]) -> str:
    """The last evaluation, where everything lies, and what to try next."""
    curves = run_dir / "rl.png"
    try:
        plot(run_dir, curves, CURVES)
    except (UserError, OSError) as error:  # no matplotlib, a full disk: the run is done all the same
        curves = error
    said = [
        f"{how} reward {evaluation[f'eval_{how}']:.3f}, right {evaluation[f'eval_{how}_exact']:.1%}"
        for how in ("greedy", "sampled")
        if f"eval_{how}" in evaluation
    ]
    commands = [f"glm5 rl --inspect {run_dir} --worst"]
    samples = read_samples(run_dir)[1]
    plain = runs.read_config(run_dir).data.template == "plain"  # glm5 generate continues a text as it is
    if plain and samples and samples[0]["prompt"].isprintable() and len(samples[0]["prompt"]) < 60:
        commands.append(f"glm5 generate {run_dir} --prompt {shlex.quote(samples[0]['prompt'])}")
    return f"""
held-out prompts: {"; ".join(said) or "no answer could be scored"}

config       {run_dir / "config.json"}
metrics      {run_dir / "metrics.jsonl"}  (tensorboard --logdir {run_dir})
samples      {run_dir / "samples"}
checkpoints  {run_dir / "checkpoints"}
curves       {curves}

next:
""" + "\n".join(f"  {command}" for command in commands)
