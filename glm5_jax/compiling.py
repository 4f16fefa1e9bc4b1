"""`jax.jit` with the compiler settings this project wants, on the backend that is there."""

import functools
import glob
import importlib.util
import os

import jax

GOOGLE = "0x1ae0"  # PCI vendor of TPUs


# Tokens travel to their experts beside products, for which libtpu would wait otherwise. It has more such settings, but refuses
# to fuse all-gathers with products on chips other than v5e (libtpu 0.0.50: "incorrect results, hang").
_TPU_OPTIONS = {"xla_tpu_enable_async_all_to_all": True}


def compiler_options() -> dict:
    """Settings for XLA on the platform that programs are being compiled for.

    On CPU, the fusion emitters of jax 0.10 take twice as long and twice the memory to compile a training step. Without
    them a step is 3% slower on `bench train-step`, 10% with `small`. Later versions have no such switch.
    """
    platform = target_platform()
    if platform == "cpu" and jax.__version_info__ < (0, 11):
        return {"xla_cpu_use_fusion_emitters": False}
    return dict(_TPU_OPTIONS) if platform == "tpu" else {}


def target_platform() -> str:
    """What programs are being compiled for: the described chips of an ahead-of-time compilation, or the default backend."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind.startswith("TPU"):
        return "tpu"
    return jax.default_backend()


def jit(function, **arguments):
    """`jax.jit(function, **arguments)` with `compiler_options()`, made at the first call: importing touches no backend.

    Called while something else is being traced it runs `function` itself, since an inner jit may not carry options.
    """

    @functools.cache
    def compiled():
        return jax.jit(function, compiler_options=compiler_options(), **arguments)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


def pass_over_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU where libtpu is installed only to compile for one: it fills the terminal with errors.

    Call before JAX makes its backends. Does nothing where a platform was chosen, or where a TPU or a GPU plugin exists.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None:
        return
    vendors = [open(path).read().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")]
    gpu = any(importlib.util.find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13", "rocm60", "rocm7"))
    if GOOGLE not in vendors and not gpu:
        jax.config.update("jax_platforms", "cpu")
