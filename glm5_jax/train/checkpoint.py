"""Checkpoints of a training run: written in the background by orbax, committed whole or not at all, checked when read.

    run_dir/checkpoints/<step>/
        arrays/params/, arrays/rest/    the state's tensors (orbax, OCDBT); params apart so that eval reads nothing else
        data.json                       where the data iterator stood: the same for all processes, however many share its rows
        SHA256SUMS.<process>            digests of all of the above, in the format of `sha256sum -c`

A step is written as `<step>.saving` and renamed when it is complete, so a kill at any moment leaves the whole step or
none. Neither orbax nor its file format notices every damaged byte; the digests do, also what a power cut lost, since
nothing is fsynced. A damaged step is set aside as `<step>.bad` in favour of the previous. The processes of a pod share
the run directory, on one POSIX file system, and the work: each writes its shards and digests its share of the files.

A tensor is stored under its path in the state, `params.embed.table`, so what is on disk does not depend on the Python
classes that hold it.
"""

import base64
import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from glm5_jax.config import check

PyTree = Any
Say = Callable[[str], None]

SUMS = "SHA256SUMS"
DATA = "data.json"
_SAVING, _BAD = ".saving", ".bad"
_LARGE = 2**26  # bytes of a stacked parameter that is stored in more than one chunk for each device
_TIMEOUT_S = 1200  # one process waits this long for the others before a save counts as failed


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves its state, and which saves stay on disk."""

    every: int = 1000  # steps between two saves
    keep_last: int = 2  # newest checkpoints kept on disk
    keep_every: int = 0  # steps that are multiples of this are kept for ever; 0 = none

    def __post_init__(self):
        check(self.every >= 1, f"every={self.every}: must be at least 1")
        check(self.keep_last >= 1, f"keep_last={self.keep_last}: must be at least 1")
        check(self.keep_every >= 0, f"keep_every={self.keep_every}: must be 0 (none) or a number of steps")


class Checkpoints:
    """The checkpoints of one run directory, and its only writer: what a killed run left half written is removed.

    Every process of a run makes one and calls its methods at the same steps; process 0 decides and speaks.

    Attributes:
      last_good: step of the newest checkpoint known to be complete (saved or restored by this object), or None.
    """

    def __init__(
        self, run_dir: str | Path, config: CheckpointConfig, say: Say = print, stacked: dict[str, int] | None = None
    ):
        """Args: `say` receives one line for each event a user should know of, also from a background thread; `stacked` says
        for each parameter, by name, how many leading dimensions (layers, experts) have entries to be read one by one.
        """
        self._dir = Path(run_dir).absolute() / "checkpoints"
        self._config = config
        self._say = _once(say)
        self._orbax = _orbax()
        self._stacked = stacked or {}
        self._committer = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future | None = None
        self.last_good: int | None = None
        self._remove_leftovers()

    def steps(self) -> list[int]:
        """Steps on disk, ascending, damaged ones included."""
        return _steps(self._dir)

    def save(self, step: int, state: PyTree, data_state: bytes | dict, wait: bool = False) -> None:
        """Saves a step. Returns once the tensors are copied to the host: the caller may then donate their buffers.

        A disk that refuses (full, over quota, failing) ends in a line through `say`, not in an exception: the run goes
        on with the last good checkpoint, and the next save is a new attempt. Saving `last_good` again does nothing.

        Args:
          step: steps done so far; names the directory.
          state: pytree of jax or numpy arrays of any dtype, typed PRNG keys included.
          data_state: position of the data iterator, bytes or anything JSON holds.
          wait: return only when the step is on disk.

        Raises:
          UserError: a checkpoint of that step, not written by this run, is already there.
        """
        self.wait()
        if step == self.last_good:
            return
        final, saving = self._dir / str(step), self._dir / f"{step}{_SAVING}"
        check(not final.exists(), f"{final}: already there, from another run; resume that or use a new run directory")
        try:
            self._remove_leftovers()
            _check_space(self._dir, state)
            saving.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                (saving / DATA).write_text(encode_data_state(data_state))
            self._orbax.save(saving / "arrays", args=ocp.args.Composite(**_save_args(state, self._stacked)))
        except Exception as error:
            self._give_up(step, error)
            return
        self._pending = self._committer.submit(self._commit, step, saving, final)
        if wait:
            self.wait()

    def restore(self, template: PyTree) -> tuple[int, PyTree, bytes | dict] | None:
        """The newest good checkpoint as (step, state, data_state); None where there is none at all.

        A damaged one (a byte changed, a file cut, missing or added) is passed over, with a line through `say`, and
        renamed to `<step>.bad`.

        Args:
          template: the state wanted, as jax.ShapeDtypeStruct or arrays; their shardings, if any, place the result,
            whatever mesh it was saved on.

        Raises:
          UserError: every checkpoint is damaged, or the newest good one holds other tensors than `template`.
        """
        self.wait()
        step, damaged = _newest_good(self._dir, "", self._say)
        if step is None:
            return None
        directory = self._dir / str(step)
        state = _read(directory, template, "", ("params", "rest"))
        data_state = _decode((directory / DATA).read_text())
        if jax.process_index() == 0:
            for bad in damaged:
                _remove(self._dir / f"{bad}{_BAD}")
                (self._dir / str(bad)).rename(self._dir / f"{bad}{_BAD}")
        _barrier(f"restored {step}")
        self.last_good = step
        return step, state, data_state

    def wait(self) -> None:
        """Returns when no save is in flight."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finishes the save in flight and stops the background threads."""
        self.wait()
        self._committer.shutdown()
        self._orbax.close()

    def _commit(self, step: int, saving: Path, final: Path) -> None:
        """Background: once orbax has written everything, digest it and give the step its name."""
        try:
            self._orbax.wait_until_finished()
            _write_sums(saving)
            _barrier(f"digests of {step}")
            if jax.process_index() == 0:
                saving.rename(final)
            _barrier(f"name of {step}")
        except Exception as error:
            self._give_up(step, error)
            return
        self.last_good = step
        if jax.process_index() == 0:
            self._prune()

    def _give_up(self, step: int, error: Exception) -> None:
        """Reports a save that the disk refused and removes what it left. Any other error is a bug and is raised."""
        reason = disk_error(error)
        if reason is None:
            raise error
        self._remove_leftovers()
        kept = "there is no earlier one" if self.last_good is None else f"step {self.last_good} is kept"
        self._say(f"checkpoint of step {step} could not be saved ({reason}); {kept}, the next save tries again")

    def _prune(self) -> None:
        steps, every = self.steps(), self._config.keep_every
        for step in steps[: -self._config.keep_last]:
            if not (every and step % every == 0):
                # Renamed first: a kill inside the removal leaves a leftover to clean, not a step with files missing.
                gone = self._dir / f"{step}{_SAVING}"
                (self._dir / str(step)).rename(gone)
                _remove(gone)

    def _remove_leftovers(self) -> None:
        if jax.process_index() == 0:
            for path in self._dir.glob(f"*{_SAVING}"):
                _remove(path)
        _barrier("leftovers")


