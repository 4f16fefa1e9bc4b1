"""The whole recipe of GLM-5 in miniature, seven stages: `make pipeline`, or `glm5 run experiments/recipe`.

The first four are recipes of `glm5_jax.train.stages`, shorter, and with few enough keys a query that the choice matters. SFT
teaches two tasks of the ladder (`glm5_jax.rl.tasks`) as conversations that think first; RL goes on with one of them alone; in
distillation RL's run teaches that one, SFT's the other.
docs/pipeline.md says what came of it.
"""

import dataclasses
import itertools
import json
import pathlib

from glm5_jax.config import override
from glm5_jax.convert.tokenizer import BpeTokenizer
from glm5_jax.model import Glm5
from glm5_jax.pipeline.measure import answers, continued, corpus_of, held_out
from glm5_jax.pipeline.run import Pipeline, Stage
from glm5_jax.rl.config import RlConfig, RolloutConfig, RowConfig
from glm5_jax.rl.tasks import Prompt, task
from glm5_jax.train import stages
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import InitConfig, TrainConfig

SUM, REVERSE = "digit_sum:4", "reverse:4"
CONVERSATIONS = 4000  # of each of the two
EVAL_PROMPTS = 128  # held-out questions of each
TEXT = 16_384  # held-out tokens of Python that are measured, in rows of either length
SHORT, LONG = 256, 2048  # tokens of a row before and after mid-training
KEYS = 32  # K, of 2,048 tokens about as few as GLM-5's 2,048 of 202,752
PROMPT = "def read_config(path, default=None):\n    "

PYTHON, LONGER, SPARSE = (
    f"Python, rows of {SHORT}, bits per byte",
    f"Python, rows of {LONG:,}, bits per byte",
    f"Python, rows of {LONG:,}, sparse attention, bits per byte",
)
CHATS = "conversations, bits per byte"
RIGHT = {(name, how): f"{name}, {how}, % right" for name in (SUM, REVERSE) for how in ("greedy", "sampled")}


