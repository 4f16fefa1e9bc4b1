"""GLM-5 at 4,096 tokens on 512 TPU v5p chips: the first stage of pre-training (paper sections 2.2 and 2.3).

    glm5 train experiments/pods/glm5_4k.py --processes 0 --run-dir /runs/glm5-4k      # on every machine of the slice
"""

from glm5_jax.config import glm5
from glm5_jax.sharding.mesh import MeshConfig
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import LossConfig


def config() -> TrainConfig:
    """Tokenised text and the tokenizer are expected under /runs/data; README.md says what they may be."""
    return TrainConfig(
        model=glm5(attention="dense", remat="block", dtype="bfloat16"),
        data=DataConfig(sources=("/runs/data/text",), tokenizer="/runs/data/tokenizer.json", seq_len=4096),
        lr=LearningRate("cosine", peak=2e-4, final=4e-5, warmup_steps=2000),
        loss=LossConfig(mtp_steps=3),
        checkpoint=CheckpointConfig(every=250),
        mesh=MeshConfig(data=8, expert=64),
        steps=100_000,
        micro_rows=512,
        batch_rows=((0, 4096), (500_000_000_000, 16_384)),
        eval_every=1000,
        eval_rows=512,
    )
