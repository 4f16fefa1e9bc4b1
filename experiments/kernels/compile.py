"""Compiles one attention layer of GLM-5 for TPUs that are not there: how long it takes and what memory it plans.

    python experiments/kernels/compile.py --topologies v5p:2x2x1 --lengths 16384 131072 --out experiments/kernels/results.json

The layer is the sparse stage at GLM-5's widths in bfloat16: projections, indexer, selection, attention over the selection
and the indexer's loss, forward and backward, one sequence on one device. Needs libtpu (`pip install 'glm5_jax[tpu]'`), no
TPU. Rows already in the file are replaced, others stay.
"""

import argparse
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.config import glm5
from glm5_jax.layers.block import make_context
from glm5_jax.layers.mla import Mla, Selection
from glm5_jax.model import merge, split
from glm5_jax.plan import GIB, HEADROOM, describe
from glm5_jax.sparse.masks import Rows


def layer_gradients(t: int):
    """(function, argument shapes): gradients of the layer of a sequence of t tokens, given those of its two outputs."""
    cfg = glm5(dtype="bfloat16")
    graphdef, params = split(nnx.eval_shape(lambda: Mla(cfg, nnx.Rngs(0))))

    def forward(params, a):
        layer = merge(graphdef, params)
        slot, segment = jnp.arange(t, dtype=jnp.int32)[None], jnp.ones((1, t), jnp.int32)
        ctx = make_context(Rows(slot, segment), segment, slot, cfg)
        cq, keys = layer.query_latent(a), layer.keys(a, ctx)
        index = layer.index(cq, a, keys, ctx)
        out = layer.attend(cq, keys, Selection(layer.select(index, ctx), index), ctx, absorbed=False)
        return out.out, out.index_kl

    def gradients(params, a, d_out, d_kl):
        return jax.vjp(forward, params, a)[1]((d_out, d_kl))

    a = jax.ShapeDtypeStruct((1, t, cfg.hidden_size), jnp.bfloat16)
    return gradients, (params, a, a, jax.ShapeDtypeStruct((1, t), jnp.float32))


def compile_layer(topology: str, t: int) -> dict:
    """One row of the table."""
    function, shapes = layer_gradients(t)
    chip, devices = describe(topology)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices[:1]), ("x",)), jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        lowered = jax.jit(function, out_shardings=sharding).lower(*shapes)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    gib = {name: getattr(memory, f"{name}_size_in_bytes") / GIB for name in ("argument", "output", "temp")}
    total = sum(gib.values())
    return {
        "topology": topology,
        "tokens": t,
        "compile_s": round(time.perf_counter() - began, 1),
        **{f"{name}_gib": round(value, 3) for name, value in gib.items()},
        "fits": total < (1 - HEADROOM) * chip.memory / GIB,
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16],
        "jax": jax.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16_384])
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to keep the rows in")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    print(f"{'topology':<14}{'tokens':>9}{'compile s':>11}{'arguments':>11}{'outputs':>9}{'temporaries':>13} GiB  fits")
    for topology in options.topologies:
        for t in options.lengths:
            row = compile_layer(topology, t)
            print(
                f"{topology:<14}{t:>9,}{row['compile_s']:>11.0f}{row['argument_gib']:>11.2f}{row['output_gib']:>9.2f}"
                f"{row['temp_gib']:>13.2f}      {'yes' if row['fits'] else 'no'}",
                flush=True,
            )
            rows = [r for r in rows if (r["topology"], r["tokens"]) != (topology, t)] + [row]
            if options.out:
                rows.sort(key=lambda r: (r["topology"], r["tokens"]))
                options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
