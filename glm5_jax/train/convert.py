"""`glm5 convert`: between Hugging Face directories and runs, tensor by tensor, whatever their size.

Everything is written to OUT.partial and renamed when it is complete. OUT.partial/convert.json says of what it is a conversion:
the same command goes on where a killed one stopped, any other is refused. A run is made of files of at most `PIECE_BYTES`, each
listed with its digest as soon as it is written; a Hugging Face directory of shards, each of which gets its name when it is
complete. What is listed, or has its name, is done.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glm5_jax.config import ModelConfig, check
from glm5_jax.convert import hf
from glm5_jax.convert.published import Band, Piece, from_published, row_axis, stored, tensor_shape, tensor_table, to_published
from glm5_jax.convert.stream import Meter, peak_memory, raw_read_speed, run, threads
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import Glm5, flat, template
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import (
    DATA,
    SUMS,
    digest,
    disk_error,
    encode_data_state,
    find_params,
    format_sums,
    list_files,
    read_sums,
)
from glm5_jax.train.data import DataConfig
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import LossConfig
from glm5_jax.train.stored import Arrays, create, encode, file_name, plan

_STATE = "convert.json"
_PARAMS = "arrays/params"


class Result(NamedTuple):
    """What a conversion took.

    Attributes:
      dtype: of what is written.
      read_bytes: of the source, without what was converted before it was stopped. seconds: from reading to the end.
      raw_read_speed: bytes/s that the disk gives. peak_memory, largest_tensor: bytes.
    """

    dtype: str
    read_bytes: int
    seconds: float
    raw_read_speed: float
    peak_memory: int
    largest_tensor: int

    def __str__(self):
        rate = self.read_bytes / self.seconds
        return (
            f"{self.read_bytes / 1e9:.2f} GB in {self.seconds:.1f} s, {rate / 1e6:.0f} MB/s; the disk reads "
            f"{self.raw_read_speed / 1e6:.0f} MB/s; peak memory {self.peak_memory / 1e6:.0f} MB, "
            f"largest tensor {self.largest_tensor / 1e6:.0f} MB"
        )


class Source(NamedTuple):
    """What is converted.

    Attributes:
      config: what a run of it has as its settings.
      dtype: that of its matrices, bfloat16 where they are FP8.
      read: see `hf.Read`. order: names of the published tensors as they are best read.
      sizes: bytes of each published tensor.
      files: to measure the disk with.
      identity: another one when the content is another.
    """

    config: TrainConfig
    dtype: str
    read: hf.Read
    order: list[str]
    sizes: dict[str, int]
    files: list[Path]
    identity: str
    tokenizer: Path


def convert(source: Path, out: Path, to: str, dtype: str, say: Callable[[str], None] = print) -> Result:
    """Converts a run or a Hugging Face directory; goes on where an earlier call with the same arguments was stopped.

    Args:
      source: directory to read.
      out: directory to make; must not exist, or be empty.
      to: "hf", the Hugging Face layout, or "run", a run directory with a checkpoint of step 0 that holds the parameters.
      dtype: "float32", "bfloat16", for hf also "fp8" (see `published.stored`); "" = that of the source.
    Raises:
      UserError: one of the directories is not what it should be, or the disk is full.
    """
    check(source.is_dir(), f"{source}: no such directory")
    place = out.absolute()
    check(source.absolute() not in (place, *place.parents), f"{out}: lies in {source}, which is to be converted")
    check(out.exists() or not out.is_symlink(), f"{out}: is a link to nothing")
    check(to in ("hf", "run"), f"to={to}: hf or run")
    kinds = ("", "float32", "bfloat16", "fp8") if to == "hf" else ("", "float32", "bfloat16")
    check(dtype in kinds, f"dtype={dtype}: with --to {to} it is {', '.join(kinds[1:-1])} or {kinds[-1]}")
    hf.check_free(out)
    opened = _open_run(source, say) if (source / "checkpoints").is_dir() else _open_hf(source, to)
    dtype = dtype or opened.dtype
    work = out.with_name(out.name + ".partial") if out.name else place.with_name(place.name + ".partial")
    try:
        with _claimed(work, {"source": opened.identity, "to": to, "dtype": dtype}):
            _check_space(work, opened.config.model, dtype)
            raw = raw_read_speed(opened.files)
            meter = Meter(str(out), sum(opened.sizes.values()))
            with contextlib.closing(meter):
                (_write_hf if to == "hf" else _write_run)(opened, dtype, work, meter)
            os.replace(work, place)
    except (OSError, ValueError) as error:
        reason = disk_error(error)
        full = reason in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
        check(reason is None, f"{work}: cannot go on ({reason}){'; the same command does when there is space' if full else ''}")
        raise
    (place / _STATE).unlink()
    return Result(dtype, int(meter.done), meter.seconds(), raw, peak_memory(), max(opened.sizes.values()))


# Sources


def _open_hf(path: Path, to: str) -> Source:
    cfg, table, files = published = hf.open_hf(path)
    tokenizer = path / "tokenizer.json"
    data = DataConfig(sources=(), seq_len=min(DataConfig.seq_len, cfg.max_position_embeddings))
    if to == "run" and tokenizer.is_file():
        data = dataclasses.replace(data, tokenizer=f"bpe:{load_tokenizer(str(tokenizer)).vocab_size}")
    loss = LossConfig() if cfg.num_nextn_predict_layers else LossConfig(mtp_steps=0)
    config = TrainConfig(model=cfg, data=data, loss=loss)
    wide = files.dtype("model.embed_tokens.weight").name
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.files]
    return Source(
        config=config,
        dtype=wide if wide in ("float32", "bfloat16") else "float32",
        read=lambda name, pieces, dtype, band: files.read(name, dtype, band.start, band.stop),
        order=published.in_order(),
        sizes={name: files.nbytes(name) for name in table},
        files=files.files,
        identity=_hash((path / "config.json").read_text(), stats),
        tokenizer=tokenizer,
    )


def _open_run(path: Path, say: Callable[[str], None]) -> Source:
    config = runs.read_config(path)
    check(runs.network_class(config) is Glm5, f"{path}: network={config.network} has no published layout")
    step, directory = find_params(path, say)
    table, shapes = tensor_table(config.model), flat(template(config.model, "float32")[1])
    stored = _open_arrays(directory, {runs.array_name(at): leaf.shape for at, leaf in shapes.items()})

    def read(name: str, pieces: list[Piece], dtype: np.dtype, band: Band) -> np.ndarray:
        cuts = [(slice(None),) * row_axis(p) + (slice(band.first, band.last),) for p in pieces]
        slices = [stored.read(runs.array_name(p.path), (*p.index, *cut), row_axis(p)) for p, cut in zip(pieces, cuts)]
        return to_published(slices, pieces).astype(dtype, copy=False)

    itemsize = stored.dtype(runs.array_name(("embedding",))).itemsize
    return Source(
        config=config,
        dtype=stored.dtype(runs.array_name(("embedding",))).name,
        read=read,
        order=list(table),
        sizes={name: math.prod(tensor_shape(pieces)) * itemsize for name, pieces in table.items()},
        files=sorted(file for file in (directory / _PARAMS).rglob("*") if file.is_file()),
        identity=_hash((path / "config.json").read_text(), [sums.read_text() for sums in sorted(directory.glob(f"{SUMS}.*"))]),
        tokenizer=path / "data" / "tokenizer.json",
    )


def _open_arrays(directory: Path, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    try:
        arrays = Arrays(directory / _PARAMS, list(shapes))
    except ValueError as error:  # what tensorstore raises for arrays that are not there
        raise UserError(f"{directory}: does not hold the parameters of its config ({str(error)[:200]})") from None
    other = [f"{name} {list(arrays.shape(name))}, not {list(s)}" for name, s in shapes.items() if arrays.shape(name) != s]
    check(not other, f"{directory}: does not hold the parameters of its config: {'; '.join(other[:3])}")
    return arrays


def _hash(*content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# Results


def _write_hf(source: Source, dtype: str, work: Path, meter: Meter) -> None:
    cfg = source.config.model
    done = lambda name, share, here: meter.add(source.sizes[name] * share, here)  # noqa: E731
    hf.write_hf(cfg, dtype, source.read, work, done, threads(max(source.sizes.values())), hf.SHARD_BYTES)
    if source.tokenizer.is_file():
        shutil.copyfile(source.tokenizer, work / "tokenizer.json")


def _write_run(source: Source, dtype: str, work: Path, meter: Meter) -> None:
    directory = work / "checkpoints" / "0"
    writer = _RunWriter(source, dtype, directory, meter)
    run(writer.jobs(), threads(max(source.sizes.values())))
    (directory / DATA).write_text(encode_data_state({}))
    writer.sums.add_others()
    if source.tokenizer.is_file():
        (work / "data").mkdir(exist_ok=True)
        shutil.copyfile(source.tokenizer, work / "data" / "tokenizer.json")
    runs.write_config(work, source.config)


class _RunWriter:
    """The checkpoint of a run, written from published tensors."""

    def __init__(self, source: Source, dtype: str, directory: Path, meter: Meter):
        self._source, self._meter = source, meter
        self._table = tensor_table(source.config.model)
        shapes = flat(template(source.config.model, dtype)[1])
        self._plans = {}
        for pieces in self._table.values():
            for i, piece in enumerate(pieces):
                if piece.path not in self._plans:
                    leaf = shapes[piece.path]
                    self._plans[piece.path] = plan(pieces, i, leaf.shape, np.dtype(leaf.dtype))
        self._folder = directory / _PARAMS
        layouts = {runs.array_name(path): layout for path, (layout, _) in self._plans.items()}
        if not self._folder.is_dir():
            unfinished = self._folder.with_name("unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            create(unfinished, layouts)
            unfinished.rename(self._folder)
        self.sums = _Sums(directory)

    def jobs(self) -> Iterator[Callable[[], None]]:
        """One for each band of rows of a published tensor that is not written yet."""
        for name in self._source.order:
            pieces = self._table[name]
            for band in self._plans[pieces[0].path][1]:
                files = [self._file(piece, band) for piece in pieces]
                nbytes = self._source.sizes[name] * (band.stop - band.start) / tensor_shape(pieces)[0]
                if all(file in self.sums for file in files):
                    self._meter.add(nbytes, here=False)
                else:
                    yield functools.partial(self._write, name, pieces, band, files, nbytes)

    def _file(self, piece: Piece, band: Band) -> str:
        axis = row_axis(piece)
        start = (*piece.index, *(band.first if i == axis else 0 for i in range(len(piece.shape))))
        return f"{_PARAMS}/{file_name(runs.array_name(piece.path), self._plans[piece.path][0], start)}"

    def _write(self, name: str, pieces: list[Piece], band: Band, files: list[str], nbytes: float) -> None:
        dtype = self._plans[pieces[0].path][0].dtype
        rows = self._source.read(name, pieces, dtype, band)
        for piece, values, file in zip(pieces, from_published(rows, pieces), files):
            self.sums.write(file, encode(values, self._plans[piece.path][0]))
        self._meter.add(nbytes)


class _Sums:
    """The digests of a checkpoint, listed as its files are written: what is listed is complete."""

    def __init__(self, directory: Path):
        self._directory, self._lock = directory, threading.Lock()
        self._path = directory / f"{SUMS}.0"
        lines = read_sums(self._path.read_text()) if self._path.is_file() else []
        self._listed = {file for _, file in lines if (directory / file).is_file()}
        self._path.write_text(format_sums([line for line in lines if line[1] in self._listed]))

    def __contains__(self, file: str) -> bool:
        return file in self._listed

    def write(self, file: str, parts: list[np.ndarray]) -> None:
        """Writes a file and, when it is complete, lists it."""
        path, sha = self._directory / file, hashlib.sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            for part in parts:
                sha.update(part)
                out.write(part)
        self._list(sha.hexdigest(), file)

    def add_others(self) -> None:
        """Lists the files that are not listed yet."""
        listed = {file for _, file in read_sums(self._path.read_text())}
        for file in list_files(self._directory):
            if file not in listed:
                self._list(digest(self._directory / file), file)

    def _list(self, hexdigest: str, file: str) -> None:
        with self._lock, open(self._path, "a") as sums:
            sums.write(format_sums([(hexdigest, file)]))


@contextlib.contextmanager
def _claimed(work: Path, what: dict[str, str]):
    """`work` as the place of one conversion and of no other, whether begun here or by an earlier process."""
    if work.exists():
        check((work / _STATE).is_file(), f"{work}: is in the way, and holds no conversion that could go on")
    work.mkdir(parents=True, exist_ok=True)
    with open(work / _STATE, "a+") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another process is writing there") from None
        state.seek(0)
        begun = _begun(state.read(), work)
        if begun is None:
            state.write(json.dumps(what))
            state.flush()
            begun = what
        other = [f"{name}={begun[name]}" for name in ("to", "dtype") if begun[name] != what[name]]
        other += ["another source, or this one before it changed"] * (begun["source"] != what["source"])
        check(not other, f"{work}: holds a conversion begun with {', '.join(other)}; go on with that, or delete it")
        yield


def _begun(text: str, work: Path) -> dict[str, str] | None:
    """What the state file of a conversion says, None of a new one."""
    try:
        begun = json.loads(text or "null")
    except ValueError:
        begun = {}
    whole = begun is None or isinstance(begun, dict) and {"source", "to", "dtype"} <= begun.keys()
    check(whole, f"{work / _STATE}: says nothing of a conversion that could go on; delete {work}")
    return begun


def _check_space(work: Path, cfg: ModelConfig, dtype: str) -> None:
    """Raises UserError before hours of work if the result cannot fit."""
    needed = sum(tensor.nbytes for group in stored(cfg, dtype) for tensor in group.values())
    there = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    disk = shutil.disk_usage(work)  # of size 0 on some network file systems
    enough = disk.total == 0 or disk.free + there >= needed
    check(enough, f"{work}: disk full: {(needed - there) / 1e6:.0f} MB needed, {disk.free / 1e6:.0f} MB free")
