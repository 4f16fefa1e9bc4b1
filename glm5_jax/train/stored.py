"""The parameters of a checkpoint as tensorstore arrays: read, or written, a slice at a time, by any number of threads.

What a training run saves (orbax, OCDBT) is read here; what is written is an orbax checkpoint as well (one directory per array,
zarr 3), which `train.checkpoint` restores. In it each published tensor is a file of its own, or a few if it is large, so that
it can be written alone, and is cut inside into chunks, so that a device reads little more than its part of it.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from glm5_jax.convert.published import Band, Piece, cut_rows, row_axis, tensor_shape
from glm5_jax.sharding.rules import partition
from glm5_jax.train.checkpoint import quieten_orbax

_CACHE_BYTES = 64 * 2**20  # chunks that hold parts of several published tensors are not read once for each
_PARTS = 16  # into which a published tensor is cut along the dimension that a mesh cuts first


class Layout(NamedTuple):
    """An array: shape and dtype, the shape of one file and of the chunks in it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: tuple[int, ...]
    chunk: tuple[int, ...]


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
    return Layout(shape, dtype, tuple(file), tuple(chunk)), bands


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
    for name, layout in layouts.items():
        ts.open(_new(folder, name, layout), create=True, delete_existing=True).result()


def _new(folder: Path, name: str, layout: Layout) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    parts = {"chunk_shape": layout.chunk, "codecs": [little], "index_codecs": [little, {"name": "crc32c"}]}
    metadata = {
        "shape": layout.shape,
        "data_type": layout.dtype.name,
        "fill_value": 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.file}},
        "codecs": [{"name": "sharding_indexed", "configuration": parts}],
    }
    return _array(folder, name) | {"metadata": metadata}


def _array(folder: Path, name: str) -> dict:
    # A file of zeros is written like any other: it has to be there to be known as done.
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/{name}/"},
        "store_data_equal_to_fill_value": True,
    }


class Arrays:
    """The arrays in a directory, by name."""

    def __init__(self, folder: Path, names: list[str]):
        # Nothing is fsynced, as in a training run: the digests notice what a power cut lost.
        context = ts.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        ocdbt = {"driver": "ocdbt", "base": f"file://{folder.absolute()}"}
        if (folder / "manifest.ocdbt").is_file():
            specs = {name: {"driver": "zarr", "kvstore": ocdbt | {"path": f"{name}/"}} for name in names}
        else:
            specs = {name: _array(folder, name) for name in names}
        opening = {name: ts.open(spec, open=True, context=context) for name, spec in specs.items()}
        self._arrays = {name: array.result() for name, array in opening.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._arrays[name].shape

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(a.shape) * a.dtype.numpy_dtype.itemsize for a in self._arrays.values())

    def dtype(self, name: str) -> np.dtype:
        """dtype of an array."""
        return self._arrays[name].dtype.numpy_dtype

    def read(self, name: str, at: tuple) -> np.ndarray:
        """array[at]."""
        return self._arrays[name][at].read().result()

    def write(self, name: str, at: tuple, values: np.ndarray) -> None:
        """array[at] = values."""
        self._arrays[name][at].write(values).result()
