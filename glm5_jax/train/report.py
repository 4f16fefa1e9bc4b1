"""What a finished run tells its user, and `glm5 eval`."""

import dataclasses
import json
import math
import pathlib
import sys
import tempfile

import numpy as np
import rich.progress

from glm5_jax.config import check
from glm5_jax.convert.chat import marked
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, merge, split
from glm5_jax.serve.decode import generate
from glm5_jax.train import run_dir as runs
from glm5_jax.train.data import Corpus, DataConfig, held_out_batches, load_corpus, source_files
from glm5_jax.train.evaluate import bits_per_byte, in_batches, make_loss_sum
from glm5_jax.train.inherit import bring_tokenizer, open_source
from glm5_jax.train.metrics import plot
from glm5_jax.train.sources import parse_source
from glm5_jax.train.stages import RECIPES
from glm5_jax.train.step import LossConfig
from glm5_jax.train.token_cache import tokenised


def final_words(config, run_dir: pathlib.Path, result, recipe: str) -> str:
    """A sampled continuation, the score, where everything lies and what to try next. recipe: CONFIG of the command line."""
    chat = config.data.kind == "chat"
    prompt, new = (answer_held_out if chat else sample_held_out)(config, result)
    curve = run_dir / "loss.png"
    try:
        plot(run_dir, curve)
    except (UserError, OSError) as error:  # no matplotlib, a full disk: the run is done all the same
        curve = error
    commands = [
        *([] if chat else [f'glm5 generate {run_dir} --prompt "def parse(" --temperature 0.7']),
        f"glm5 eval {run_dir} --sources path/to/your/{'conversations.jsonl' if chat else 'code'}",
        *next_trainings(config, run_dir, recipe),
    ]
    return f"""
held-out bits per byte: {result.bits_per_byte:.4f}

--- a held-out {"conversation" if chat else "text"}, continued by the model behind the bar ---
{prompt}▌{new}
---
config       {run_dir / "config.json"}
metrics      {run_dir / "metrics.jsonl"}  (tensorboard --logdir {run_dir})
checkpoints  {run_dir / "checkpoints"}
loss curve   {curve}

next:
""" + "\n".join(f"  {command}" for command in commands)


def next_trainings(config, run_dir: pathlib.Path, recipe: str) -> list[str]:
    """Commands that train next: the stage that starts from a recipe's run, and, after fresh weights, other text."""
    usual = f"runs/{recipe}"
    commands = []
    for name, make in RECIPES.items():
        # Another model than the recipe's would need the same changes in the next stage.
        if make().init.run == usual and config.model == RECIPES[recipe]().model:
            command = "glm5 sft" if make().data.kind == "chat" else f"glm5 train {name}"
            commands.append(command + (f" --init.run {run_dir}" if str(run_dir) != usual else ""))
    own = "glm5 train tiny --run-dir runs/mine --data.sources path/to/your/code"
    return commands if config.init.run else [*commands, own]


