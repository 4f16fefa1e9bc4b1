"""The wheel holds the package, types included, and the example that changes a layer works from outside of it."""

import importlib.util
import pathlib
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glm5_jax as glm5
from glm5_jax.config import tiny
from glm5_jax.errors import UserError
from glm5_jax.layers.norm import rms_norm
from glm5_jax.model import specs
from glm5_jax.train.step import flat, trainable_specs

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("custom_attention", ROOT / "experiments" / "custom_attention.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_attention"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small_config():
    return tiny(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2, q_lora_rank=16,
        kv_lora_rank=12, n_routed_experts=4, moe_intermediate_size=16, index_topk=8,
    )  # fmt: skip


@pytest.mark.e2e
def test_wheel_holds_every_module_and_py_typed_and_nothing_else(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    tracked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "glm5_jax").rglob("*.py")}
    assert names == tracked | {"glm5_jax/py.typed"}
    assert "glm5 = glm5_jax.cli:main" in entry_points


def test_custom_attention_adds_one_norm_per_attention_trained_without_decay(example, small_config):
    changed = flat(specs(example.QueryNormGlm5(small_config, nnx.Rngs(0))))
    plain = flat(specs(glm5.Glm5(small_config, nnx.Rngs(0))))
    added = {path: spec for path, spec in changed.items() if path not in plain}
    assert {path[-1] for path in added} == {"head_norm"}
    assert len(added) == 3  # the dense layer, the stacked MoE layer, the MTP layer
    assert {spec.kind for spec in added.values()} == {"norm"}
    assert added.keys() <= trainable_specs(example.QueryNormGlm5(small_config, nnx.Rngs(0)), ()).keys()


def test_custom_attention_normalises_queries_as_written(example, small_config):
    model = example.QueryNormGlm5(small_config, nnx.Rngs(0))
    plain = glm5.Glm5(small_config, nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 12)))
    assert np.abs(model(tokens).logits - plain(tokens).logits).max() > 1e-4
    attention = nnx.merge(*nnx.split(model.mtp.block.attention))
    base = super(example.QueryNormMla, attention)
    cq = jax.random.normal(jax.random.key(0), (1, 5, 16))
    from glm5_jax.layers.block import make_context
    from glm5_jax.sparse.masks import Rows

    slot = jnp.arange(5)[None]
    ctx = make_context(Rows(slot, jnp.ones_like(slot)), jnp.ones_like(slot), slot, small_config)
    attention.head_norm[...] = jnp.linspace(0.5, 2, small_config.qk_head_dim)
    q = np.asarray(base.queries(cq, ctx), np.float64)
    rms = np.sqrt((q**2).mean(-1, keepdims=True) + small_config.rms_norm_eps)
    want = q / rms * np.linspace(0.5, 2, small_config.qk_head_dim)
    np.testing.assert_allclose(attention.queries(cq, ctx), want, atol=1e-5)
    assert rms_norm is example.rms_norm


def test_custom_attention_trains_by_its_path_and_loads_again(example, tmp_path):
    from glm5_jax.cli import main

    text = tmp_path / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    run = tmp_path / "run"
    sizes = {
        "vocab-size": 260, "hidden-size": 32, "num-hidden-layers": 2, "intermediate-size": 48, "num-attention-heads": 2,
        "q-lora-rank": 16, "kv-lora-rank": 12, "n-routed-experts": 4, "moe-intermediate-size": 16,
    }  # fmt: skip
    arguments = ["train", str(ROOT / "experiments" / "custom_attention.py"), "--run-dir", str(run), "--steps", "2"]
    arguments += ["--data.sources", str(text), "--data.tokenizer", "bytes", "--data.seq-len", "32"]
    arguments += [part for name, value in sizes.items() for part in (f"--model.{name}", str(value))]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    model = glm5.load(run)
    assert type(model).__name__ == "QueryNormGlm5"
    assert not np.array_equal(model.mtp.block.attention.head_norm[...], np.ones(48))
    with pytest.raises(UserError, match="QueryNormGlm5"):
        glm5.save(model, tmp_path / "out")
