"""Session fixtures: golden checkpoints with their stored outputs, and small models with random norms and biases."""

import functools
import gc
import importlib.metadata
import json
import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the suite's figures are float32 on CPU; kernels are compiled, not run, for TPUs
# Almost all programs of the suite run once: compiling them takes the time. A third of it with these.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Runs that go on where others stopped, and files with the same network, compile the same programs: once is enough.
if "PYTEST_XDIST_WORKER" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="glm5_jax_compiled_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
if importlib.metadata.version("jax").startswith("0.10."):  # later versions have no such switch
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"

import jax
import numpy as np
import pytest
import safetensors.numpy

import reference
from glm5_jax.convert.hf import load_hf
from glm5_jax.model import Glm5
from helpers_data import write_folder

GOLDENS = pathlib.Path(__file__).parent / "goldens"


MOST_MAPS = 25_000  # of the 65,530 memory maps that Linux allows a process


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Forgets compiled programs before they are too many: each takes a few memory maps, and without one XLA crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def forward(model: Glm5, *args, **kwargs):
    """model(...) with everything a layer decides collected, so that equal shapes share one compiled program."""
    return model(*args, collect=("hidden", "index_scores", "selected"), **kwargs)


class Golden:
    """A checkpoint of tests/goldens with its cases; models and forward passes are made once."""

    def __init__(self, name: str):
        self.path = GOLDENS / name
        self.meta = json.loads((self.path / "meta.json").read_text())
        self.raw_config = json.loads((self.path / "config.json").read_text())
        self.cases = safetensors.numpy.load_file(self.path / "cases.safetensors")
        self.full_layers = [i for i, kind in enumerate(self.meta["indexer_types"]) if kind == "full"]
        self.tolerance = self.meta["suggested_tolerance"]

    @functools.cache
    def model(self, **overrides) -> Glm5:
        """The checkpoint; latent norms at 1e-6 as in transformers unless told otherwise."""
        return load_hf(self.path, **({"latent_norm_eps": 1e-6} | overrides))

    @functools.cache
    def run(self, case: str):
        """The forward pass of a case with everything collected."""
        c = self.cases
        inputs = {}
        if case == "packed":
            lengths = self.meta["cases"]["packed"]["doc_lengths"]
            inputs["segment_ids"] = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
        if f"{case}/attention_mask" in c:
            inputs["segment_ids"] = c[f"{case}/attention_mask"]
        if f"{case}/position_ids" in c:
            inputs["positions"] = c[f"{case}/position_ids"]
        collect = ("hidden", "selected", "index_scores", "router")
        if case == "long" and "mtp/input_ids" in c:
            assert (c["mtp/input_ids"] == c["long/input_ids"]).all()
            collect += ("mtp",)
        return self.model()(c[f"{case}/input_ids"], collect=collect, **inputs)

    def valid(self, case: str) -> np.ndarray:
        """bool [B,T]: rows that may be compared."""
        valid = self.cases[f"{case}/valid_rows"] != 0
        return valid & (self.cases[f"{case}/attention_mask"] != 0) if case == "rightpad" else valid


@functools.cache
def _golden(name: str) -> Golden:
    return Golden(name)


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> `Golden`."""
    return _golden


@pytest.fixture(scope="session")
def micro():
    """micro(**overrides) -> (model, published float64 tensors) of `reference.micro_config`, made once per setting."""

    @functools.cache
    def make(**overrides):
        model = reference.random_model(reference.micro_config(**overrides))
        return model, reference.published(model)

    return make


@pytest.fixture(scope="session")
def tokens():
    """Two rows of 20 token ids for the micro models, which select 4 keys."""
    return np.random.default_rng(5).integers(0, 32, (2, 20))


@pytest.fixture
def folder(tmp_path):
    """Path of a folder with the small corpus of `helpers_data`."""
    return write_folder(tmp_path / "texts")