def restore_params(run_dir: str | Path, template: PyTree, say: Say = print, step: int | None = None) -> tuple[int, PyTree]:
    """Only the `params` of a checkpoint of a run, as (step, params). No optimizer state is read.

    Args:
      run_dir: the run directory.
      template: the parameters wanted (the `params` entry of the state), as for `Checkpoints.restore`; cast if they are stored
        in another dtype.
      say: receives a line for each damaged checkpoint passed over.
      step: which checkpoint; None = the newest good one.

    Raises:
      UserError: there is no such checkpoint, it is damaged (without `step`: all are), or it holds other parameters.
    """
    step, directory = find_params(run_dir, say, step)
    return step, _read(directory, template, "params", ("params",))


def find_params(run_dir: str | Path, say: Say = print, step: int | None = None) -> tuple[int, Path]:
    """(step, its directory) of the checkpoint from which `restore_params` reads; its digests are verified."""
    return _find(run_dir, "arrays/params/", say, step)


def restore_state(run_dir: str | Path, template: PyTree, say: Say = print, step: int | None = None) -> tuple[int, PyTree]:
    """The whole state of a checkpoint of a run, as (step, state); otherwise as `restore_params`."""
    step, directory = _find(run_dir, "arrays/", say, step)
    return step, _read(directory, template, "", ("params", "rest"))


def _find(run_dir: str | Path, part: str, say: Say, step: int | None) -> tuple[int, Path]:
    """(step, directory) of the checkpoint `step`, None = the newest one that is good under `part`."""
    directory = Path(run_dir).absolute() / "checkpoints"
    if step is not None:
        there = ", ".join(map(str, _steps(directory))) or "none"
        check((directory / str(step)).is_dir(), f"{directory}: no checkpoint of step {step}; there is {there}")
        problem = find_damage(directory / str(step), part)
        check(problem is None, f"{directory / str(step)}: damaged ({problem})")
        return step, directory / str(step)
    newest, _ = _newest_good(directory, part, _once(say))
    check(newest is not None, f"{directory}: no checkpoint in it")
    return newest, directory / str(newest)


