"""Distillation: teachers against full passes, the gradient against that of the KL by enumeration, stops, and bad input."""

import dataclasses
import functools
import itertools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm5_jax as glm5
from glm5_jax.convert.tokenizer import load_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, merge, split
from glm5_jax.rl.config import DISTILL_RECIPES, RlConfig, RolloutConfig, RowConfig
from glm5_jax.rl.distill import distill
from glm5_jax.rl.objectives import IcePop, Tokens, distillation_advantage
from glm5_jax.rl.policy import policy_loss
from glm5_jax.rl.teachers import Teachers, assign, load_teacher
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import CheckpointConfig, Checkpoints
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import InitConfig
from glm5_jax.train.step import LossConfig, flat
from helpers_train import compile_cache, lively_model, log_softmax, recorded, step_config

CHARS = "chars:0123456789=+"
TASKS = ("reverse:2", "copy:2")
TEMPERATURE = 1.3
MODEL = step_config(vocab_size=16, num_hidden_layers=1, num_nextn_predict_layers=0, attention="sparse")  # selects 4 keys
GRAPHDEF = split(abstract(MODEL))[0]


def make_config(**settings) -> RlConfig:
    return RlConfig(
        **dict(
            model=MODEL,
            data=RowConfig(tokenizer=CHARS, seq_len=8),
            rollout=RolloutConfig(TASKS, prompts=8, group=1, max_new_tokens=3, temperature=TEMPERATURE, slots=8),
            optimizer=OptimizerConfig(name="adamw"),
            lr=LearningRate("constant", peak=1e-2, warmup_steps=0),
            loss=LossConfig(mtp_steps=0, balance_weight=0.0),
            checkpoint=CheckpointConfig(every=2),
            micro_rows=4,
            steps=4,
            eval_every=100,
            eval_prompts=4,
        )
        | settings
    )  # fmt: skip


def save_step(folder: pathlib.Path, step: int, model) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=9))
    checkpoints.save(step, {"params": split(model)[1], "step": jnp.int32(step)}, {"ordinal": 0}, wait=True)
    checkpoints.close()


@functools.cache
def network(seed: int):
    return lively_model(MODEL, seed)


