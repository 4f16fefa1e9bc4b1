"""GLM-5 that is told positions: not the paper's network, but one that learns places from few samples.

RoPE tells a layer how far apart two tokens are. Which place of an answer a token has must be put together from that over
layers, which is slow to learn, and slower from rewards. For short tasks that test the RL loop (docs/rl.md has figures).
"""

import jax.numpy as jnp
from flax import nnx

from glm5_jax.config import ModelConfig
from glm5_jax.layers.block import Block
from glm5_jax.layers.param import declare
from glm5_jax.model import Glm5


class PlacedBlock(Block):
    """A decoder layer that adds a linear map of the rotary angles' sines and cosines to its input."""

    def __init__(self, cfg: ModelConfig, ffn: str, indexers: tuple | None, rngs: nnx.Rngs, stack=(), part="trunk"):
        super().__init__(cfg, ffn, indexers, rngs, stack, part)
        std = cfg.initializer_range / cfg.qk_rope_head_dim**0.5  # no larger than an embedding
        self.place = declare(
            rngs, stack, (cfg.qk_rope_head_dim, cfg.hidden_size), ("kv_rank", "embed"), "matrix", std,
            inputs=(-2,), outputs=(-1,), part=part,
        )  # fmt: skip

    def __call__(self, x, ctx, *args, **kwargs):
        """As `Block`; positions are those of the rotary tables, [B,T,P/2] each."""
        angles = jnp.concatenate([ctx.cos, ctx.sin], axis=-1).astype(x.dtype)
        return super().__call__(x + angles @ self.place[...].astype(x.dtype), ctx, *args, **kwargs)


class PlacedGlm5(Glm5):
    """GLM-5 of `PlacedBlock`s."""

    block_class = PlacedBlock
