"""Safetensors files written piece by piece, tensors and rows in any order, without ever holding a file in memory."""

import json
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np

from glm5_jax.convert.safetensors_dir import CODES

INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """How a tensor is stored."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut_into_files(groups: list[dict[str, Stored]], limit: int) -> dict[str, dict[str, Stored]]:
    """File name -> the tensors in it: groups of tensors in order, at most `limit` bytes in a file of several groups."""
    files, size = [{}], 0
    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group.values())
        if files[-1] and size + nbytes > limit:
            files.append({})
            size = 0
        files[-1] |= group
        size += nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": tensors for i, tensors in enumerate(files)}


def write_index(folder: pathlib.Path, files: dict[str, dict[str, Stored]]) -> None:
    """The index of several files; a single file needs none."""
    if len(files) > 1:
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        where = {name: file for file, tensors in files.items() for name in tensors}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


class SafetensorsFile:
    """One file, as a context: written under another name until it ends well, so that a file under its own name is complete."""

    def __init__(self, path: pathlib.Path, tensors: dict[str, Stored]):
        self._path, self._part = path, path.with_name(path.name + ".part")
        header, self._offset, at = {"__metadata__": {"format": "pt"}}, {}, 0
        # Wide dtypes first, so that every tensor is aligned, as the safetensors library does it.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            end = at + tensor.nbytes
            header[name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [at, end]}
            self._offset[name], at = at, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base, self.size = 8 + len(text), 8 + len(text) + at
        self._head = len(text).to_bytes(8, "little") + text

    def is_complete(self) -> bool:
        """Whether an earlier process finished the file."""
        return self._path.is_file() and self._path.stat().st_size == self.size

    def __enter__(self):
        """Begins anew."""
        self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        _write_at(self._file, self._head, 0)
        os.ftruncate(self._file, self.size)
        return self

    def __exit__(self, kind, *_):
        os.close(self._file)
        if kind is None:
            os.replace(self._part, self._path)

    def write(self, name: str, rows: np.ndarray, start: int = 0) -> None:
        """Writes rows from `start` on of a tensor's first dimension; any thread, any order."""
        rows = np.ascontiguousarray(rows)
        offset = self._base + self._offset[name] + start * (rows.nbytes // len(rows) if rows.ndim and len(rows) else 0)
        _write_at(self._file, rows.reshape(-1).view(np.uint8).data, offset)


def _write_at(file: int, data, offset: int) -> None:
    data = memoryview(data)
    while data:
        n = os.pwrite(file, data[: 2**30], offset)  # Linux writes at most 2 GiB at once
        data, offset = data[n:], offset + n
