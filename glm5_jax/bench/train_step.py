"""glm5 bench train-step: step time, tokens/s, compile time and peak memory of a named shape, and where the time goes.

Shapes: `yardstick` (a whole AdamW step of a 4-layer model on 2 x 256 tokens), `long` (the same on 1 x 4,096 tokens) and
`small` (forward + backward of the 27.3M preset on 2 x 512 tokens). `--sparse` is the sparse stage of DSA: sparse attention,
LM loss and the indexer's loss. Each is measured in a fresh process, so that peak memory (VmHWM) counts imports and
compilation.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import time

from glm5_jax.config import ModelConfig, check, small


def yardstick_config(**overrides) -> ModelConfig:
    """4 layers (1 dense), D 256, 4 heads, 8 experts top 2 of width 128, vocabulary 1024."""
    return small(
        **dict(
            num_hidden_layers=4, hidden_size=256, num_attention_heads=4, q_lora_rank=128, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=512, n_routed_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=1024, index_n_heads=4, index_topk=64,
        )
        | overrides
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A benchmark: model, rows, tokens per row, and whether the optimizer belongs to it."""

    model: ModelConfig
    rows: int
    seq_len: int
    optimizer: bool


SHAPES = {
    "yardstick": lambda: Shape(yardstick_config(), 2, 256, True),
    "long": lambda: Shape(yardstick_config(index_topk=256, remat="block"), 1, 4096, True),
    "small": lambda: Shape(small(), 2, 512, False),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `glm5 bench train-step [SHAPE]`."""

    sparse: bool = False  # sparse attention with the indexer's loss, instead of dense attention with the indexer frozen
    repeats: int = 30  # timed steps; the median counts
    json: bool = False  # end with one line of JSON
    here: bool = False  # measure in this process instead of a fresh one (then memory counts what it held before)


def main(arguments: list[str]) -> int:
    """Prints the table."""
    from glm5_jax.cli_options import parse

    named = bool(arguments) and not arguments[0].startswith("-")
    shape = arguments[0] if named else "yardstick"
    options = parse(Options(), arguments[named:], f"glm5 bench train-step [{' | '.join(SHAPES)}]", "Times a training step.")
    check(shape in SHAPES, f"unknown shape {shape!r}: one of {', '.join(SHAPES)}")
    check(options.repeats >= 1, f"repeats={options.repeats}: must be at least 1")
    if options.here:
        result = measure(SHAPES[shape](), options.sparse, options.repeats)
    else:
        command = [sys.executable, "-m", "glm5_jax", "bench", "train-step", shape, "--here", "--json"]
        command += ["--repeats", str(options.repeats)] + ["--sparse"] * options.sparse
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    what = "forward + backward + AdamW" if SHAPES[shape]().optimizer else "forward + backward"
    print(f"{shape}{', sparse, with the loss of the indexer' if options.sparse else ', dense'}: {what}")
    for name, value in result.items():
        print(f"  {name:<34}{value:>12,.4g}")
    if options.json:
        print(json.dumps(result))
    return 0


def measure(shape: Shape, sparse: bool, repeats: int) -> dict[str, float]:
    """Medians over `repeats` calls, after one warm-up; times in seconds, memory in MB."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from glm5_jax.compiling import jit
    from glm5_jax.convert.stream import peak_memory
    from glm5_jax.model import Glm5, abstract, split
    from glm5_jax.train.flops import flops_per_token
    from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer
    from glm5_jax.train.schedule import LearningRate
    from glm5_jax.train.step import LossConfig, Rates, TrainState, flat, gradients, make_step, trainable_specs

    cfg = dataclasses.replace(shape.model, attention="sparse" if sparse else "dense")
    loss = LossConfig(mtp_steps=0, index_weight=float(sparse))
    freeze = () if sparse else ("indexer",)
    began = time.perf_counter()
    params = split(Glm5(cfg, nnx.Rngs(0)))[1]
    model = abstract(cfg)
    random = np.random.default_rng(0)
    size = (1, shape.rows, shape.seq_len)
    batch = {
        "tokens": jnp.asarray(random.integers(0, cfg.vocab_size, size), jnp.int32),
        "segment_ids": jnp.ones(size, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape.seq_len, dtype=jnp.int32), size),
    }
    graphdef = split(model)[0]
    keep = trainable_specs(model, freeze)
    trainable = {p: v for p, v in flat(params).items() if p in keep}
    frozen = {p: v for p, v in flat(params).items() if p not in keep}
    if shape.optimizer:
        optimizer = make_optimizer(OptimizerConfig("adamw"), LearningRate().schedule(1000), keep)
        rates = Rates(lambda step: jnp.float32(0.3), lambda step: jnp.float32(0.001))
        function = jit(make_step(model, optimizer, rates, loss, freeze), donate_argnums=0)
        carry = TrainState(jnp.int32(0), params, jit(optimizer.init)(trainable))
    else:
        backward = jit(lambda train, frozen, batch: gradients(graphdef, train, frozen, batch, jnp.float32(0), loss))
        carry = (trainable, frozen)

        def function(carry, batch):
            return carry, backward(*carry, batch)

    ready = time.perf_counter()
    carry, out = function(carry, batch)
    jax.block_until_ready(out)
    first_step = time.perf_counter() - ready
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry, out = function(carry, batch)
        jax.block_until_ready((carry, out))
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    tokens = shape.rows * shape.seq_len
    work = flops_per_token(model, shape.seq_len, 0) * tokens
    return {
        "median step, s": median,
        "fastest step, s": min(seconds),
        "tokens/s": tokens / median,
        "model GFLOP/s": work / median / 1e9,
        "initialisation, s": ready - began,
        "first step with compilation, s": first_step,
        "peak memory of the process, MB": peak_memory() / 2**20,
    } | ({} if sparse else breakdown(cfg, shape.rows, shape.seq_len, repeats))


