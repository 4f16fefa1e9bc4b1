"""Run directories: the config comes back as it was, differences are named, and whatever is wrong is one line."""

import dataclasses
import json

import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.train import run_dir as runs
from glm5_jax.train.stages import RECIPES, TrainConfig
from helpers_train import load_run_config, write_run_config


@pytest.fixture
def config(tmp_path):
    return load_run_config(write_run_config(tmp_path / "mine.py", tmp_path / "corpus"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back_from_its_file(tmp_path, name):
    config = RECIPES[name]()
    runs.write_config(tmp_path, config)
    assert runs.read_config(tmp_path) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_nested_tuples_lists_and_nothing_come_back(tmp_path, config):
    changes = dict(num_hidden_layers=2, indexer_types=("full", "shared"), latent_norm_eps=1e-6, eos_token_id=(3, 5))
    model = dataclasses.replace(config.model, **changes)
    loss = dataclasses.replace(config.loss, index_weight=0.5)
    config = dataclasses.replace(config, model=model, loss=loss, mtp_weight=((0, 0.5), (1e6, 0.25)), freeze=())
    runs.write_config(tmp_path / "run", config)
    back = runs.read_config(tmp_path / "run")
    assert back == config
    assert back.model.indexer_types == ("full", "shared") and back.model.index_topk_pattern is None
    assert back.mtp_weight == ((0, 0.5), (1e6, 0.25)) and isinstance(back.mtp_weight[1], tuple)


def test_the_file_holds_every_setting_by_name(tmp_path, config):
    runs.write_config(tmp_path / "run", config)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert set(stored) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(stored["model"]) == {f.name for f in dataclasses.fields(ModelConfig)}
    assert stored["model"]["kv_lora_rank"] == 16 and stored["data"]["seq_len"] == 32


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"\S+config\.json: not a readable run config \(.*No such file.*\)"),
        ("{", r"\S+config\.json: not a readable run config \(.*\)"),
        ("[]", r"config\.json: top level is not an object"),
        ('{"model": 3}', r"config\.json: model\. is not an object"),
        ('{"lr": {"paek": 1}}', r"config\.json: unknown setting lr\.paek"),
        ('{"steps": 0}', r"steps=0: must be at least 1"),
    ],
)
def test_an_unusable_config_file_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{message}$"):
        runs.read_config(tmp_path)


def test_all_changed_settings_are_named_up_to_three(tmp_path, config):
    model = dataclasses.replace(config.model, hidden_size=64, v_head_dim=4)
    other = dataclasses.replace(config, model=model, seed=1, micro_rows=1, steps=99)
    with pytest.raises(UserError) as error:
        runs.check_same(config, other, tmp_path)
    message = str(error.value)
    assert "model.hidden_size (32 then, 64 now)" in message and "model.v_head_dim (8 then, 4 now)" in message
    assert "seed (0 then, 1 now) ..." in message and "steps" not in message and "--no-resume" in message


def test_a_network_must_be_a_glm5(config):
    assert runs.network_class(config).__name__ == "Glm5"
    for name, message in {
        "glm5_jax.model:Output": r"not a subclass of Glm5",
        "glm5_jax.model:Nothing": r"AttributeError: .*",
        "nowhere/net.py:Net": r"no such file",
    }.items():
        where = name if name.endswith("Output") else name.rpartition(":")[0]
        with pytest.raises(UserError, match=rf"{where}: {message}$"):
            runs.network_class(dataclasses.replace(config, network=name))


def test_weights_of_a_fresh_model_are_a_function_of_the_seed(config):
    first, again, other = (
        runs.fresh_model(dataclasses.replace(config, seed=seed)).embedding[...] for seed in (0, 0, 1)
    )
    assert (first == again).all() and (first != other).mean() > 0.99
    assert float(first.std()) == pytest.approx(config.model.initializer_range, rel=0.05)


def test_the_tokenizer_of_a_run_is_the_one_it_trained(tmp_path, config):
    from glm5_jax.convert.tokenizer import train_bpe

    data = dataclasses.replace(config.data, tokenizer="bpe:280")
    runs.write_config(tmp_path / "run", dataclasses.replace(config, data=data))
    (tmp_path / "run" / "data").mkdir()
    tokenizer = train_bpe(["the then them there the then them there " * 5], 280)
    tokenizer.save(tmp_path / "run" / "data" / "tokenizer.json")
    found = runs.run_tokenizer(tmp_path / "run")
    assert list(found.encode("them there")) == list(tokenizer.encode("them there"))
    runs.write_config(tmp_path / "bytes", config)
    assert list(runs.run_tokenizer(tmp_path / "bytes").encode("ab")) != list(found.encode("ab"))


def test_bad_recipes_name_the_setting():
    for change, message in {
        ("steps", 0): r"^steps=0: must be at least 1$",
        ("micro_rows", 0): r"^micro_rows=0: must be at least 1$",
        ("eval_every", 0): r"^eval_every=0: must be at least 1$",
        ("eval_rows", -1): r"^eval_rows=-1: must not be negative$",
        ("freeze", ("trunk", "indexer", "mtp")): r"^freeze=.*: some of trunk, indexer and mtp, not all$",
        ("freeze", ("head",)): r"^freeze=.*: some of trunk, indexer and mtp, not all$",
        ("batch_rows", ((0, 7),)): r"^batch_rows=7: must be a positive multiple of micro_rows=8$",
    }.items():
        with pytest.raises(UserError, match=message):
            dataclasses.replace(RECIPES["tiny"](), **dict([change]))