def write_run(folder: pathlib.Path, model, tokenizer: str = CHARS) -> None:
    """A run as training leaves it, at step 7."""
    runs.write_config(folder, make_config(model=model.cfg, data=RowConfig(tokenizer, 7)))
    save_step(folder, 7, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs `reverser` and `copier`, networks 1 and 2, and those that do not fit; relative names, as a user gives them."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "reverser", network(1))
    write_run(folder / "copier", network(2))
    write_run(folder / "other_tokens", network(1), "chars:0123456789+=")
    write_run(folder / "wider", lively_model(dataclasses.replace(MODEL, vocab_size=20)))
    write_run(folder / "shorter", lively_model(dataclasses.replace(MODEL, max_position_embeddings=7)))
    (folder / "nothing").mkdir()
    return folder


def teachers_of(folder, **runs_of) -> tuple[str, ...]:
    return tuple(f"{name}:2={folder / run}" for name, run in runs_of.items())


@jax.jit
def forward(params, tokens):
    return merge(GRAPHDEF, params)(tokens).logits


def log_probs_of(seed: int, tokens: list[int]) -> np.ndarray:
    """float64 [n]: log-probability of each token but the first by a pass over a row of its own; 0 for the first."""
    row = np.zeros((1, 8), np.int32)  # what follows is not seen by what stands before
    row[0, : len(tokens)] = tokens
    log_p = log_softmax(np.asarray(forward(split(network(seed))[1], row))[0] / TEMPERATURE)
    return np.array([0.0, *(log_p[i, token] for i, token in enumerate(tokens[1:]))])


# --- teachers --------------------------------------------------------------------------------------------------------


def test_each_row_is_scored_by_the_teacher_of_its_task(folder, tmp_path):
    rng = np.random.default_rng(0)
    tasks = [TASKS[i] for i in (0, 1, 1, 0, 1, 1, 1, 0, 1)]  # 3 and 6 rows in micro-batches of 4
    batch = {name: np.zeros((12, 8), np.int32) for name in ("tokens", "positions", "segment_ids")}
    batch["loss_mask"] = np.zeros((12, 8), bool)
    lengths = rng.integers(4, 9, len(tasks))
    for row, n in enumerate(lengths):
        batch["tokens"][row, :n], batch["segment_ids"][row, :n] = rng.integers(0, 13, n), 1
        batch["positions"][row, :n], batch["loss_mask"][row, 3:n] = np.arange(n), True
    config = make_config(teachers=teachers_of(folder, copy="copier", reverse="reverser"))
    scores = Teachers(config, load_tokenizer(CHARS), TASKS, tmp_path).score(tasks, batch)
    assert scores.dtype == np.float32 and not scores[~batch["loss_mask"]].any() and not scores[9:].any()
    for row, (name, n) in enumerate(zip(tasks, lengths)):
        wanted = log_probs_of(1 + TASKS.index(name), batch["tokens"][row, :n].tolist())
        np.testing.assert_allclose(scores[row, 3:n], wanted[3:], rtol=2e-5, atol=2e-5)
        assert abs(wanted[3:] - log_probs_of(2 - TASKS.index(name), batch["tokens"][row, :n].tolist())[3:]).max() > 1e-3


def test_one_teacher_may_have_several_tasks_and_names_are_those_of_tasks(folder, tmp_path):
    assert assign(("reverse:02=a=b", "copy:2=a=b"), TASKS) == dict.fromkeys(TASKS, "a=b")
    config = make_config(teachers=teachers_of(folder, reverse="copier", copy="copier"))
    Teachers(config, load_tokenizer(CHARS), TASKS, tmp_path)
    assert json.loads((tmp_path / "teachers.json").read_text()) == {str(folder / "copier"): 7}


def test_a_hugging_face_directory_and_another_width(tmp_path):
    cfg = dataclasses.replace(MODEL, vocab_size=260, hidden_size=24)
    teacher = lively_model(cfg)
    glm5.save(teacher, tmp_path / "hf")
    config = make_config(model=dataclasses.replace(MODEL, vocab_size=260), data=RowConfig("bytes", 8))
    loaded = load_teacher(str(tmp_path / "hf"), config, load_tokenizer("bytes"))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, jax.device_get(split(teacher)[1]))
    with pytest.raises(UserError, match="another tokenizer"):
        load_teacher(str(tmp_path / "hf"), config, load_tokenizer(CHARS))


# --- the gradient ----------------------------------------------------------------------------------------------------


ANSWERS = np.array(list(itertools.product(range(16), repeat=2)), np.int32)  # all answers of two tokens
ROWS = np.concatenate([np.tile(np.int32([3, 5]), (256, 1)), ANSWERS], axis=1)


def enumerated(log_mu, teacher) -> dict:
    """The batch of all answers, each weighted by its probability under the policy that sampled: sums are expectations."""
    place = lambda x: np.pad(np.asarray(x, np.float32), ((0, 0), (2, 0)))  # noqa: E731
    weight = np.repeat(np.exp(log_mu.sum(1, keepdims=True)), 2, axis=1)
    batch = {"tokens": ROWS, "segment_ids": np.ones_like(ROWS), "positions": np.tile(np.arange(4, dtype=np.int32), (256, 1))}
    garbage = np.full((256, 2), 7.0)  # the advantage of the group: distillation does not read it
    return batch | {
        "loss_mask": place(np.ones((256, 2))) > 0, "rollout": place(log_mu), "weight": place(weight),
        "teacher": place(teacher), "advantage": place(garbage),
    }  # fmt: skip


