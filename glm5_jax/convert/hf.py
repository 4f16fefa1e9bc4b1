"""Hugging Face checkpoints in and out.

One table, derived from the parameters' declarations, names every published tensor and says which slice of which parameter
it is; it serves loading, saving and the tensor list of a preset. A published matrix is [out, in]; ours is [in..., out...].
Parameters that declare the same name are one published tensor, joined along their last output dimension (kv_b_proj: per
head its key rows, then its value rows).
"""

import dataclasses
import json
import math
import os
import pathlib
import warnings
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from glm5_jax.config import ModelConfig, check, override
from glm5_jax.convert.hf_config import config_from_hf, config_to_hf
from glm5_jax.convert.safetensors_dir import TensorDirectory
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, abstract, layer_groups, specs, split

_SHARD_BYTES = 4 * 2**30


class Piece(NamedTuple):
    """Part of a published tensor: the parameter's path, the index into its leading dimensions, its slice's shape."""

    path: tuple
    index: tuple[int, ...]
    shape: tuple[int, ...]
    spec: Spec


def tensor_table(cfg: ModelConfig) -> dict[str, list[Piece]]:
    """Published name -> the pieces it is made of, for every tensor of the model; allocates nothing."""
    model = abstract(cfg)
    leaves = jax.tree_util.tree_leaves_with_path(specs(model), is_leaf=lambda x: isinstance(x, Spec))
    shapes = _flat(split(model)[1])
    prefixes = _layer_prefixes(cfg)
    table = {}
    for path, spec in leaves:
        path = tuple(key.key for key in path)
        shape = shapes[path].shape
        lead = len(shape) - len(spec.inputs + spec.outputs) if spec.kind == "matrix" else spec.axes.count("layers")
        for index in np.ndindex(shape[:lead]):
            name = _published_name(path, spec, index, prefixes)
            table.setdefault(name, []).append(Piece(path, index, shape[lead:], spec))
    return {name: sorted(pieces, key=lambda p: p.path) for name, pieces in table.items()}


def _published_name(path, spec: Spec, index, prefixes) -> str:
    if path[0] == "groups":
        return prefixes[path[1], path[3]][index[0]] + spec.hf.format(e=index[-1])
    if path[0] == "mtp":
        return prefixes["mtp"] + spec.hf.format(e=index[-1] if index else 0)
    return spec.hf


def _layer_prefixes(cfg: ModelConfig) -> dict:
    """(group, block) -> per repeat "model.layers.{i}.", and "mtp" -> that of the MTP layer."""
    prefixes, first = {"mtp": f"model.layers.{cfg.num_hidden_layers}."}, 0
    for g, (pattern, repeats) in enumerate(layer_groups(cfg.layer_kinds)):
        for b in range(len(pattern)):
            prefixes[g, b] = [f"model.layers.{first + r * len(pattern) + b}." for r in range(repeats)]
        first += len(pattern) * repeats
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
    mtp = _layer_prefixes(cfg)["mtp"]
    sizes = {name: math.prod(shape) for name, shape in tensors.items()}
    return sum(size for name, size in sizes.items() if not name.startswith(mtp)), sum(sizes.values())


def from_published(tensor: np.ndarray, pieces: list[Piece]) -> list[np.ndarray]:
    """Cuts a published tensor into the slices of our parameters."""
    n_in = len(pieces[0].spec.inputs)
    if not n_in:
        return [tensor]
    inputs, middle = pieces[0].shape[:n_in], pieces[0].shape[n_in:-1]
    joined = tensor.T.reshape(*inputs, *middle, -1)
    cuts = np.cumsum([p.shape[-1] for p in pieces])[:-1]
    return np.split(joined, cuts, axis=-1)


def to_published(slices: list[np.ndarray], pieces: list[Piece]) -> np.ndarray:
    """The inverse of `from_published`."""
    if not pieces[0].spec.inputs:
        return slices[0]
    rows, columns = tensor_shape(pieces)
    return np.ascontiguousarray(np.concatenate(slices, axis=-1).reshape(columns, rows).T)


def load_hf(path: str | os.PathLike, dtype: str = "float32", **overrides) -> Glm5:
    """Reads a `glm_moe_dsa` checkpoint directory.

    Args:
      path: directory with config.json and *.safetensors (float32, bfloat16 or FP8 with 128x128 block scales).
      dtype: dtype of parameters and matrix products; the router bias stays float32.
      **overrides: fields of `ModelConfig`.
    Returns:
      The model. If the file has no MTP layer, neither has the model, and a warning says so.
    Raises:
      UserError: another architecture, missing, unexpected, misshapen or truncated tensors (named), unknown field.
    """
    path = pathlib.Path(path)
    cfg = override(config_from_hf(_read_json(path / "config.json")), dtype=dtype, **overrides)
    files = TensorDirectory(path)
    if cfg.num_nextn_predict_layers and not any(n.startswith(_layer_prefixes(cfg)["mtp"]) for n in files.names()):
        warnings.warn(f"{path}: the MTP layer is absent from the checkpoint; the model is loaded without it", stacklevel=3)
        cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0)
    table = tensor_table(cfg)
    _check_tensors(path, table, files)
    model = abstract(cfg)
    graphdef, shapes = split(model)
    bias = {piece.path for pieces in table.values() for piece in pieces if piece.spec.kind == "router_bias"}
    arrays = {
        at: np.empty(leaf.shape, np.float32 if at in bias else _numpy_dtype(dtype)) for at, leaf in _flat(shapes).items()
    }
    for name, pieces in table.items():
        for piece, part in zip(pieces, from_published(files.read(name), pieces)):
            arrays[piece.path][piece.index] = part
    params = jax.tree_util.tree_map_with_path(lambda at, _: jax.numpy.asarray(arrays.pop(_keys(at))), shapes)
    return nnx.merge(graphdef, params)


def save_hf(model: Glm5, path: str | os.PathLike, shard_bytes: int = _SHARD_BYTES) -> None:
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
    check(not path.exists() or (path.is_dir() and not any(path.iterdir())), f"{path}: exists and is not empty")
    work = path.with_name(path.name + ".partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
        _write_tensors(model, work, shard_bytes)
        dtype = np.dtype(jax.tree.leaves(split(model)[1]["embedding"])[0].dtype).name
        (work / "config.json").write_text(json.dumps(config_to_hf(model.cfg, dtype), indent=2) + "\n")
        generation = {"eos_token_id": list(model.cfg.eos_token_id), "pad_token_id": model.cfg.pad_token_id}
        (work / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        os.replace(work, path)
    except OSError as error:
        check(False, f"{path}: cannot be written ({error})")
    finally:
        if work.exists():
            for file in work.iterdir():
                file.unlink()
            work.rmdir()


def _write_tensors(model: Glm5, folder: pathlib.Path, shard_bytes: int) -> None:
    from safetensors.numpy import save_file

    table = tensor_table(model.cfg)
    params = _flat(split(model)[1])
    shards, size = [[]], 0
    for name, pieces in table.items():
        nbytes = math.prod(tensor_shape(pieces)) * params[pieces[0].path].dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    index = {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: to_published([np.asarray(params[p.path][p.index]) for p in table[name]], table[name]) for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(math.prod(tensor_shape(p)) * params[p[0].path].dtype.itemsize for p in table.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


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


def _numpy_dtype(name: str):
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _keys(path) -> tuple:
    return tuple(key.key for key in path)


def _flat(tree: dict) -> dict:
    """Path -> leaf of a nested dict."""
    return {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