def breakdown(cfg: ModelConfig, rows: int, seq_len: int, repeats: int) -> dict[str, float]:
    """Seconds of forward + backward of each part of all layers, run alone, and of the matrix products of the whole.

    The products are timed as one square product of 1024 and scaled by FLOPs: what a perfect program would take.
    """
    import jax
    import jax.numpy as jnp

    from glm5_jax.layers.experts import experts
    from glm5_jax.layers.mlp import swiglu
    from glm5_jax.model import abstract
    from glm5_jax.sparse.dense import dense
    from glm5_jax.sparse.masks import Rows
    from glm5_jax.train.flops import flops_per_token
    from glm5_jax.train.loss import cross_entropy

    key = jax.random.key(0)
    draw = lambda *shape: 0.1 * jax.random.normal(key, shape)  # noqa: E731
    m, d, f = rows * seq_len, cfg.hidden_size, cfg.moe_intermediate_size
    e, n, qk = cfg.n_routed_experts, cfg.num_attention_heads, cfg.qk_head_dim
    slot = jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32), (rows, seq_len))
    ones = jnp.ones_like(slot)
    ids = jnp.argsort(jax.random.uniform(key, (m, e)), axis=1)[:, : cfg.num_experts_per_tok].astype(jnp.int32)
    moe_layers = sum(ffn == "moe" for ffn, _ in cfg.layer_kinds)
    heads = (rows, seq_len, n, qk)

    def attend(q, k, v):
        return dense(q, k, v, Rows(slot, ones), ones, qk**-0.5, cfg.query_chunk)[0]

    parts = {
        "attention core": (attend, (draw(*heads), draw(*heads), draw(*heads[:3], cfg.v_head_dim)), cfg.num_hidden_layers),
        "routed experts": (
            lambda x, w, gate, up, down: experts(x, ids, w, gate, up, down),
            (draw(m, d), draw(m, cfg.num_experts_per_tok), draw(e, d, f), draw(e, d, f), draw(e, f, d)),
            moe_layers,
        ),
        "shared experts": (swiglu, (draw(m, d), draw(d, f), draw(d, f), draw(f, d)), moe_layers),
        "head and loss": (
            lambda hidden, head: cross_entropy(hidden, head, slot, jnp.ones(slot.shape), 1024),
            (draw(rows, seq_len, d), draw(d, cfg.vocab_size)),
            1,
        ),
    }
    seconds = {f"  {name}, s": _time_gradient(*part, repeats) for name, part in parts.items()}
    square = draw(1024, 1024)
    rate = 2 * 1024**3 / _time(jax.jit(lambda a, b: a @ b), (square, square), repeats)
    work = flops_per_token(abstract(cfg), seq_len, 0) * m
    return seconds | {"  matrix products alone, s": work / rate}


def _time_gradient(function, arguments: tuple, times: int, repeats: int) -> float:
    import jax.numpy as jnp
    from jax import grad

    from glm5_jax.compiling import jit

    return times * _time(
        jit(grad(lambda *a: jnp.sum(jnp.square(function(*a))), tuple(range(len(arguments))))), arguments, repeats
    )


def _time(function, arguments: tuple, repeats: int) -> float:
    import jax

    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
