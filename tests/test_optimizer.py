"""Muon Split against Newton-Schulz in numpy float64, head by head; AdamW, decay and clipping by closed forms."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.errors import UserError
from glm5_jax.model import split
from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer, norms, restart_schedule
from glm5_jax.train.step import flat, init_state, trainable_specs
from helpers_train import flat_specs, lively_model, step_config

CFG = step_config()


def covered(path: tuple) -> bool:
    """One of each kind: all of the stacked MoE layers, and of the dense layer and MTP what those do not have."""
    if path[:2] == ("groups", 0):
        return path[-1] in ("gate", "down", "q_up", "k_up") and "indexer" not in path
    return path[0] != "mtp" or path[-1] in ("project", "v_up", "router", "embed_norm")


SPECS = {path: spec for path, spec in flat_specs(CFG).items() if spec.kind != "router_bias" and covered(path)}
PARAMS = {path: value for path, value in flat(split(lively_model(CFG))[1]).items() if path in SPECS}
LR = 0.5
NO_CLIP = OptimizerConfig(weight_decay=0.0, clip=1e30)

# Trailing dimensions of each kind of matrix as [rows, columns]; what stands before them is a batch of matrices.
UP = {"q_up": (12, 3, 10), "k_up": (8, 3, 6), "v_up": (8, 3, 5)}
WHOLE = {
    "out": ((3, 5, 16), (15, 16)), "project": ((32, 16), (32, 16)), "q_down": ((16, 12), (16, 12)),
    "kv_down": ((16, 12), (16, 12)), "indexer.q_up": ((12, 2, 9), (12, 18)), "indexer.k": ((16, 9), (16, 9)),
    "indexer.head_weights": ((16, 2), (16, 2)), "shared.gate": ((16, 7), (16, 7)), "shared.down": ((7, 16), (7, 16)),
}  # fmt: skip
EXPERT = {"gate": (16, 7), "up": (16, 7), "down": (7, 16)}
DENSE = {"gate": (16, 20), "up": (16, 20), "down": (20, 16)}


def newton_schulz(g: np.ndarray) -> np.ndarray:
    """Five quintic steps from the normalised matrix, float64."""
    wide = g.shape[0] <= g.shape[1]
    x = np.asarray(g if wide else g.T, np.float64)
    x = x / (np.sqrt((x**2).sum()) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x if wide else x.T


def muon_update(g: np.ndarray) -> np.ndarray:
    """Update of one matrix before the learning rate, of root mean square about 0.2."""
    return 0.2 * np.sqrt(max(g.shape)) * newton_schulz(g)


def nesterov(grads: list[np.ndarray], beta: float = 0.95) -> list[np.ndarray]:
    """What is orthogonalised at each step: bias-corrected momentum one step ahead, mixed with the gradient."""
    m, out = 0.0, []
    for t, g in enumerate(grads, 1):
        m = beta * m + (1 - beta) * g
        out.append(beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t))
    return out


def as_matrices(path: tuple, x: np.ndarray, name: str) -> tuple[np.ndarray, object]:
    """The matrices [n,rows,columns] that a parameter consists of, and the way back; None for an AdamW parameter."""
    x = np.asarray(x, np.float64)
    short = ".".join(map(str, path[-2:]))
    if path[-1] in UP and path[-2] != "indexer":
        rows, heads, width = UP[path[-1]]
        if name == "muon":
            return x.reshape(-1, rows, heads * width), lambda m: m.reshape(x.shape)
        per_head = np.moveaxis(x.reshape(-1, rows, heads, width), 2, 1)
        back = lambda m: np.moveaxis(m.reshape(-1, heads, rows, width), 1, 2).reshape(x.shape)  # noqa: E731
        return per_head.reshape(-1, rows, width), back
    matrix = WHOLE.get(path[-1], WHOLE.get(short))
    parent = path[-2] if len(path) > 1 else None
    if matrix is None and parent == "ffn" and path[-1] in EXPERT:
        table = DENSE if path[1] == 0 and path[0] == "groups" else EXPERT
        matrix = (table[path[-1]], table[path[-1]])
    if matrix is None and parent == "shared":
        matrix = (EXPERT[path[-1]], EXPERT[path[-1]])
    if matrix is None:
        return None
    trailing, shape = matrix
    assert x.shape[x.ndim - len(trailing) :] == trailing, path
    return x.reshape(-1, *shape), lambda m: m.reshape(x.shape)


def gradients(seed: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng(seed)
    return {p: scale * rng.standard_normal(v.shape).astype(np.float32) for p, v in PARAMS.items()}


def constant(_):
    return LR


@functools.cache
def compiled(cfg: OptimizerConfig, lr, paths: tuple):
    """(initial optimizer state, compiled update) for some of the parameters."""
    optimizer = make_optimizer(cfg, lr, {p: SPECS[p] for p in paths})
    params = {p: PARAMS[p] for p in paths}
    state = optimizer.init(params)
    shapes = {p: jax.ShapeDtypeStruct(v.shape, v.dtype) for p, v in params.items()}
    return state, jax.jit(optimizer.update).lower(shapes, state, params).compile()


def updates_of(cfg: OptimizerConfig, steps: list[dict], paths: tuple = tuple(PARAMS), lr=constant) -> list[dict]:
    """Updates of consecutive steps with the given gradients."""
    state, update = compiled(cfg, lr, paths)
    params, results = {p: PARAMS[p] for p in paths}, []
    for grads in steps:
        result, state = update({p: grads[p] for p in paths}, state, params)
        results.append(jax.device_get(result))
    return results


@pytest.fixture(scope="module")
def three_steps():
    """Updates of three steps by each optimizer, with the gradients given."""
    grads = [gradients(s) for s in range(3)]
    return grads, {
        name: updates_of(dataclasses.replace(NO_CLIP, name=name), grads) for name in ("muon_split", "muon", "adamw")
    }


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["muon_split", "muon"])
def test_every_matrix_gets_the_newton_schulz_update_of_its_own_gradients(three_steps, name):
    grads, results = three_steps
    checked = set()
    for path in PARAMS:
        if as_matrices(path, PARAMS[path], name) is None:
            continue
        for t, momentum in enumerate(nesterov([np.asarray(g[path], np.float64) for g in grads])):
            matrices, back = as_matrices(path, momentum, name)
            expected = -LR * back(np.stack([muon_update(m) for m in matrices]))
            np.testing.assert_allclose(results[name][t][path], expected, atol=2e-4, err_msg=str((path, t)))
        checked.add(path)
    assert checked == {p for p, s in SPECS.items() if s.kind == "matrix"}


def test_number_of_orthogonal_blocks_of_each_up_projection_is_heads_times_layers(three_steps):
    _, results = three_steps
    for path, heads_times_layers in {
        ("groups", 1, "layers", "attention", "q_up"): 3 * 2,
        ("groups", 0, "layers", "attention", "k_up"): 3,
        ("mtp", "block", "attention", "v_up"): 3,
    }.items():
        matrices, _ = as_matrices(path, results["muon_split"][0][path], "muon_split")
        assert len(matrices) == heads_times_layers
        for m in matrices:  # the iteration leaves singular values in about 0.7 .. 1.2
            singular = np.linalg.svd(m / (LR * 0.2 * np.sqrt(max(m.shape))), compute_uv=False)
            assert 0.5 < singular.min() and singular.max() < 1.4, path


def test_whole_muon_differs_from_muon_split_in_the_three_up_projections_only(three_steps):
    _, results = three_steps
    for path in PARAMS:
        a, b = results["muon_split"][2][path], results["muon"][2][path]
        same = np.abs(a - b).max() < 1e-5 * np.abs(a).max()
        assert same == (path[-1] not in UP or path[-2] == "indexer"), path


def test_experts_and_stacked_layers_do_not_influence_each_other():
    path = ("groups", 1, "layers", "ffn", "gate")  # 2 layers x 5 experts
    first, other = gradients(0), gradients(0)
    other[path] = other[path].copy()
    other[path][1, 3] *= np.linspace(-5, 5, 7)
    a, b = (updates_of(NO_CLIP, [g], (path,))[0][path] for g in (first, other))
    changed = np.abs(a - b).max(axis=(2, 3)) > 1e-3
    np.testing.assert_array_equal(np.argwhere(changed), [[1, 3]])


def test_a_rescaled_head_changes_only_its_own_step_under_muon_split():
    path = ("groups", 0, "layers", "attention", "q_up")
    grads = gradients(0)
    louder = dict(grads) | {path: grads[path] * np.array([1, 1000, 1])[:, None]}
    split_a, split_b = (updates_of(NO_CLIP, [g], (path,))[0][path] for g in (grads, louder))
    np.testing.assert_allclose(split_a, split_b, atol=1e-5)  # a head's scale cancels, whatever the others do
    whole = dataclasses.replace(NO_CLIP, name="muon")
    whole_a, whole_b = (updates_of(whole, [g], (path,))[0][path] for g in (grads, louder))
    assert np.abs(whole_a - whole_b).max() > 0.05


def adamw(grads: list[np.ndarray], b1=0.9, b2=0.95, eps=1e-8) -> np.ndarray:
    m = v = 0.0
    for g in grads:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    t = len(grads)
    return -LR * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


@pytest.mark.parametrize("name", ["muon_split", "adamw"])
def test_embedding_head_norms_biases_and_router_take_adamw(three_steps, name):
    grads, results = three_steps
    took = set()
    for path in PARAMS:
        expected = adamw([np.asarray(g[path], np.float64) for g in grads])
        if np.allclose(results[name][2][path], expected, atol=1e-4):
            took.add(path)
    kinds = {"embedding", "head", "norm", "bias", "router"} | ({"matrix"} if name == "adamw" else set())
    assert took == {p for p, s in SPECS.items() if s.kind in kinds}


def eighth(_):
    return 0.125


def test_without_gradient_exactly_matrices_router_embedding_and_head_decay():
    zero = {p: np.zeros_like(v) for p, v in PARAMS.items()}
    (updates,) = updates_of(dataclasses.replace(NO_CLIP, weight_decay=0.25), [zero], lr=eighth)
    new = optax.apply_updates(PARAMS, updates)
    shrunk = 1 - 0.125 * 0.25
    for path, spec in SPECS.items():
        if spec.kind in ("norm", "bias"):
            np.testing.assert_array_equal(new[path], PARAMS[path])
        else:
            np.testing.assert_allclose(new[path], np.asarray(PARAMS[path]) * np.float32(shrunk), rtol=2e-7)


def test_clipping_uses_one_norm_over_muon_and_adamw_parameters_together():
    """A Muon gradient of 1e6 shrinks an AdamW gradient by 1e6; eps makes AdamW's update show its size."""
    cfg = OptimizerConfig(weight_decay=0.0, clip=1.0, eps=1e-3)
    head, other = ("head",), ("groups", 1, "layers", "attention", "q_down")
    grads = {p: np.zeros_like(v) for p, v in PARAMS.items()}
    grads[head][0, 0] = 1e-2  # AdamW
    grads[other][0, 0, 0] = 1e6  # Muon
    (updates,) = updates_of(cfg, [grads], (head, other))
    g = 1e-2 / 1e6  # what clipping leaves of the AdamW gradient
    np.testing.assert_allclose(updates[head][0, 0], -LR * g / (g + 1e-3), rtol=1e-4)
    grads[other][0, 0, 0] = 0.5  # norm below 1: nothing is clipped
    (updates,) = updates_of(cfg, [grads], (head, other))
    np.testing.assert_allclose(updates[head][0, 0], -LR * 1e-2 / (1e-2 + 1e-3), rtol=1e-4)


