"""A run directory: `config.json` (complete, reloadable), metrics, checkpoints, and the tokenizer under `data/`.

A config is a TrainConfig, or of another class with the same `model`, `network`, `data.tokenizer` and `init`; then config.json
names it.
"""

import dataclasses
import json
import os
import pathlib
import types
import typing

from flax import nnx
from jax.sharding import Mesh

from glm5_jax.config import check, override
from glm5_jax.convert.tokenizer import bpe_size, load_tokenizer
from glm5_jax.importing import import_object
from glm5_jax.model import Glm5, flat, merge, specs, template
from glm5_jax.train.checkpoint import restore_params
from glm5_jax.train.stages import TrainConfig

# What may change between two starts of one run: nothing that a finished step depended on.
# On another mesh a run goes on with the same values; only sums over devices may round differently from then on.
RESUMABLE = ("steps", "eval_every", "eval_rows", "eval_prompts", "checkpoint", "nonfinite", "profile", "mesh")


def write_config(run_dir: pathlib.Path, config: TrainConfig) -> None:
    """Writes RUN/config.json in one move."""
    run_dir.mkdir(parents=True, exist_ok=True)
    new = run_dir / "config.json.new"
    kind = {} if type(config) is TrainConfig else {"kind": f"{type(config).__module__}:{type(config).__qualname__}"}
    new.write_text(json.dumps(kind | dataclasses.asdict(config), indent=2) + "\n")
    os.replace(new, run_dir / "config.json")


def read_config(run_dir: str | os.PathLike) -> TrainConfig:
    """The config of a run.

    Raises:
      UserError: there is none, or it does not hold what this version writes.
    """
    path = pathlib.Path(run_dir) / "config.json"
    try:
        settings = json.loads(path.read_text())
        kind = settings.pop("kind", None) if isinstance(settings, dict) else None
        return from_json(import_object(kind) if kind else TrainConfig, settings, "")
    except (OSError, json.JSONDecodeError) as error:
        check(False, f"{path}: not a readable run config ({error})")


def from_json(kind, value, name: str):
    """The inverse of `dataclasses.asdict` and JSON: nested dataclasses, tuples from lists."""
    if dataclasses.is_dataclass(kind):
        fields = {f.name: f for f in dataclasses.fields(kind)}
        check(isinstance(value, dict), f"config.json: {name or 'top level'} is not an object")
        unknown = sorted(set(value) - set(fields))
        check(not unknown, f"config.json: unknown setting {', '.join(name + key for key in unknown)}")
        types_ = typing.get_type_hints(kind)
        return kind(**{key: from_json(types_[key], item, f"{name}{key}.") for key, item in value.items()})
    if isinstance(value, list):
        inner = _item_type(kind)
        return tuple(from_json(inner, item, name) for item in value)
    return value


def _item_type(kind):
    for option in typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,):
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return None


def check_same(old: TrainConfig, new: TrainConfig, run_dir: pathlib.Path) -> None:
    """Raises UserError that names the settings in which a run differs from what is asked of it now."""
    kinds = type(old).__name__, type(new).__name__
    check(
        type(old) is type(new),
        f"{run_dir}: holds a run of another kind, {kinds[0]} and not {kinds[1]}; choose another --run-dir, or start over with "
        "--no-resume",
    )
    changed = [
        f"{name} ({a} then, {b} now)"
        for (name, a), (_, b) in zip(_flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new)))
        if a != b and name.split(".")[0] not in RESUMABLE
    ]
    check(
        not changed,
        f"{run_dir}: holds a run with other settings: {'; '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}; "
        "choose another --run-dir, or start over with --no-resume",
    )


def _flat(tree: dict, prefix: str = "") -> list[tuple]:
    items = []
    for key, value in tree.items():
        items += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return items


def network_class(config: TrainConfig) -> type[Glm5]:
    """The class that `config.network` names."""
    network = import_object(config.network)
    check(isinstance(network, type) and issubclass(network, Glm5), f"network={config.network}: not a subclass of Glm5")
    return network


def load_run(run_dir: str | os.PathLike, dtype: str, mesh: Mesh | None = None, **overrides) -> Glm5:
    """The model of a run's newest good checkpoint; arguments as for `glm5_jax.load`."""
    config = read_config(run_dir)
    cfg = override(config.model, dtype=dtype, **overrides)
    graphdef, wanted = template(cfg, dtype, mesh, network_class(config))
    _, params = restore_params(run_dir, wanted)
    return merge(graphdef, params)


def array_name(path: tuple) -> str:
    """The name under which a checkpoint holds the parameter at `path`."""
    return ".".join(map(str, ("params", *path)))


def stacked_dimensions(model: Glm5) -> dict[str, int]:
    """Array name of each parameter -> number of its leading dimensions, layers and experts."""
    declared = flat(specs(model)).items()
    return {array_name(path): spec.axes.count("layers") + spec.axes.count("experts") for path, spec in declared}


def fresh_model(config: TrainConfig) -> Glm5:
    """The model before step 0."""
    return network_class(config)(config.model, nnx.Rngs(config.seed))


def run_tokenizer(run_dir: pathlib.Path):
    """The tokenizer that a run was trained with."""
    return tokenizer_of(read_config(run_dir).data.tokenizer, run_dir / "data")


def tokenizer_of(name: str, data: pathlib.Path):
    """The tokenizer that the setting `name` stands for; one that was trained is kept in the folder `data`."""
    path = data / "tokenizer.json"
    trained = bpe_size(name) is not None
    check(not trained or path.is_file(), f"data.tokenizer={name}: there is none trained; start from a run that has it")
    return load_tokenizer(str(path) if trained else name)
