"""What a run takes over from an earlier one at step 0: the parameters, the tokenizer and, if asked, the optimizer's moments.

All of it is copied, and the new run is saved before its first step: after that the earlier one may move on or go.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from glm5_jax.compiling import jit
from glm5_jax.config import ModelConfig, check
from glm5_jax.convert.hf import load_hf
from glm5_jax.convert.hf_config import config_from_hf
from glm5_jax.convert.tokenizer import bpe_size, load_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, merge, split
from glm5_jax.sharding.mesh import local
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import restore_params, restore_state
from glm5_jax.train.optimizer import restart_schedule
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import TrainState, init_state

# Settings of the model that a stage may change: they decide what is computed with a parameter, not what it is.
STAGE_SETTINGS = (
    "attention", "sparse_implementation", "index_topk", "rope_theta", "max_position_embeddings", "query_chunk", "remat",
    "dtype", "initializer_range",
)  # fmt: skip
_PATTERN = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")  # ways to say `layer_kinds`


class Source(NamedTuple):
    """The directory that `init.run` names. train: the config of the run, None for a Hugging Face directory."""

    path: pathlib.Path
    model: ModelConfig
    train: TrainConfig | None


def open_source(config: TrainConfig, run_dir: pathlib.Path) -> Source:
    """The source of a run, its settings checked against those of the run.

    Raises:
      UserError: nothing to start from there, or the first setting in which the two may not differ.
    """
    path = pathlib.Path(config.init.run)
    check(path.is_dir(), f"init.run={path}: no such directory")
    check(path.resolve() != run_dir.resolve(), f"init.run={path}: is the run directory itself; choose another --run-dir")
    if (path / "checkpoints").is_dir():
        train = runs.read_config(path)
        source = Source(path, train.model, train)
    else:
        source = Source(path, _hf_config(path), None)
    _check_model(source, config)
    _check_optimizer(source, config)
    return source


def _hf_config(path: pathlib.Path) -> ModelConfig:
    try:
        raw = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"init.run={path}: neither a run nor a Hugging Face directory ({error})") from None
    check(isinstance(raw, dict), f"init.run={path}: neither a run nor a Hugging Face directory")
    return config_from_hf(raw)


def _check_model(source: Source, config: TrainConfig) -> None:
    mine, theirs = dataclasses.asdict(config.model), dataclasses.asdict(source.model)
    for name in mine:
        if name not in STAGE_SETTINGS + _PATTERN:
            check(mine[name] == theirs[name], f"model.{name}={mine[name]}: {source.path} has {theirs[name]}")
    check(
        config.model.layer_kinds == source.model.layer_kinds,
        f"model.indexer_types: the layers of {source.path} that own an indexer are others",
    )


def _check_optimizer(source: Source, config: TrainConfig) -> None:
    if config.init.optimizer == "reset":
        return
    keep = f"init.optimizer=keep: {source.path}"
    check(source.train is not None, f"{keep} is no run, it has no optimizer state")
    same = set(source.train.freeze) == set(config.freeze)
    check(same, f"{keep} trained with freeze={source.train.freeze}, this run has freeze={config.freeze}; use reset")
    theirs, mine = source.train.optimizer.name, config.optimizer.name
    check(theirs == mine, f"{keep} trained with optimizer.name={theirs}, this run has {mine}; use reset")


def bring_tokenizer(source: Source, name: str, data: pathlib.Path) -> None:
    """Copies a trained tokenizer of the source to `data`, where `load_corpus` then finds it trained.

    Args:
      name: the setting data.tokenizer of the new run.
    Raises:
      UserError: it stands for another tokenizer than the source's.
    """
    file = source.path / ("tokenizer.json" if source.train is None else "data/tokenizer.json")
    if source.train is not None:
        theirs, called = runs.run_tokenizer(source.path), source.train.data.tokenizer
    else:
        theirs, called = (load_tokenizer(str(file)), str(file)) if file.is_file() else (load_tokenizer("bytes"), "bytes")
    size = bpe_size(name)
    if size is None:
        same = load_tokenizer(name).fingerprint == theirs.fingerprint
    else:
        same = file.is_file() and theirs.vocab_size == size
    check(same, f"data.tokenizer={name}: {source.path} was trained with {called}")
    if size is not None:
        data.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, data / "tokenizer.json")


def first_state(
    config: TrainConfig, optimizer: optax.GradientTransformation, say: Callable[[str], None] = print
) -> TrainState:
    """The state before step 0: fresh weights, or those of `init.run`, to the bit.

    Raises:
      UserError: no such checkpoint, a damaged one, or the first tensors that differ.
    """
    init = config.init
    fresh = lambda: init_state(runs.fresh_model(config), optimizer, config.freeze)  # noqa: E731
    if not init.run:
        return fresh()
    if init.optimizer == "keep":
        step, state = restore_state(init.run, jax.eval_shape(fresh), say, init.step)
        say(f"starting from {init.run}, step {step}, with its optimizer state")
        return TrainState(jnp.int32(0), state.params, restart_schedule(state.opt_state))
    graphdef, template = split(abstract(config.model, runs.network_class(config)))
    if (pathlib.Path(init.run) / "checkpoints").is_dir():
        step, params = restore_params(init.run, template, say, init.step)
        say(f"starting from {init.run}, step {step}")
    else:
        params = _hf_params(init.run, template)
        say(f"starting from {init.run}")
    return init_state(merge(graphdef, params), optimizer, config.freeze)


_HOST_BYTES = 1 << 30  # of a state that every process may make whole: faster for small models, whose drawing takes compiling


def first_state_on(
    mesh: Mesh, shardings: TrainState, config: TrainConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """`first_state` over a mesh, the same values: large models are drawn part by part, each device its own; small ones and
    those of `init.run` go by way of the host."""
    draw = lambda: init_state(runs.fresh_model(config), optimizer, config.freeze)  # noqa: E731
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(draw)))
    if config.init.run or size <= _HOST_BYTES:
        return jax.device_put(jax.device_get(first_state(config, optimizer)), shardings)
    return jit(local(draw, mesh, (), jax.tree.map(lambda s: s.spec, shardings)))()


def _hf_params(path: str, template: dict) -> dict:
    params = split(load_hf(path))[1]
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)  # noqa: E731
    # The settings agree; what may still differ is an MTP layer that the files lack, or a network of the user's own.
    check(shapes(params) == shapes(template), f"init.run={path}: does not hold the parameters of this network")
    return params
