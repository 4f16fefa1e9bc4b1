"""Training configs: one function per recipe, each returns a TrainConfig (paper section 2; Appendix A).

`glm5 train tiny` runs `tiny()` below; `glm5 train path/to/mine.py` runs the function `config()` of that file.
"""

import dataclasses
from typing import Literal

from glm5_jax import config as models
from glm5_jax.config import ModelConfig, check
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import BatchPlan, ByTokens, LearningRate, check_by_tokens
from glm5_jax.train.step import LossConfig

Part = Literal["trunk", "indexer", "mtp"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run."""

    model: ModelConfig = dataclasses.field(default_factory=models.tiny)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lr: LearningRate = dataclasses.field(default_factory=LearningRate)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    network: str = "glm5_jax.model:Glm5"  # class of the network: module:Class or file.py:Class
    steps: int = 1000  # optimizer steps
    seed: int = 0  # of the initial weights
    micro_rows: int = 8  # rows whose activations exist at once; a batch is a multiple
    batch_rows: ByTokens = ((0, 8),)  # rows of a batch, by tokens seen: pairs (tokens, rows)
    mtp_weight: ByTokens = ((0, 0.3), (15e12, 0.1))  # weight of the MTP loss, by tokens seen
    bias_rate: ByTokens = ((0, 0.001), (15e12, 0.0))  # step of the router bias, by tokens seen
    freeze: tuple[Part, ...] = ("indexer",)  # parts that do not train; dense pre-training gives the indexer no loss
    nonfinite: Literal["stop", "skip"] = "stop"  # when a loss or gradient is not finite: end the run, or skip the update
    eval_every: int = 500  # steps between evaluations on held-out text; the last step always evaluates
    eval_rows: int = 64  # held-out rows per evaluation, 0 = all; the last evaluation takes all of them
    profile: tuple[int, int] = (0, 0)  # steps [first, last) to trace with the JAX profiler into RUN/profile

    def __post_init__(self):
        check(self.steps >= 1, f"steps={self.steps}: must be at least 1")
        check(self.seed >= 0, f"seed={self.seed}: must not be negative")
        check(0 <= self.profile[0] <= self.profile[1], f"profile={self.profile}: first and last step, rising from 0")
        check(self.micro_rows >= 1, f"micro_rows={self.micro_rows}: must be at least 1")
        check(self.eval_every >= 1, f"eval_every={self.eval_every}: must be at least 1")
        check(self.eval_rows >= 0, f"eval_rows={self.eval_rows}: must not be negative")
        check(
            self.data.seq_len <= self.model.max_position_embeddings,
            f"data.seq_len={self.data.seq_len}: the position limit is "
            f"model.max_position_embeddings={self.model.max_position_embeddings}",
        )
        check(
            self.loss.mtp_steps == 0 or self.model.num_nextn_predict_layers == 1,
            f"loss.mtp_steps={self.loss.mtp_steps}: the model has no MTP layer (model.num_nextn_predict_layers=0)",
        )
        check(
            set(self.freeze) < {"trunk", "indexer", "mtp"} and len(set(self.freeze)) == len(self.freeze),
            f"freeze={self.freeze}: some of trunk, indexer and mtp, not all",
        )
        check_by_tokens("mtp_weight", self.mtp_weight)
        check_by_tokens("bias_rate", self.bias_rate)
        self.plan()

    def plan(self) -> BatchPlan:
        """Rows and tokens of each step."""
        return BatchPlan(self.batch_rows, self.micro_rows, self.data.seq_len)


def tiny() -> TrainConfig:
    """A few minutes on a laptop: a 4M-parameter GLM-5 learns Python from the standard library's source files."""
    return TrainConfig(
        model=models.tiny(attention="dense"),
        data=DataConfig(tokenizer="bpe:2048", seq_len=256, held_out=0.01),
        lr=LearningRate("cosine", peak=0.01, final=0.001, warmup_steps=20),
        loss=LossConfig(mtp_steps=1),
        checkpoint=CheckpointConfig(every=50),
        steps=350,
        micro_rows=8,
        batch_rows=((0, 8),),
        eval_every=50,
        eval_rows=32,
    )


def small() -> TrainConfig:
    """27.3M parameters on the standard library's source files; hours on a laptop, minutes on an accelerator."""
    return TrainConfig(
        model=models.small(attention="dense"),
        data=DataConfig(tokenizer="bpe:4096", seq_len=512, packing="split"),
        lr=LearningRate("cosine", peak=0.005, final=0.0005, warmup_steps=100),
        loss=LossConfig(mtp_steps=0),
        steps=2000,
        micro_rows=8,
        batch_rows=((0, 16),),
    )


RECIPES = {f.__name__: f for f in (tiny, small)}
