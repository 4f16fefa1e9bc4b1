"""One training step as a pure function: step(state, batch) -> (state, metrics).

The batch is [A,b,T]: A micro-batches of b rows, whose gradients add up. Every mean is taken over the whole batch, counted
before the first micro-batch, so accumulation equals one large batch. Loss = cross entropy + MTP weight x mean over MTP
steps + balance weight x sequence balance loss; there is no z-loss. The indexer's loss is added, but it reaches the indexers
only, and nothing else reaches them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, traverse_util
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.config import ModelConfig, check
from glm5_jax.layers.mtp import same_document, shift
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, flat, merge, specs, split
from glm5_jax.sharding.context import own
from glm5_jax.sharding.mesh import AXES, ROWS, largest, local, total
from glm5_jax.sharding.rules import parameter_specs, uncut
from glm5_jax.train.loss import cross_entropies
from glm5_jax.train.optimizer import norms


class TrainState(NamedTuple):
    """step: int32 scalar. params: nested dict of float32 arrays. opt_state: optax state of the trainable ones."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights and shapes of the loss."""

    mtp_steps: int = 3  # tokens beyond the next one to predict; 0 = no MTP loss
    balance_weight: float = 1e-4  # of the sequence-level balance loss, summed over MoE layers
    index_weight: float = 0.0  # of the indexer's loss, which trains nothing but the indexers; 0 = not computed
    detach_mtp: bool = False  # the MTP loss trains the MTP layer alone: trunk, embedding and head get no gradient of it
    chunk: int = 1024  # tokens of each row whose logits exist at the same time

    def __post_init__(self):
        check(self.mtp_steps >= 0, f"loss.mtp_steps={self.mtp_steps}: must not be negative")
        for name in ("balance_weight", "index_weight"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"loss.{name}={value}: must be finite and not negative")
        check(self.chunk >= 1, f"loss.chunk={self.chunk}: must be at least 1")


MAXIMA = {"max_logit", "max_abs_log_ratio"}  # metrics of which parts are combined by their maximum; all others add up


class Rates(NamedTuple):
    """Step -> float32 value of what is scheduled besides the learning rate."""

    mtp_weight: Callable
    bias_rate: Callable


def trainable_specs(model: Glm5, freeze: tuple[str, ...]) -> dict[tuple, Spec]:
    """Declarations of what the optimizer trains: all but the frozen parts and the router bias."""
    return {
        path: spec for path, spec in flat(specs(model)).items() if spec.part not in freeze and spec.kind != "router_bias"
    }


def target_weights(batch: dict, ahead: int) -> jax.Array:
    """float32 [...,T]: 1 where the token `ahead` positions on is a target: same document, and in the loss mask."""
    rows = batch["segment_ids"].reshape(-1, batch["segment_ids"].shape[-1])
    keep = same_document(rows, ahead)
    if "loss_mask" in batch:
        keep &= shift(batch["loss_mask"].reshape(rows.shape), ahead).astype(bool)
    return keep.astype(jnp.float32).reshape(batch["segment_ids"].shape)


def count_targets(batch: dict, mtp_steps: int) -> dict:
    """What the means of a whole batch divide by: targets of the next token, of each MTP step, and rows."""
    counts = [jnp.sum(target_weights(batch, d)) for d in range(1, mtp_steps + 2)]
    rows = jnp.sum(jnp.any(batch["segment_ids"] != 0, axis=-1)).astype(jnp.float32)
    *counts, rows = jnp.maximum(total(jnp.stack([*counts, rows]), *ROWS), 1.0)
    return {"next": counts[0], "mtp": counts[1:], "rows": rows}


