"""GLM-5 (arXiv 2602.15763) in JAX: the model, its training and its inference.

    import glm5_jax as glm5
    model = glm5.load("path/of/a/checkpoint")
    out = model(tokens)
    new = glm5.generate(model, tokens, max_new_tokens=64)
"""

import os
import pathlib

import jax

from glm5_jax.config import ModelConfig, check
from glm5_jax.errors import UserError
from glm5_jax.model import Glm5, Output
from glm5_jax.serve.decode import generate

__all__ = ["Glm5", "ModelConfig", "Output", "UserError", "generate", "load", "save"]
__version__ = "0.1.0"


def load(path: str | os.PathLike, dtype: str = "float32", mesh=None, **overrides) -> Glm5:
    """Reads a model from a Hugging Face checkpoint directory or from a run directory.

    Args:
      path: a directory with config.json and *.safetensors, or one that `glm5 train` wrote.
      dtype: "float32", "bfloat16" or (with jax_enable_x64) "float64", of parameters and matrix products; the
        router bias stays float32.
      mesh: a `MeshConfig` of `glm5_jax.sharding.mesh`, or the mesh that `make_mesh` makes of one: its devices share the
        parameters, and each process reads what its devices hold. None = all on the default device.
      **overrides: fields of `ModelConfig`, e.g. latent_norm_eps=1e-6 to match transformers.
    Raises:
      UserError: what is wrong with the directory, the tensors or an override, in one line.
    """
    from glm5_jax.convert.hf import load_hf
    from glm5_jax.sharding.mesh import AXES, MeshConfig, make_mesh
    from glm5_jax.train.run_dir import load_run

    check(dtype in ("float32", "bfloat16", "float64"), f"dtype={dtype}: float32, bfloat16 or float64")
    check(dtype != "float64" or jax.config.jax_enable_x64, "dtype=float64: needs jax.config.update('jax_enable_x64', True)")
    check(pathlib.Path(path).is_dir(), f"{path}: no such directory")
    mesh = make_mesh(mesh) if isinstance(mesh, MeshConfig) else mesh
    good = mesh is None or isinstance(mesh, jax.sharding.Mesh) and mesh.axis_names == AXES
    check(good, f"mesh={' '.join(repr(mesh).split())}: need a MeshConfig, or a mesh of the axes {', '.join(AXES)}")
    if (pathlib.Path(path) / "checkpoints").is_dir():
        return load_run(path, dtype, mesh, **overrides)
    return load_hf(path, dtype, mesh, **overrides)


def save(model: Glm5, path: str | os.PathLike) -> None:
    """Writes a checkpoint directory in the Hugging Face layout, which `load` and transformers read.

    Raises:
      UserError: the directory exists and is not empty, or cannot be written.
    """
    from glm5_jax.convert.hf import save_hf

    save_hf(model, path)
