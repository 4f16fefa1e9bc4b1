"""A small network on any mesh: inputs whose choices are far from ties, gradients and steps of one device and of eight.

Importing this gives the process 8 CPU devices, so the tests here run in processes of their own (`make test`).
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from glm5_jax.layers import moe
from glm5_jax.model import abstract, merge, split
from glm5_jax.sharding.mesh import MeshConfig, make_mesh, put_rows, shardings_of
from glm5_jax.sharding.rules import parameter_specs, place_parameters
from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer
from glm5_jax.train.step import LossConfig, Rates, TrainState, flat, make_gradients, make_step, state_specs, trainable_specs
from helpers_train import lively_model, packed_batch, step_config

MESHES = {"data": (8, 1, 1), "expert": (1, 8, 1), "context": (1, 1, 8), "all three": (2, 2, 2)}
jax.config.update("jax_num_cpu_devices", 8)  # an error if a backend is there already
jax.config.update("jax_enable_x64", True)

LOSS = LossConfig(mtp_steps=2, index_weight=1.0, balance_weight=0.1, chunk=5)
ROWS = [[7, 9], [16], [5, 6, 3], [4, 8], [16], [2, 13], [10, 6], [1, 15]]  # lengths of documents; one crosses every cut


def network(**overrides):
    """2 layers, one of each kind, an MTP layer; every width that is cut is a multiple of 8, T = 16 is 4 times K."""
    widths = dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=8, intermediate_size=24,
        moe_intermediate_size=8, n_routed_experts=8, index_n_heads=6, attention="sparse",
    )  # fmt: skip
    return step_config(**widths | overrides)


def mesh(data=1, expert=1, context=1):
    return make_mesh(MeshConfig(data, expert, context))


@functools.cache
def inputs(dtype: str, seed: int = 4, **overrides):
    """(flat parameters of `network` in a dtype, batch [1,8,16] on the host)."""
    params = flat(split(lively_model(network(**overrides), seed))[1])
    batch = packed_batch(ROWS, 16, seed=seed)
    return {path: np.asarray(x, dtype) for path, x in params.items()}, jax.tree.map(np.asarray, batch)


def placed(cfg, mesh):
    """The abstract network, on a mesh or not."""
    model = abstract(cfg)
    return model if mesh is None else place_parameters(model, dict(mesh.shape))


def put(params: dict, model, mesh) -> dict:
    """Flat parameters on a mesh."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, params)
    shardings = shardings_of(mesh, flat(parameter_specs(model)))
    return {path: jax.device_put(x, shardings[path]) for path, x in params.items()}


def gradients_on(mesh, cfg, params: dict, batch: dict, loss: LossConfig = LOSS):
    """(loss, parts, flat gradients), on the host; without a mesh on one device."""
    model = placed(cfg, mesh)
    params, keep = put(params, model, mesh), trainable_specs(model, ())
    train = {path: x for path, x in params.items() if path in keep}
    rest = {path: x for path, x in params.items() if path not in keep}
    out = jax.jit(make_gradients(model, loss, (), mesh))(train, rest, put_rows(batch, mesh), jnp.float32(0.3))
    return jax.device_get(out)


@functools.cache
def on_one_device(dtype: str):
    return gradients_on(None, network(dtype=dtype), *inputs(dtype))


def least_gap(cfg, params: dict, batch: dict) -> float:
    """Smallest distance of what is chosen last from what is passed over first, in all selections and all routing."""
    model = merge(split(abstract(cfg))[0], traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, params)))
    tokens, positions, segments = (jnp.asarray(batch[name][0]) for name in ("tokens", "positions", "segment_ids"))
    gaps, route = [], moe.route

    def watched(scores, bias, cfg):
        jax.debug.callback(lambda choice: gaps.append(_gap(choice, cfg.num_experts_per_tok)), scores + bias)
        return route(scores, bias, cfg)

    def run():
        collect = frozenset({"index_scores"})
        hidden, aux, _ = model.trunk(tokens, positions, segments, collect=collect)
        steps = model.mtp_steps(hidden, tokens, positions, segments, LOSS.mtp_steps, collect)
        return [layer["index_scores"] for layer in (*aux, *(step.aux for step in steps)) if "index_scores" in layer]

    with mock.patch.object(moe, "route", watched):
        gaps += [_gap(scores, cfg.index_topk) for scores in jax.jit(run)()]
        jax.effects_barrier()
    return min(gaps)


def _gap(scores, k: int) -> float:
    """Least distance of the k-th largest from the next, over rows where both are visible."""
    ranked = -np.sort(-np.asarray(scores), axis=-1)
    both = ranked[..., k] > -1e29
    return float(np.min((ranked[..., k - 1] - ranked[..., k])[both], initial=np.inf))


def make(cfg, mesh, loss: LossConfig):
    """(compiled step, its model, optimizer) on a mesh or on one device; all parts train."""
    model = placed(cfg, mesh)
    cuts = flat(parameter_specs(model)) if mesh else None
    optimizer = make_optimizer(OptimizerConfig(), lambda _: jnp.float32(0.01), trainable_specs(model, ()), cuts, mesh)
    rates = Rates(lambda _: jnp.float32(0.3), lambda _: jnp.float32(0.001))
    return make_step(model, optimizer, rates, loss, (), mesh), model, optimizer


def state_on(mesh, model, optimizer, params: dict) -> TrainState:
    """The state before step 0 of parameters from `inputs`."""
    params = jax.tree.map(jnp.asarray, params)
    trained = {path: x for path, x in params.items() if path in trainable_specs(model, ())}
    state = TrainState(jnp.int32(0), traverse_util.unflatten_dict(params), optimizer.init(trained))
    return state if mesh is None else jax.device_put(state, shardings_of(mesh, state_specs(state, model)))