@pytest.mark.parametrize("name", ["muon_split", "adamw"])
def test_the_indexers_gradient_and_that_of_all_others_are_clipped_apart(name):
    """A hundred times the indexer's gradient: not a bit of another update changes, and the indexer's own is clipped."""
    cfg = OptimizerConfig(name=name, clip=1.0, eps=1e-3)
    matrix, bias = (("groups", 1, "layers", "attention", "indexer", leaf) for leaf in ("k", "k_bias"))
    others = (("head",), ("norm",), ("mtp", "project"), ("groups", 1, "layers", "attention", "q_down"))
    assert [SPECS[p].part for p in (matrix, bias, *others)] == ["indexer"] * 2 + ["trunk"] * 2 + ["mtp", "trunk"]
    grads = gradients(0)
    louder = {p: g * (100 if p in (matrix, bias) else 1) for p, g in grads.items()}
    (a,), (b,) = (updates_of(cfg, [g], (matrix, bias, *others)) for g in (grads, louder))
    for path in others:
        assert a[path].tobytes() == b[path].tobytes(), path
    norm = np.sqrt(sum((np.asarray(grads[p], np.float64) ** 2).sum() for p in (matrix, bias)))
    assert norm > 1  # clipped to 1 both times, so the update is the same up to rounding
    clipped = grads[bias] / norm
    for update in (a, b):
        np.testing.assert_allclose(update[bias], -LR * clipped / (np.abs(clipped) + 1e-3), rtol=1e-4)
    np.testing.assert_allclose(a[matrix], b[matrix], atol=1e-4)


