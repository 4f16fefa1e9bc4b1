"""The published tensors of a model and how our parameters make them up.

One table, derived from the parameters' declarations, names every published tensor and says which slice of which parameter
it is; it serves loading, saving and the tensor list of a preset. A published matrix is [out, in]; ours is [in..., out...].
Parameters that declare the same name are one published tensor, joined along their last output dimension (kv_b_proj: per
head its key rows, then its value rows).
"""

import functools
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.convert.safetensors_dir import FP8, SCALE, scale_shape
from glm5_jax.convert.safetensors_write import Stored
from glm5_jax.convert.stream import PIECE_BYTES
from glm5_jax.layers.param import Spec
from glm5_jax.model import abstract, flat, layer_places, specs, split


class Piece(NamedTuple):
    """Part of a published tensor: the parameter's path, the index into its leading dimensions, its slice's shape."""

    path: tuple
    index: tuple[int, ...]
    shape: tuple[int, ...]
    spec: Spec


@functools.lru_cache(maxsize=1)
def tensor_table(cfg: ModelConfig) -> dict[str, list[Piece]]:
    """Published name -> the pieces it is made of, for every tensor of the model; allocates nothing."""
    model = abstract(cfg)
    shapes = flat(split(model)[1])
    prefixes = layer_prefixes(cfg)
    table = {}
    for path, spec in flat(specs(model)).items():
        shape = shapes[path].shape
        lead = len(shape) - len(spec.inputs + spec.outputs) if spec.kind == "matrix" else spec.axes.count("layers")
        for index in np.ndindex(shape[:lead]):
            name = _published_name(path, spec, index, prefixes)
            table.setdefault(name, []).append(Piece(path, index, shape[lead:], spec))
    return {name: sorted(pieces, key=lambda p: p.path) for name, pieces in table.items()}


def _published_name(path, spec: Spec, index, prefixes) -> str:
    if path[0] == "groups":
        return prefixes[path[1], "indexer" in path, index[0]] + spec.hf.format(e=index[-1])
    if path[0] == "mtp":
        return prefixes["mtp"] + spec.hf.format(e=index[-1] if index else 0)
    return spec.hf


def layer_prefixes(cfg: ModelConfig) -> dict:
    """(group, whether the indexer's parameters are meant, their place there) -> "model.layers.{i}."; "mtp" -> that of MTP."""
    places = layer_places(cfg.layer_kinds)
    prefixes = {"mtp": f"model.layers.{len(places)}."}
    for i, (group, place, indexer) in enumerate(places):
        prefixes |= {(group, False, place): f"model.layers.{i}.", (group, True, indexer): f"model.layers.{i}."}
    return prefixes


def tensor_shape(pieces: list[Piece]) -> tuple[int, ...]:
    """Shape of the published tensor that the pieces make up."""
    spec = pieces[0].spec
    if not spec.inputs:
        return pieces[0].shape
    rows = sum(math.prod(p.shape[len(spec.inputs) :]) for p in pieces)
    return rows, math.prod(pieces[0].shape[: len(spec.inputs)])


