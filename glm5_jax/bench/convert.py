"""glm5 bench convert: `glm5 convert` on a checkpoint of 2 GB made on the spot: speed beside that of the disk, and peak memory.

Four conversions, each in a fresh process: bfloat16 to a run and back (compared to the bit), FP8 to a run, that run to FP8.
The speed is that of the source's bytes, the disk's is measured in the same process; the memory allowed is three times the
largest tensor plus 500 MB.
"""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import zlib

import numpy as np

from glm5_jax.config import ModelConfig, glm5
from glm5_jax.convert.published import Band, Piece, tensor_shape

_CONVERT = """
import json, pathlib, sys
from glm5_jax.train.convert import convert
source, out, to, dtype = sys.argv[1:]
print(json.dumps(convert(pathlib.Path(source), pathlib.Path(out), to, dtype)._asdict()))
"""


def config_2gb(**overrides) -> ModelConfig:
    """1.04 billion parameters: 4 layers (1 dense) and MTP, 36 experts; the largest tensor is the embedding, 67 MB."""
    return glm5(
        **dict(
            vocab_size=16_384, hidden_size=2048, num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=16,
            q_lora_rank=768, intermediate_size=6144, moe_intermediate_size=1024, n_routed_experts=36,
            eos_token_id=(0,), pad_token_id=0,
        )
        | overrides
    )  # fmt: skip


def random_values():
    """A `hf.Read` of random tensors, the same in every process, as fast as copying: parts of one random block."""
    pool = np.random.default_rng(0).standard_normal(2**23, np.float32) / 32

    def read(name: str, pieces: list[Piece], dtype: np.dtype, band: Band) -> np.ndarray:
        shape = (band.stop - band.start, *tensor_shape(pieces)[1:])
        start = zlib.crc32(f"{name} {band.start}".encode()) % (len(pool) // 2)
        return np.resize(pool[start : start + math.prod(shape)], shape).astype(dtype)

    return read


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `glm5 bench convert`."""

    directory: str = ""  # where to make the checkpoints, 12 GB for a while; default: the system's temporary directory
    json: bool = False  # end with one line of JSON


def main(arguments: list[str]) -> int:
    """Prints the table; status 1 if a result differs."""
    from glm5_jax.cli_options import parse

    about = "Converts a checkpoint of 2 GB in both directions."
    options = parse(Options(), arguments, "glm5 bench convert", about)
    rows = []
    print(f"{'conversion':<18}{'GB':>6}{'s':>8}{'MB/s':>8}{'disk':>8}{'ratio':>8}{'peak MB':>10}{'allowed':>9}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.directory or None) as place:
        for what, result in measure(pathlib.Path(place), config_2gb()):
            rate, allowed = result["read_bytes"] / result["seconds"], 3 * result["largest_tensor"] + 500 * 10**6
            numbers = dict(
                gb=result["read_bytes"] / 1e9, seconds=result["seconds"], mb_per_s=rate / 1e6,
                disk_mb_per_s=result["raw_read_speed"] / 1e6, ratio=rate / result["raw_read_speed"],
                peak_mb=result["peak_memory"] / 1e6, allowed_mb=allowed / 1e6,
            )  # fmt: skip
            rows.append({"conversion": what} | {name: round(value, 3) for name, value in numbers.items()})
            formats = zip(numbers.values(), ("6.2f", "8.1f", "8.0f", "8.0f", "8.2f", "10.0f", "9.0f"))
            print(f"{what:<18}" + "".join(format(value, f) for value, f in formats), flush=True)
        same = same_tensors(pathlib.Path(place) / "bfloat16", pathlib.Path(place) / "again")
    print(f"bfloat16 to a run and back: {'the same bits' if same else 'DIFFERENT'}")
    if options.json:
        print(json.dumps({"rows": rows, "same": same}))
    return 0 if same else 1


STEPS = (  # what, from where, to where, as what, in which dtype
    ("bf16 to run", "bfloat16", "run", "run", ""),
    ("run to bf16", "run", "again", "hf", ""),
    ("fp8 to run", "fp8", "run8", "run", ""),
    ("run to fp8", "run8", "again8", "hf", "fp8"),
)


def measure(place: pathlib.Path, cfg: ModelConfig, steps=STEPS):
    """Yields (name, fields of `train.convert.Result`) of each conversion; leaves everything in `place`."""
    from glm5_jax.convert.hf import write_hf

    for what, source, out, to, dtype in steps:
        if source in ("bfloat16", "fp8"):
            write_hf(cfg, source, random_values(), place / source, workers=os.cpu_count() or 1, shard_bytes=2**29)
        os.sync()  # only what is on the disk can be dropped from memory
        command = [sys.executable, "-c", _CONVERT, str(place / source), str(place / out), to, dtype]
        yield what, json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def same_tensors(a: pathlib.Path, b: pathlib.Path) -> bool:
    """Whether two Hugging Face directories hold the same tensors, to the bit."""
    from glm5_jax.convert.safetensors_dir import TensorDirectory

    a, b = TensorDirectory(a), TensorDirectory(b)
    same = lambda name: np.array_equal(a.read(name).view(np.uint8), b.read(name).view(np.uint8))  # noqa: E731
    return a.names() == b.names() and all(map(same, a.names()))
