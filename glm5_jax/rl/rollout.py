"""Answers of the policy to the prompts of a step, their rewards, and the batch that the trainer reads.

What is drawn depends on the seed of the run and on the ordinals of the prompts, never on time or on how answers were batched.
"""

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from glm5_jax.config import check
from glm5_jax.convert import chat
from glm5_jax.rl.advantages import Advantages, group_advantages, keep_informative, token_weights
from glm5_jax.rl.config import RlConfig, RowConfig
from glm5_jax.rl.rewards import Score, Scorer
from glm5_jax.rl.tasks import Mixture, Prompt
from glm5_jax.serve.engine import Completion, Engine, Request

EXACT = 0.999  # an answer with at least this reward is right


@dataclasses.dataclass
class Sample:
    """An answer. ids: int32 [n], the prompt's tokens. reward: that of `score` after the rule for truncated answers."""

    prompt: Prompt
    ids: np.ndarray
    completion: Completion
    text: str
    score: Score
    reward: float | None


class Rollouts:
    """Asks the engine and scores what it answers."""

    def __init__(self, config: RlConfig, tokenizer, engine: Engine, scorer: Scorer, prompts: Mixture):
        self.config, self.tokenizer, self.engine, self.scorer, self.prompts = config, tokenizer, engine, scorer, prompts

    def collect(self, first: int, progress: Callable[[int], None] | None = None) -> tuple[list[Sample], int, dict]:
        """Samples of a step, group by group.

        With `rollout.filter`, prompts whose answers all score the same are replaced by later ones, for at most `rollout.rounds`
        rounds; then the step is smaller.

        Args:
          first: ordinal of the first prompt.
        Returns:
          (samples, ordinal of the next step's first prompt, counts of prompts asked and filtered).
        """
        c, kept, at = self.config.rollout, [], first
        for _ in range(c.rounds if c.filter else 1):
            wanted = c.prompts - len(kept) // c.group
            ordinals = range(at, at + wanted)
            at += wanted
            samples = self.answer([self.prompts.prompt(i) for i in ordinals], c.group, c.temperature, progress)
            if c.filter:
                told = keep_informative([s.reward for s in samples], [s.prompt.ordinal for s in samples])
                told = np.repeat(told.reshape(-1, c.group).any(axis=1), c.group)
                samples = [sample for sample, keep in zip(samples, told) if keep]
            kept += samples
            if len(kept) == c.prompts * c.group:
                break
        return kept, at, {"prompts": at - first, "filtered": at - first - len(kept) // c.group}

    def answer(self, prompts: Sequence[Prompt], group: int, temperature: float, progress=None) -> list[Sample]:
        """`group` answers to each prompt, prompt by prompt."""
        config, tokenizer = self.config, self.tokenizer
        encoded = [(prompt, encode(prompt, tokenizer, config.data)) for prompt in prompts]
        asked = [(prompt, ids, i) for prompt, ids in encoded for i in range(group)]
        requests = [
            Request(ids, config.rollout.max_new_tokens, temperature, seed=_seed(config.seed, prompt.ordinal, i))
            for prompt, ids, i in asked
        ]
        completions = self.engine.generate(requests, progress)
        texts = [self._text(completion) for completion in completions]
        answers = texts if config.data.template == "plain" else [text.partition("</think>")[2] for text in texts]
        scores = self.scorer.score([prompt for prompt, _, _ in asked], answers)
        return [
            Sample(prompt, request.tokens, completion, text, score, self._reward(completion, score))
            for (prompt, _, _), request, completion, text, score in zip(asked, requests, completions, texts, scores)
        ]

    def _text(self, completion: Completion) -> str:
        """The answer without its stop token; ids that only the model has (its vocabulary may be padded) say nothing."""
        ids = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        return self.tokenizer.decode(ids[ids < self.tokenizer.vocab_size])

    def _reward(self, completion: Completion, score: Score) -> float | None:
        rule = self.config.rollout.truncated
        if completion.finish == "stop" or rule == "score" or score.value is None:
            return score.value
        return 0.0 if rule == "zero" else None


def encode(prompt: Prompt, tokenizer, rows: RowConfig) -> np.ndarray:
    """The prompt's tokens, int32 [n], in a chat template up to the <think> behind which the model begins.

    UserError: there are none, they leave no room for an answer, or the tokenizer lacks tokens of the template.
    """
    if rows.template == "plain":
        ids = tokenizer.encode_plain(prompt.text)
    else:
        chat.check_chat_tokens(tokenizer, rows.tokenizer)
        question = [{"role": "user", "content": prompt.text}]
        ids, _ = chat.encode(chat.render(question, version=rows.template, add_generation_prompt=True), tokenizer)
    what = f"{prompt.task}: prompt {prompt.ordinal} has {len(ids)} tokens"
    check(0 < len(ids) < rows.seq_len, f"{what}, which with an answer has to fit into data.seq_len={rows.seq_len}")
    return ids


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def assemble(samples: list[Sample], rows: int, seq_len: int, scale: str) -> tuple[dict, Advantages]:
    """The batch of a step and the advantages of its samples.

    Answers without a reward are in the batch and not in the loss.

    Args:
      rows: of the batch, at least one for each sample; those left over are padding. scale: see `group_advantages`.
    Returns:
      (arrays [rows,seq_len]: tokens, segment_ids, positions int32, loss_mask bool; rollout, advantage, weight float32).
    """
    advantages = group_advantages([s.reward for s in samples], [s.prompt.ordinal for s in samples], scale)
    masks = [np.ones(len(s.completion.tokens), bool) for s in samples]
    weights = token_weights(masks, range(len(samples)), ~advantages.missing)
    ints = {name: np.zeros((rows, seq_len), np.int32) for name in ("tokens", "segment_ids", "positions")}
    floats = {name: np.zeros((rows, seq_len), np.float32) for name in ("rollout", "advantage", "weight")}
    batch = ints | floats | {"loss_mask": np.zeros((rows, seq_len), bool)}
    for row, (sample, weight) in enumerate(zip(samples, weights)):
        made = sample.completion
        start, end = len(sample.ids), len(sample.ids) + len(made.tokens)
        batch["tokens"][row, :end] = np.concatenate([sample.ids, made.tokens])
        batch["segment_ids"][row, :end] = 1
        batch["positions"][row, :end] = np.arange(end)
        batch["loss_mask"][row, start:end] = not advantages.missing[row]
        batch["rollout"][row, start:end] = made.logprobs
        batch["advantage"][row, start:end] = advantages.values[row]
        batch["weight"][row, start:end] = weight
    return batch, advantages


def summary(samples: list[Sample], advantages: Advantages) -> dict[str, float]:
    """Metrics of a step's samples; docs/rl.md defines them."""
    rewards = _rewards(samples)
    every = [r for of_task in rewards.values() for r in of_task]
    finishes, kinds = Counter(s.completion.finish for s in samples), Counter(s.score.kind for s in samples)
    n = max(len(samples), 1)
    line = {
        "reward": float(np.mean(every)) if every else float("nan"),
        "exact": float(np.mean(np.array(every) >= EXACT)) if every else float("nan"),
        "zero_variance": float(advantages.zero_variance.sum()) / n,
        "missing": float(advantages.missing.sum()) / n,
        "truncated": finishes["length"] / n,
        "answer_tokens": float(np.mean([len(s.completion.tokens) for s in samples])) if samples else 0.0,
    }
    if len(rewards) > 1:
        line |= {f"reward/{task}": float(np.mean(values)) for task, values in sorted(rewards.items())}
    return line | {f"scores_{kind}": count for kind, count in sorted(kinds.items()) if kind != "scored"}


def evaluate(rollouts: Rollouts, prompts: int) -> dict[str, float]:
    """Rewards of held-out prompts, each answered greedily, and once at temperature 1: of all, and of each of several tasks."""
    questions = [rollouts.prompts.prompt(i, held_out=True) for i in range(prompts)]
    line = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rewards = _rewards(rollouts.answer(questions, 1, temperature))
        groups = {"": [r for of_task in rewards.values() for r in of_task]} if rewards else {}
        groups |= {f"/{task}": values for task, values in sorted(rewards.items())} if len(rewards) > 1 else {}
        for suffix, values in groups.items():
            line[f"eval_{name}{suffix}"] = float(np.mean(values))
            line[f"eval_{name}_exact{suffix}"] = float(np.mean(np.array(values) >= EXACT))
    return line


def _rewards(samples: list[Sample]) -> dict[str, list[float]]:
    """Those that there are, by task."""
    rewards = {}
    for s in samples:
        if s.reward is not None:
            rewards.setdefault(s.prompt.task, []).append(s.reward)
    return rewards


def write_samples(path: pathlib.Path, samples: list[Sample], advantages: Advantages) -> None:
    """One JSON line for each sample, in one move."""
    lines = []
    for sample, advantage in zip(samples, advantages.values):
        c, p = sample.completion, sample.prompt
        lines.append(
            dict(
                task=p.task, ordinal=p.ordinal, prompt=p.text, answer=sample.text, reward=sample.reward,
                parts=sample.score.parts, error=sample.score.error, advantage=float(advantage), finish=c.finish,
                tokens=c.tokens.tolist(), logprobs=[float(x) for x in c.logprobs], version=int(c.versions[0]),
            )
        )  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    new.replace(path)