def rows_log_p(params) -> jax.Array:
    """[256,2,16]: distributions of the two answer tokens, by the definition."""
    logits = merge(GRAPHDEF, params)(jnp.asarray(ROWS)).logits
    return jax.nn.log_softmax(logits[:, 1:3] / TEMPERATURE, axis=-1)


def of_answers(log_p) -> np.ndarray:
    """[256,2]: those of the tokens that were drawn."""
    return np.take_along_axis(np.asarray(log_p), ANSWERS[:, :, None], axis=2)[..., 0]


@jax.jit
def gradient(params, batch):
    """(metrics, flat dict of gradients) of the policy's loss."""

    def loss(params):
        model = merge(GRAPHDEF, params)
        hidden = model.trunk(batch["tokens"], batch["positions"], batch["segment_ids"])[0]
        return policy_loss(IcePop(), TEMPERATURE, 1024)(model, hidden, batch)

    grads, metrics = jax.grad(loss, has_aux=True)(params)
    return metrics, flat(grads)


@pytest.fixture(scope="module")
def policies():
    """(parameters of the student, log-probabilities [256,2,16] of the student and of another network)."""
    params, other = split(network(0))[1], split(network(1))[1]
    run = jax.jit(rows_log_p)
    return params, run(params), run(other)


def test_the_expected_gradient_is_that_of_the_kl_given_the_tokens_before(policies):
    params, mine, theirs = policies
    metrics, grads = gradient(params, enumerated(of_answers(mine), of_answers(theirs)))

    @jax.jit
    @jax.grad
    def wanted(params):
        log_p = rows_log_p(params)
        kl = jnp.sum(jnp.exp(log_p) * (log_p - theirs), axis=-1)
        prefix = jnp.exp(of_answers(mine)[:, 0])  # a constant: how a token changes the KL of later ones is left out
        return kl[0, 0] + jnp.sum(prefix[::16] * kl[::16, 1])

    wanted = flat(wanted(params))
    scale = max(float(jnp.abs(g).max()) for g in wanted.values())
    assert scale > 1e-2 and metrics["popped"] == metrics["clipped_low"] == metrics["clipped_high"] == 0
    for path, g in wanted.items():
        np.testing.assert_allclose(grads[path], g, rtol=1e-3, atol=2e-5 * scale, err_msg=str(path))


def test_a_student_that_is_its_own_teacher_has_no_gradient(policies, folder, tmp_path):
    """Exactly none where the two log-probabilities are the same bits; of the teachers' own program they differ by rounding."""
    params, mine, theirs = policies
    batch = enumerated(of_answers(mine), of_answers(theirs))
    scale = max(float(jnp.abs(g).max()) for g in gradient(params, batch)[1].values())
    write_run(tmp_path / "self", network(0))
    config = make_config(teachers=teachers_of(tmp_path, reverse="self", copy="self"))
    own = Teachers(config, load_tokenizer(CHARS), TASKS, tmp_path).score([TASKS[0]] * 256, batch)
    grads = gradient(params, batch | {"teacher": own})[1]
    assert all(float(jnp.abs(g).max()) < 1e-5 * scale for g in grads.values())
    logp = jnp.asarray(of_answers(mine))
    tokens = Tokens(None, logp, distillation_advantage(logp, logp, logp < 0), logp < 0, jnp.ones_like(logp))
    assert not jax.grad(lambda logp: IcePop().loss(logp, tokens)[0])(logp).any()


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_by_its_samples_and_to_the_bit_after_a_stop(folder, tmp_path):
    """Killed after step 2 of 4, while the teacher's run goes on: what was chosen at the start stays the teacher."""
    for name in ("reverser", "copier"):
        shutil.copytree(folder / name, tmp_path / name)
    teachers = teachers_of(tmp_path, reverse="reverser", copy="copier")
    config = make_config(teachers=teachers, init=InitConfig(str(tmp_path / "copier")))
    with compile_cache(tmp_path / "cache"):
        whole = distill(config, tmp_path / "whole")
        shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
        shutil.rmtree(tmp_path / "stopped/checkpoints/4")
        save_step(tmp_path / "copier", 8, network(3))
        resumed = distill(config, tmp_path / "stopped")
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    names = ("loss", "teacher_k1", *(f"teacher_k1/{task}" for task in TASKS))
    assert all(len(recorded(tmp_path / "whole", n)) == 4 for n in names)
    assert all(recorded(tmp_path / "whole", n) == recorded(tmp_path / "stopped", n) for n in names)
    assert {"reward", "eval_greedy/reverse:2", "eval_sampled_exact/copy:2"} <= set(last_line(tmp_path / "whole"))
    before = flat(split(network(2))[1])
    assert any((np.asarray(value) != before[path]).any() for path, value in flat(whole.params).items())

    tokenizer, gaps = load_tokenizer(CHARS), {task: [] for task in TASKS}
    for line in (tmp_path / "whole/samples/1.jsonl").read_text().splitlines():
        sample = json.loads(line)
        prompt = tokenizer.encode(sample["prompt"]).tolist()
        wanted = log_probs_of(1 + TASKS.index(sample["task"]), prompt + sample["tokens"])[len(prompt) :]
        gaps[sample["task"]] += list(np.array(sample["logprobs"]) - wanted)
    expected = [*gaps[TASKS[0]], *gaps[TASKS[1]]], *gaps.values()
    for name, gap in zip(names[1:], expected):
        assert recorded(tmp_path / "whole", name)[0] == (1, pytest.approx(np.mean(gap), abs=2e-5))


