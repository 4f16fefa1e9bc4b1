"""Checkpoints read onto meshes, from Hugging Face directories and from runs: values of one device, places of the rules."""

import jax
import numpy as np
import pytest

import glm5_jax
import reference
from conftest import GOLDENS
from glm5_jax.convert.hf import save_hf
from glm5_jax.convert.safetensors_dir import TensorDirectory
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, flat, split
from glm5_jax.sharding.mesh import MeshConfig, shardings_of
from glm5_jax.sharding.rules import parameter_specs, place_parameters
from glm5_jax.train.convert import convert
from helpers_mesh import MESHES, mesh, network


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(parameters, a Hugging Face directory that holds them, a run)."""
    place = tmp_path_factory.mktemp("load")
    model = reference.random_model(network())
    save_hf(model, place / "hf")
    convert(place / "hf", place / "run", "run", "", lambda line: None)
    return {path: np.asarray(x) for path, x in flat(split(model)[1]).items()}, place / "hf", place / "run"


@pytest.mark.parametrize("kind, sizes", [("hf", MESHES["expert"]), ("hf", MESHES["all three"]), ("run", MESHES["all three"])])
def test_parameters_lie_where_the_rules_say(sources, sizes, kind):
    expected, *places = sources
    m = mesh(*sizes)
    model = glm5_jax.load(places[kind == "run"], mesh=m)
    placed = place_parameters(abstract(model.cfg), dict(m.shape))
    shardings = shardings_of(m, flat(parameter_specs(placed)))
    found = flat(split(model)[1])
    assert found.keys() == expected.keys()
    for path, array in found.items():
        assert array.sharding.is_equivalent_to(shardings[path], array.ndim), path
        np.testing.assert_array_equal(np.asarray(array), expected[path], err_msg=str(path))


def test_a_mesh_may_be_given_by_its_config(sources):
    model = glm5_jax.load(sources[1], mesh=MeshConfig(expert=2, context=2))
    for path, array in flat(split(model)[1]).items():
        assert array.sharding.mesh == mesh(2, 2, 2), path
    other = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for wrong in ("expert=2", (2, 2, 2), other):
        with pytest.raises(UserError, match="^mesh=.*: need a MeshConfig, or a mesh of the axes data, expert, context$"):
            glm5_jax.load(sources[1], mesh=wrong)
    with pytest.raises(UserError, match="3x1: does not divide the 8 devices"):
        glm5_jax.load(sources[1], mesh=MeshConfig(expert=3))


def test_a_device_of_experts_reads_only_its_own(monkeypatch):
    """What one process of a pod would do for its two devices: of 8 experts on 8 devices it reads 2."""
    read, names = TensorDirectory.read, []
    monkeypatch.setattr(TensorDirectory, "read", lambda self, name, *args: names.append(name) or read(self, name, *args))
    devices = jax.sharding.NamedSharding.addressable_devices_indices_map
    mine = lambda self, shape: {d: i for d, i in devices(self, shape).items() if d.id in (2, 5)}  # noqa: E731
    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", mine)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: np.zeros(shape))
    glm5_jax.load(GOLDENS / "glm5_tiny", mesh=mesh(1, 8, 1))
    assert {name.split("experts.")[1].split(".")[0] for name in names if ".experts." in name} == {"2", "5"}


def test_a_loaded_model_on_a_mesh_gives_the_logits_of_one_device(sources):
    tokens = np.arange(12).reshape(2, 6) % 16
    one = glm5_jax.load(sources[1])(tokens).logits
    several = glm5_jax.load(sources[1], mesh=mesh(2, 2, 2))(tokens).logits
    np.testing.assert_allclose(several, one, rtol=0, atol=1e-5)