def test_norms_are_those_of_the_two_groups_and_of_no_group_that_does_not_train():
    indexer = ("groups", 1, "layers", "attention", "indexer", "k_bias")
    a, b, c, d = (np.full(n, v, np.float32) for n, v in ((2, 3.0), (1, 4.0), (4, 6.0), (2, 8.0)))
    grads = {indexer: a, ("norm",): b, ("mtp", "norm"): c, ("head",): d}
    specs = flat_specs(CFG)
    found = norms(grads, {p: specs[p] for p in grads})
    assert {group: round(float(norm), 4) for group, norm in found.items()} == {
        "indexer": round(math.sqrt(18), 4), "network": round(math.sqrt(16 + 4 * 36 + 2 * 64), 4)
    }  # fmt: skip
    assert set(norms(grads, {indexer: specs[indexer]})) == {"indexer"}


@pytest.mark.parametrize("name", ["muon_split", "adamw"])
def test_a_restarted_schedule_keeps_the_moments_and_their_bias_corrections(name):
    """The third update at the rate of step 0 instead of step 2: everything else as it was."""
    cfg = dataclasses.replace(NO_CLIP, name=name)
    paths, rate = (("head",), ("mtp", "project")), lambda step: 0.5 / (1 + step)
    state, update = compiled(cfg, rate, paths)
    params = {p: PARAMS[p] for p in paths}
    for seed in range(2):
        _, state = update({p: gradients(seed)[p] for p in paths}, state, params)
    grads = {p: gradients(2)[p] for p in paths}
    third, again = update(grads, state, params)[0], update(grads, restart_schedule(state), params)[0]
    for path in paths:
        np.testing.assert_allclose(again[path], 3 * third[path], rtol=1e-5, atol=1e-7)


