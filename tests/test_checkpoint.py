"""Checkpoints: every bit comes back; no kill, damaged file or full disk loses more than the save it hits."""

import dataclasses
import errno
import os
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct

from glm5_jax.errors import UserError
from glm5_jax.train import checkpoint
from glm5_jax.train.checkpoint import CheckpointConfig, Checkpoints, restore_params

KEEP_ALL = CheckpointConfig(keep_last=1000)


class Counters(NamedTuple):
    tokens: jax.Array
    seen: dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt", "counters"], meta_fields=[])
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict[str, Any]
    opt: Any
    counters: Counters


@struct.dataclass
class Small:
    step: jax.Array
    params: dict[str, jax.Array]


def full_state() -> State:
    """Every kind of leaf a training state has; the float bits are random, NaN payloads and subnormals among them."""
    bits = np.random.default_rng(0)
    params = {
        "embed": {"table": jnp.asarray(bits.integers(0, 2**32, (16, 8), np.uint32).view(np.float32))},
        "blocks": [{"w": jnp.asarray(bits.integers(0, 2**16, (4, 4), np.uint16)).view(jnp.bfloat16)} for _ in range(2)],
        "scale": jnp.float32(1 / 3),
    }
    mask = {"embed": True, "blocks": False, "scale": True}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), mask))
    typed, rbg = jax.random.split(jax.random.key(5), 3), jax.random.key(1, impl="rbg")
    counters = Counters(jnp.uint32(4_000_000_000), {"typed": typed, "raw": jax.random.PRNGKey(6), "rbg": rbg})
    return State(jnp.int32(-7), params, tx.init(params), counters)


def small(step: int) -> Small:
    """A state that is a function of the step, so that a mixture of two steps shows."""
    return Small(jnp.int32(step), {"w": jnp.full((64, 64), step, jnp.float32), "b": jnp.full((3,), step, jnp.bfloat16)})


def describe(tree):
    return jax.eval_shape(lambda: tree)


def raw_bytes(leaf) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert raw_bytes(a) == raw_bytes(b)


def assert_is_step(restored, step: int):
    got, state, data = restored
    assert (got, data) == (step, {"position": step})
    assert_same_bits(state, small(step))


def run_with_steps(run_dir: Path, *steps: int) -> None:
    checkpoints = Checkpoints(run_dir, KEEP_ALL)
    for step in steps:
        checkpoints.save(step, small(step), {"position": step})
    checkpoints.close()


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.mark.parametrize("data_state", [{"epoch": 1, "at": [3, None, "x"]}, b"\x00\xff binary"])
def test_round_trip_is_exact_to_the_bit(tmp_path, data_state):
    state = full_state()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(40, state, data_state, wait=True)
    checkpoints.close()
    step, got, data = Checkpoints(tmp_path, CheckpointConfig()).restore(describe(state))
    assert (step, data) == (40, data_state)
    assert_same_bits(got, state)


def test_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.restore(describe(small(0))) is None
    assert checkpoints.last_good is None
    with pytest.raises(UserError, match="no checkpoint"):
        restore_params(tmp_path, describe(small(0).params))


def test_shardings_of_the_template_place_the_result(tmp_path):
    run_with_steps(tmp_path, 1)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    template = describe(small(1))
    template.params["w"] = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)
    restored = Checkpoints(tmp_path, KEEP_ALL).restore(template)
    assert restored[1].params["w"].sharding == sharding
    assert_is_step(restored, 1)


def test_restore_params_reads_neither_the_rest_nor_its_damage(tmp_path):
    state = full_state()
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(3, state, {}, wait=True)
    checkpoints.close()
    for path in (tmp_path / "checkpoints/3/arrays/rest").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    step, params = restore_params(tmp_path, describe(state.params))
    assert step == 3
    assert_same_bits(params, state.params)
    assert names(tmp_path) == {"3"}


def test_donated_buffers_do_not_reach_the_disk(tmp_path):
    @partial(jax.jit, donate_argnums=0)
    def next_step(state):
        return jax.tree.map(lambda x: x + 1, state)

    big = {"params": {str(i): jnp.full((1 << 20,), 100.0 + i) for i in range(8)}}
    template = describe(big)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, big, {})
    for _ in range(5):
        big = next_step(big)
    jax.block_until_ready(big)
    _, got, _ = checkpoints.restore(template)
    assert all(np.all(np.asarray(got["params"][str(i)]) == 100.0 + i) for i in range(8))
    checkpoints.close()


