"""How to change a layer without editing the package: queries normalised per head (QK-Norm, half of it).

    glm5 train experiments/custom_attention.py

A layer is a class; the blocks say which class they use for attention, the network which class it uses for blocks. The new
parameter is declared where it is used, with its axes and its kind ("norm": AdamW, no weight decay); sharding, optimizer and
checkpoints need nothing more.
"""

import dataclasses

from flax import nnx

from glm5_jax.config import ModelConfig
from glm5_jax.layers.block import Block
from glm5_jax.layers.mla import Mla
from glm5_jax.layers.norm import rms_norm
from glm5_jax.layers.param import declare
from glm5_jax.model import Glm5
from glm5_jax.train import stages


class QueryNormMla(Mla):
    """MLA whose queries pass through an RMSNorm of width C + P per head."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, stack=(), indexers: tuple | None = (), part="trunk"):
        super().__init__(cfg, rngs, stack, indexers, part)
        self.head_norm = declare(rngs, stack, (cfg.qk_head_dim,), ("head_dim",), "norm", part=part)

    def queries(self, cq, ctx):
        """Per-head queries [B,T,N,C+P], normalised after the rotation."""
        return rms_norm(super().queries(cq, ctx), self.head_norm[...], self.cfg.rms_norm_eps)


class QueryNormBlock(Block):
    """A decoder layer with the attention above."""

    attention_class = QueryNormMla


class QueryNormGlm5(Glm5):
    """GLM-5 built of the layers above."""

    block_class = QueryNormBlock


def config() -> stages.TrainConfig:
    """The `tiny` recipe with the changed network."""
    return dataclasses.replace(stages.tiny(), network=f"{__file__}:QueryNormGlm5")
