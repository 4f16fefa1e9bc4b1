"""SwiGLU: the dense FFN of the first layers and the shared expert (paper section 2.1)."""

import jax
from flax import nnx

from glm5_jax.layers.param import declare


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down, for x [..., D], gate and up [D,F], down [F,D]; weights are cast to x.dtype."""
    gate, up, down = (w.astype(x.dtype) for w in (gate, up, down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Mlp(nnx.Module):
    """SwiGLU with weights gate, up [D,F] and down [F,D]."""

    def __init__(self, width: int, hidden: int, std: float, rngs: nnx.Rngs, stack=(), part="trunk", hf="mlp"):
        into = dict(kind="matrix", std=std, inputs=(-2,), outputs=(-1,), part=part)
        self.gate = declare(rngs, stack, (width, hidden), ("embed", "mlp"), hf=f"{hf}.gate_proj.weight", **into)
        self.up = declare(rngs, stack, (width, hidden), ("embed", "mlp"), hf=f"{hf}.up_proj.weight", **into)
        self.down = declare(rngs, stack, (hidden, width), ("mlp", "embed"), hf=f"{hf}.down_proj.weight", **into)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D]."""
        return swiglu(x, self.gate[...], self.up[...], self.down[...])
