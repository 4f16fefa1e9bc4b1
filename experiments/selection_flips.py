"""How many selections differ between one device and a mesh of eight, on inputs that nobody chose.

    JAX_PLATFORMS=cpu python experiments/selection_flips.py

The tests compare devices on inputs whose scores are further than 1e-4 from a tie. Here nothing is filtered: fresh weights,
random tokens, four seeds. A mesh adds the same numbers in another order, so a key whose score almost ties with the K-th may be
chosen on one and not on the other, and so may an expert; what follows from that in later layers counts as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from glm5_jax.config import tiny
from glm5_jax.model import Glm5, merge, split
from glm5_jax.sharding.context import slots
from glm5_jax.sharding.mesh import ROWS, MeshConfig, local, make_mesh
from glm5_jax.sharding.rules import parameter_specs, place_parameters

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
B, T, SEEDS = 8, 512, 4


def choices(model: Glm5, mesh, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(selected keys [L,B,T,K], selected experts [MoE layers,B,T,X]), each ascending, tokens in the order of the row."""
    model = place_parameters(model, dict(mesh.shape)) if mesh else model
    graphdef, params = split(model)

    def run(params, tokens):
        aux = merge(graphdef, params).trunk(tokens, collect=frozenset({"selected", "router"}))[1]
        keys = jnp.stack([layer["selected"] for layer in aux])
        experts = jnp.stack([layer["router"].experts for layer in aux if "router" in layer])
        return keys, experts.reshape(len(experts), *keys.shape[1:3], -1), slots(*tokens.shape)

    out = (P(None, ROWS, "context"), P(None, ROWS, "context"), P(ROWS, "context"))
    fn = local(run, mesh, (parameter_specs(model), P(ROWS)), out) if mesh else run
    keys, experts, order = jax.device_get(jax.jit(fn)(params, tokens))
    order = np.argsort(order, axis=1)[None, :, :, None]
    return tuple(np.sort(np.take_along_axis(x, order, axis=2), axis=-1) for x in (keys, experts))


def differing(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """(members of a's sets that b's lack, members of a's sets) over the last axis."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return sum(len(np.setdiff1d(x, y)) for x, y in zip(a, b)), int((a >= 0).sum())


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{B} rows of {T} tokens, {SEEDS} seeds, mesh against one device: selected keys and experts that differ\n")
    print("| dtype | mesh | keys | experts |")
    print("|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        sums = {sizes: np.zeros(4, int) for sizes in MESHES}
        for seed in range(SEEDS):
            cfg = tiny(index_topk=64, dtype=dtype, num_nextn_predict_layers=0)
            model = Glm5(cfg, nnx.Rngs(seed))
            tokens = np.random.default_rng(seed).integers(0, cfg.vocab_size, (B, T)).astype(np.int32)
            one = choices(model, None, tokens)
            for sizes in MESHES:
                many = choices(model, make_mesh(MeshConfig(*sizes)), tokens)
                sums[sizes] += np.array([n for pair in zip(one, many) for n in differing(*pair)])
        for sizes, (keys, of_keys, experts, of_experts) in sums.items():
            mesh = "x".join(map(str, sizes))
            print(f"| {dtype} | {mesh} | {keys:,} of {of_keys:,} | {experts:,} of {of_experts:,} |", flush=True)


if __name__ == "__main__":
    main()
