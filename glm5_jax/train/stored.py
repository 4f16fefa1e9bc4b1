"""The parameters of a checkpoint as arrays on the disk: read, or written, a slice at a time, by any number of threads.

What a training run saves (orbax, OCDBT) is read here; what is written is an orbax checkpoint as well (one directory per array,
zarr 3), which `train.checkpoint` restores. In it each published tensor is a file of its own, or a few if it is large, so that
it can be written alone, and is cut inside into chunks, so that a device reads little more than its part of it. Numbers lie in
the order of the published tensor, [out..., in...]: turning matrices would take longer than all else, and who reads turns less.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from glm5_jax.convert.published import Band, Piece, copy_packed, cut_rows, row_axis, tensor_shape
from glm5_jax.sharding.rules import partition
from glm5_jax.train.checkpoint import quieten_orbax

_CACHE_BYTES = 64 * 2**20  # chunks that hold parts of several published tensors are not read once for each
_PARTS = 16  # into which a published tensor is cut along the dimension that a mesh cuts first


class Layout(NamedTuple):
    """How an array is stored.

    Attributes:
      shape: [lead..., in..., out...]. dtype: of its elements.
      file, chunk: shape of the part that one file holds, and of the parts into which that is cut.
      order: of the dimensions on the disk, [lead..., out..., in...].
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: tuple[int, ...]
    chunk: tuple[int, ...]
    order: tuple[int, ...]


def plan(pieces: list[Piece], number: int, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Layout, list[Band]]:
    """How a stacked parameter is stored, and in which bands of rows the published tensors that it is made of are written.

    Args:
      pieces: of one of these tensors. number: which piece is a part of the parameter.
      shape: of the parameter. dtype: that it is stored in.
    Returns:
      (layout, bands); each band of each tensor becomes one file.
    """
    piece, lead = pieces[number], len(pieces[number].index)
    row = lead + row_axis(piece)
    cuts = partition(piece.spec.axes, shape, {"data": _PARTS})
    chunk = [1 if i < lead else n // _PARTS if cut else n for i, (n, cut) in enumerate(zip(shape, cuts))]
    row_bytes = math.prod(tensor_shape(pieces)[1:]) * dtype.itemsize
    bands = cut_rows(pieces, row_bytes, multiple=chunk[row] if cuts[row] else 1)
    file = [1 if i < lead else n for i, n in enumerate(shape)]
    file[row] = bands[0].last
    chunk[row] = min(chunk[row], file[row])
    order = (*range(lead), *range(row, len(shape)), *range(lead, row))
    return Layout(shape, dtype, tuple(file), tuple(chunk), order), bands


def file_name(name: str, layout: Layout, start: tuple[int, ...]) -> str:
    """Path of the file that begins at the element `start` of an array, relative to the directory of the arrays."""
    return "/".join((name, "c", *(str(i // n) for i, n in zip(start, layout.file))))


def create(folder: Path, layouts: dict[str, Layout]) -> None:
    """Makes an orbax checkpoint of arrays of which nothing is written yet. folder: must not exist."""
    quieten_orbax()
    # orbax writes what it needs to find them from arrays of one number; then each gets its own shape.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        small = {name: np.zeros(1, layout.dtype) for name, layout in layouts.items()}
        checkpointer.save(folder, args=ocp.args.PyTreeSave(small))
    context = ts.Context({"file_io_sync": False})
    new = [ts.open(_new(folder, n, l), create=True, delete_existing=True, context=context) for n, l in layouts.items()]
    for array in new:
        array.result()


def _new(folder: Path, name: str, layout: Layout) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    turn = {"name": "transpose", "configuration": {"order": layout.order}}
    parts = {"chunk_shape": layout.chunk, "codecs": [turn, little], "index_codecs": [little]}
    metadata = {
        "shape": layout.shape,
        "data_type": layout.dtype.name,
        "fill_value": 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.file}},
        "codecs": [{"name": "sharding_indexed", "configuration": parts}],
    }
    return _array(folder, name) | {"metadata": metadata}


def _array(folder: Path, name: str) -> dict:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/{name}/"}}


_ABSENT = 2**64 - 1


def encode(values: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The content of one file, in parts: what zarr 3 calls a shard, its chunks one after the other and then where they begin.

    Made by hand, since tensorstore would copy everything twice more, and read it again for its digest.

    Args:
      values: [in..., out...], a part of `layout.file` that is smaller along its first output dimension if it is the last one.
    """
    lead = len(layout.shape) - values.ndim
    file, chunk, order = layout.file[lead:], layout.chunk[lead:], [axis - lead for axis in layout.order[lead:]]
    grid = [n // c for n, c in zip(file, chunk)]
    index = np.full((math.prod(grid), 2), _ABSENT, "<u8")
    present = [at for at in np.ndindex(*grid) if all(i * c < n for i, c, n in zip(at, chunk, values.shape))]
    content = np.zeros((len(present), *(chunk[axis] for axis in order)), values.dtype)
    for i, at in enumerate(present):
        part = values[tuple(slice(j * c, (j + 1) * c) for j, c in zip(at, chunk))].transpose(order)
        copy_packed(part, content[i][tuple(map(slice, part.shape))])
        index[np.ravel_multi_index(at, grid)] = i * content[i].nbytes, content[i].nbytes
    return [content.reshape(-1).view(np.uint8), index.reshape(-1).view(np.uint8)]


class Arrays:
    """The arrays in a directory, by name, for reading."""

    def __init__(self, folder: Path, names: list[str]):
        context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        ocdbt = {"driver": "ocdbt", "base": f"file://{folder.absolute()}"}
        self._outputs_first = not (folder / "manifest.ocdbt").is_file()
        if not self._outputs_first:
            specs = {name: {"driver": "zarr", "kvstore": ocdbt | {"path": f"{name}/"}} for name in names}
        else:
            specs = {name: _array(folder, name) for name in names}
        opening = {name: ts.open(spec, open=True, context=context) for name, spec in specs.items()}
        self._arrays = {name: array.result() for name, array in opening.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        """dtype of an array."""
        return self._arrays[name].dtype.numpy_dtype

    def read(self, name: str, at: tuple, n_in: int) -> np.ndarray:
        """array[at], [in..., out...] with n_in input dimensions; a view of [out..., in...] if it lies so on the disk."""
        part = self._arrays[name][at]
        if not self._outputs_first:
            return part.read().result()
        order = (*range(n_in, part.rank), *range(n_in))
        return np.moveaxis(part[ts.d[order].transpose[:]].read().result(), range(-n_in, 0), range(n_in))
