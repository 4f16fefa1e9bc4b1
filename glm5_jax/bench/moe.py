"""How the experts' cost depends on tokens, on the number of experts and on the routing: `glm5 bench moe`.

One call of `glm5_jax.layers.experts.experts` forward and backward (gradients to x, weights, gate, up, down) in float32
with the backend's default implementation. GFLOP/s counts the selected rows only, 3 passes x 3 products x 2 D F each, so
padding shows as a lower number. The cost should follow the selected experts, not their number: the runs
for E = 8 and E = 64 alternate in one process and their ratio is the median over rounds.
"""

import dataclasses
import time
from json import dumps

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.cli_options import parse
from glm5_jax.layers.experts import experts, implementation

WIDTH, EXPERT_WIDTH, PER_TOKEN = 256, 128, 2  # D, F, X of the tiny preset
FEW, MANY = 8, 64  # E
ROUNDS = {512: 30, 4096: 12, 16_384: 8}  # tokens -> timed rounds


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `glm5 bench moe`."""

    json: bool = False  # end with one line of JSON


def main(arguments: list[str]) -> int:
    """Runs the benchmark from the command line."""
    run(parse(Options(), arguments, "glm5 bench moe", "Times the experts of one MoE layer.").json)
    return 0


def run(json: bool = False) -> dict:
    """Measures, prints a table and returns its numbers.

    Args:
      json: also print one JSON object with the same numbers as the last line.

    Returns:
      {"implementation": str, "rows": [{"tokens", "experts", "routing", "ms", "gflops"}, ...],
      "ratio": {tokens: time at E=64 / time at E=8}}; times are medians in milliseconds.
    """
    result = {"implementation": implementation(jax.default_backend()), "rows": [], "ratio": {}}
    print(f"experts forward + backward, D {WIDTH}, F {EXPERT_WIDTH}, X {PER_TOKEN}, {result['implementation']}")
    print(f"{'tokens':>8}{'experts':>9}  {'routing':<9}{'ms':>8}{'GFLOP/s':>9}{f'E={MANY}/E={FEW}':>12}")
    for tokens in ROUNDS:
        cases = [(FEW, "random"), (MANY, "random")]
        if tokens == max(ROUNDS):
            cases.append((MANY, "worst"))
        times = _alternate([_inputs(tokens, *case) for case in cases], ROUNDS[tokens])
        ratio = float(np.median(times[:, 1] / times[:, 0]))
        result["ratio"][str(tokens)] = round(ratio, 3)
        for (e, routing), ms in zip(cases, np.median(times, axis=0) * 1e3):
            gflops = 18 * tokens * PER_TOKEN * WIDTH * EXPERT_WIDTH / float(ms) / 1e6
            row = dict(tokens=tokens, experts=e, routing=routing, ms=round(float(ms), 2), gflops=round(gflops, 1))
            result["rows"].append(row)
            note = f"{ratio:.2f}" if (e, routing) == cases[1] else ""
            print(f"{tokens:>8}{e:>9}  {routing:<9}{ms:>8.1f}{gflops:>9.0f}{note:>12}")
    print('routing "random" = uniform over experts; "worst" = all tokens on the same two experts')
    if json:
        print(dumps(result))
    return result


def _inputs(tokens: int, count: int, routing: str) -> tuple:
    """The arguments of `experts` for `count` experts."""
    rng = np.random.default_rng(0)
    if routing == "worst":
        ids = np.tile(np.arange(PER_TOKEN) + 1, (tokens, 1))
    else:
        ids = np.argsort(rng.random((tokens, count)), axis=1)[:, :PER_TOKEN]

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape, scale=shape[-2] ** -0.5), jnp.float32)

    inward, outward = (count, WIDTH, EXPERT_WIDTH), (count, EXPERT_WIDTH, WIDTH)
    weights = jnp.asarray(rng.random((tokens, PER_TOKEN)), jnp.float32)
    matrices = normal(*inward), normal(*inward), normal(*outward)
    return normal(tokens, WIDTH), jnp.asarray(ids, jnp.int32), weights, *matrices


def _alternate(arguments: list[tuple], rounds: int) -> np.ndarray:
    """Seconds per call, [rounds, len(arguments)]; every round runs each case once."""
    step = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.square(experts(*a))), (0, 2, 3, 4, 5)))
    for a in arguments:
        jax.block_until_ready(step(*a))
    times = np.zeros((rounds, len(arguments)))
    for i in range(rounds):
        for j, a in enumerate(arguments):
            start = time.perf_counter()
            jax.block_until_ready(step(*a))
            times[i, j] = time.perf_counter() - start
    return times