def micro_loss(
    model: Glm5, batch: dict, counts: dict, mtp_weight: jax.Array, cfg: LossConfig, policy: Callable | None = None
) -> tuple[jax.Array, dict]:
    """Share of one micro-batch [b,T] in the loss of the whole batch.

    Args:
      batch: tokens, segment_ids, positions int32 [b,T]; optional loss_mask bool [b,T]: tokens that count as targets.
      counts: from `count_targets` of the whole batch.
      policy: what the trunk learns from in place of the cross entropy of the next token, a function of (model, its hidden
        states, batch) to (loss, parts); see `rl.policy`.
    Returns:
      (loss float32, parts: "ce" or those of the policy, "mtp", "balance", "index_kl", "load" [MoE layers,E], "max_logit"), all
      but `MAXIMA` adding up over micro-batches, and over the devices of a mesh; "index_kl" only if the indexer's loss has a
      weight.
    """
    tokens, positions, segments = batch["tokens"], batch["positions"], batch["segment_ids"]
    collect = frozenset({"index_kl"} if cfg.index_weight else ())
    hidden, aux, _ = model.trunk(tokens, positions, segments, collect=collect)
    load = [layer["load"] for layer in aux if "load" in layer]
    balance = sum((layer["balance"] for layer in aux if "balance" in layer), jnp.float32(0))
    steps = []
    teacher = constant(model) if cfg.detach_mtp else model
    if cfg.mtp_steps:
        given = jax.lax.stop_gradient(hidden) if cfg.detach_mtp else hidden
        steps = teacher.mtp_steps(given, tokens, positions, segments, cfg.mtp_steps, collect)
        balance += sum(s.aux["balance"] for s in steps) / cfg.mtp_steps
        load.append(sum(s.aux["load"] for s in steps))
    balance = balance / counts["rows"]
    if policy:
        loss, parts = policy(model, hidden, batch)
        mtp_loss, mtp = mtp_losses(teacher, steps, batch, counts, mtp_weight, cfg.chunk)
        loss += mtp_loss
    else:
        head = teacher.output_matrix() if cfg.detach_mtp else None
        loss, (ce, *mtp) = token_losses(model, hidden, steps, batch, counts, mtp_weight, cfg.chunk, head)
        parts = {"ce": ce}
    loss += cfg.balance_weight * balance
    top = jnp.max(jnp.stack([layer["max_logit"] for layer in aux]))
    parts |= {"mtp": sum(mtp, jnp.float32(0)) / max(1, len(mtp)), "balance": balance, "max_logit": top}
    parts["load"] = jnp.stack(load) if load else None
    if cfg.index_weight:
        parts["index_kl"] = index_loss(model.cfg, aux, steps, batch, counts)
        loss += cfg.index_weight * parts["index_kl"]
    return loss, parts


def constant(model: Glm5) -> Glm5:
    """The model with every parameter outside the MTP layer a constant: the same values, no gradient."""
    graphdef, params = split(model)
    params = {p: v if p[0] == "mtp" else jax.lax.stop_gradient(v) for p, v in flat(params).items()}
    return merge(graphdef, traverse_util.unflatten_dict(params))


def token_losses(model: Glm5, hidden, steps: list, batch: dict, counts: dict, mtp_weight, chunk: int, mtp_head=None):
    """Cross entropy of the next token and of each MTP step, from one pass over the head.

    Args:
      hidden: of the trunk [b,T,D]. steps: MTP steps. mtp_weight: of the mean over them.
      mtp_head: [D,W], read by the MTP steps in place of the model's, in a pass of its own: the trunk's is then computed as
        without them, to the bit.
    Returns:
      (their weighted sum, a list of their means over the whole batch's targets).
    """
    first = _head_inputs([hidden], batch, [counts["next"]], [jnp.ones_like(mtp_weight)], 1)
    ahead = _mtp_inputs(steps, batch, counts, mtp_weight)
    if mtp_head is None or not steps:
        together = jax.tree.map(lambda *x: jnp.concatenate(x), first, ahead) if steps else first
        loss, means = _apply_head(model.output_matrix(), together, chunk)
        return loss, list(means)
    loss, ce = _apply_head(model.output_matrix(), first, chunk)
    mtp_loss, means = _apply_head(mtp_head, ahead, chunk)
    return loss + mtp_loss, [*ce, *means]


def mtp_losses(model: Glm5, steps: list, batch: dict, counts: dict, mtp_weight, chunk: int) -> tuple[jax.Array, list]:
    """`token_losses` of the MTP steps alone."""
    if not steps:
        return jnp.float32(0), []
    loss, means = _apply_head(model.output_matrix(), _mtp_inputs(steps, batch, counts, mtp_weight), chunk)
    return loss, list(means)


def _mtp_inputs(steps: list, batch: dict, counts: dict, mtp_weight):
    scales = [mtp_weight / len(steps) for _ in steps]
    return _head_inputs([step.hidden for step in steps], batch, counts["mtp"], scales, 2)


def _head_inputs(hidden: list, batch: dict, counts: list, scales: list, ahead: int):
    """What `cross_entropies` takes besides the head, stacked: hidden states [G,b,T,D] that predict the tokens `ahead`,
    `ahead` + 1.. positions on, their targets, weights and scales; None for none."""
    if not hidden:
        return None
    places = range(ahead, ahead + len(hidden))
    targets = jnp.stack([own(shift(batch["tokens"], d)) for d in places])
    weights = jnp.stack([own(target_weights(batch, d)) / count for d, count in zip(places, counts)])
    return jnp.stack(hidden), targets, weights, jnp.stack(scales)


def _apply_head(head, inputs, chunk: int):
    hidden, targets, weights, scales = inputs
    return cross_entropies(hidden, head, targets, weights, scales, chunk)