# What is on disk: which steps, whole or damaged.


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir())


def _newest_good(directory: Path, part: str, say: Say) -> tuple[int | None, list[int]]:
    """(newest step whose files under `part` are as written, or None if there are no steps; the damaged newer steps)."""
    problems = {}
    for step in reversed(_steps(directory)):
        problem = find_damage(directory / str(step), part)
        if problem is None:
            for bad, why in problems.items():
                say(f"checkpoint of step {bad} is damaged ({why}); using step {step}")
            return step, list(problems)
        problems[step] = problem
    listed = "; ".join(f"step {step}: {problem}" for step, problem in problems.items())
    check(not problems, f"{directory}: every checkpoint is damaged ({listed})")
    return None, []


def find_damage(directory: Path, part: str) -> str | None:
    """What is wrong with a step, or None. Reads the files whose path starts with `part`; the processes share them."""
    expected = {}
    for sums in sorted(directory.glob(f"{SUMS}.*")):
        lines = read_sums(text := sums.read_bytes().decode(errors="replace"))
        if text != format_sums(lines):
            return f"{sums.name} is garbled"
        expected |= {path: digest for digest, path in lines}
    if not expected:
        return f"no {SUMS}"
    present = set(list_files(directory))
    for path in sorted(present ^ expected.keys()):
        return f"{path} is not in {SUMS}" if path in present else f"{path} is missing"
    share = [path for path in _share(sorted(present)) if path.startswith(part)]
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        found = pool.map(lambda path: digest(directory / path), share)
        changed = next((path for path, sum_ in zip(share, found) if sum_ != expected[path]), None)
    if not np.any(multihost_utils.process_allgather(np.array(changed is not None))):
        return None
    return f"{changed} has changed" if changed else "a file has changed"


def _write_sums(directory: Path) -> None:
    lines = [(digest(directory / path), path) for path in _share(list_files(directory))]
    (directory / f"{SUMS}.{jax.process_index()}").write_text(format_sums(lines))


def read_sums(text: str) -> list[tuple[str, str]]:
    """(digest, path) of the lines of a file of digests; what is not such a line is passed over."""
    return re.findall(r"([0-9a-f]{64})  (.+)\n", text)


def format_sums(lines: list[tuple[str, str]]) -> str:
    """The format of `sha256sum`, from (digest, path)."""
    return "".join(f"{digest}  {path}\n" for digest, path in lines)


def list_files(directory: Path) -> list[str]:
    """Relative paths of all files of a step except the digests."""
    files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in files if not path.startswith(SUMS))


def _share(items: list) -> list:
    """This process's part of a list that all processes hold in the same order."""
    return items[jax.process_index() :: jax.process_count()]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_data_state(data_state: bytes | dict) -> str:
    if isinstance(data_state, bytes):
        return json.dumps({"base64": base64.b64encode(data_state).decode()})
    return json.dumps({"json": data_state})


def _decode(text: str) -> bytes | dict:
    stored = json.loads(text)
    return base64.b64decode(stored["base64"]) if "base64" in stored else stored["json"]


def _remove(path: Path) -> None:
    """Removes a directory, if it is there; what resists is left for the next save, which tries again."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)  # the other writes of a failed save may still be under way


# The tensors: a pytree on one side, orbax's flat dictionaries on the other.


def _orbax() -> ocp.AsyncCheckpointer:
    """Writes {"params": flat dict, "rest": flat dict}. Uncompressed: trained weights do not compress."""
    quieten_orbax()
    sys.unraisablehook = _drop_late_writes
    handlers = {part: ocp.PyTreeCheckpointHandler(use_compression=False) for part in ("params", "rest")}
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(**handlers),
        async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, create_directories_asynchronously=False),
    )


def quieten_orbax() -> None:
    """Failures are reported here, in one line; orbax's own tracebacks and notes of them stay out of the user's terminal."""
    logging.getLogger("absl").addFilter(_not_from_orbax)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


_unraisablehook = sys.unraisablehook


def _drop_late_writes(unraisable: Any) -> None:
    """After one write of a save has failed, each of the others ends in this error, about a loop that orbax has left."""
    if str(unraisable.exc_value) != "Event loop is closed":
        _unraisablehook(unraisable)


def _named(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """{path: leaf} in the order of jax.tree.leaves, with typed PRNG keys as their uint32 data."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {".".join(filter(None, (prefix, name))): _raw(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    """A typed PRNG key array [...] as uint32 [..., words]; a described one stays a description. Else the leaf."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _unraw(stored: jax.Array, leaf: Any) -> jax.Array:
    """The inverse of `_raw`, to the type of PRNG key that `leaf` has."""
    if not _is_key(leaf):
        return stored
    impl = []  # key_impl takes a key or a tracer of one, not a description
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(stored, impl=impl[0])


