"""Configs of reinforcement learning: one function per recipe, each returns an RlConfig (paper section 3.2).

`glm5 rl reverse` runs `reverse()` below; `glm5 rl path/to/mine.py` runs the function `config()` of that file.
"""

import dataclasses
import math
from typing import Literal

from glm5_jax import config as models
from glm5_jax.config import ModelConfig, check
from glm5_jax.rl.objectives import DoubleSided, Grpo, IcePop, Truncated
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import InitConfig, Part
from glm5_jax.train.step import LossConfig

OBJECTIVES = {"icepop": IcePop, "grpo": Grpo, "truncated": Truncated, "double_sided": DoubleSided}


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """Text and rows."""

    tokenizer: str = "bytes"  # as in training; a run that is started from brings its own
    seq_len: int = 512  # tokens of a prompt and its answer, and of a row of the trainer
    # of a question: its text alone, or a user message of that release's chat template; then what follows </think> is scored
    template: Literal["plain", "5", "5.1", "5.2"] = "plain"


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """What is asked, how often, and how answers are drawn and scored."""

    tasks: tuple[str, ...] = ("reverse:4",)  # NAME or NAME@WEIGHT, mixed by weight in one batch
    prompts: int = 32  # of a step
    group: int = 32  # answers to each prompt
    max_new_tokens: int = 64  # of an answer
    temperature: float = 1.0  # of the draws and of the trainer's log-probabilities
    slots: int = 64  # answers that are made at the same time
    draft_steps: int = 0  # tokens that the MTP layer guesses ahead; changes the time, not the answers
    filter: bool = False  # dynamic filtering: prompts whose answers all score the same are replaced by others
    rounds: int = 4  # of prompts at most, to replace them
    truncated: Literal["score", "zero", "drop"] = "score"  # answers without an end: as any other, reward 0, or left out
    advantage: Literal["std", "none"] = "std"  # divide by the standard deviation of the group, or not
    timeout: float = 10.0  # seconds for a scorer that runs in a process of its own

    def __post_init__(self):
        for name in ("prompts", "group", "max_new_tokens", "slots", "rounds"):
            check(getattr(self, name) >= 1, f"rollout.{name}={getattr(self, name)}: must be at least 1")
        check(bool(self.tasks), "rollout.tasks: names no task")
        check(self.temperature > 0, f"rollout.temperature={self.temperature}: must be positive")
        check(self.draft_steps >= 0, f"rollout.draft_steps={self.draft_steps}: must not be negative")
        check(self.timeout > 0, f"rollout.timeout={self.timeout}: must be positive")


