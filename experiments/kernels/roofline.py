"""Bytes moved and FLOPs per query of the Pallas kernels at GLM-5's widths, against the roofline of each chip.

    python experiments/kernels/roofline.py

Counted from the kernels' own block shapes (`attend.make_plan`, `select`), not measured. What decides is how many of the keys
that a tile of neighbouring queries selected are the same: `share` is the union of their selections over their sum.
"""

import jax
import jax.numpy as jnp

from glm5_jax.config import glm5
from glm5_jax.plan import CHIPS
from glm5_jax.sparse.indexer import Index
from glm5_jax.sparse.kernels import attend, select
from glm5_jax.sparse.kernels.tiles import LANES

LENGTH = 131_072  # T = S
SHARES = (0.125, 0.375, 1.0)
LINE = LANES * 4  # bytes of a line of 32-bit words


def abstract_inputs(cfg):
    """(q, index) of one row of LENGTH tokens, shapes only."""
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    n, width = cfg.num_attention_heads, cfg.kv_lora_rank + cfg.qk_rope_head_dim
    i, j = cfg.index_n_heads, cfg.index_head_dim
    index = Index(shape(1, LENGTH, i, j), shape(1, LENGTH, j), shape(1, LENGTH, i, dtype=jnp.float32))
    return shape(1, LENGTH, n, width), index


def attention_costs(plan, k: int, share: float) -> dict:
    """Pass -> (bytes, FLOPs, row copies), each for one query."""
    keys = share * k  # union of a tile / its queries
    pairs = 2 * plan.tile * keys * plan.heads  # FLOPs of one product are pairs x its width: all queries meet all keys
    index_pairs = 2 * plan.tile * keys * plan.index_heads
    key, gradient = plan.key_lines * LINE, plan.gradient_lines * LINE
    query, out = 2 * plan.heads * plan.width, 2 * plan.heads * plan.rank
    stats, index = 4 * plan.stats, plan.index_heads * (2 * plan.index_width + 4)
    loss = pairs * plan.width + index_pairs * plan.index_width
    back = pairs * (3 * plan.width + 2 * plan.rank) + 3 * index_pairs * plan.index_width
    return {
        "attention": (keys * key + query + out + stats, pairs * (plan.width + plan.rank), keys),
        "indexer's loss": (keys * key + index, loss, keys),
        "backward": (keys * (key + 2 * gradient) + 2 * (query + out + index) + stats, back, 2 * keys),
    }


def select_costs(index: Index, k: int) -> tuple[float, float]:
    """(bytes, FLOPs) for one query, which sees half of the keys on average."""
    heads, width = index.q.shape[2:]
    block = select.query_block(index, k, 512)
    visited = LENGTH / 2
    read = 2 * visited * width / block + 2 * heads * width + 4 * LANES + 4 * k
    return read, visited * (2 * heads * width + 2 * 2 * LANES * 2)  # scores; ranks of keys above and of ties


def row(name: str, share: str, moved: float, flops: float, copies: str) -> str:
    floors = []
    for chip in CHIPS.values():
        compute, memory = (1e6 * x / rate / chip.per_chip for x, rate in ((flops, chip.flops), (moved, chip.hbm)))
        floors.append(f"{max(compute, memory):.2f} ({'memory' if memory > compute else 'compute'})")
    return f"| {name} | {share} | {moved / 1e6:.2f} | {flops / 1e6:,.0f} | {copies} | {' | '.join(floors)} |"


def main():
    jax.config.update("jax_platforms", "cpu")
    cfg = glm5()
    k = cfg.index_topk
    q, index = abstract_inputs(cfg)
    plan = attend.make_plan(q, index, cfg.kv_lora_rank, cfg.qk_head_dim**-0.5)
    print(f"T = S = {LENGTH:,}, bfloat16; tiles of {plan.tile} queries, blocks of {plan.block} keys\n")
    print(f"| kernel | share | MB / query | MFLOP / query | row copies | {' | '.join(f'{c}, us' for c in CHIPS)} |")
    print("|---|---|---|---|---|" + "---|" * len(CHIPS))
    print(row("selection", "-", *select_costs(index, k), "-"))
    for share in SHARES:
        for name, (moved, flops, copies) in attention_costs(plan, k, share).items():
            print(row(name, f"{share:g}", moved, flops, f"{copies:,.0f}"))


if __name__ == "__main__":
    main()