def _part(name: str) -> str:
    return "params" if name.split(".")[0] == "params" else "rest"


def _split(named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"params": ..., "rest": ...}, without an empty part, which orbax does not store."""
    parts = {part: {k: v for k, v in named.items() if _part(k) == part} for part in ("params", "rest")}
    return {part: entries for part, entries in parts.items() if entries}


def _save_args(state: PyTree, stacked: dict[str, int]) -> dict[str, ocp.args.PyTreeSave]:
    named = _named(state)
    assert len(named) == len(jax.tree.leaves(state)), "two leaves of the state have the same path"

    cut = {name: range(stacked.get(name, 0)) if leaf.nbytes >= _LARGE else () for name, leaf in named.items()}
    how = lambda entries: {name: ocp.SaveArgs(shard_axes=tuple(cut[name])) for name in entries}  # noqa: E731
    return {part: ocp.args.PyTreeSave(entries, how(entries)) for part, entries in _split(named).items()}


def _read(directory: Path, template: PyTree, prefix: str, parts: tuple[str, ...]) -> PyTree:
    """Reads `template` from the parts of a step; raises UserError if the tensors stored there are others."""
    leaves, treedef = jax.tree.flatten(template)
    wanted = _named(template, prefix)
    handler = ocp.PyTreeCheckpointHandler()
    folders = {part: directory / "arrays" / part for part in parts if (directory / "arrays" / part).exists()}
    stored = {name: leaf for folder in folders.values() for name, leaf in handler.metadata(folder).tree.items()}
    _check_same(directory, stored, wanted, dtypes=parts != ("params",))
    found = {}
    for part, entries in _split(wanted).items():
        args = {name: _restore_args(leaf) for name, leaf in entries.items()}
        found |= handler.restore(folders[part], args=ocp.args.PyTreeRestore(item=entries, restore_args=args))
    handler.close()
    return jax.tree.unflatten(treedef, map(_unraw, (found[name] for name in wanted), leaves))


def _restore_args(leaf: Any) -> ocp.ArrayRestoreArgs:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True)


def _check_same(directory: Path, stored: dict[str, Any], wanted: dict[str, Any], dtypes: bool) -> None:
    """Raises UserError naming the first tensors whose name, shape or, if they count, dtype differ."""

    def show(leaf) -> str:
        return "nothing" if leaf is None else f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

    def same(was, want) -> bool:
        return None not in (was, want) and was.shape == want.shape and (not dtypes or was.dtype == want.dtype)

    names = [*wanted, *(name for name in stored if name not in wanted)]
    pairs = [(name, stored.get(name), wanted.get(name)) for name in names]
    other = [f"{name} stored {show(was)}, wanted {show(want)}" for name, was, want in pairs if not same(was, want)]
    more = f"; and {len(other) - 3} more" if len(other) > 3 else ""
    check(
        not other,
        f"{directory}: {len(other)} of {len(names)} tensors differ from the model of this run: "
        f"{'; '.join(other[:3])}{more}",
    )


# The machine around it: the disk, the other processes.


def disk_error(error: Exception) -> str | None:
    """The operating system's words if `error` says that it refused a file operation, else None."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"os_error_code='(\d+)'", str(error))  # tensorstore raises a ValueError with this in it
    return os.strerror(int(code[1])) if code else None


def _check_space(directory: Path, state: PyTree) -> None:
    """Raises OSError(ENOSPC) before anything is written if the state cannot fit."""
    leaves = jax.tree.leaves(state)
    needed = sum(leaf.nbytes + 2048 for leaf in leaves)  # 2 kB: what orbax and the digests note down per tensor
    directory.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(directory)
    # Some network file systems report a size of 0. One verdict for all processes, or they would wait for each other.
    if np.any(multihost_utils.process_allgather(np.array(0 < disk.total and disk.free < needed))):
        raise OSError(errno.ENOSPC, f"disk full: {needed / 1e6:.0f} MB needed, {disk.free / 1e6:.0f} MB free")


def _once(say: Say) -> Say:
    """`say` for process 0, silence for the others."""
    return say if jax.process_index() == 0 else lambda line: None


def _barrier(name: str) -> None:
    """Waits for the other processes; through the coordinator, so it is safe in a background thread during a step."""
    ocp.multihost.get_barrier_sync_fn()(key=f"glm5 checkpoint: {name}", timeout_ms=_TIMEOUT_S * 1000)
