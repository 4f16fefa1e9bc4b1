"""Muon Split, whole Muon and AdamW (paper section 2.1, Table 1; section 2.2 for the recipe).

Muon Split orthogonalises the query, key and value up-projections head by head, so that heads can move at different scales;
every other matrix whole, experts one by one. Which dimensions form a matrix is read from each parameter's declaration.
Embedding, head, norms, biases and the router (our choice) take AdamW; the router bias takes no gradient.

The indexer learns from a loss of its own, so its gradient is clipped by a norm of its own: neither loss can shrink the
other's update. Under sparse attention, small models need a higher learning rate for it than for the network, whose changes
it has to follow (experiments/dsa_adaptation).
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from glm5_jax.config import check
from glm5_jax.layers.param import Spec
from glm5_jax.train.muon import Matrices, scale_by_muon


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer settings. Newton-Schulz runs 5 steps, momentum is Nesterov, as in the reference of the method."""

    name: Literal["muon_split", "muon", "adamw"] = "muon_split"  # muon = up-projections whole; adamw = no Muon at all
    momentum: float = 0.95  # of Muon
    update_rms: float = 0.2  # root mean square of a Muon update before the learning rate
    b1: float = 0.9  # AdamW, first moment
    b2: float = 0.95  # AdamW, second moment
    eps: float = 1e-8  # AdamW
    weight_decay: float = 0.1  # decoupled; on matrices, router, embedding and head, never on norms and biases
    clip: float = 1.0  # largest global norm of the gradient: of the indexer by itself, of all other parameters together
    indexer_rate: float = 1.0  # learning rate of the indexer, in multiples of that of all other parameters

    def __post_init__(self):
        for name in ("momentum", "b1", "b2"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}={getattr(self, name)}: must lie in [0, 1)")
        for name in ("update_rms", "eps", "indexer_rate"):
            check(0 < getattr(self, name) < math.inf, f"optimizer.{name}={getattr(self, name)}: must be positive and finite")
        check(self.clip > 0, f"optimizer.clip={self.clip}: must be positive")  # inf = no clipping
        check(0 <= self.weight_decay < math.inf, f"optimizer.weight_decay={self.weight_decay}: must be finite, not negative")


def decays(spec: Spec) -> bool:
    """Whether weight decay applies to a parameter."""
    return spec.kind in ("matrix", "router", "embedding", "head")


def muon_matrices(spec: Spec, name: str) -> Matrices | None:
    """The matrices that Muon orthogonalises, None for an AdamW parameter."""
    if spec.kind != "matrix" or name == "adamw":
        return None
    outputs = spec.outputs
    if name == "muon_split" and spec.heads is not None:
        outputs = tuple(axis for axis in outputs if axis != spec.heads)
    return Matrices(spec.inputs, outputs)


def make_optimizer(
    cfg: OptimizerConfig,
    learning_rate: optax.Schedule,
    specs: dict[tuple, Spec],
    cuts: dict | None = None,
    mesh: Mesh | None = None,
    apart: tuple[str, ...] = ("indexer",),
) -> optax.GradientTransformation:
    """The optimizer for a flat dict of parameters.

    Args:
      cfg: settings. learning_rate: step -> learning rate.
      specs: path -> declaration of each trainable parameter; the same keys as parameters and gradients.
      cuts: path -> jax PartitionSpec over the mesh, if there is one.
      apart: parts of the model whose gradient is clipped by a norm of its own.
    """
    matrices = {path: muon_matrices(spec, cfg.name) for path, spec in specs.items()}
    decay = {path: decays(spec) for path, spec in specs.items()}
    labels = {path: "adamw" if dims is None else "muon" for path, dims in matrices.items()}

    def masked(kind):  # the decay mask in the structure that `optax.partition` hands to each part
        return lambda tree: {p: (decay[p] if labels[p] == kind else optax.MaskedNode()) for p in tree}

    parts = {
        "adamw": optax.adamw(
            learning_rate, cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=masked("adamw")
        )
    }
    if "muon" in labels.values():
        parts["muon"] = optax.chain(
            scale_by_muon(matrices, cfg.momentum, cfg.update_rms, cuts, mesh),
            optax.add_decayed_weights(cfg.weight_decay, masked("muon")),
            optax.scale_by_learning_rate(learning_rate),
        )
    groups = {path: group_of(spec, apart) for path, spec in specs.items()}
    clips = {group: optax.clip_by_global_norm(cfg.clip) for group in (*apart, "network")}
    factors = {group: optax.scale(cfg.indexer_rate) if group == "indexer" else optax.identity() for group in clips}
    return optax.chain(optax.partition(clips, groups), optax.partition(parts, labels), optax.partition(factors, groups))


def group_of(spec: Spec, apart: tuple[str, ...] = ("indexer",)) -> str:
    """Which parameters share a norm and a rate: a part of `apart`, or "network" for all others: one loss trains them."""
    return spec.part if spec.part in apart else "network"


def norms(tree: dict, specs: dict[tuple, Spec], apart: tuple[str, ...] = ("indexer",)) -> dict[str, jax.Array]:
    """Group -> global norm, float32, of a flat dict with the keys of `specs`; groups without parameters are absent."""
    groups = {path: group_of(spec, apart) for path, spec in specs.items()}
    return {g: optax.global_norm([tree[p] for p in specs if groups[p] == g]) for g in sorted(set(groups.values()))}


def restart_schedule(opt_state: optax.OptState) -> optax.OptState:
    """The state with its learning-rate schedules back at step 0; moments and their bias corrections stay."""
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    restart = lambda node: node._replace(count=jnp.zeros_like(node.count)) if is_schedule(node) else node  # noqa: E731
    return jax.tree.map(restart, opt_state, is_leaf=is_schedule)
