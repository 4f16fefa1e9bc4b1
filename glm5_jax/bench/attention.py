"""What sparse attention costs against dense, by length: `glm5 bench attention`.

One attention layer (projections, indexer, selection, core), forward and backward in float32, one sequence. Dense is its
best causal form: expanded heads, blocks of queries and keys, future blocks skipped, softmax recomputed in the backward
pass. Both run in this process, in turn; times are medians. Memory is what the compiler plans for temporaries.
"""

import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.cli_options import parse
from glm5_jax.compiling import jit
from glm5_jax.config import ModelConfig, check, small
from glm5_jax.layers.block import make_context
from glm5_jax.layers.mla import Mla, Selection
from glm5_jax.model import merge, split
from glm5_jax.sparse import attention
from glm5_jax.sparse.dense import dense
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.masks import Rows


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `glm5 bench attention`."""

    lengths: tuple[int, ...] = (4096, 8192, 16_384, 32_768)  # tokens in the sequence
    dense_up_to: int = 16_384  # longest sequence that is also timed dense: it takes a minute at 16,384 tokens on 2 cores
    repeats: int = 3  # timed runs of each; the median counts
    plot: str = ""  # write time and memory against length to this PNG file (needs matplotlib)
    json: bool = False  # end with one line of JSON


def layer_config() -> ModelConfig:
    """D 1024, Q 256, N 16, C 48, P 16, V 64, R 128, I 8, J 32, K 256."""
    return small(hidden_size=1024, num_attention_heads=16, max_position_embeddings=1 << 20)


def main(arguments: list[str]) -> int:
    """Runs the benchmark from the command line."""
    options = parse(Options(), arguments, "glm5 bench attention", "Times sparse and dense attention by length.")
    check(min(options.lengths, default=0) > layer_config().index_topk, "lengths: each must exceed index_topk=256")
    check(options.repeats >= 1, f"repeats={options.repeats}: must be at least 1")
    result = run(options)
    if options.plot:
        draw(result, options.plot)
        print(f"plot: {options.plot}")
    if options.json:
        print(json.dumps(result))
    return 0


def run(options: Options) -> dict:
    """Measures, prints a table and returns its numbers: {"implementation", "rows", "core_exponent"}; seconds and MB."""
    cfg = layer_config()
    result = {"implementation": attention.implementation(), "rows": []}
    print(f"one attention layer, forward + backward, 1 sequence, float32; sparse: {result['implementation']}")
    print(
        f"{'tokens':>8}{'dense s':>10}{'GFLOP/s':>9}{'sparse s':>10}{'+ loss s':>10}{'select s':>10}{'core s':>8}"
        f"{'dense/sparse':>14}{'dense MB':>10}{'sparse MB':>11}"
    )
    for t in options.lengths:
        row = measure(cfg, t, t <= options.dense_up_to, options.repeats)
        result["rows"].append(row)
        ratio = row["dense_s"] / row["sparse_s"] if "dense_s" in row else None
        print(
            f"{t:>8}{_text(row.get('dense_s'), 10)}{_text(row.get('dense_gflops'), 9, 0)}{row['sparse_s']:>10.2f}"
            f"{row['sparse_loss_s']:>10.2f}{row['select_s']:>10.2f}{row['core_s']:>8.2f}{_text(ratio, 14)}"
            f"{row['dense_mb']:>10.0f}{row['sparse_mb']:>11.0f}",
            flush=True,
        )
    if len(options.lengths) > 1:
        tokens, seconds = np.log(options.lengths), np.log([row["core_s"] for row in result["rows"]])
        result["core_exponent"] = round(float(np.polyfit(tokens, seconds, 1)[0]), 3)
        print(f"time of the sparse core grows with length to the power {result['core_exponent']:.2f}")
    print("+ loss: with the indexer's loss; select: scores and top-k, forward only; core: attention to the selected keys")
    print("GFLOP/s: of dense attention's core alone, counting 2 products of visible queries and keys forward, 5 backward")
    return result


def _text(value, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def measure(cfg: ModelConfig, t: int, with_dense: bool, repeats: int) -> dict:
    """Medians for one length."""
    graphdef, params = split(Mla(cfg, nnx.Rngs(0)))
    a = jax.random.normal(jax.random.key(0), (1, t, cfg.hidden_size))
    whole = {name: layer_gradient(cfg, graphdef, t, name) for name in ("dense", "sparse", "sparse_loss")}
    memory = {name: planned_mb(whole[name], params, a) for name in ("dense", "sparse")}
    runs = {name: (function, (params, a)) for name, function in whole.items() if with_dense or name != "dense"}
    runs |= core_parts(cfg, graphdef, params, a, with_dense)
    seconds = alternate(runs, repeats)
    row = {"tokens": t} | {f"{name}_s": value for name, value in seconds.items()}
    row |= {f"{name}_mb": value for name, value in memory.items()}
    if with_dense:
        n, width = cfg.num_attention_heads, cfg.qk_head_dim
        pairs = n * t * (t + 1) / 2
        # Products of queries and keys: scores, scores again, dq, dk; of weights and values: out, dp, dv.
        row["dense_gflops"] = 2 * pairs * (4 * width + 3 * cfg.v_head_dim) / seconds["dense_core"] / 1e9
    return row


def layer_gradient(cfg: ModelConfig, graphdef, t: int, form: str):
    """Function (params, a) -> gradients of a loss of the layer's output; form: dense, sparse or sparse_loss."""

    def loss(params, a):
        layer, ctx = merge(graphdef, params), context(cfg, t)
        cq, keys = layer.query_latent(a), layer.keys(a, ctx)
        selection = Selection()
        if form != "dense":
            index = layer.index(cq, a, keys, ctx)
            selection = Selection(layer.select(index, ctx), index if form == "sparse_loss" else None)
        out = layer.attend(cq, keys, selection, ctx, absorbed=False)
        kl = 0.0 if out.index_kl is None else jnp.mean(out.index_kl)
        return jnp.mean(jnp.square(out.out)) + kl

    return jax.grad(loss, (0, 1))