@pytest.mark.parametrize(
    "keep_last, keep_every, kept",
    [(1, 0, {60}), (2, 0, {50, 60}), (2, 20, {20, 40, 50, 60}), (3, 30, {30, 40, 50, 60}), (4, 0, {30, 40, 50, 60})],
)
def test_kept_steps(tmp_path, keep_last, keep_every, kept):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=keep_last, keep_every=keep_every))
    for step in range(10, 70, 10):
        checkpoints.save(step, small(step), {"position": step})
    checkpoints.close()
    assert names(tmp_path) == {str(step) for step in kept}
    assert set(checkpoints.steps()) == kept


def test_saving_a_step_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(5, small(5), {"position": 5})
    checkpoints.save(5, small(5), {"position": 5})
    assert checkpoints.last_good == 5
    with pytest.raises(UserError, match="already there"):
        Checkpoints(tmp_path, KEEP_ALL).save(5, small(5), {"position": 5})


@pytest.mark.parametrize("field", ["every", "keep_last", "keep_every"])
def test_config_refuses_a_negative(field):
    with pytest.raises(UserError, match=f"{field}=-1"):
        CheckpointConfig(**{field: -1})


# Damage.


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def garble(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip, truncate, garble, Path.unlink], ids=["flip", "truncate", "garble", "delete"])
def test_any_damaged_file_is_noticed_and_the_step_before_is_used(tmp_path, damage):
    run_with_steps(tmp_path, 10, 20)
    newest = tmp_path / "checkpoints" / "20"
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert len(files) > 10
    whole = shutil.copytree(newest, tmp_path / "whole")
    template, said = describe(small(0)), []
    for path in files:
        damage(path)
        checkpoints = Checkpoints(tmp_path, KEEP_ALL, said.append)
        assert_is_step(checkpoints.restore(template), 10)
        assert len(said) == 1 and "step 20 is damaged" in said[0] and "using step 10" in said[0], path
        assert names(tmp_path) == {"10", "20.bad"}
        said.clear()
        shutil.copytree(whole, newest)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL, said.append)
    assert_is_step(checkpoints.restore(template), 20)
    assert said == []


def test_run_goes_on_over_a_damaged_step(tmp_path):
    run_with_steps(tmp_path, 10, 20)
    flip(tmp_path / "checkpoints/20/data.json")
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.restore(describe(small(0)))
    checkpoints.save(20, small(20), {"position": 20}, wait=True)
    assert_is_step(checkpoints.restore(describe(small(0))), 20)


@pytest.mark.parametrize("left", [(), ("_CHECKPOINT_METADATA",)], ids=["nothing", "no digests"])
def test_a_step_of_which_a_power_cut_left_no_digests_is_passed_over(tmp_path, left):
    run_with_steps(tmp_path, 10)
    newest = tmp_path / "checkpoints/20"
    newest.mkdir()
    for name in left:
        (newest / name).write_text("{}")
    assert_is_step(Checkpoints(tmp_path, KEEP_ALL).restore(describe(small(0))), 10)


def test_file_that_does_not_belong_is_noticed(tmp_path):
    run_with_steps(tmp_path, 10, 20)
    (tmp_path / "checkpoints/20/arrays/params/d/extra").write_bytes(b"x")
    assert_is_step(Checkpoints(tmp_path, KEEP_ALL).restore(describe(small(0))), 10)


def test_every_checkpoint_damaged(tmp_path):
    run_with_steps(tmp_path, 10, 20)
    for step in (10, 20):
        flip(tmp_path / f"checkpoints/{step}/data.json")
    with pytest.raises(UserError, match="every checkpoint is damaged .step 20: data.*; step 10: data") as raised:
        Checkpoints(tmp_path, KEEP_ALL).restore(describe(small(0)))
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == {"10", "20"}


def test_state_of_another_model_is_named(tmp_path):
    state = {"params": {name: jnp.zeros((2, 3)) for name in "abcdef"}, "step": jnp.int32(1)}
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, state, {}, wait=True)
    other = describe(state)
    other["params"] |= {"a": jax.ShapeDtypeStruct((2, 4), jnp.float32), "b": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    other["params"]["new"] = other["params"].pop("c")
    with pytest.raises(UserError) as raised:
        checkpoints.restore(other)
    assert str(raised.value) == (
        f"{tmp_path}/checkpoints/1: 4 of 8 tensors differ from the model of this run: "
        "params.a stored float32[2, 3], wanted float32[2, 4]; params.b stored float32[2, 3], wanted bfloat16[2, 3]; "
        "params.new stored nothing, wanted float32[2, 3]; and 1 more"
    )
    with pytest.raises(UserError, match="params.new stored nothing"):
        restore_params(tmp_path, other["params"])
    assert names(tmp_path) == {"1"}
    assert_same_bits(checkpoints.restore(describe(state))[1], state)


# Kills. One interpreter imports jax and forks a run per moment, before any backend exists.

RUN = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:3]
import test_checkpoint as t
from glm5_jax.train import checkpoint