def index_loss(cfg: ModelConfig, aux: list, steps: list, batch: dict, counts: dict) -> jax.Array:
    """Mean over indexers of the mean KL of the layers each one serves (IndexShare: paper of GLM-5.2).

    A query counts where it has a next token to predict, as in the LM loss: padding and masked targets do not.

    Args:
      aux: of the trunk's layers, with "index_kl" [b,T]. steps: MTP steps, which the MTP layer's one indexer serves.
    """
    weights = own(target_weights(batch, 1)) / counts["next"]
    loss = sum(share * jnp.sum(weights * layer["index_kl"]) for share, layer in zip(served_shares(cfg), aux))
    indexers = sum(full for _, full in cfg.layer_kinds)
    if steps:
        indexers += 1
        for d, step in enumerate(steps, 1):
            ahead = own(target_weights(batch, d + 1)) / counts["mtp"][d - 1]
            loss += jnp.sum(ahead * step.aux["index_kl"]) / len(steps)
    return loss / indexers


def served_shares(cfg: ModelConfig) -> list[float]:
    """Per layer, 1 / number of layers that its indexer serves."""
    owner, owners = -1, []
    for _, full in cfg.layer_kinds:
        owner += full
        owners.append(owner)
    return [1 / owners.count(owner) for owner in owners]


