"""Attention over all visible keys at GLM-5's widths, forward and backward, compiled for TPUs that are not there.

    python experiments/kernels/dense.py

The loops of XLA against the Pallas kernels: bytes of HBM that the compiled programs move, and the time that products and bytes
take at the chip's peak, each instruction the longer of the two. One row, bfloat16. Needs libtpu, no TPU.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import glm5
from glm5_jax.plan import describe
from glm5_jax.program import instructions
from glm5_jax.sparse import dense as module
from glm5_jax.sparse.masks import Rows

CFG = glm5()
SCALE, BLOCK = CFG.qk_head_dim**-0.5, CFG.query_chunk


def loops(q, k, v, rows, segment):
    return module._dense(SCALE, module._tiles(q.shape[1], q.shape[2], BLOCK), q, k, v, rows, segment)[0]


def kernels(q, k, v, rows, segment):
    return module.dense(q, k, v, rows, segment, SCALE, BLOCK)[0]


def compiled(attend, topology: str, t: int):
    """(chip, instructions of the program, how often its loops run) of attend and its gradients for one row of t tokens."""
    chip, devices = describe(topology)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), ("x",)), jax.sharding.PartitionSpec())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, t, *shape), dtype, sharding=sharding)

    def gradients(q, k, v, segment, d_out):
        rows = Rows(jnp.arange(t, dtype=jnp.int32)[None], segment)
        out, vjp = jax.vjp(lambda *a: attend(*a, rows, segment), q, k, v)
        return out, vjp(d_out)

    n, width, value = CFG.num_attention_heads, CFG.qk_head_dim, CFG.v_head_dim
    shapes = array(n, width), array(n, width), array(n, value), array(dtype=jnp.int32), array(n, value)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        text = jax.jit(gradients, out_shardings=sharding).lower(*shapes).compile().as_text()
        turns, _ = module.mean_turns(t, 1, n, BLOCK)
    return chip, instructions(text, turns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
    parser.add_argument("--length", type=int, default=4096)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"{options.length:,} tokens\n\n| device | | TFLOP | GB of HBM | ms at peak: products | HBM | the longer of each |")
    print("|---|---|---|---|---|---|---|")
    for topology in options.topologies:
        device = topology.split(":")[0]
        for attend in (loops, kernels):
            chip, found = compiled(attend, topology, options.length)
            flops, moved = sum(i.flops * i.times for i in found), sum(i.bytes * i.times for i in found)
            alone = sum(max(i.flops / chip.flops, i.bytes / chip.hbm) * i.times for i in found)
            times = " | ".join(f"{1000 * x:.1f}" for x in (flops / chip.flops, moved / chip.hbm, alone))
            print(f"| {device} | {attend.__name__} | {flops / 1e12:.2f} | {moved / 1e9:.1f} | {times} |", flush=True)


if __name__ == "__main__":
    main()
