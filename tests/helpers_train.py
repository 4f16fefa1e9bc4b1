"""What the tests of training share: small networks with every kind of part, packed batches, a corpus of text files."""

import contextlib
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from glm5_jax.config import ModelConfig
from glm5_jax.layers.param import Spec
from glm5_jax.model import Glm5, abstract, merge, specs, split
from glm5_jax.train.step import flat

MOE_LAYERS = 2


@contextlib.contextmanager
def compile_cache(folder: pathlib.Path):
    """Keeps compiled programs in a folder, so that starting a run again costs no compilation."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    old = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def step_config(**overrides) -> ModelConfig:
    """3 layers (1 dense), 5 experts of which 2, an MTP layer; no two widths that could be confused are equal."""
    return ModelConfig(
        **dict(
            vocab_size=40, hidden_size=16, num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=3,
            q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, intermediate_size=20,
            moe_intermediate_size=7, n_routed_experts=5, num_experts_per_tok=2, index_n_heads=2, index_head_dim=9,
            index_topk=4, max_position_embeddings=64, rope_theta=100.0, eos_token_id=(0,), pad_token_id=0,
            attention="dense",
        )
        | overrides
    )  # fmt: skip


def lively_model(cfg: ModelConfig, seed: int = 0) -> Glm5:
    """A model whose signals and gradients are of order 1 in every part: no test passes because something is near 0."""
    rng = np.random.default_rng(seed)
    graphdef, shapes = split(abstract(cfg))

    def fill(leaf, spec: Spec):
        noise = rng.standard_normal(leaf.shape)
        if spec.kind == "norm":
            noise = 1 + 0.2 * noise
        elif spec.kind in ("bias", "router_bias"):
            noise = 0.1 * noise
        elif spec.kind != "embedding":
            noise /= math.sqrt(math.prod(leaf.shape[i] for i in spec.inputs))
        return jnp.asarray(noise, jnp.float32)

    return merge(graphdef, jax.tree.map(fill, shapes, specs(abstract(cfg))))


def flat_specs(cfg: ModelConfig) -> dict[tuple, Spec]:
    return flat(specs(abstract(cfg)))


def packed_batch(rows: list[list[int]], seq_len: int, vocab: int = 40, seed: int = 0, micro: int = 1) -> dict:
    """Batch [micro,b,T] of random tokens. rows: lengths of each row's documents; what is left over is padding."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), seq_len)
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions")}
    for r, lengths in enumerate(rows):
        at = 0
        for segment, length in enumerate(lengths, 1):
            span = slice(at, at + length)
            batch["tokens"][r, span] = rng.integers(1, vocab, length)
            batch["segment_ids"][r, span] = segment
            batch["positions"][r, span] = np.arange(length)
            at += length
    return {k: jnp.asarray(v.reshape(micro, len(rows) // micro, seq_len)) for k, v in batch.items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def buffer_sizes(hlo: str, kinds: str = "f64|f32|bf16|f16|s32|u32|pred|s8|u8") -> list[int]:
    """Elements of every array that a compiled program's text mentions."""
    shapes = re.findall(rf"\b(?:{kinds})\[([0-9,]*)\]", hlo)
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


def write_corpus(folder: pathlib.Path, files: int = 24, seed: int = 0) -> pathlib.Path:
    """A folder of small text files, words with a structure that a model can learn."""
    rng = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "def", "return", "x = 1", "été", "for i in y:"]
    folder.mkdir(parents=True)
    for i in range(files):
        lines = (" ".join(rng.choice(words, 6)) for _ in range(6))
        (folder / f"doc{i:02}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


RUN_CONFIG = '''
from glm5_jax.config import ModelConfig
from glm5_jax.train.checkpoint import CheckpointConfig
from glm5_jax.train.data import DataConfig
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import TrainConfig
from glm5_jax.train.step import LossConfig


def config():
    return TrainConfig(
        model=ModelConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=0, num_attention_heads=2,
            q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=32,
            moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=2, index_head_dim=8,
            index_topk=16, max_position_embeddings=64, rope_theta=1e4, eos_token_id=(0,), pad_token_id=0,
            num_nextn_predict_layers=0,
            attention="dense",
        ),
        data=DataConfig(sources=({corpus!r},), tokenizer="bytes", seq_len=32, held_out=0.2),
        lr=LearningRate("cosine", peak=0.01, final=0.001, warmup_steps=3),
        loss=LossConfig(mtp_steps=0),
        checkpoint=CheckpointConfig(every=4),
        steps=12,
        micro_rows=2,
        batch_rows=((0, 2), (256, 4)),
        eval_every=6,
        eval_rows=4,
    )
'''


def write_run_config(path: pathlib.Path, corpus: pathlib.Path) -> pathlib.Path:
    """A config file for `glm5 train`: a network that compiles in seconds; the batch doubles at step 4."""
    path.write_text(RUN_CONFIG.replace("{corpus!r}", repr(str(corpus))))
    return path


def load_run_config(path: pathlib.Path):
    """The TrainConfig of a file from `write_run_config`."""
    scope: dict = {}
    exec(path.read_text(), scope)
    return scope["config"]()


def recorded(run_dir: pathlib.Path, name: str = "loss") -> list[tuple[int, float]]:
    """(step, value) of each line of metrics.jsonl that has `name`, read without the package, exact to the bit."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]