@dataclasses.dataclass(frozen=True)
class RlConfig:
    """Everything that decides a run of reinforcement learning. The router bias never moves."""

    model: ModelConfig = dataclasses.field(default_factory=models.tiny)
    data: RowConfig = dataclasses.field(default_factory=RowConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    objective: Literal["icepop", "grpo", "truncated", "double_sided"] = "icepop"  # see docs/rl_objectives.md
    teachers: tuple[str, ...] = ()  # TASK=RUN for each task: distillation from these; see docs/distillation.md
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lr: LearningRate = dataclasses.field(default_factory=LearningRate)
    loss: LossConfig = dataclasses.field(default_factory=lambda: LossConfig(mtp_steps=1, balance_weight=0.0, detach_mtp=True))
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    network: str = "glm5_jax.model:Glm5"  # class of the network: module:Class or file.py:Class
    steps: int = 100  # updates, each with fresh answers
    seed: int = 0  # of the weights before step 0, the prompts and the draws
    micro_rows: int = 32  # answers whose activations exist at once; prompts x group is a multiple
    mtp_weight: float = 0.1  # of the MTP loss, which trains the MTP layer alone
    freeze: tuple[Part, ...] = ("indexer",)  # parts that do not change; a frozen indexer still selects
    eval_every: int = 10  # steps between evaluations on held-out prompts; the last step always evaluates
    eval_prompts: int = 64  # held-out prompts, each answered greedily and once at temperature 1

    def __post_init__(self):
        check(self.steps >= 1, f"steps={self.steps}: must be at least 1")
        check(self.seed >= 0, f"seed={self.seed}: must not be negative")
        check(self.eval_every >= 1, f"eval_every={self.eval_every}: must be at least 1")
        check(self.eval_prompts >= 1, f"eval_prompts={self.eval_prompts}: must be at least 1")
        rows = self.rollout.prompts * self.rollout.group
        check(
            self.micro_rows >= 1 and rows % self.micro_rows == 0,
            f"micro_rows={self.micro_rows}: must divide rollout.prompts x rollout.group = {rows}",
        )
        check(0 <= self.mtp_weight < math.inf, f"mtp_weight={self.mtp_weight}: must be finite and not negative")
        limit = self.model.max_position_embeddings
        check(2 <= self.data.seq_len <= limit, f"data.seq_len={self.data.seq_len}: must lie in 2..{limit}, the position limit")
        for entry in self.teachers:
            name, equals, run = entry.partition("=")
            check(bool(name and equals and run), f"teachers={entry}: must be TASK=RUN, as in reverse:4=runs/reverse")
        unfiltered = not (self.teachers and self.rollout.filter)
        check(unfiltered, "rollout.filter=True: compares the answers of a group, distillation has one; set it to False")
        check("trunk" not in self.freeze, f"freeze={self.freeze}: nothing of the policy would train")
        check("indexer" in self.freeze, f"freeze={self.freeze}: RL freezes the indexer (paper section 3.2)")
        check(self.loss.index_weight == 0, f"loss.index_weight={self.loss.index_weight}: the indexer is frozen; set it to 0")
        check(
            self.loss.detach_mtp or not self.loss.mtp_steps,
            "loss.detach_mtp=False: the MTP loss would reach the policy; set it to True, or loss.mtp_steps to 0",
        )
        for steps, name in ((self.loss.mtp_steps, "loss.mtp_steps"), (self.rollout.draft_steps, "rollout.draft_steps")):
            has = self.model.num_nextn_predict_layers == 1
            check(not steps or has, f"{name}={steps}: the model has no MTP layer; set it to 0")


def reverse() -> RlConfig:
    """A minute or two on a laptop: four digits to be turned round, a 1.2M-parameter network from random weights.

    Layers, experts, indexer and Muon Split are GLM-5's; what is not is `PlacedGlm5`: the network is told its positions. K lies
    below the length of a row, so that the (random, frozen) indexer decides what is seen. Embedding and head, which AdamW
    moves, learn more slowly than with Muon's usual rates: otherwise the answers stop to vary before places are learnt.
    """
    return RlConfig(
        network="glm5_jax.rl.positions:PlacedGlm5",
        model=models.tiny(
            vocab_size=16, hidden_size=256, num_hidden_layers=2, intermediate_size=512, moe_intermediate_size=128,
            n_routed_experts=4, num_experts_per_tok=2, num_nextn_predict_layers=0, index_topk=8, max_position_embeddings=64,
            rope_theta=30.0,
        ),
        data=RowConfig(tokenizer="chars:0123456789=+", seq_len=10),
        rollout=RolloutConfig(tasks=("reverse:4",), prompts=16, group=16, max_new_tokens=5, slots=256),
        optimizer=OptimizerConfig(update_rms=2.0, weight_decay=0.0),
        lr=LearningRate("cosine", peak=3e-4, final=3e-5, warmup_steps=0),
        loss=LossConfig(mtp_steps=0, balance_weight=0.0),
        checkpoint=CheckpointConfig(every=50),
        micro_rows=256,
        steps=90,
        eval_prompts=256,
    )  # fmt: skip


RECIPES = {f.__name__: f for f in (reverse,)}


def reverse_copy() -> RlConfig:
    """From a run that learnt to reverse, then to copy, and forgot: both skills, each from the run that had it.

    Before it: `glm5 rl reverse`, and `glm5 rl reverse --init.run runs/reverse --rollout.tasks copy:4 --run-dir runs/copy`.
    """
    recipe = reverse()
    return dataclasses.replace(
        recipe,
        rollout=dataclasses.replace(recipe.rollout, tasks=("reverse:4", "copy:4"), prompts=256, group=1),
        teachers=("reverse:4=runs/reverse", "copy:4=runs/copy"),
        init=InitConfig(run="runs/copy"),
        micro_rows=256,
    )


DISTILL_RECIPES = {f.__name__: f for f in (reverse_copy,)}