def sample_held_out(config, result, prompt_bytes: int = 240, new_tokens: int = 96) -> tuple[str, str]:
    """The start of a function in held-out text, or of a document if there is none, and how the model goes on."""
    tokenizer = result.corpus.tokenizer
    prompt = ""
    for documents in result.corpus.held_out:
        for d in range(len(documents)):
            text = tokenizer.decode(documents[d][:4000])
            start = text.find("\ndef ")
            end = text.find("\n", start + prompt_bytes)
            if start >= 0 and end > 0:
                prompt = text[start + 1 : end + 1]
                break
        if prompt:
            break
    limit = config.model.max_position_embeddings
    if prompt:
        tokens = tokenizer.encode(prompt)
    else:
        document = next(d for d in (*result.corpus.held_out, *result.corpus.train) if len(d))[0]
        tokens = document[: min(prompt_bytes, (len(document) + 1) // 2)]
    tokens = np.asarray(tokens, np.int32)[: (limit + 1) // 2]
    return _continued(config, result, tokens, new_tokens, config.model.eos_token_id)


def answer_held_out(config, result, new_tokens: int = 128) -> tuple[str, str]:
    """The start of a held-out conversation up to its first trained token, and how the model goes on until it stops."""
    held_out = [source.cut(config.data.seq_len) for source in result.corpus.held_out]
    source = next(source for source in (*held_out, *result.corpus.train) if len(source))
    ids = result.corpus.tokenizer.chat_ids
    stops = (*config.model.eos_token_id, ids["<|user|>"], ids["<|observation|>"])
    return _continued(config, result, np.asarray(source[0][: source.firsts[0]], np.int32), new_tokens, stops)


def _continued(config, result, tokens: np.ndarray, new_tokens: int, stops: tuple[int, ...]) -> tuple[str, str]:
    """The text of tokens [n], and what the model adds to it before any of `stops`."""
    tokenizer = result.corpus.tokenizer
    graphdef = split(abstract(config.model, runs.network_class(config)))[0]
    new_tokens = min(new_tokens, config.model.max_position_embeddings - len(tokens))
    new = generate(merge(graphdef, result.params), tokens[None], new_tokens, temperature=0.7, top_p=0.95)[0]
    stop = np.flatnonzero(np.isin(new, stops))
    new = new[: stop[0]] if len(stop) else new
    return tokenizer.decode(tokens), tokenizer.decode(new[new < tokenizer.vocab_size])  # the model's vocabulary may be padded


def show_mask(config) -> None:
    """Prints the first conversation that would train, each run of trained tokens in brackets, and starts nothing."""
    with tempfile.TemporaryDirectory() as folder:
        cache = pathlib.Path(folder)
        if config.init.run:
            bring_tokenizer(open_source(config, cache), config.data.tokenizer, cache)
        corpus = load_corpus(config.data, cache)
        documents = corpus.train[0].cut(config.data.seq_len)
        print(corpus.summary)
        for d in [d for d, name in enumerate(documents.ids) if name == documents.ids[0]]:
            ids = np.append(documents[d], corpus.tokenizer.eos_id)
            mask = documents.mask(d)
            print(f"\n{documents.ids[d]}: {mask.sum():,} of {len(mask):,} tokens trained")
            print(marked(ids, mask, corpus.tokenizer))


def evaluate_directory(path: pathlib.Path, model, tokenizer, options) -> int:
    """Evaluates a model on the run's held-out part or on other sources, and prints the result."""
    check(options.batch_rows >= 1, f"batch_rows={options.batch_rows}: must be at least 1")
    check(options.rows >= 0, f"rows={options.rows}: must not be negative")
    is_run = (path / "checkpoints").is_dir()
    data = runs.read_config(path).data if is_run else DataConfig(sources=())
    if not isinstance(data, DataConfig):  # a run of RL has no text
        data = DataConfig(sources=(), tokenizer=data.tokenizer, seq_len=data.seq_len)
    check(bool(options.sources or data.sources), "sources: name what to evaluate on (--sources PATH ...)")
    seq_len = options.seq_len or (data.seq_len if is_run else 512)
    limit = model.cfg.max_position_embeddings
    check(seq_len <= limit, f"seq_len={seq_len}: the position limit is {limit}")
    if options.sources:
        data = dataclasses.replace(
            data,
            sources=options.sources,
            extensions=options.extensions or data.extensions,
            text_field=options.text_field or data.text_field,
        )
        corpus = whole_corpus(data, tokenizer)
    else:
        corpus = load_corpus(data, path / "data")
    config = dataclasses.replace(data, seq_len=seq_len)
    batches = in_batches(held_out_batches(corpus, config, 1, options.rows or None), options.batch_rows)
    done = 0

    def show(rows: int) -> None:
        nonlocal done
        done = rows
        bar.update(task, completed=rows)

    params = split(model)[1]
    with rich.progress.Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("evaluating", total=None)
        loss_sum = make_loss_sum(model, LossConfig().chunk)
        score = bits_per_byte(loss_sum, params, batches, show)
    check(not math.isnan(score), "sources: too short, there is no byte of text to predict")
    print(f"{corpus.summary}\nbits per byte: {score:.4f} ({done:,} rows of {seq_len:,} tokens)")
    if options.json:
        print(json.dumps({"bits_per_byte": score, "rows": done}))
    return 0


def whole_corpus(config: DataConfig, tokenizer) -> Corpus:
    """The sources of `config`, all of it held out."""
    paths, weights = zip(*map(parse_source, config.sources))
    with tempfile.TemporaryDirectory() as cache:
        files = [source_files(config, path) for path in paths]
        how, chat = (config.text_field, tokenizer, pathlib.Path(cache)), config.chat if config.kind == "chat" else None
        documents, skipped = zip(*(tokenised(f, *how, lambda _: None, chat) for f in files))
        documents = tuple(d.in_memory() for d in documents)
    lines = [
        f"{path}: {len(d):,} documents, {d.sizes.sum():,} bytes, {d.lengths.sum():,} tokens"
        + "".join(f"; skipped {count:,} {reason}" for reason, count in sorted(skip.items()))
        for path, d, skip in zip(paths, documents, skipped)
    ]
    return Corpus((), documents, weights, tokenizer, "\n".join(lines))
