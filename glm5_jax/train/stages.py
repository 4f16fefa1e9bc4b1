"""Training configs: one function per recipe, each returns a TrainConfig (paper section 2; Appendix A).

`glm5 train tiny` runs `tiny()` below; `glm5 train path/to/mine.py` runs the function `config()` of that file.

The stages of one model, each starting from the run before it: tiny -> midtrain -> dsa_warmup -> dsa_sparse -> sft. They are one
loop under different settings: what trains (`freeze`), by which loss (`loss`), at which row lengths, from which parameters.
Tokens seen count from the start of each run, and each takes the corpus in an order of its own (`data.seed`; every row length
of a run adds 1); MTP weight and router-bias rate are those that the paper has reached by then.
"""

import dataclasses
from typing import Literal

import jax

from glm5_jax import config as models
from glm5_jax.config import ModelConfig, check
from glm5_jax.sharding.mesh import MeshConfig
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.conversations import ARITHMETIC
from glm5_jax.train.data import DataConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import BatchPlan, ByTokens, LearningRate, check_by_tokens
from glm5_jax.train.step import LossConfig

Part = Literal["trunk", "indexer", "mtp"]


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Where the parameters before step 0 come from. They are copied: afterwards the run needs its source no more."""

    run: str = ""  # run or Hugging Face directory to start from, its tokenizer included; empty = fresh weights
    step: int | None = None  # checkpoint of that run; None = the newest
    optimizer: Literal["reset", "keep"] = "reset"  # keep = go on with that run's moments; the same parts must train

    def __post_init__(self):
        alone = self.step is None and self.optimizer == "reset"
        check(
            bool(self.run) or alone,
            f"init.step={self.step}, init.optimizer={self.optimizer}: init.run names no run to take them from",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run."""

    model: ModelConfig = dataclasses.field(default_factory=models.tiny)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    lr: LearningRate = dataclasses.field(default_factory=LearningRate)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    network: str = "glm5_jax.model:Glm5"  # class of the network: module:Class or file.py:Class
    steps: int = 1000  # optimizer steps
    seed: int = 0  # of the initial weights
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    micro_rows: int = 8  # rows whose activations exist at once, on all devices together; a batch is a multiple
    batch_rows: ByTokens = ((0, 8),)  # rows of a batch, by tokens seen: pairs (tokens, rows)
    lengths: ByTokens = ()  # tokens per row, by tokens seen, rising to data.seq_len, more rows while shorter; none = seq_len
    mtp_weight: ByTokens = ((0, 0.3), (15e12, 0.1))  # weight of the MTP loss, by tokens seen
    bias_rate: ByTokens = ((0, 0.001), (15e12, 0.0))  # step of the router bias, by tokens seen
    freeze: tuple[Part, ...] = ("indexer",)  # parts that do not change; a frozen indexer still selects
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
        check(
            self.model.dtype != "float64" or jax.config.jax_enable_x64,
            "model.dtype=float64: JAX would compute in float32; set JAX_ENABLE_X64=1",
        )
        check(
            self.loss.mtp_steps > 0 or not self.loss.detach_mtp,
            "loss.detach_mtp=True: there is no MTP loss to keep from the trunk (loss.mtp_steps=0); set it to False",
        )
        _check_indexer(self.freeze, self.loss.index_weight)
        check_by_tokens("mtp_weight", self.mtp_weight)
        check_by_tokens("bias_rate", self.bias_rate)
        self.plan()

    def plan(self) -> BatchPlan:
        """Rows and tokens of each step."""
        return BatchPlan(self.batch_rows, self.micro_rows, self.data.seq_len, self.lengths)


def _check_indexer(freeze: tuple[Part, ...], weight: float) -> None:
    """The indexer learns from its own loss or not at all."""
    frozen = "indexer" in freeze
    check(not (frozen and weight > 0), f"loss.index_weight={weight}: the indexer is frozen (freeze={freeze}); set it to 0")
    check(
        frozen or weight > 0,
        f"freeze={freeze}: the indexer has nothing to learn from; freeze it, or set loss.index_weight above 0",
    )


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


# After pre-training both schedules by tokens stand at their last value (paper Appendix A).
_AFTER_PRETRAINING = dict(mtp_weight=((0, 0.1),), bias_rate=((0, 0.0),))


