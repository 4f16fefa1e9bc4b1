"""The measurements that are made of every stage's model: held-out text, held-out conversations, tasks, and samples."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import numpy as np

from glm5_jax.config import ModelConfig, override
from glm5_jax.convert.tokenizer import BpeTokenizer
from glm5_jax.model import Glm5, abstract, split
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.rewards import Scorer
from glm5_jax.rl.rollout import Rollouts, evaluate
from glm5_jax.rl.tasks import mixture
from glm5_jax.serve.engine import Engine, Request
from glm5_jax.train.data import Corpus, DataConfig, held_out_batches, load_corpus
from glm5_jax.train.evaluate import bits_per_byte, in_batches, make_loss_sum
from glm5_jax.train.step import LossConfig


def corpus_of(data: DataConfig, cache: pathlib.Path, tokenizer) -> Corpus:
    """The corpus of `data` in the ids of `tokenizer`, kept in the folder `cache`."""
    cache.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, BpeTokenizer):  # a trained one; `load_corpus` finds it there and trains none
        tokenizer.save(cache / "tokenizer.json")
    return load_corpus(data, cache)


@functools.cache
def _loss_sum(cfg: ModelConfig, kind: type[Glm5]) -> Callable:
    """One compiled program for all models alike."""
    return make_loss_sum(abstract(cfg, kind), LossConfig().chunk)


def held_out(model: Glm5, corpus: Corpus, data: DataConfig, rows: int, batch_rows: int, **overrides) -> float:
    """Bits per byte of the first `rows` held-out rows of `data.seq_len` tokens: of text, or of what conversations train.

    Args:
      overrides: settings of the model, such as attention="sparse".
    """
    loss_sum = _loss_sum(override(model.cfg, **overrides), type(model))
    return bits_per_byte(loss_sum, split(model)[1], in_batches(held_out_batches(corpus, data, 1, rows), batch_rows))


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers to held-out questions of one task. greedy, sampled: percent that are right. samples: texts, greedy."""

    greedy: float
    sampled: float
    samples: list[str]


def answers(
    model: Glm5, tokenizer, config: RlConfig, tasks: tuple[str, ...], prompts: int, shown: int = 3
) -> dict[str, Answers]:
    """{task: Answers} to `prompts` held-out questions of each, greedily and at temperature 1, asked as `config` asks."""
    engine, found = Engine(model, config.rollout.slots, config.data.seq_len), {}
    for name in tasks:
        questions = mixture((name,), config.seed)
        with Scorer(questions.tasks, seconds=config.rollout.timeout) as scorer:
            rollouts = Rollouts(config, tokenizer, engine, scorer, questions)
            line = evaluate(rollouts, prompts)
            first = rollouts.answer([questions.prompt(i, held_out=True) for i in range(shown)], 1, 0.0)
        texts = [f"{tokenizer.decode(sample.ids)}▌{sample.text}  reward {sample.reward:g}" for sample in first]
        found[name] = Answers(100 * line["eval_greedy_exact"], 100 * line["eval_sampled_exact"], texts)
    return found


def continued(model: Glm5, tokenizer, text: str, new_tokens: int, temperature: float = 0.7, seed: int = 0) -> str:
    """`text`, a bar, and how the model goes on."""
    ids = tokenizer.encode(text)
    engine = Engine(model, 1, len(ids) + new_tokens)
    made = engine.generate([Request(ids, new_tokens, temperature, top_p=0.95, seed=seed)])[0].tokens
    made = made[~np.isin(made, model.cfg.eos_token_id) & (made < tokenizer.vocab_size)]
    return f"{text}▌{tokenizer.decode(made)}"
