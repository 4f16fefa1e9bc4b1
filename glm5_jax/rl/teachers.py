"""Teachers of distillation: earlier checkpoints, each of which judges the answers to the prompts of its own tasks (Eq. 2)."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.compiling import jit
from glm5_jax.config import check, override
from glm5_jax.convert.hf import load_hf
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.layers.mtp import shift
from glm5_jax.model import abstract, merge, split
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.tasks import task
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import restore_params
from glm5_jax.train.loss import token_log_probs

STEPS = "teachers.json"  # beside a run's tokenizer: which checkpoint of each teacher it learns from


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A checkpoint. params: nested dict of numpy arrays. step: of its run; None for a Hugging Face directory."""

    graphdef: nnx.GraphDef
    params: dict
    step: int | None


class Teachers:
    """The teachers that `config.teachers` names. Their parameters wait on the host; the device holds one teacher at a time.

    Args of the constructor:
      tokenizer: of the student. tasks: names of all tasks that are asked. data: the folder `data` of the run; the checkpoints
        that it names are taken, so that a teacher's run may go on while this one is stopped.
    Raises:
      UserError: a task without a teacher, a teacher without a task, no checkpoint there, another tokenizer or vocabulary.
    """

    def __init__(self, config: RlConfig, tokenizer, tasks: Sequence[str], data: pathlib.Path):
        self._config, self._run_of = config, assign(config.teachers, tasks)
        pinned = json.loads((data / STEPS).read_text()) if (data / STEPS).exists() else {}
        self._teachers = {
            run: load_teacher(run, config, tokenizer, pinned.get(run)) for run in dict.fromkeys(self._run_of.values())
        }
        (data / STEPS).write_text(json.dumps({run: teacher.step for run, teacher in self._teachers.items()}))

    def score(self, tasks: Sequence[str], batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32 [rows,T]: log-probability of every sampled token under the teacher of its row's task, 0 elsewhere.

        At the temperature of sampling. Teacher by teacher, in micro-batches of one size: networks that are alike share one
        compiled program.

        Args:
          tasks: of the first rows; the others are padding. batch: of `rollout.assemble`.
        """
        size, logps = self._config.micro_rows, np.zeros(batch["tokens"].shape, np.float32)
        for run, teacher in self._teachers.items():
            mine = np.array([row for row, name in enumerate(tasks) if self._run_of[name] == run], np.int64)
            params = jax.device_put(teacher.params) if len(mine) else None
            for start in range(0, len(mine), size):
                rows = mine[start : start + size]
                full = np.resize(rows, size)  # the last ones are filled up with repetitions
                inputs = (batch[name][full] for name in ("tokens", "positions", "segment_ids"))
                temperature, chunk = self._config.rollout.temperature, self._config.loss.chunk
                logps[rows] = _log_probs(teacher.graphdef, params, *inputs, temperature, chunk)[: len(rows)]
        return np.where(batch["loss_mask"], logps, 0)


def assign(teachers: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """{task: run} of entries TASK=RUN, for exactly the tasks that are asked."""
    run_of = {}
    for entry in teachers:
        name, _, run = entry.partition("=")
        name = task(name).name
        check(name not in run_of, f"teachers: {name} has two; exactly one for each task")
        run_of[name] = run
    for name in tasks:
        check(name in run_of, f"teachers: none for {name}; name one, as in {name}=RUN")
    foreign = sorted(set(run_of) - set(tasks))
    check(not foreign, f"teachers: {', '.join(foreign)}: no task of rollout.tasks={', '.join(tasks)}")
    return run_of


def load_teacher(run: str, config: RlConfig, tokenizer, step: int | None = None) -> Teacher:
    """The teacher of a run or Hugging Face directory. step: None = the newest good checkpoint.

    Its network is its own (attention, K, width); it computes in the student's dtype.
    """
    path = pathlib.Path(run)
    check(path.is_dir(), f"teachers: {run}: no such directory")
    if (path / "checkpoints").is_dir():
        theirs, its_tokenizer = runs.read_config(path), runs.run_tokenizer(path)
        model = abstract(override(theirs.model, dtype=config.model.dtype), runs.network_class(theirs))
        graphdef, wanted = split(model)
        step, params = restore_params(path, wanted, step=step)
    else:
        file = path / "tokenizer.json"
        its_tokenizer = load_tokenizer(str(file) if file.is_file() else "bytes")
        model = load_hf(path, config.model.dtype)
        graphdef, params = split(model)
    same = its_tokenizer.fingerprint == tokenizer.fingerprint
    check(same, f"teachers: {run}: has another tokenizer than data.tokenizer={config.data.tokenizer}")
    ids, mine = model.cfg.vocab_size, config.model.vocab_size
    check(ids == mine, f"teachers: {run}: has a vocabulary of {ids}, model.vocab_size={mine}")
    limit = model.cfg.max_position_embeddings
    check(config.data.seq_len <= limit, f"teachers: {run}: has a position limit of {limit}, data.seq_len={config.data.seq_len}")
    return Teacher(graphdef, jax.device_get(params), step)


def reverse_kl(tasks: Sequence[str], batch: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of a step: `teacher_k1`, mean over sampled tokens of log mu - log pi_teacher; `teacher_k1/TASK` where several.

    mu, recorded in sampling, is the student, so that this estimates KL(student || teacher) without bias.

    Args:
      tasks: of the first rows. batch: of `rollout.assemble`, with "teacher".
    """
    mask = batch["loss_mask"]
    k1, counts = np.where(mask, batch["rollout"] - batch["teacher"], 0).sum(1, dtype=np.float64), mask.sum(1)
    line = {"teacher_k1": float(k1.sum() / max(counts.sum(), 1))}
    names = sorted(set(tasks))
    for name in names if len(names) > 1 else ():
        rows = [row for row, its_task in enumerate(tasks) if its_task == name]
        line[f"teacher_k1/{name}"] = float(k1[rows].sum() / max(counts[rows].sum(), 1))
    return line


@functools.partial(jit, static_argnums=(0, 5, 6))
def _log_probs(graphdef: nnx.GraphDef, params, tokens, positions, segments, temperature: float, chunk: int) -> jax.Array:
    """float32 [b,T]: log-probability of each token given those before it, 0 for the first."""
    model = merge(graphdef, params)
    hidden, _, _ = model.trunk(tokens, positions, segments)
    logps, _ = token_log_probs(hidden, model.output_matrix(), shift(tokens, 1), temperature, chunk)
    return jnp.pad(logps[:, :-1], ((0, 0), (1, 0)))
