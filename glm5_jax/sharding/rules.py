"""Where the parts of each parameter lie: one table from logical axes to mesh axes.

Experts are spread over "expert", and only there does a device compute with what it holds. Every other cut is for memory alone
(ZeRO-3, FSDP): parameters, gradients and optimizer state are split over all devices, and a layer gathers its parameters when
it runs (`whole`), forward and again backward; their gradients are summed and split again on the way back.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from glm5_jax.config import check
from glm5_jax.sharding.mesh import AXES, size

# Logical axes that may be cut for memory, in order of preference: each mesh axis cuts the first that it divides.
STORED = ("embed", "embed_pair", "q_rank", "kv_rank", "expert_mlp", "mlp", "heads", "head_dim", "index_heads")

Partition = tuple[tuple[str, ...], ...]  # the mesh axes that cut each dimension


def partition(axes: tuple[str, ...], shape: tuple[int, ...], sizes: dict[str, int]) -> Partition:
    """The mesh axes that cut each dimension of a parameter.

    A vector is whole everywhere: it is small, and gathering it would take longer than storing it.

    Args:
      axes: logical axis of each dimension. shape: its size. sizes: devices along each mesh axis.
    Raises:
      UserError: the experts cannot be spread evenly.
    """
    cuts = [()] * len(axes)
    left = [a for a in AXES if sizes.get(a, 1) > 1]
    if "experts" in axes and "expert" in left:
        at, n = axes.index("experts"), sizes["expert"]
        check(shape[at] % n == 0, f"mesh.expert={n}: {shape[at]} experts cannot be spread evenly over it")
        cuts[at] = ("expert",)
        left.remove("expert")
    if len(set(axes) - {"layers", "experts"}) < 2:
        return tuple(cuts)
    for mesh_axis in sorted(left, key=lambda a: -sizes[a]):
        for at in sorted((i for i, a in enumerate(axes) if a in STORED), key=lambda i: STORED.index(axes[i])):
            parts = math.prod(sizes[a] for a in (*cuts[at], mesh_axis))
            if shape[at] % parts == 0:
                cuts[at] = (*cuts[at], mesh_axis)
                break
    return tuple(cuts)


def own_part(axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[list, tuple[int, ...]]:
    """(where this device's part of a parameter begins, its shape); all of it outside of a mesh."""
    cuts = partition(axes, shape, {a: size(a) for a in AXES})
    part = tuple(n // math.prod(size(a) for a in cut) for n, cut in zip(shape, cuts))
    return [lax.axis_index(cut) * n if cut else jnp.int32(0) for n, cut in zip(part, cuts)], part


def place_parameters(model: nnx.Module, sizes: dict[str, int], experts_only: bool = False) -> nnx.Module:
    """The model, abstract or not, whose parameters know their `partition`.

    experts_only: nothing but the experts is cut, as for serving, where a step has no time to gather parameters.
    """

    def mark(param):
        axes, shape = param.get_metadata()["spec"].axes, param.get_value().shape
        cut = sizes if not experts_only or "experts" in axes else {}
        marked = param.replace(param.get_value())
        marked.set_metadata("partition", partition(axes, shape, cut))
        return marked

    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(mark, state, is_leaf=_is_variable))


def _is_variable(leaf) -> bool:
    return isinstance(leaf, nnx.Variable)


def whole(state, dtype):
    """The parameters of a layer, gathered from the devices that hold their parts; experts stay where they are.

    Args:
      state: a parameter or a pytree of them, stacked or of one layer. dtype: what they are cast to before they travel, unless
        they are declared to be used in float32.
    """

    def one(param):
        metadata = param.get_metadata()
        value, spec = param.get_value(), metadata["spec"]
        names, cuts = spec.axes[-value.ndim :], metadata.get("partition", ())[-value.ndim :]
        cuts = tuple((at, axes) for at, (name, axes) in enumerate(zip(names, cuts)) if axes and name != "experts")
        return param.replace(_gather(cuts, value.dtype if spec.wide else dtype, value)) if cuts else param

    return jax.tree.map(one, state, is_leaf=_is_variable) if size(*AXES) > 1 else state


def look_up(embedding, tokens: jax.Array, dtype) -> jax.Array:
    """Rows [B,T,D] of an embedding [W,D] for tokens [B,T] of this device.

    A device that holds some columns looks them up for the tokens of all that hold the others, and sends them there: what
    travels is as large as the result, not as the table.
    """
    table, cuts = embedding.get_value(), embedding.get_metadata().get("partition", ())
    axes = cuts[-1] if cuts and size(*AXES) > 1 else ()
    if not axes:
        return table[tokens].astype(dtype)
    columns = table[lax.all_gather(tokens, axes)].astype(dtype)  # [devices,B,T,D/devices]
    return lax.all_to_all(columns, axes, split_axis=0, concat_axis=3, tiled=True)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(cuts, dtype, x):
    x = x.astype(dtype)
    # One axis after another, the last first: of several at once XLA makes an all-reduce on TPUs, which sends twice as much.
    for at, axes in cuts:
        for axis in reversed(axes):
            x = lax.all_gather(x, axis, axis=at, tiled=True)
    return x


def _gather_forward(cuts, dtype, x):
    return _gather(cuts, dtype, x), jnp.zeros((), x.dtype)


def _gather_backward(cuts, dtype, like, g):
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))  # sums over many devices
    for at, axes in reversed(cuts):
        for axis in axes:
            g = lax.psum_scatter(g, axis, scatter_dimension=at, tiled=True)
    return (g.astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def parameter_specs(model: nnx.Module) -> dict:
    """Nested dict like that of `model.split`, with the jax PartitionSpec of each parameter of a placed model."""
    to_spec = lambda p: PartitionSpec(*(axes or None for axes in p.get_metadata()["partition"]))  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(to_spec, nnx.state(model), is_leaf=_is_variable))


def axes_by_dimension(spec: PartitionSpec) -> Partition:
    """The mesh axes that cut each dimension that `spec` names."""
    return tuple(() if cut is None else (cut,) if isinstance(cut, str) else cut for cut in spec)


def uncut(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes over which every device holds all of an array."""
    return tuple(a for a in AXES if not any(a in cut for cut in axes_by_dimension(spec)))
