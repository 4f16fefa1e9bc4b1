"""Hugging Face checkpoints in and out: whole models between memory and a directory; `write_hf` also from what is on disk."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, SingleDeviceSharding

from glm5_jax.config import ModelConfig, check, override
from glm5_jax.convert.hf_config import config_from_hf, config_to_hf
from glm5_jax.convert.published import (
    Band,
    Piece,
    copy_packed,
    cut_rows,
    from_published,
    layer_prefixes,
    row_axis,
    stored,
    tensor_shape,
    tensor_table,
    to_published,
)
from glm5_jax.convert.safetensors_dir import BLOCK, FP8, SCALE, TensorDirectory, quantise
from glm5_jax.convert.safetensors_write import SafetensorsFile, Stored, cut_into_files, write_index
from glm5_jax.convert.stream import run
from glm5_jax.model import Glm5, flat, merge, split, template

SHARD_BYTES = 4 * 2**30
Read = Callable[[str, list[Piece], np.dtype, Band], np.ndarray]


# Reading


class Published(NamedTuple):
    """A checkpoint directory that fits its config. table: of the tensors of cfg."""

    cfg: ModelConfig
    table: dict[str, list[Piece]]
    files: TensorDirectory

    def in_order(self) -> list[str]:
        """Names of the tensors as they lie on the disk."""
        return sorted(self.table, key=self.files.place)


def open_hf(path: str | os.PathLike, **overrides) -> Published:
    """Opens a checkpoint directory and compares the names and shapes of its tensors with the config; reads no tensor.

    Raises:
      UserError: as `load_hf`.
    """
    path = pathlib.Path(path)
    cfg = override(config_from_hf(_read_json(path / "config.json")), **overrides)
    files = TensorDirectory(path)
    if cfg.num_nextn_predict_layers and not any(n.startswith(layer_prefixes(cfg)["mtp"]) for n in files.names()):
        warnings.warn(f"{path}: the MTP layer is absent from the checkpoint; the model is loaded without it", stacklevel=4)
        cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0)
    table = tensor_table(cfg)
    _check_tensors(path, table, files)
    return Published(cfg, table, files)


def load_hf(path: str | os.PathLike, dtype: str = "float32", mesh: Mesh | None = None, **overrides) -> Glm5:
    """Reads a `glm_moe_dsa` checkpoint directory.

    Args:
      path: directory with config.json and *.safetensors (float32, bfloat16 or FP8 with 128x128 block scales).
      dtype: dtype of parameters and matrix products; the router bias stays float32.
      mesh: the devices that share the parameters (`sharding.rules`). Each process reads the tensors of which its devices
        hold something, and holds its part of one stacked parameter at a time in host memory. None: the default device.
      **overrides: fields of `ModelConfig`.
    Returns:
      The model. If the file has no MTP layer, neither has the model, and a warning says so.
    Raises:
      UserError: another architecture, missing, unexpected, misshapen or truncated tensors (named), unknown field.
    """
    source = open_hf(path, dtype=dtype, **overrides)
    graphdef, templates = template(source.cfg, dtype, mesh)
    where = {}
    for name in source.in_order():
        for i, piece in enumerate(source.table[name]):
            where.setdefault(piece.path, []).append((name, i))
    params = {path: _load(source, where[path], leaf) for path, leaf in flat(templates).items()}
    return merge(graphdef, traverse_util.unflatten_dict(params))


def _load(source: Published, where: list[tuple[str, int]], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The parameter that the published tensors `where`, (name, number of the piece), make up."""
    devices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    bounds = {d: tuple(slice(*cut.indices(n)[:2]) for cut, n in zip(index, leaf.shape)) for d, index in devices.items()}
    parts = {str(b): (b, np.empty([cut.stop - cut.start for cut in b], leaf.dtype)) for b in bounds.values()}
    run((functools.partial(_fill, source, name, i, list(parts.values())) for name, i in where), os.cpu_count() or 1)
    arrays = [jax.device_put(parts[str(b)][1], device) for device, b in bounds.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


def _fill(source: Published, name: str, number: int, parts: list) -> None:
    """Copies what belongs there of a piece of a published tensor to parts (bounds, array) of its parameter."""
    pieces = source.table[name]
    piece, axis = pieces[number], row_axis(pieces[number])
    lead = len(piece.index)
    wanted = [(b, a) for b, a in parts if all(cut.start <= i < cut.stop for i, cut in zip(piece.index, b))]
    for band in cut_rows(pieces, math.prod(tensor_shape(pieces)[1:]) * 4):
        inside = [(b, a) for b, a in wanted if b[lead + axis].start < band.last and b[lead + axis].stop > band.first]
        if not inside:
            continue
        rows = from_published(source.files.read(name, inside[0][1].dtype, band.start, band.stop), pieces)[number]
        for bounds, array in inside:
            array = array[tuple(i - cut.start for i, cut in zip(piece.index, bounds))]
            own = list(bounds[lead:])
            first, last = max(own[axis].start, band.first), min(own[axis].stop, band.last)
            target = (slice(None),) * axis + (slice(first - own[axis].start, last - own[axis].start),)
            own[axis] = slice(first - band.first, last - band.first)
            copy_packed(rows[tuple(own)], array[target])


# Writing


def save_hf(model: Glm5, path: str | os.PathLike, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a checkpoint directory that `load_hf` and transformers read; appears whole or not at all.

    Args:
      model: the model, in the dtype to be written.
      path: directory to create; must not exist, or be empty.
      shard_bytes: largest size of one file; more tensors go into further files with an index.
    Raises:
      UserError: the directory is not empty, or cannot be written.
    """
    path = pathlib.Path(path)
    check(type(model) is Glm5, f"{type(model).__name__}: a changed network has no published layout to be written in")
    check_free(path)
    work = path.with_name(path.name + ".partial")
    params = flat(split(model)[1])
    dtype = np.dtype(params["embedding",].dtype).name

    @functools.lru_cache(maxsize=2)  # one tensor, for all of its bands
    def fetch(path: tuple, index: tuple[int, ...]) -> np.ndarray:
        return _slice(params[path], index)

    def read(name: str, pieces: list[Piece], dtype: np.dtype, band: Band) -> np.ndarray:
        parts = [fetch(p.path, p.index) for p in pieces]
        rows = [part[(slice(None),) * row_axis(p) + (slice(band.first, band.last),)] for part, p in zip(parts, pieces)]
        return to_published(rows, pieces).astype(dtype, copy=False)

    try:
        shutil.rmtree(work, ignore_errors=True)
        write_hf(model.cfg, dtype, read, work, shard_bytes=shard_bytes)
        os.replace(work, path)
    except OSError as error:
        check(False, f"{path}: cannot be written ({error})")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _slice(array: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """array[index] on the host."""
    if isinstance(array.sharding, SingleDeviceSharding) and next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)[index]  # no copy, and no program to compile
    return np.asarray(array[index])


def check_free(path: pathlib.Path) -> None:
    """Raises UserError unless nothing is there, or an empty directory."""
    check(not path.exists() or (path.is_dir() and not any(path.iterdir())), f"{path}: exists and is not empty")


def write_hf(
    cfg: ModelConfig,
    dtype: str,
    read: Read,
    folder: pathlib.Path,
    done: Callable[[str, float, bool], None] = lambda name, share, here: None,
    workers: int = 1,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the published form of a model into a folder; files that are complete there are kept.

    Args:
      dtype: "float32", "bfloat16", "float64" or "fp8", see `stored`.
      read: (name, pieces, dtype, band) -> those rows of a published tensor in that dtype.
      done: receives the name of a tensor, the share of it that is on the disk now, and whether it was written here or before.
      workers: threads that read and write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, files = tensor_table(cfg), cut_into_files(stored(cfg, dtype), shard_bytes)
    for file_name, tensors in files.items():
        file = SafetensorsFile(folder / file_name, tensors)
        if file.is_complete():
            for name in tensors.keys() & table.keys():
                done(name, 1.0, False)
        else:
            with file:
                run(_bands_to_write(file, tensors, table, read, done), workers)
    write_index(folder, files)
    config = config_to_hf(cfg, "bfloat16" if dtype == "fp8" else dtype)
    if dtype == "fp8":
        config["quantization_config"] = quantization_config({k: v for tensors in files.values() for k, v in tensors.items()})
    generation = {"eos_token_id": list(cfg.eos_token_id), "pad_token_id": cfg.pad_token_id}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def quantization_config(tensors: dict[str, Stored]) -> dict:
    """What config.json says of an FP8 checkpoint; the modules not converted are the matrices without a scale."""
    plain = [name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.dtype != FP8]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in plain if len(tensors[name + ".weight"].shape) == 2],
    }


def _bands_to_write(file: SafetensorsFile, tensors: dict[str, Stored], table: dict, read: Read, done: Callable) -> Iterator:
    """One job for each band of each tensor of a file."""
    for name in (n for n in tensors if n in table):
        pieces, (dtype, shape) = table[name], tensors[name]
        heads = pieces[0].shape[row_axis(pieces[0])]
        multiple = BLOCK // math.gcd(BLOCK, shape[0] // heads) if dtype == FP8 else 1
        for band in cut_rows(pieces, math.prod(shape[1:]) * 4, multiple):
            yield functools.partial(_write_band, file, name, pieces, dtype, band, read, done)


def _write_band(file: SafetensorsFile, name: str, pieces: list[Piece], dtype: np.dtype, band: Band, read: Read, done) -> None:
    if dtype == FP8:
        values = read(name, pieces, np.dtype(np.float32), band)
        check(bool(np.isfinite(values).all()), f"{name}: holds values that are not finite, which FP8 cannot hold")
        values, scale = quantise(values)
        file.write(name + SCALE, scale, band.start // BLOCK)
    else:
        values = read(name, pieces, dtype, band)
    file.write(name, values, band.start)
    done(name, (band.stop - band.start) / tensor_shape(pieces)[0], True)


def _check_tensors(path, table: dict, files: TensorDirectory) -> None:
    """One error that names what is missing, unexpected or misshapen."""
    missing = sorted(table.keys() - files.names())
    unexpected = sorted(files.names() - table.keys())
    misshapen = [
        f"{name} {files.shape(name)} instead of {tensor_shape(table[name])}"
        for name in sorted(table.keys() & files.names())
        if files.shape(name) != tensor_shape(table[name])
    ]
    found = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    parts = [f"{len(v)} {k}: {', '.join(v[:5])}{' ...' if len(v) > 5 else ''}" for k, v in found.items() if v]
    check(not parts, f"{path}: tensors do not fit the config: {'; '.join(parts)}")


def _read_json(file: pathlib.Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        check(False, f"{file}: not a readable config ({error})")
    check(isinstance(content, dict), f"{file}: not a config")
    return content