def context(cfg: ModelConfig, t: int):
    """One document of t tokens."""
    slot, segment = jnp.arange(t, dtype=jnp.int32)[None], jnp.ones((1, t), jnp.int32)
    return make_context(Rows(slot, segment), segment, slot, cfg)


def core_parts(cfg: ModelConfig, graphdef, params, a, with_dense: bool) -> dict:
    """The selection, and both cores forward + backward, alone: name -> (function, arguments)."""
    t, r, scale = a.shape[1], cfg.kv_lora_rank, cfg.qk_head_dim**-0.5

    def inputs(params, a):
        layer, ctx = merge(graphdef, params), context(cfg, t)
        cq, keys = layer.query_latent(a), layer.keys(a, ctx)
        return layer._absorb(layer.queries(cq, ctx)), keys.latent, layer.index(cq, a, keys, ctx)

    def select(index: Index):
        return attention.select(index, context(cfg, t).rows, jnp.ones((1, t), jnp.int32), cfg.index_topk, cfg.query_chunk)

    def core(q, latent, selected):
        return jnp.sum(jnp.square(attention.attend(q, latent, selected, r, scale, cfg.query_chunk).out))

    def dense_core(q, k, v):
        ctx = context(cfg, t)
        return jnp.sum(jnp.square(dense(q, k, v, ctx.rows, ctx.key_segment, scale, cfg.query_chunk)[0]))

    q, latent, index = jit(inputs)(params, a)
    parts = {"select": (select, (index,)), "core": (jax.grad(core, (0, 1)), (q, latent, jit(select)(index)))}
    if with_dense:
        n = cfg.num_attention_heads
        shapes = ((1, t, n, cfg.qk_head_dim), (1, t, n, cfg.qk_head_dim), (1, t, n, cfg.v_head_dim))
        qkv = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        parts["dense_core"] = (jax.grad(dense_core, (0, 1, 2)), qkv)
    return parts


def planned_mb(function, *arguments) -> float:
    """Temporaries that the compiled program needs, MB."""
    from glm5_jax.compiling import compiler_options

    compiled = jax.jit(function).lower(*arguments).compile(compiler_options())
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def alternate(runs: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each (function, arguments), compiled, warmed up, and timed in turn."""
    compiled = {name: (jit(function), arguments) for name, (function, arguments) in runs.items()}
    seconds = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name, (function, arguments) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def draw(result: dict, path: str) -> None:
    """Time and memory against length, dense and sparse, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for ax, unit, label in ((axes[0], "s", "seconds, forward + backward"), (axes[1], "mb", "temporaries, MB")):
        for form, colour in (("dense", "tab:orange"), ("sparse", "tab:blue")):
            points = [(row["tokens"], row[f"{form}_{unit}"]) for row in result["rows"] if f"{form}_{unit}" in row]
            ax.plot(*zip(*points), "o-", label=form, color=colour)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        ax.set_xticks([row["tokens"] for row in result["rows"]], [f"{row['tokens']:,}" for row in result["rows"]])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle("One attention layer: D 1024, 16 heads, K 256, float32")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