def pipeline(runs: pathlib.Path) -> Pipeline:
    """The seven stages. Writes the conversations of SFT into the folder `runs`, where the stages will lie."""
    chats = DataConfig(
        sources=(write_conversations(runs / "conversations.jsonl"),), kind="chat", tokenizer="bpe:2048", seq_len=512,
        packing="best_fit", held_out=0.05, seed=6,
    )  # fmt: skip
    ask = reasoning(REVERSE)

    def measure(model: Glm5, tokenizer: BpeTokenizer) -> dict:
        text = corpus_of(stages.tiny().data, runs / "measured", tokenizer)
        loss = lambda n, **how: held_out(model, text, rows_of(n), TEXT // n, 2048 // n, **how)  # noqa: E731
        said = answers(model, tokenizer, ask, (SUM, REVERSE), EVAL_PROMPTS)
        numbers = {
            PYTHON: loss(SHORT),
            LONGER: loss(LONG),
            SPARSE: loss(LONG, attention="sparse"),
            CHATS: held_out(model, corpus_of(chats, runs / "measured", tokenizer), chats, 16, 4),
        }
        numbers |= {RIGHT[name, how]: getattr(said[name], how) for name, how in RIGHT}
        samples = {"Python, temperature 0.7": continued(model, tokenizer, PROMPT, 80)}
        return {"numbers": numbers, "samples": samples | {name: "\n".join(said[name].samples) for name in said}}

    return Pipeline("The recipe of GLM-5, in miniature", (
        Stage(
            "pretrain", "Pre-training", "From random weights to Python: the standard library's source files in rows of 256 "
            "tokens, dense attention, Muon Split, MTP with one parameter set.", "2.2",
            shorter(stages.tiny(), steps=300), (PYTHON,),
        ),
        Stage(
            "midtrain", "Longer context", "Rows of 512, 1,024, then 2,048 tokens, whole documents, a larger rotary base. The "
            "same held-out text becomes easier to predict where more of it is in one row.", "2.3",
            longer(), (LONGER,),
        ),
        Stage(
            "dsa_warmup", "DSA warm-up", "Everything is frozen but the indexer, which learns which keys dense attention looks "
            "at. Sparse attention over the keys that it selects comes close to dense attention.", "2.1.1",
            shorter(stages.dsa_warmup(), steps=60, eval_every=15), (SPARSE,),
        ),
        Stage(
            "dsa_sparse", "Sparse adaptation", "Everything trains under sparse attention: the network by the loss of the text, "
            "the indexer by its KL over the keys that it selected.", "2.1.1",
            shorter(stages.dsa_sparse(), steps=60, eval_every=15), (SPARSE,),
        ),
        Stage(
            "sft", "Supervised fine-tuning", "Conversations in the chat template, of two tasks, each thought through and then "
            "answered; only what the model is to say is trained.", "3.1", fine_tuning(chats),
            (CHATS, RIGHT[SUM, "sampled"], RIGHT[REVERSE, "sampled"]),
        ),
        Stage(
            "rl", "Reasoning RL", f"GRPO with IcePop on {REVERSE} alone: eight thoughts and answers to each question, rewarded "
            "by the share of digits that are right. The indexer is frozen.", "3.2", ask, (RIGHT[REVERSE, "sampled"],),
        ),
        Stage(
            "distill", "Cross-stage distillation", f"Both tasks, answered by the model itself: RL's run judges the answers to "
            f"{REVERSE} token by token, SFT's run those to {SUM}.", "3.5", distillation(runs),
            (RIGHT[SUM, "sampled"], RIGHT[REVERSE, "sampled"]),
        ),
    ), measure)  # fmt: skip


def shorter(recipe: TrainConfig, **changes) -> TrainConfig:
    """A recipe with `KEYS` keys a query, without the run that it usually starts from, and with other changes."""
    return dataclasses.replace(recipe, model=override(recipe.model, index_topk=KEYS), init=InitConfig(), **changes)


def longer() -> TrainConfig:
    """Mid-training, 30 steps at each of three lengths."""
    tokens = 30 * LONG  # of 30 steps, at any length
    return shorter(stages.midtrain(), steps=90, eval_every=15, lengths=((0, 512), (tokens, 1024), (2 * tokens, LONG)))


def rows_of(length: int) -> DataConfig:
    """The held-out text of all stages in rows of `length` tokens."""
    return dataclasses.replace(stages.tiny().data, seq_len=length)


def fine_tuning(chats: DataConfig) -> TrainConfig:
    """Six times the learning rate of the recipe, and few steps: what is left to learn is for RL."""
    return shorter(
        stages.sft(),
        data=chats,
        lr=LearningRate("cosine", peak=0.006, final=0.0006, warmup_steps=10),
        steps=120,
        eval_every=20,
        micro_rows=4,
        batch_rows=((0, 4),),
    )


def reasoning(*tasks: str) -> RlConfig:
    """RL from SFT's model: the same network, 32 questions with 8 answers a step. In rows of 40 tokens both tasks have room."""
    return RlConfig(
        model=override(stages.sft().model, index_topk=KEYS),
        data=RowConfig(tokenizer="bpe:2048", seq_len=40, template="5"),
        rollout=RolloutConfig(tasks=tasks, prompts=32, group=8, max_new_tokens=28, slots=256, truncated="zero"),
        optimizer=OptimizerConfig(name="adamw"),
        lr=LearningRate("constant", peak=2e-4, warmup_steps=0),
        checkpoint=CheckpointConfig(every=10),
        micro_rows=64,
        steps=60,
        eval_every=20,
        eval_prompts=128,
    )


def distillation(runs: pathlib.Path) -> RlConfig:
    """As many answers a step as RL, each to a question of its own."""
    both = reasoning(SUM, REVERSE)
    return dataclasses.replace(
        both,
        rollout=dataclasses.replace(both.rollout, prompts=256, group=1, truncated="score"),
        teachers=(f"{SUM}={runs / 'sft'}", f"{REVERSE}={runs / 'rl'}"),
        lr=LearningRate("linear", peak=2e-4, final=2e-5, warmup_steps=0),
        steps=30,
    )


def write_conversations(path: pathlib.Path) -> str:
    """The path as text, to which one conversation for each question of the training part is written, the same ones always."""
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = ((thought, task(name).prompt(i)) for i in range(CONVERSATIONS) for name, thought in THOUGHTS.items())
    path.write_text("".join(json.dumps(conversation(prompt, thought(prompt))) + "\n" for thought, prompt in asked))
    return str(path)


def conversation(prompt: Prompt, thought: str) -> dict:
    """A question, a thought and the answer, as of the OpenAI API."""
    answer = {"role": "assistant", "reasoning_content": thought, "content": prompt.metadata["answer"]}
    return {"messages": [{"role": "user", "content": prompt.text}, answer]}


def adding(prompt: Prompt) -> str:
    """1+2+3+4= is thought as 1+2=3;3+3=6;6+4=10."""
    digits = [int(digit) for digit in prompt.text.rstrip("=").split("+")]
    totals = list(itertools.accumulate(digits))
    return ";".join(f"{a}+{d}={a + d}" for a, d in zip(totals, digits[1:]))


def spelling(prompt: Prompt) -> str:
    """1234= is thought as 1 2 3 4;4 3 2 1."""
    digits = prompt.text.rstrip("=")
    return f"{' '.join(digits)};{' '.join(reversed(digits))}"


THOUGHTS = {SUM: adding, REVERSE: spelling}
