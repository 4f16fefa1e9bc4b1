"""Tensors of a safetensors directory, read and written piece by piece, FP8 blocks dequantised and quantised.

The numpy binding of safetensors knows no float8 and writes no file that is larger than memory, so files are read and written
by their header: 8 bytes of length, JSON with dtype, shape and byte range of each tensor, then the bytes.
"""

import itertools
import json
import math
import operator
import os
import pathlib

import ml_dtypes
import numpy as np

from glm5_jax.config import check
from glm5_jax.errors import UserError

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = "_scale_inv"  # what the name of an FP8 tensor's block scales ends in
BLOCK = 128


class TensorDirectory:
    """All tensors of a checkpoint directory, by name.

    Raises:
      UserError: a file is missing, truncated or corrupt, a tensor holds integers or another float8, an FP8 tensor has no
        scales, a scale no tensor.
    """

    def __init__(self, path: str | os.PathLike):
        self.files = _files(pathlib.Path(path))
        self._where = {}
        for file in self.files:
            for name, entry in _header(file).items():
                check(name not in self._where, f"{file}: tensor {name} is in {self._where.get(name, '?')[0]} too")
                self._where[name] = (file, *entry)
        _check_scales(self._where)

    def names(self) -> set[str]:
        """Names of all tensors; scales count as part of theirs."""
        return {name for name in self._where if not name.endswith(SCALE)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._where[name][2]

    def dtype(self, name: str) -> np.dtype:
        """dtype that a tensor is stored in."""
        return np.dtype(self._where[name][1])

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor and its scales as they are stored."""
        both = [self._where[n] for n in (name, name + SCALE) if n in self._where]
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape, _ in both)

    def place(self, name: str) -> tuple[pathlib.Path, int]:
        """(file, offset) of a tensor: tensors read in this order are read as they lie on the disk."""
        return self._where[name][0], self._where[name][3]

    def read(self, name: str, dtype=None, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The rows [start, stop) of a tensor's first dimension, FP8 dequantised.

        Args:
          dtype: of the result; None = as it is stored, float32 for an FP8 tensor.
        """
        stored = self._rows(name, start, stop)
        if name + SCALE not in self._where:
            return stored.astype(dtype or stored.dtype, copy=False)
        blocks = slice(start // BLOCK, math.ceil((start + len(stored)) / BLOCK))
        scale = self._rows(name + SCALE, blocks.start, blocks.stop)
        return dequantise(stored, scale, dtype or np.float32, start % BLOCK)

    def _rows(self, name: str, start: int, stop: int | None) -> np.ndarray:
        """As stored. Read, not mapped: pages of a mapped file count as memory of the process."""
        file, dtype, shape, offset = self._where[name]
        if shape:
            shape = (len(range(*slice(start, stop).indices(shape[0]))), *shape[1:])
            offset += start * math.prod(shape[1:]) * np.dtype(dtype).itemsize
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        raw = np.fromfile(file, np.uint8, nbytes, offset=offset)
        check(raw.nbytes == nbytes, f"{file}: {name} cannot be read, the file has become shorter")
        return raw.view(dtype).reshape(shape)


_VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
_AT_ONCE = 8  # blocks: half a MiB of float32 stays in a cache
_LARGEST = float(ml_dtypes.finfo(FP8).max)  # 448


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block scales of a matrix [out,in]; blocks at the edges may be partial."""
    return tuple(math.ceil(n / BLOCK) for n in shape)


def dequantise(weight: np.ndarray, scale_inv: np.ndarray, dtype=np.float32, skip: int = 0) -> np.ndarray:
    """Values of a block-quantised matrix: weight * scale_inv in float32, in spite of the name; then cast to `dtype`.

    Args:
      weight: float8_e4m3fn [out,in]. scale_inv: float32 [ceil((skip + out)/128), ceil(in/128)].
      skip: rows of the first block that lie before those of `weight`.
    """
    values, rows = np.empty(weight.shape, dtype), len(weight)
    edges = [0, *range(BLOCK - skip, rows, BLOCK), rows]
    for scale, start, stop in zip(scale_inv.astype(np.float32), edges, edges[1:]):
        for j in range(0, len(scale), _AT_ONCE):
            part = np.s_[start:stop, j * BLOCK : (j + _AT_ONCE) * BLOCK]
            block = np.take(_VALUES, weight[part].view(np.uint8), mode="clip")  # a table: 4 times as fast as a cast
            values[part] = np.multiply(block, np.repeat(scale[j : j + _AT_ONCE], BLOCK)[: block.shape[1]], out=block)
    return values


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `dequantise` up to rounding: the largest value of each block of 128 x 128 becomes 448.

    Args:
      weight: [out,in], float, finite.
    Returns:
      (float8_e4m3fn [out,in], scale_inv float32 [ceil(out/128), ceil(in/128)]); a block of zeros has the scale 1.
    """
    quantised = np.empty(weight.shape, FP8)
    scales = np.empty(scale_shape(weight.shape), np.float32)
    for i in range(scales.shape[0]):
        for j in range(0, scales.shape[1], _AT_ONCE):
            part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + _AT_ONCE) * BLOCK]
            values = weight[part].astype(np.float32)
            largest = np.maximum.reduceat(np.abs(values).max(axis=0), range(0, values.shape[1], BLOCK))
            # Never 0, also where largest/448 is: 0/0 would be stored as NaN.
            scale = np.where(largest > 0, np.maximum(largest / _LARGEST, np.finfo(np.float32).tiny), 1)
            values /= np.repeat(scale, BLOCK)[: values.shape[1]]
            quantised[part] = _round_to_fp8(values)
            scales[i, j : j + _AT_ONCE] = scale
    return quantised, scales


