"""The stages of training: what a run takes over from another, what stays frozen, row lengths that rise within a run."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import optax
import pytest

import glm5_jax
from glm5_jax.config import tiny
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, split
from glm5_jax.train import inherit, loop
from glm5_jax.train import run_dir as runs
from glm5_jax.train.checkpoint import CheckpointConfig, restore_params, restore_state
from glm5_jax.train.data import load_corpus
from glm5_jax.train.loop import Run, Stopped, train
from glm5_jax.train.optimizer import OptimizerConfig
from glm5_jax.train.schedule import LearningRate
from glm5_jax.train.stages import RECIPES, InitConfig, TrainConfig
from glm5_jax.train.step import LossConfig, flat
from helpers_train import compile_cache, flat_specs, load_run_config, recorded, write_corpus, write_run_config

LENGTHS = ((0, 16), (256, 32), (512, 64))  # 128 tokens a step: rows of 16 for 2 steps, of 32 for 2, then of 64
INDEXER, OTHERS = ("indexer",), ("trunk", "mtp")
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpus/ and a cache of compiled programs."""
    place = tmp_path_factory.mktemp("stages")
    write_run_config(place / "mine.py", write_corpus(place / "corpus"))
    with compile_cache(place / "compiled"):
        yield place


@pytest.fixture(scope="module")
def config(place):
    """A MoE layer and MTP, rows of 32 tokens; an indexer that selects 8 keys; every step is kept."""
    config = load_run_config(place / "mine.py")
    model = dict(
        num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=1, index_topk=8, initializer_range=0.3
    )  # fmt: skip
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **model), loss=LossConfig(mtp_steps=1), steps=STEPS,
        optimizer=OptimizerConfig(name="adamw"), lr=LearningRate("constant", 2**-7, warmup_steps=0),
        batch_rows=((0, 2),), eval_every=100, checkpoint=CheckpointConfig(every=1, keep_every=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(place, config):
    """A finished run, the source of the others."""
    train(config, place / "base")
    return place / "base"


def stage(config, source, **changes) -> TrainConfig:
    return dataclasses.replace(config, **{"init": InitConfig(run=str(source))} | changes)


def warmup(config, source) -> TrainConfig:
    """The router-bias rate is left above 0: what is frozen stays all the same."""
    lr, loss = LearningRate("linear", 0.02, 0.001, 0), dataclasses.replace(config.loss, index_weight=1.0)
    return stage(config, source, freeze=OTHERS, loss=loss, lr=lr, steps=12)


def sparse(config, source, weight: float, freeze=()) -> TrainConfig:
    model = dataclasses.replace(config.model, attention="sparse")
    loss = dataclasses.replace(config.loss, index_weight=weight)
    return stage(config, source, model=model, loss=loss, freeze=freeze, steps=1)


def params_at(run, step: int) -> dict:
    """Flat dict of the parameters of a checkpoint."""
    template = split(abstract(runs.read_config(run).model, glm5_jax.Glm5))[1]
    return jax.device_get(flat(restore_params(run, template, step=step)[1]))


def same(a: dict, b: dict) -> set:
    """Paths at which two flat dicts are equal to the bit."""
    assert a.keys() == b.keys()
    return {path for path in a if np.asarray(a[path]).tobytes() == np.asarray(b[path]).tobytes()}


def parts(config, *names) -> set:
    return {path for path, spec in flat_specs(config.model).items() if spec.part in names}


def first_params(config) -> dict:
    """Flat parameters before step 0, as the loop makes them."""
    return flat(inherit.first_state(config, optax.identity()).params)


# DSA warm-up and sparse adaptation


@pytest.fixture(scope="module")
def warmed(place, config, base):
    """The run of a warm-up stage."""
    train(warmup(config, base), place / "warm")
    return place / "warm"


@pytest.mark.smoke
def test_a_warm_up_changes_every_parameter_of_the_indexer_and_no_bit_of_the_others(config, base, warmed):
    assert same(params_at(base, STEPS), params_at(warmed, 12)) == parts(config, *OTHERS)
    indexer = parts(config, *INDEXER)
    assert {path[0] for path in indexer} == {"groups", "mtp"} and len(indexer) == 2 * 5


def test_what_is_frozen_has_no_optimizer_memory_on_disk(config, warmed):
    """Two moments of AdamW for each number of the indexer, and counters."""
    corpus = load_corpus(config.data, warmed / "data")
    _, state = restore_state(warmed, Run(warmup(config, warmed), warmed, corpus).template)
    sizes = {p: v.size for p, v in flat(state.params).items()}
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(sizes[p] for p in parts(config, *INDEXER)) > 0


def test_a_warm_up_records_the_norms_of_the_indexer_only_and_its_loss_falls(base, warmed):
    names = {name for line in (warmed / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"grad_norm_indexer", "update_norm_indexer", "index_kl"} <= names and not {"grad_norm", "update_norm"} & names
    kl = [value for _, value in recorded(warmed, "index_kl")]
    assert 0 < np.mean(kl[-3:]) < np.mean(kl[:3])
    scores = [recorded(run, "bits_per_byte")[-1][1] for run in (base, warmed)]
    assert scores[0] == scores[1]  # dense attention: the network computes what it did


def test_sparse_adaptation_trains_everything_and_the_weight_of_the_kl_does_not_reach_the_network(place, config, base):
    for weight in (1.0, 100.0):
        train(sparse(config, base, weight), place / f"sparse{weight:g}")
    small, large = (params_at(place / f"sparse{weight}", 1) for weight in (1, 100))
    assert same(params_at(base, STEPS), small) == set()
    assert same(small, large) >= parts(config, *OTHERS)
    for name in ("grad_norm", "update_norm", "ce"):
        assert recorded(place / "sparse1", name)[0] == recorded(place / "sparse100", name)[0]
    norms = [dict(recorded(place / f"sparse{weight}", "grad_norm_indexer"))[1] for weight in (1, 100)]
    assert norms[1] == pytest.approx(100 * norms[0], rel=1e-5)


def test_a_frozen_indexer_selects_and_does_not_move(place, config, base):
    train(sparse(config, base, 0.0, freeze=INDEXER), place / "frozen")
    assert same(params_at(base, STEPS), params_at(place / "frozen", 1)) == parts(config, *INDEXER)
    assert recorded(place / "frozen", "grad_norm")[0] == recorded(place / "sparse1", "grad_norm")[0]


# Starting from another run


def test_step_0_holds_the_parameters_of_the_source_to_the_bit(config, base, warmed):
    everything = parts(config, *INDEXER, *OTHERS)
    assert same(params_at(base, STEPS), params_at(warmed, 0)) == everything
    earlier = first_params(stage(config, base, init=InitConfig(str(base), step=1)))
    assert same(params_at(base, 1), earlier) == everything != same(params_at(base, STEPS), earlier)


def test_a_run_outlives_its_source(monkeypatch, config, base, warmed, tmp_path):
    """Killed before its first own checkpoint; the source is gone when it goes on, and the losses are the same."""
    shutil.copytree(base, tmp_path / "source")
    changed = dataclasses.replace(warmup(config, tmp_path / "source"), checkpoint=CheckpointConfig(every=100))

    class Killed(Exception):
        pass

    def kill(self, pending):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_report", kill)
        with pytest.raises(Killed):
            train(changed, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["0"]
    shutil.rmtree(tmp_path / "source")
    train(changed, tmp_path / "run")
    assert recorded(tmp_path / "run") == recorded(warmed)


def test_kept_moments_go_on_as_if_the_run_had_not_ended_under_a_schedule_of_its_own(monkeypatch, config, base, tmp_path):
    """On the second batch, the only step of the new run is the second step of its source, moments included.

    At step 0, and there only, the rate of the new run is that of its source.
    """
    original = Run._next_batch

    def second_batch(self, step):
        next(self.data)
        return original(self, step)

    monkeypatch.setattr(Run, "_next_batch", second_batch)
    init, falling = InitConfig(str(base), step=1, optimizer="keep"), LearningRate("linear", 2**-7, 2**-8, 0)
    train(dataclasses.replace(config, init=init, lr=falling, steps=1), tmp_path / "kept")
    kept = params_at(tmp_path / "kept", 1)
    assert same(params_at(base, 2), kept) == set(kept)
    assert same(params_at(base, 1), kept) == parts(config, *INDEXER)


def test_the_tokenizer_of_the_source_is_used_and_not_trained_again(config, tmp_path):
    data = dataclasses.replace(config.data, tokenizer="bpe:286")
    source, other = tmp_path / "source", tmp_path / "other"
    runs.write_config(source, dataclasses.replace(config, data=data))
    load_corpus(data, source / "data")
    (source / "checkpoints").mkdir()
    other.mkdir()
    for i in range(8):
        (other / f"{i}.txt").write_text("zqzqzq zqzq xkxkxk zqxk xkzq " * 12)

    def corpus(tokenizer):
        data = dataclasses.replace(config.data, sources=(str(other),), tokenizer=tokenizer)
        changed = stage(config, source, data=data)
        return loop._load_corpus(changed, tmp_path / "data", True, inherit.open_source(changed, tmp_path / "run"))

    tokens = corpus("bpe:286").train[0][0]
    mine, theirs = ((folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "data", source / "data"))
    assert mine == theirs
    assert len(tokens) > 100  # words that its training text does not hold are spelled out
    assert (corpus(str(source / "data" / "tokenizer.json")).train[0][0] == tokens).all()
    for name in ("bytes", "bpe:287"):
        with pytest.raises(UserError, match=rf"^data\.tokenizer={name}: \S+source was trained with bpe:286$"):
            corpus(name)


def test_a_hugging_face_directory_is_a_source(config, base, tmp_path):
    glm5_jax.save(glm5_jax.load(base), tmp_path / "hf")
    changed = stage(config, tmp_path / "hf")
    assert inherit.open_source(changed, tmp_path / "run").model.hidden_size == 32
    assert same(params_at(base, STEPS), first_params(changed)) == parts(config, *INDEXER, *OTHERS)
    kept = stage(config, base, init=InitConfig(str(tmp_path / "hf"), optimizer="keep"))
    with pytest.raises(UserError, match=r"^init\.optimizer=keep: \S+hf is no run, it has no optimizer state$"):
        inherit.open_source(kept, tmp_path / "run")
    for content in (None, "{", "[]", '{"model_type": "other"}'):
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        if content:
            (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"^(init\.run=\S+empty: neither|model_type='other'|config\.json).*$"):
            inherit.open_source(stage(config, folder), tmp_path / "run")


@pytest.mark.parametrize(
    "model",
    [dict(rope_theta=5e5), dict(index_topk=5), dict(attention="sparse"), dict(max_position_embeddings=50)],
)
def test_what_a_stage_may_change(config, base, tmp_path, model):
    changed = stage(config, base, model=dataclasses.replace(config.model, **model))
    assert inherit.open_source(changed, tmp_path / "run").path == base


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model=dict(hidden_size=64, v_head_dim=4)), r"model\.hidden_size=64: \S+base has 32"),
        (dict(model=dict(num_experts_per_tok=1)), r"model\.num_experts_per_tok=1: \S+base has 2"),
        (dict(init=dict(run="/nowhere")), r"init\.run=/nowhere: no such directory"),
        (dict(init=dict(step=9)), r"\S+checkpoints: no checkpoint of step 9; there is 1, 2, 3"),
        (
            dict(init=dict(optimizer="keep"), loss=dict(index_weight=1.0), freeze=OTHERS),
            r"init\.optimizer=keep: \S+base trained with freeze=\('indexer',\), this run has freeze=.*; use reset",
        ),
        (
            dict(init=dict(optimizer="keep"), optimizer=dict(name="muon")),
            r"init\.optimizer=keep: \S+base trained with optimizer\.name=adamw, this run has muon; use reset",
        ),
    ],
)  # fmt: skip
def test_a_source_that_does_not_fit_is_refused_in_one_line(config, base, tmp_path, changes, message):
    start = stage(config, base)
    values = {n: dataclasses.replace(getattr(start, n), **v) if isinstance(v, dict) else v for n, v in changes.items()}
    with pytest.raises(UserError, match=rf"^{message}$"):
        train(dataclasses.replace(start, **values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_cannot_start_over_from_itself(config, base):
    with pytest.raises(UserError, match=r"^init\.run=\S+base: is the run directory itself; choose another --run-dir$"):
        train(stage(config, base), base, resume=False)
    assert (base / "checkpoints" / "3").is_dir()


def test_a_damaged_source_is_passed_over_or_refused(config, base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "source")
    victim = next(p for p in (tmp_path / "source" / "checkpoints" / "3" / "arrays" / "params").rglob("*") if p.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    found = first_params(stage(config, tmp_path / "source"))
    assert same(found, params_at(base, 2)) == set(found)
    said = capsys.readouterr().out
    assert "checkpoint of step 3 is damaged" in said and f"starting from {tmp_path / 'source'}, step 2" in said
    with pytest.raises(UserError, match=r"checkpoints/3: damaged \(.* has changed\)$"):
        first_params(stage(config, base, init=InitConfig(str(tmp_path / "source"), step=3)))


# Row lengths that rise


@pytest.fixture(scope="module")
def rising(place, config):
    """A run whose rows grow from 16 to 32 to 64 tokens: (config, shapes of its batches, shapes traced, the run)."""
    shapes, traced, next_batch, make_step = [], [], Run._next_batch, loop.make_step
    data = dataclasses.replace(config.data, seq_len=64, packing="best_fit")
    model, loss = dataclasses.replace(config.model, num_nextn_predict_layers=0), LossConfig(mtp_steps=0)
    long = dataclasses.replace(config, model=model, loss=loss, data=data, lengths=LENGTHS, micro_rows=1, steps=7)

    def watched(self, step):
        batch = next_batch(self, step)
        shapes.append(batch[1]["tokens"].shape)
        return batch

    def counted(*arguments):
        step = make_step(*arguments)

        def call(state, batch):
            traced.append(batch["tokens"].shape)
            return step(state, batch)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_next_batch", watched)
        patch.setattr(loop, "make_step", counted)
        run = Run(long, place / "rising", load_corpus(data, place / "rising" / "data"))
        run.train()
    return long, shapes, traced, run


def test_rows_grow_and_the_tokens_of_a_step_stay_with_one_program_per_length(place, rising):
    _, shapes, traced, run = rising
    assert traced == [(2, 4, 16), (2, 2, 32), (2, 1, 64)]
    assert shapes == [traced[0]] * 2 + [traced[1]] * 2 + [traced[2]] * 3
    assert [n for _, n in recorded(place / "rising", "seq_len")] == [16] * 2 + [32] * 2 + [64] * 3
    assert [n for _, n in recorded(place / "rising", "tokens")] == [128 * step for step in range(1, 8)]
    assert "7 steps of 8 x 16, then 4 x 32, then 2 x 64 tokens, 896 in all" in run.header()


def test_a_run_stopped_in_every_phase_goes_on_bit_for_bit(place, monkeypatch, rising, tmp_path):
    """Stopped inside a length, at the last step of one, and in the last one."""
    config, original = rising[0], Run._next_batch
    for step in (1, 4, 6):

        def stop(self, now, step=step):
            self.signal = 15 if now == step - 1 else None
            return original(self, now)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "_next_batch", stop)
            with pytest.raises(Stopped):
                train(config, tmp_path / "run")
        assert recorded(tmp_path / "run")[-1][0] == step
    train(config, tmp_path / "run")
    for name in ("loss", "seq_len", "bits_per_byte"):
        assert recorded(tmp_path / "run", name) == recorded(place / "rising", name)


def test_each_length_packs_the_corpus_anew_in_an_order_of_its_own(rising):
    config, _, _, run = rising
    texts = {}
    for step, length in ((0, 16), (2, 32), (4, 64)):
        run._open_data(step)
        rows = [row for _ in range(40) for row in next(run.data)["tokens"]]
        assert {len(row) for row in rows} == {length}
        texts[length] = run.corpus.tokenizer.decode(np.concatenate(rows))
    assert len({text[:64] for text in texts.values()}) == 3  # another document comes first


def test_evaluation_is_at_the_last_length(place, rising):
    config, _, _, run = rising
    (score,) = [value for _, value in recorded(place / "rising", "bits_per_byte")]
    state = run.checkpoints.last_good
    assert not math.isnan(score) and state == 7
    params = restore_params(place / "rising", run.template.params)[1]
    rows = loop.held_out_batches(run.corpus, config.data, 1)
    assert loop.bits_per_byte(run.loss_sum, params, rows) == score
    assert next(loop.held_out_batches(run.corpus, config.data, 1))["tokens"].shape == (1, 64)


# Recipes and settings


def test_the_stages_have_the_papers_proportions():
    """Learning rates of paper Appendix A: warm-up 5e-3 -> 2e-4; sparse constant where mid-training ended; 4 to 1 in it."""
    mid, warm, adapt = (RECIPES[name]() for name in ("midtrain", "dsa_warmup", "dsa_sparse"))
    assert (warm.lr.peak, warm.lr.final, warm.lr.warmup_steps) == (5e-3, 2e-4, 0)
    assert adapt.lr.kind == "constant" and adapt.lr.peak == mid.lr.final and mid.lr.peak == 4 * mid.lr.final
    assert (mid.model.attention, warm.model.attention, adapt.model.attention) == ("dense", "dense", "sparse")
    assert (mid.freeze, set(warm.freeze), adapt.freeze) == (("indexer",), set(OTHERS), ())
    assert mid.data.packing == "best_fit" and mid.lengths[-1][1] == mid.data.seq_len
    for config in (mid, warm, adapt):
        assert config.data.seq_len > 4 * config.model.index_topk
        assert config.mtp_weight == ((0, 0.1),) and config.bias_rate == ((0, 0.0),)
        assert len(config.plan().phases(config.steps)) == (3 if config == mid else 1)


def test_the_stages_chain_and_each_model_fits_the_one_before(tmp_path):
    previous, path = RECIPES["tiny"](), tmp_path / "tiny"
    for name in ("midtrain", "dsa_warmup", "dsa_sparse"):
        config = RECIPES[name]()
        assert config.init.run == f"runs/{path.name}"
        runs.write_config(path, previous)
        (path / "checkpoints").mkdir()
        here = dataclasses.replace(config, init=InitConfig(run=str(path)))
        assert inherit.open_source(here, tmp_path / name).train == previous
        previous, path = config, tmp_path / name
    model = dataclasses.replace(here.model, index_topk_pattern="FSFS")
    with pytest.raises(UserError, match=r"^model\.indexer_types: the layers of \S+ that own an indexer are others$"):
        inherit.open_source(dataclasses.replace(here, model=model), tmp_path / "run")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(freeze=()), r"freeze=\(\): the indexer has nothing to learn from; freeze it, or set loss\.index_weight .*"),
        (
            dict(loss=LossConfig(index_weight=0.5)),
            r"loss\.index_weight=0\.5: the indexer is frozen \(freeze=\('indexer',\)\); set it to 0",
        ),
        (dict(lengths=((0, 128),)), r"lengths=.*: must rise, the last one to data\.seq_len=256"),
        (dict(lengths=((0, 256), (5, 256))), r"lengths=.*: must rise, .*"),
        (dict(lengths=((5, 256),)), r"lengths=.*: pairs \(tokens, value\), .* the tokens rising from 0"),
        (dict(model=tiny(dtype="float64")), r"model\.dtype=float64: JAX would compute in float32; set JAX_ENABLE_X64=1"),
        (dict(lengths=((0, 100), (5, 256))), r"lengths=100: must be an integer .* micro_rows=8 x data\.seq_len=256"),
        (dict(lengths=((0, 1), (5, 256))), r"lengths=1: must be an integer of at least 2 .*"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(changes, message):
    with pytest.raises(UserError, match=rf"^{message}$"):
        dataclasses.replace(RECIPES["tiny"](), **changes)


@pytest.mark.parametrize("bad", [dict(step=0), dict(step=3), dict(optimizer="keep")])
def test_an_init_that_names_no_run_is_refused(bad):
    with pytest.raises(UserError, match=r"^init\.step=[^\n]*: init\.run names no run to take them from$"):
        InitConfig(**bad)


def test_sparse_rows_that_select_every_key_are_noted(config, place, base):
    note = "note: every key is selected and the indexer decides nothing: data.seq_len=32, model.index_topk=32"
    for topk, noted in ((32, True), (31, False)):
        changed = sparse(config, base, 1.0)
        changed = dataclasses.replace(changed, model=dataclasses.replace(changed.model, index_topk=topk))
        header = Run(changed, place / "noted", load_corpus(config.data, base / "data")).header()
        assert (note in header) == noted