def tensor_list(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the published checkpoint, from abstract shapes alone."""
    return {name: tensor_shape(pieces) for name, pieces in tensor_table(cfg).items()}


def count_parameters(cfg: ModelConfig, tensors: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Parameters without and with the MTP layer, router biases included, of the `tensor_list` of cfg."""
    mtp = layer_prefixes(cfg)["mtp"]
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    return sum(size for name, size in sizes.items() if not name.startswith(mtp)), sum(sizes.values())


def stored(cfg: ModelConfig, dtype: str) -> list[dict[str, Stored]]:
    """Every file entry of the published checkpoint of cfg in `dtype`, in order: an FP8 tensor comes with its scales.

    Args:
      dtype: "float32", "bfloat16", "float64" or "fp8": E4M3 with a scale per block of 128 x 128 for the matrices that the
        published FP8 files hold so, bfloat16 for the others. The router bias is float32 in all of them.
    """
    groups = []
    for name, pieces in tensor_table(cfg).items():
        shape, kind = tensor_shape(pieces), stored_dtype(pieces, dtype)
        groups.append({name: Stored(kind, shape)})
        if kind == FP8:
            groups[-1][name + SCALE] = Stored(np.dtype(np.float32), scale_shape(shape))
    return groups


def stored_dtype(pieces: list[Piece], dtype: str) -> np.dtype:
    """The dtype of a published tensor in a checkpoint of `dtype`, see `stored`."""
    spec = pieces[0].spec
    if spec.kind == "router_bias":
        return np.dtype(np.float32)
    if dtype == "fp8":
        return FP8 if spec.kind == "matrix" and spec.fp8 and not spec.wide else np.dtype(ml_dtypes.bfloat16)
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


# Layout


class Band(NamedTuple):
    """Consecutive rows [start, stop) of a published tensor, and [first, last) of its pieces' first output dimension."""

    start: int
    stop: int
    first: int
    last: int


def row_axis(piece: Piece) -> int:
    """The dimension of a piece's slice that runs with the rows of the published tensor: the first output dimension."""
    return len(piece.spec.inputs)


def cut_rows(pieces: list[Piece], row_bytes: int, multiple: int = 1) -> list[Band]:
    """Cuts a published tensor into bands of about equal size, of at most `PIECE_BYTES` if the multiple allows.

    Args:
      row_bytes: bytes of one row. multiple: of the first output dimension that a band must be.
    """
    shape = tensor_shape(pieces)
    rows, axis = shape[0], row_axis(pieces[0])
    units = pieces[0].shape[axis]
    per_unit = rows // units
    # Pieces without heads are joined along the rows themselves: no band holds a part of each.
    multiple = units if len(pieces) > 1 and len(pieces[0].shape) == axis + 1 else min(multiple, units)
    most = max(PIECE_BYTES // (row_bytes * per_unit * multiple), 1) * multiple
    count = math.ceil(units / most)
    step = math.ceil(units / count / multiple) * multiple
    edges = [*range(0, units, step), units]
    return [Band(a * per_unit, b * per_unit, a, b) for a, b in zip(edges, edges[1:])]


def from_published(rows: np.ndarray, pieces: list[Piece]) -> list[np.ndarray]:
    """Cuts a published tensor, or a band of its rows, into the slices of our parameters: views of it, transposed."""
    n_in = len(pieces[0].spec.inputs)
    if not n_in:
        return [rows]
    inputs, middle = pieces[0].shape[:n_in], pieces[0].shape[n_in + 1 : -1]
    heads = len(pieces[0].shape) > n_in + 1
    joined = rows.T.reshape(*inputs, -1, *middle, *([sum(p.shape[-1] for p in pieces)] if heads else []))
    cuts = np.cumsum([p.shape[-1] for p in pieces])[:-1]
    return np.split(joined, cuts, axis=-1)


def to_published(slices: list[np.ndarray], pieces: list[Piece]) -> np.ndarray:
    """The inverse of `from_published`."""
    n_in = len(pieces[0].spec.inputs)
    if not n_in:
        return slices[0]
    turned = [outputs_first(part, n_in) for part in slices]
    joined = turned[0]
    if len(turned) > 1 or not joined.flags.c_contiguous:
        last = joined.ndim - n_in - 1  # the dimension along which pieces are joined
        edges = np.cumsum([0, *(part.shape[last] for part in turned)])
        joined = np.empty((*joined.shape[:last], edges[-1], *joined.shape[last + 1 :]), joined.dtype)
        for part, start, stop in zip(turned, edges, edges[1:]):
            copy_packed(part, joined[(slice(None),) * last + (slice(start, stop),)])
    return joined.reshape(-1, math.prod(joined.shape[-n_in:]))


def outputs_first(array: np.ndarray, n_in: int) -> np.ndarray:
    """[in..., out...] as a view [out..., in...]."""
    return np.moveaxis(array, range(n_in), range(-n_in, 0))


_TILE_BYTES = 2**21


def copy_packed(view: np.ndarray, out: np.ndarray) -> None:
    """Copies a transposed array in tiles that a cache holds: 3 times as fast as all at once."""
    # As integers: numpy copies those without holding the interpreter's lock.
    view, out = (a.view(f"u{a.dtype.itemsize}") for a in (view, out))
    axis = int(np.argmax(view.strides))
    step = max(1, _TILE_BYTES // view.strides[axis])
    for i in range(0, view.shape[axis], step):
        tile = (slice(None),) * axis + (slice(i, i + step),)
        out[tile] = view[tile]
