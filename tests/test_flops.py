"""Model FLOPs of a token, counted by hand from the shapes of the matrices."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.model import abstract, merge, split
from glm5_jax.program import products
from glm5_jax.train.flops import PEAK, attention_flops, flops_per_token, peak_flops
from helpers_train import step_config

# step_config: D 16, N 3, Q 12, R 8, C 6, P 4, V 5, dense FFN 20, E 5, X 2, F 7, W 40; one dense and two MoE layers.
ATTENTION = 16 * 12 + 12 * 3 * 10 + 16 * 12 + 8 * 3 * 6 + 8 * 3 * 5 + 3 * 5 * 16
DENSE = 3 * 16 * 20
MOE = 16 * 5 + 2 * 3 * 16 * 7 + 3 * 16 * 7  # router, 2 of 5 experts, shared expert
HEAD = 16 * 40
PROJECT = 32 * 16


def scores(seq_len: int) -> float:
    """Multiplications of q.k and p.v per token, averaged over the row: token t sees t + 1 keys."""
    return sum(t + 1 for t in range(seq_len)) / seq_len * 3 * (10 + 5)


def test_trunk_without_mtp():
    layers = 3 * (ATTENTION + scores(32)) + DENSE + 2 * MOE
    got = flops_per_token(abstract(step_config()), 32, 0)
    assert got == pytest.approx(6 * (layers + HEAD))  # 2 per multiplication, forward once and backward twice


def test_each_mtp_step_adds_its_layer_and_one_more_head():
    model = abstract(step_config())
    step = ATTENTION + scores(32) + MOE + PROJECT + HEAD
    assert flops_per_token(model, 32, 3) - flops_per_token(model, 32, 0) == pytest.approx(6 * 3 * step)


def test_sparse_attention_counts_the_selected_keys_only():
    cfg = step_config(attention="sparse")  # selects 4
    visible = sum(min(t + 1, 4) for t in range(32)) / 32
    assert attention_flops(cfg, 32) == pytest.approx(6 * visible * 3 * 15)
    assert attention_flops(cfg, 4) == attention_flops(step_config(), 4)


def test_experts_count_by_those_selected_and_not_by_their_number():
    few, many = (flops_per_token(abstract(step_config(n_routed_experts=e)), 8, 0) for e in (5, 20))
    assert many - few == pytest.approx(6 * 2 * 16 * 15)  # only the router grows


def test_peak_is_unknown_on_a_cpu_and_the_published_one_elsewhere():
    assert peak_flops() is None
    assert PEAK["TPU v5p"] == 459e12 and PEAK["TPU v6e"] == 920e12


def test_layers_of_a_pattern_are_recomputed_one_by_one():
    """F S F S multiplies what F F F F does: recomputing S does not make the output of F again."""
    def compiled(cfg):
        graphdef, params = split(abstract(cfg))

        def loss(params, tokens):
            return jnp.sum(merge(graphdef, params).trunk(tokens)[0])

        text = jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((2, 32), jnp.int32)).compile().as_text()
        return sum(p.flops * p.times for p in products(text) if p.bounded)

    alone = step_config(num_hidden_layers=4, first_k_dense_replace=4, num_nextn_predict_layers=0, remat="block")
    shares = dataclasses.replace(alone, indexer_types=("full", "shared") * 2)
    assert compiled(shares) == compiled(alone)