with np.errstate(invalid="ignore"):  # NaNs are among the 65,536
    _ROUNDED = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32).astype(FP8)


def _round_to_fp8(values: np.ndarray) -> np.ndarray:
    """float32 values of at most 448 to the nearest E4M3, ties to even; 4 times as fast as a cast.

    A table has all upper halves of a float32. A lower half that is not 0 sets the last bit of the upper one: below the bits
    that E4M3 keeps, that says on which side of a tie a value lies, which is all that its other bits could say.
    """
    bits = values.view(np.uint32)
    upper = bits & 0xFFFF
    upper += 0xFFFF  # bit 16 says whether the lower half is 0
    upper |= bits
    upper >>= 16
    return np.take(_ROUNDED.view(np.uint8), upper, mode="clip").view(FP8)


def _header(file: pathlib.Path) -> dict:
    """name -> (dtype, shape, absolute offset)."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            check(8 <= 8 + length <= size, f"{file}: truncated, its header ends at byte {8 + length} of {size}")
            header = json.loads(f.read(length))
        base, tensors = 8 + length, {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            check(entry["dtype"] in _DTYPES, f"{file}: {name} is {entry['dtype']}; weights are read from {', '.join(_DTYPES)}")
            dtype, shape = _DTYPES[entry["dtype"]], tuple(map(operator.index, entry["shape"]))
            check(begin >= 0 and base + end <= size, f"{file}: truncated, tensor {name} ends at byte {base + end} of {size}")
            check(end - begin == math.prod(shape) * np.dtype(dtype).itemsize, f"{file}: {name} has the wrong size")
            tensors[name] = (dtype, shape, base + begin)
        _check_apart(file, tensors)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a readable safetensors file ({type(error).__name__}: {error})") from None
    return tensors


def _check_apart(file: pathlib.Path, tensors: dict) -> None:
    sizes = {name: math.prod(shape) * np.dtype(dtype).itemsize for name, (dtype, shape, _) in tensors.items()}
    places = sorted((start, start + sizes[name], name) for name, (*_, start) in tensors.items())
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        check(end <= start, f"{file}: {name} and {other} lie in the same bytes")


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
        if name.endswith(SCALE):
            owner = name.removesuffix(SCALE)
            check(owner in where, f"{file}: scale {name} without its tensor")
            check(where[owner][1] == FP8, f"{file}: scale {name}, but {owner} is not FP8")
            blocks = scale_shape(where[owner][2])
            check(shape == blocks, f"{file}: {name} has shape {shape}, {owner} {where[owner][2]} needs {blocks}")
        elif dtype == FP8:
            check(name + SCALE in where, f"{file}: FP8 tensor {name} has no {name + SCALE}")