def test_frozen_parts_and_the_router_bias_have_no_optimizer_state():
    model = lively_model(CFG)
    sizes = [(spec, flat(split(model)[1])[path].size) for path, spec in flat_specs(CFG).items()]
    matrices = sum(n for spec, n in sizes if spec.kind == "matrix" and spec.part != "indexer")
    others = sum(n for spec, n in sizes if spec.kind not in ("matrix", "router_bias") and spec.part != "indexer")

    def state_size(freeze):
        optimizer = make_optimizer(OptimizerConfig(), lambda _: LR, trainable_specs(model, freeze))
        state = init_state(model, optimizer, freeze).opt_state
        return sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim > 0)

    assert state_size(("indexer",)) == matrices + 2 * others  # one moment for Muon, two for AdamW
    assert not any(path[-1] == "router_bias" for path in trainable_specs(model, ()))
    assert all(spec.part == "mtp" for spec in trainable_specs(model, ("trunk", "indexer")).values())


def test_momentum_and_scale_are_the_settings():
    cfg = dataclasses.replace(NO_CLIP, momentum=0.5, update_rms=0.4)
    grads = [gradients(s) for s in range(2)]
    path = ("mtp", "project")
    update = updates_of(cfg, grads, (path,))[1][path]
    momentum = nesterov([np.asarray(g[path], np.float64) for g in grads], 0.5)[1]
    np.testing.assert_allclose(update, -LR * 2 * muon_update(momentum), atol=2e-4)


def test_the_learning_rate_follows_the_schedule_in_both_parts():
    grads = [gradients(0), gradients(0)]  # the same gradient twice: the direction stays
    paths = (("head",), ("mtp", "project"))
    a, b = updates_of(NO_CLIP, grads, paths, lr=lambda step: jnp.where(step == 0, 0.5, 0.25))
    for path in paths:
        np.testing.assert_allclose(b[path], a[path] / 2, atol=1e-4)


@pytest.mark.parametrize("name", ["muon_split", "adamw"])
def test_the_indexer_moves_and_decays_at_its_own_multiple_of_the_rate_and_all_others_at_the_rate(name):
    paths = [p for p in PARAMS if SPECS[p].part == "indexer"] + [("head",), ("norm",), ("mtp", "project")]
    slow, fast = (OptimizerConfig(name=name, weight_decay=0.1, indexer_rate=rate) for rate in (1.0, 8.0))
    a, b = (updates_of(cfg, [gradients(0)], tuple(paths))[0] for cfg in (slow, fast))
    assert {SPECS[p].kind for p in paths[:-3]} >= {"matrix", "norm"}
    for path in paths:
        np.testing.assert_array_equal(b[path], a[path] * (8 if SPECS[path].part == "indexer" else 1), str(path))


@pytest.mark.parametrize(
    "field, value",
    [("momentum", 1), ("b1", -0.1), ("b2", 1.0), ("update_rms", 0), ("clip", 0.0), ("eps", 0.0), ("weight_decay", -1),
     ("indexer_rate", 0), ("indexer_rate", math.inf), ("update_rms", math.inf), ("weight_decay", math.nan)],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(UserError, match=rf"^optimizer\.{field}={value}: must [^\n]+$"):
        OptimizerConfig(**{field: value})