def die(*unused):
    os.kill(os.getpid(), signal.SIGKILL)

def patch(moment):
    # From the third save on, the run is killed at that moment of a save.
    if moment == "before digests":
        checkpoint._write_sums = die
    elif moment == "before rename":
        checkpoint.Path.rename = die
    elif moment == "before prune":
        checkpoint.Checkpoints._prune = die
    elif moment == "inside prune":
        checkpoint._remove = lambda path: die() if path.exists() else None

def run(moment, run_dir, ready):
    checkpoints = checkpoint.Checkpoints(run_dir, checkpoint.CheckpointConfig(keep_last=2))
    for step in range(1, 100_000):
        if step == 3:
            os.write(ready, b"x")
            patch(moment)
        checkpoints.save(step, t.small(step), {"position": step}, wait=step == 2)

for number, moment in enumerate(sys.argv[4:]):
    got, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        run(moment, os.path.join(sys.argv[3], str(number)), ready)
    os.read(got, 1)
    if moment[0].isdigit():
        time.sleep(float(moment))
        os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
"""


def test_kill_inside_a_save_leaves_whole_steps(tmp_path):
    exact = {"before digests": 2, "before rename": 2, "before prune": 3, "inside prune": 3}
    delays = ["0.005", "0.02", "0.05", "0.083", "0.13", "0.21"]
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", RUN, str(here), str(here.parent), str(tmp_path), *exact, *delays]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = []
    for number, moment in enumerate([*exact, *delays]):
        run_dir = tmp_path / str(number)
        found = names(run_dir)
        checkpoints = Checkpoints(run_dir, CheckpointConfig(), said.append)
        restored = checkpoints.restore(describe(small(0)))
        assert_is_step(restored, exact.get(moment, restored[0]))
        assert restored[0] >= 2
        assert all(name.isdecimal() for name in names(run_dir))
        if moment in exact:
            assert any(name.endswith(".saving") for name in found) == (moment != "before prune")
    assert said == []


# A disk that refuses.


def save_over_failure(tmp_path, fail, heal) -> list[str]:
    """Saves 1, then 2 while the disk refuses, then 3; returns what was said."""
    said = []
    checkpoints = Checkpoints(tmp_path, KEEP_ALL, said.append)
    checkpoints.save(1, small(1), {"position": 1}, wait=True)
    fail()
    checkpoints.save(2, small(2), {"position": 2})
    checkpoints.wait()
    heal()
    assert checkpoints.last_good == 1
    assert checkpoints.steps() == [1]
    checkpoints.save(3, small(3), {"position": 3}, wait=True)
    assert_is_step(checkpoints.restore(describe(small(0))), 3)
    assert names(tmp_path) == {"1", "3"}
    checkpoints.close()
    return said


@pytest.mark.parametrize("where", ["mkdir", "orbax", "background", "digests"])
def test_full_disk(tmp_path, monkeypatch, where):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {
        "mkdir": (Path, "mkdir"),
        "orbax": (ocp.AsyncCheckpointer, "save"),
        "background": (ocp.AsyncCheckpointer, "wait_until_finished"),
        "digests": (checkpoint, "_write_sums"),
    }[where]
    said = save_over_failure(tmp_path, lambda: monkeypatch.setattr(owner, name, refuse), monkeypatch.undo)
    assert said == [
        "checkpoint of step 2 could not be saved (No space left on device); step 1 is kept, the next save tries again"
    ]


def test_too_little_space_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    fail = partial(monkeypatch.setattr, shutil, "disk_usage", lambda path: usage)
    said = save_over_failure(tmp_path, fail, monkeypatch.undo)
    assert len(said) == 1 and "disk full" in said[0]


def test_refused_write_of_the_array_files(tmp_path, capfd):
    """The kernel itself refuses: no file may grow past 4 kB, which only the array data do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = save_over_failure(
        tmp_path,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard)),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
    )
    assert len(said) == 1 and f"({os.strerror(errno.EFBIG)})" in said[0]
    assert capfd.readouterr() == ("", "")


def test_other_errors_are_raised(tmp_path, monkeypatch):
    def bug(directory):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "_write_sums", bug)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(1, small(1), {}, wait=True)