def gradients(
    graphdef: nnx.GraphDef, trainable: dict, frozen: dict, batch: dict, mtp_weight, cfg: LossConfig, policy=None
):
    """Loss and gradients of a batch [A,b,T].

    Args:
      trainable, frozen: flat dicts of parameters; together all of them. policy: see `micro_loss`.
    Returns:
      (loss, parts as in `micro_loss`, flat dict of gradients). On a mesh the gradients of a device are those of the parts of
      the parameters that it holds, of its own tokens alone where that is all of a parameter.
    """
    counts = count_targets(batch, cfg.mtp_steps)

    def loss(trainable, micro):
        model = merge(graphdef, traverse_util.unflatten_dict(trainable | frozen))
        return micro_loss(model, micro, counts, mtp_weight, cfg, policy)

    grad = jax.value_and_grad(loss, has_aux=True)
    first = jax.tree.map(lambda x: x[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        (total, parts), grads = grad(trainable, first)
        return total, parts, grads

    def add(carry, micro):
        total, parts, grads = carry
        (more, new), more_grads = grad(trainable, micro)
        tops = {name: jnp.maximum(parts[name], new[name]) for name in MAXIMA & parts.keys()}
        parts = jax.tree.map(jnp.add, parts, new) | tops
        return (total + more, parts, jax.tree.map(jnp.add, grads, more_grads)), None

    shapes = jax.eval_shape(grad, trainable, first)
    (total, parts), grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    parts |= {name: jnp.full_like(parts[name], -jnp.inf) for name in MAXIMA & parts.keys()}
    return jax.lax.scan(add, (total, parts, grads), batch)[0]


def move_router_bias(params: dict, load: jax.Array, rate: jax.Array) -> dict:
    """Adds rate * sign(mean load - load) to each router bias (DeepSeek-V3, aux-loss-free balancing).

    Args:
      params: flat dict of parameters. load: float32 [MoE layers,E], tokens per expert, trunk layers in order, then MTP's.
    """
    params, row = dict(params), 0
    # Whole numbers: a load that is the mean moves nothing, which a rounded mean would not give.
    step = rate * jnp.sign(jnp.sum(load, axis=-1, keepdims=True) - load.shape[-1] * load)
    for path in sorted(p for p in params if p[0] == "groups" and p[-1] == "router_bias"):  # [layers,E] each
        layers = len(params[path])
        params[path] = params[path] + step[row : row + layers]
        row += layers
    for path in [p for p in params if p[0] == "mtp" and p[-1] == "router_bias"]:
        if row < load.shape[0]:
            params[path] = params[path] + step[row]
    return params


def init_state(model: Glm5, optimizer: optax.GradientTransformation, freeze: tuple[str, ...]) -> TrainState:
    """State before step 0 of a model with real or abstract parameters."""
    params = split(model)[1]
    keep = trainable_specs(model, freeze)
    return TrainState(jnp.int32(0), params, optimizer.init({p: v for p, v in flat(params).items() if p in keep}))


def make_gradients(
    model: Glm5, cfg: LossConfig, freeze: tuple[str, ...], mesh: Mesh | None = None, policy: Callable | None = None
) -> Callable:
    """A function like `gradients`, of (trainable, frozen, batch, MTP weight), that all devices of a mesh work on.

    Args:
      model: on a mesh, one that `place_parameters` has placed. Parameters and gradients are cut as it says, the rows of a
        batch over `ROWS`; loss and parts come back whole.
    """
    graphdef = split(model)[0]
    if mesh is None:
        return functools.partial(gradients, graphdef, cfg=cfg, policy=policy)
    specs = flat(parameter_specs(model))
    trainable = {p: specs[p] for p in trainable_specs(model, freeze)}
    frozen = {p: spec for p, spec in specs.items() if p not in trainable}

    def add_up(train, rest, batch, mtp_weight):
        loss, parts, grads = gradients(graphdef, train, rest, batch, mtp_weight, cfg, policy)
        tops = {name: largest(parts.pop(name), *AXES) for name in MAXIMA & parts.keys()}
        loss, parts = total((loss, parts), *AXES)
        return loss, parts | tops, {p: total(g, *uncut(trainable[p])) for p, g in grads.items()}

    return local(
        add_up, mesh, in_specs=(trainable, frozen, PartitionSpec(None, ROWS), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec(), trainable),
    )  # fmt: skip


def state_specs(state: TrainState, model: Glm5) -> TrainState:
    """The jax PartitionSpec of each leaf of a state: moments lie with their parameters, counters everywhere.

    Args:
      state: real or abstract. model: placed by `place_parameters`.
    """
    cuts = flat(parameter_specs(model))

    def of_moment(path, leaf):
        owners = [cuts[key.key] for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in cuts]
        return owners[-1] if owners else PartitionSpec()

    moments = jax.tree_util.tree_map_with_path(of_moment, state.opt_state)
    return TrainState(PartitionSpec(), traverse_util.unflatten_dict(cuts), moments)


def make_step(
    model: Glm5,
    optimizer: optax.GradientTransformation,
    rates: Rates,
    cfg: LossConfig,
    freeze: tuple[str, ...],
    mesh: Mesh | None = None,
    policy: Callable | None = None,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """The step function; jit it with the state donated. For model and mesh see `make_gradients`, for policy `micro_loss`.

    A step whose loss, gradient norm or update norm is not finite leaves parameters and optimizer state as they were and
    says so in metrics["finite"]; the caller decides whether to go on.

    A frozen part does not change by a bit, its router biases included.

    Metrics: loss, ce, mtp, balance, index_kl (if it has a weight), max_logit, finite, mtp_weight, load [MoE layers,E],
    max_violation [MoE layers] (largest load / mean load - 1); grad_norm and update_norm of trunk and MTP together,
    grad_norm_indexer and update_norm_indexer, and, where MTP is detached, grad_norm_mtp and update_norm_mtp, each where
    something trains.
    """
    check(not cfg.mtp_steps or model.mtp is not None, "loss.mtp_steps: the model has no MTP layer; set it to 0")
    work_out = make_gradients(model, cfg, freeze, mesh, policy)
    trainable = trainable_specs(model, freeze)
    biases = {p for p, spec in flat(specs(model)).items() if spec.kind == "router_bias" and spec.part not in freeze}

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        params = flat(state.params)
        train = {p: v for p, v in params.items() if p in trainable}
        frozen = {p: v for p, v in params.items() if p not in trainable}
        mtp_weight = rates.mtp_weight(state.step)
        loss, parts, grads = work_out(train, frozen, batch, mtp_weight)
        updates, opt_state = optimizer.update(grads, state.opt_state, train)
        grad_norms = _named_norms("grad_norm", grads, trainable, apart(cfg))
        update_norms = _named_norms("update_norm", updates, trainable, apart(cfg))
        finite = jnp.all(jnp.isfinite(jnp.stack([loss, *grad_norms.values(), *update_norms.values()])))
        new = params | optax.apply_updates(train, updates)
        load = parts.pop("load")
        metrics = parts | grad_norms | update_norms
        metrics |= {"loss": loss, "finite": finite, "mtp_weight": mtp_weight}
        if load is not None:
            moved = move_router_bias(new, load, rates.bias_rate(state.step))
            new |= {p: moved[p] for p in biases}
            mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-9)
            metrics |= {"load": load, "max_violation": jnp.max(load, axis=-1) / mean - 1}
        new, opt_state = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), (new, opt_state), (params, state.opt_state)
        )
        return TrainState(state.step + 1, traverse_util.unflatten_dict(new), opt_state), metrics

    return step


def apart(cfg: LossConfig) -> tuple[str, ...]:
    """The parts with a gradient norm of their own, by which they are clipped: those that a loss of their own trains."""
    return ("indexer", "mtp") if cfg.detach_mtp else ("indexer",)


def _named_norms(name: str, tree: dict, trainable: dict[tuple, Spec], parts: tuple[str, ...]) -> dict[str, jax.Array]:
    """The norms of the groups that are clipped apart, as metrics."""
    by_group = norms(tree, trainable, parts).items()
    return {name if group == "network" else f"{name}_{group}": norm for group, norm in by_group}
