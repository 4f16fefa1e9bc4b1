"""The device mesh and collectives over its axes.

Three axes, each of which also holds a part of every large parameter:

  - "data": rows of the batch.
  - "expert": rows of the batch too; experts are spread over it, and tokens travel to theirs (`sharding/expert.py`).
  - "context": parts of each row; keys are gathered over it (`sharding/context.py`).

Whatever computes on a mesh runs inside `shard_map`, where each device sees its own part of every array and communication
happens only where one of these functions is called. Each of them does nothing outside of `shard_map` and over axes of one
device, so the code of a layer is the same on one device and on a pod.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from glm5_jax.config import check

AXES = ("data", "expert", "context")
ROWS = ("data", "expert")  # the axes that split the rows of a batch


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices."""

    data: int = -1  # devices that split the rows of a batch; -1 = all that the other axes leave
    expert: int = 1  # devices that split the rows and share out the experts
    context: int = 1  # devices that share out the tokens of a row

    def __post_init__(self):
        check(self.data == -1 or self.data >= 1, f"mesh.data={self.data}: must be at least 1, or -1 for all that is left")
        for name in ("expert", "context"):
            check(getattr(self, name) >= 1, f"mesh.{name}={getattr(self, name)}: must be at least 1")

    def sizes(self, devices: int) -> tuple[int, int, int]:
        """Devices along `AXES`.

        Raises:
          UserError: the product is not `devices`.
        """
        others = self.expert * self.context
        check(
            self.data != -1 or devices % others == 0,
            f"mesh expert x context = {self.expert}x{self.context}: does not divide the {devices} devices",
        )
        data = devices // others if self.data == -1 else self.data
        asked = "x".join(map(str, (self.data, self.expert, self.context)))
        check(data * others == devices, f"mesh data x expert x context = {asked}: there are {devices} devices")
        return data, self.expert, self.context


def make_mesh(cfg: MeshConfig, devices=None) -> Mesh | None:
    """The mesh over `devices` (default: all), neighbours along "context"; None for a single device, which needs none.

    TPU slices, between which there is a network only, lie along "data".
    """
    devices = jax.devices() if devices is None else devices
    data, expert, context = sizes = cfg.sizes(len(devices))
    types = (AxisType.Auto,) * len(AXES)
    if len(devices) == 1:
        return None
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    check(data % slices == 0, f"mesh.data={data}: must be a multiple of the {slices} slices")
    if slices == 1:
        array = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        of_slice = (data // slices, expert, context)
        array = create_hybrid_device_mesh(of_slice, (slices, 1, 1), devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=types)


def local(fn: Callable, mesh: Mesh | None, in_specs, out_specs) -> Callable:
    """`fn` run by every device of the mesh on its part of the arguments; `fn` itself without a mesh.

    A gradient taken inside is that of the sum of all devices' results: what every device computes alike must count once.
    """
    if mesh is None:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def spread(*axes: str) -> tuple[str, ...]:
    """Those of the axes that split the arrays of the program being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in axes if a in mesh.manual_axes and mesh.shape[a] > 1)


def size(*axes: str) -> int:
    """Devices along axes that split the arrays of the program being traced; 1 outside of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in spread(*axes))


def total(x, *axes: str):
    """Sum of a pytree of arrays over the devices along the axes."""
    return lax.psum(x, spread(*axes)) if spread(*axes) else x


def largest(x, *axes: str):
    """Maximum of a pytree of arrays over the devices along the axes; no gradient."""
    x = lax.stop_gradient(x)
    return lax.pmax(x, spread(*axes)) if spread(*axes) else x


def check_rows(mesh: Mesh | None, rows: int, tokens: int, name: str = "micro_rows") -> None:
    """Raises UserError unless `rows` rows of `tokens` tokens can be shared out evenly. name: of the setting that rows is."""
    if mesh is None:
        return
    n, pieces = math.prod(mesh.shape[a] for a in ROWS), 2 * mesh.shape["context"]
    check(rows % n == 0, f"{name}={rows}: must be a multiple of mesh data x expert = {n}")
    check(
        pieces == 2 or tokens % pieces == 0,
        f"mesh.context={mesh.shape['context']}: rows of {tokens} tokens cannot be cut into {pieces} equal pieces",
    )


def shardings_of(mesh: Mesh, specs):
    """A pytree of jax PartitionSpecs as shardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def readers(mesh: Mesh | None) -> tuple[int, int]:
    """(number of this process among those that read different rows of a batch, how many of them there are).

    Processes whose devices share out the tokens of the same rows read the same rows.
    """
    if mesh is None:
        return 0, 1
    rows = mesh.devices.reshape(-1, mesh.devices.shape[-1])  # by rows of a batch, by tokens
    mine = {i for i, devices in enumerate(rows) if any(d.process_index == jax.process_index() for d in devices)}
    share = len(mine)
    check(
        mine == set(range(min(mine), min(mine) + share)) and min(mine) % share == 0,
        f"mesh: process {jax.process_index()} holds devices of the rows {sorted(mine)} of a batch, which are not neighbours",
    )
    return min(mine) // share, len(rows) // share


def put_rows(batch: dict, mesh: Mesh | None) -> dict:
    """Host arrays [A,b,T] of the rows that this process reads (`readers`), as arrays of all rows over the mesh."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    sharding = NamedSharding(mesh, PartitionSpec(None, ROWS))
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


def put_all_rows(batch: dict, mesh: Mesh | None) -> dict:
    """Host arrays [B,T] of all rows, the same in every process, as arrays over the mesh."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    sharding = NamedSharding(mesh, PartitionSpec(ROWS))
    return {name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for name, x in batch.items()}
