"""Tensors of a safetensors directory, read lazily, FP8 blocks dequantised.

The numpy binding of safetensors knows no float8, so files are mapped and read by their header: 8 bytes of length, JSON with
dtype, shape and byte range of each tensor, then the bytes.
"""

import json
import math
import os
import pathlib

import ml_dtypes
import numpy as np

from glm5_jax.config import check
from glm5_jax.errors import UserError

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64, "I32": np.int32, "U8": np.uint8,
}  # fmt: skip
_SCALE = "_scale_inv"
_BLOCK = 128


class TensorDirectory:
    """All tensors of a checkpoint directory, by name.

    Raises:
      UserError: a file is missing, truncated or corrupt, an FP8 tensor has no scales, a scale no tensor.
    """

    def __init__(self, path: str | os.PathLike):
        path = pathlib.Path(path)
        self._where = {}
        for file in _files(path):
            for name, entry in _header(file).items():
                check(name not in self._where, f"{file}: tensor {name} is in {self._where.get(name, '?')[0]} too")
                self._where[name] = (file, *entry)
        _check_scales(self._where)

    def names(self) -> set[str]:
        """Names of all tensors; scales count as part of theirs."""
        return {name for name in self._where if not name.endswith(_SCALE)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._where[name][2]

    def read(self, name: str) -> np.ndarray:
        """The tensor; an FP8 tensor is returned dequantised, as float32."""
        tensor = self._map(name)
        if name + _SCALE not in self._where:
            return np.array(tensor)
        return dequantise(tensor, self._map(name + _SCALE))

    def _map(self, name: str) -> np.ndarray:
        file, dtype, shape, offset = self._where[name]
        count = math.prod(shape)
        raw = np.memmap(file, np.uint8, "r", offset, count * np.dtype(dtype).itemsize) if count else np.zeros(0, np.uint8)
        return raw.view(dtype).reshape(shape)


def dequantise(weight: np.ndarray, scale_inv: np.ndarray) -> np.ndarray:
    """float32 values of a block-quantised matrix: weight * scale_inv, in spite of the name.

    Args:
      weight: float8_e4m3fn [out,in]. scale_inv: float32 [ceil(out/128), ceil(in/128)].
    """
    rows, columns = weight.shape
    scale = np.repeat(np.repeat(scale_inv.astype(np.float32), _BLOCK, 0)[:rows], _BLOCK, 1)[:, :columns]
    return weight.astype(np.float32) * scale


def _header(file: pathlib.Path) -> dict:
    """name -> (dtype, shape, absolute offset)."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length)) if length <= size else None
        base, tensors = 8 + length, {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            check(base + end <= size, f"{file}: truncated, tensor {name} ends at byte {base + end} of {size}")
            check(end - begin == math.prod(shape) * np.dtype(dtype).itemsize, f"{file}: {name} has the wrong size")
            tensors[name] = (dtype, shape, base + begin)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({type(error).__name__}: {error})") from None
    return tensors


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint: those its index lists, or model.safetensors."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        check((path / "model.safetensors").is_file(), f"{path}: neither model.safetensors nor an index file here")
        return [path / "model.safetensors"]
    try:
        files = sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a readable index ({type(error).__name__}: {error})") from None
    gone = [file.name for file in files if not file.is_file()]
    check(not gone, f"{index}: {len(gone)} files are missing: {', '.join(gone[:5])}")
    return files


def _check_scales(where: dict) -> None:
    for name, (file, dtype, shape, _) in where.items():
        if name.endswith(_SCALE):
            owner = name.removesuffix(_SCALE)
            check(owner in where, f"{file}: scale {name} without its tensor")
            check(where[owner][1] == ml_dtypes.float8_e4m3fn, f"{file}: scale {name}, but {owner} is not FP8")
            blocks = tuple(math.ceil(n / _BLOCK) for n in where[owner][2])
            check(shape == blocks, f"{file}: {name} has shape {shape}, {owner} {where[owner][2]} needs {blocks}")
        elif dtype == ml_dtypes.float8_e4m3fn:
            check(name + _SCALE in where, f"{file}: FP8 tensor {name} has no {name + _SCALE}")