def midtrain() -> TrainConfig:
    """Mid-training of `tiny`: longer rows in steps, whole documents, a larger rotary base (paper section 2.3).

    GLM-5: 1T tokens in rows of 32,768, 500B of 131,072, 50B of 202,752; learning rate 4e-5 -> 1e-5, linear; rotary base
    10,000 -> 1,000,000 (GLM-4.5); best-fit packing; mixture: software repositories, then long documents and agent traces.
    Here: pre-training rows of 256 tokens become 512, 1,024 and 2,048; name a mixture with `data.sources` (PATH@WEIGHT).
    """
    return TrainConfig(
        model=models.tiny(attention="dense", rope_theta=1e6),
        data=DataConfig(tokenizer="bpe:2048", seq_len=2048, packing="best_fit", held_out=0.01, seed=1),
        lr=LearningRate("linear", peak=0.001, final=0.00025, warmup_steps=0),
        loss=LossConfig(mtp_steps=1),
        checkpoint=CheckpointConfig(every=50),
        init=InitConfig(run="runs/tiny"),
        steps=150,
        micro_rows=1,
        batch_rows=((0, 1),),
        lengths=((0, 512), (50 * 2048, 1024), (100 * 2048, 2048)),
        eval_every=50,
        eval_rows=4,
        **_AFTER_PRETRAINING,
    )


def dsa_warmup() -> TrainConfig:
    """DSA warm-up after `midtrain`: only the indexer trains, towards the dense attention of its layers (section 2.1.1).

    GLM-5: 1,000 steps of 14 rows of 202,752 tokens, learning rate 5e-3 -> 2e-4 (linear is our choice).
    """
    return dataclasses.replace(
        midtrain(),
        data=dataclasses.replace(midtrain().data, seed=4),
        lr=LearningRate("linear", peak=0.005, final=0.0002, warmup_steps=0),
        loss=LossConfig(mtp_steps=1, index_weight=1.0),
        freeze=("trunk", "mtp"),
        init=InitConfig(run="runs/midtrain"),
        steps=100,
        lengths=(),
    )


def dsa_sparse() -> TrainConfig:
    """Sparse adaptation after `dsa_warmup`: everything trains under sparse attention (section 2.1.1).

    The indexer learns from its KL over the selected keys, the rest from the LM loss; each gradient is clipped by its own norm.
    GLM-5: 20B tokens of mid-training data at 202,752, learning rate constant at 1e-5, where mid-training ended; the weight
    of the KL is not stated (1 here: Muon and AdamW do not depend on the scale of a gradient that no other one is added to), nor
    whether the indexer shares that rate. Here it learns 10 times as fast, or it may lose the network it follows
    (experiments/dsa_adaptation).
    A frozen indexer, as in RL: --freeze indexer --loss.index-weight 0.
    """
    return dataclasses.replace(
        midtrain(),
        model=models.tiny(attention="sparse", rope_theta=1e6),
        data=dataclasses.replace(midtrain().data, seed=5),
        lr=LearningRate("constant", peak=0.00025, warmup_steps=0),
        optimizer=OptimizerConfig(indexer_rate=10.0),
        loss=LossConfig(mtp_steps=1, index_weight=1.0),
        freeze=(),
        init=InitConfig(run="runs/dsa_warmup"),
        steps=100,
        lengths=(),
    )


def sft() -> TrainConfig:
    """Supervised fine-tuning after `dsa_sparse`, on conversations (section 3.1): `glm5 sft`.

    GLM-5: rows of up to 202,752 tokens; sizes, epochs and learning rate are not published. The indexer is frozen, as in RL
    (section 3.2), and MTP goes on learning from the trunk without a gradient into it.
    Here: sums, explained or worked out with a tool; name conversations of yours with `data.sources`.
    """
    return dataclasses.replace(
        dsa_sparse(),
        data=DataConfig(
            sources=(ARITHMETIC,), kind="chat", tokenizer="bpe:2048", seq_len=1024, packing="best_fit", held_out=0.02, seed=6
        ),
        lr=LearningRate("cosine", peak=0.001, final=0.0001, warmup_steps=10),
        optimizer=OptimizerConfig(),
        loss=LossConfig(mtp_steps=1, detach_mtp=True),
        freeze=("indexer",),
        init=InitConfig(run="runs/dsa_sparse"),
        steps=150,
        micro_rows=2,
        batch_rows=((0, 2),),
        eval_rows=8,
    )


RECIPES = {f.__name__: f for f in (tiny, small, midtrain, dsa_warmup, dsa_sparse, sft)}