def last_line(run_dir: pathlib.Path) -> dict:
    """All metrics of the last step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return dict(item for line in lines if line["step"] == lines[-1]["step"] for item in line.items())


@pytest.mark.parametrize("recipe", DISTILL_RECIPES.values(), ids=DISTILL_RECIPES)
def test_recipes_have_a_teacher_for_each_task_and_groups_of_one(recipe):
    config = recipe()
    assign(config.teachers, config.rollout.tasks)
    assert config.rollout.group == 1 and config.rollout.prompts >= 256 and config.objective == "icepop"


@pytest.mark.parametrize(
    ("runs_of", "message"),
    [
        ({}, "teachers: none named"),
        ({"reverse": "reverser"}, "none for copy:2; name one, as in copy:2=RUN"),
        ({"reverse": "reverser", "copy": "copier", "digit_sum": "copier"}, "digit_sum:2: no task of rollout.tasks"),
        ({"reverse": "reverser", "cpoy": "copier"}, "cpoy:2: no such task"),
        ({"reverse": "reverser", "copy": "missing"}, "missing: no such directory"),
        ({"reverse": "reverser", "copy": "nothing"}, "nothing"),
        ({"reverse": "reverser", "copy": "other_tokens"}, "other_tokens: has another tokenizer"),
        ({"reverse": "reverser", "copy": "wider"}, "wider: has a vocabulary of 20, model.vocab_size=16"),
        ({"reverse": "reverser", "copy": "shorter"}, "shorter: has a position limit of 7, data.seq_len=8"),
    ],
)
def test_bad_teachers_are_one_line_and_leave_nothing(folder, tmp_path, runs_of, message):
    with pytest.raises(UserError, match=message) as error:
        distill(make_config(teachers=teachers_of(folder, **runs_of)), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_second_teacher_of_a_task_and_bad_settings():
    with pytest.raises(UserError, match="copy:2 has two"):
        assign(("copy:2=a", "copy:2=b"), TASKS)
    for entry in ("copy:2", "=run", "copy:2="):
        with pytest.raises(UserError, match=f"teachers={entry}: must be TASK=RUN"):
            make_config(teachers=(entry,))
    with pytest.raises(UserError, match="rollout.filter=True"):
        make_config(teachers=("copy:2=a",), rollout=RolloutConfig(TASKS, prompts=8, group=1, filter=True))
