"""The command line: glm5 train | sft | rl | distill | run | generate | eval | convert | plan | bench | show."""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Literal

from glm5_jax.compiling import pass_over_absent_tpu
from glm5_jax.config import check
from glm5_jax.errors import UserError

USAGE = """usage: glm5 VERB ...

  train CONFIG      train; CONFIG is a recipe (tiny, small; the stages after tiny: midtrain, dsa_warmup, dsa_sparse)
                    or path/to/file.py
  sft [CONFIG]      fine-tune on conversations (JSONL with messages and tools); CONFIG is sft unless given
  rl CONFIG         reinforcement learning; CONFIG is a recipe (reverse) or path/to/file.py
  rl --inspect RUN  answers of such a run, with their rewards
  distill CONFIG    learn from several earlier runs, each the teacher of its tasks
  run FOLDER        all stages of FOLDER/recipe.py, each from the last, with one report: experiments/recipe
  generate DIR      continue a text, from a run or a Hugging Face directory
  eval DIR          held-out bits per byte of a run or a Hugging Face directory
  convert DIR OUT   between Hugging Face directories (bfloat16, FP8) and runs, of any size
  plan PRESET       compile the training step for a TPU pod that is not there: memory, FLOPs, communication, time
  bench NAME        measure: train-step, attention, moe, convert
  show PRESET       parameters and published tensors of glm5, glm5_2, glm47_flash, small or tiny

glm5 VERB --help shows every setting with its type and default."""


def main(arguments: list[str] | None = None) -> None:
    """Runs one verb. A mistake ends in one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = lambda message, *_: print(f"note: {message}", file=sys.stderr)
    verbs = {
        "train": train, "sft": sft, "rl": rl, "distill": distill, "run": run, "generate": generate, "eval": evaluate,
        "convert": convert, "plan": plan, "bench": bench, "show": show,
    }  # fmt: skip
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    pass_over_absent_tpu()
    try:
        if arguments[0] not in verbs:
            raise UserError(f"unknown verb {arguments[0]!r}: one of {', '.join(verbs)}")
        sys.exit(verbs[arguments[0]](arguments[1:]))
    except UserError as error:
        print("glm5: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("glm5: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing to say
        sys.exit(141)


def _positional(arguments: list[str], verb: str, names: list[str]) -> tuple[list[str], list[str]]:
    """The leading arguments called `names`, and the options behind them."""
    if {"--help", "-h"} & set(arguments):
        given = [a for a in arguments[: len(names)] if not a.startswith("-")]
        return given + [""] * (len(names) - len(given)), ["--help"]
    given = arguments[: len(names)]
    if len(given) < len(names) or any(a.startswith("--") for a in given):
        raise UserError(f"usage: glm5 {verb} {' '.join(names)} [--option value ...]; see glm5 {verb} --help")
    return given, arguments[len(names) :]


def train(arguments: list[str], verb: str = "train") -> int:
    """Trains; status 0 when done or after SIGTERM, 130 after Ctrl-C."""
    from glm5_jax.cli_options import find_config, parse
    from glm5_jax.train.stages import RECIPES, TrainConfig

    (name,), rest = _positional(arguments, verb, ["CONFIG"])
    config = find_config(name or "tiny", RECIPES, TrainConfig)

    @dataclasses.dataclass(frozen=True)
    class Options(TrainConfig):
        run_dir: str = f"runs/{pathlib.Path((name or 'CONFIG').split(':')[0]).stem}"  # where config, metrics and checkpoints go
        resume: bool = True  # go on from the run directory's newest checkpoint; --no-resume deletes it and starts over
        processes: int = 1  # that train together; 0 = as JAX finds them (TPU pods, Slurm)
        process: int = 0  # number of this one among them; 0 reports
        coordinator: str = ""  # HOST:PORT on which process 0 brings them together

    @dataclasses.dataclass(frozen=True)
    class SftOptions(Options):
        show_mask: bool = False  # print the first conversation with each run of trained tokens in brackets, train nothing

    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(TrainConfig)}
    about = "Trains a model, from fresh weights or, with --init.run RUN, from those of an earlier run; the settings are below."
    kind = SftOptions if verb == "sft" else Options
    options = parse(kind(**fields), rest, f"glm5 {verb} {name or 'CONFIG'}", about)
    config = TrainConfig(**{name: getattr(options, name) for name in fields})
    if verb == "sft":
        from glm5_jax.train.report import show_mask

        check(config.data.kind == "chat", f"data.kind={config.data.kind}: glm5 sft trains on conversations; set it to chat")
        if options.show_mask:
            show_mask(config)
            return 0
    if options.processes == 1:
        return _train(config, pathlib.Path(options.run_dir), options.resume, name)
    from glm5_jax.processes import is_first, join
    from glm5_jax.train.loop import settings_text

    settings = settings_text(config, pathlib.Path(options.run_dir), options.resume)
    join(options.coordinator, options.processes, options.process, settings)
    with contextlib.redirect_stdout(sys.stdout if is_first() else open(os.devnull, "w")):
        return _train(config, pathlib.Path(options.run_dir), options.resume, name)


def sft(arguments: list[str]) -> int:
    """Trains on conversations: the same loop, of which the recipe is `sft` unless another is named."""
    named = arguments and not arguments[0].startswith("-")
    return train(arguments if named else ["sft", *arguments], "sft")


def _train(config, run_dir: pathlib.Path, resume: bool, recipe: str) -> int:
    from glm5_jax.train.loop import train
    from glm5_jax.train.report import final_words

    return _run(train, config, run_dir, resume, lambda result: final_words(config, run_dir, result, recipe))


def _run(loop: Callable, config, run_dir: pathlib.Path, resume: bool, final_words: Callable) -> int:
    """loop(config, run_dir, resume), and what is said after it; status 0 when done or after SIGTERM, 130 after Ctrl-C."""
    from glm5_jax.train.session import Stopped

    try:
        result = loop(config, run_dir, resume)
    except Stopped as stopped:
        return _stopped(stopped, run_dir, resume)
    if result.already_done:
        print(f"{run_dir}: already done, {config.steps} steps.")
    print(final_words(result))
    return 0


def _stopped(stopped, run_dir: pathlib.Path, resume: bool) -> int:
    """Says how to go on; the status."""
    import signal

    same = "The same command" if resume else "The same command without --no-resume"
    saved = f"saved in {run_dir}. {same} goes on from here."
    print("stopped; " + (saved if stopped.saved else f"not saved. {same} goes on from the last checkpoint."))
    return 0 if stopped.signal == signal.SIGTERM else 130


def rl(arguments: list[str]) -> int:
    """Reinforcement learning, or, with --inspect, a look at the answers of a run; status as of `train`."""
    from glm5_jax.cli_options import given, parse

    if "inspect" in given(arguments):
        from glm5_jax.rl.inspect import InspectOptions, show_samples

        show_samples(parse(InspectOptions(), arguments, "glm5 rl", "Shows answers of a run of glm5 rl or distill."))
        return 0
    from glm5_jax.rl.config import RECIPES
    from glm5_jax.rl.loop import reinforce

    about = "Reinforcement learning with verifiable rewards; glm5 rl --inspect RUN shows the answers of a run."
    return _reinforce("rl", arguments, RECIPES, reinforce, about)


def distill(arguments: list[str]) -> int:
    """On-policy distillation from several teachers; status as of `train`."""
    from glm5_jax.rl.config import DISTILL_RECIPES
    from glm5_jax.rl.distill import distill

    about = "Learns from the runs that --teachers names, each the teacher of its tasks, on answers of its own."
    return _reinforce("distill", arguments, DISTILL_RECIPES, distill, about)


def _reinforce(verb: str, arguments: list[str], recipes: dict, loop: Callable, about: str) -> int:
    from glm5_jax.cli_options import find_config, parse
    from glm5_jax.rl.config import RlConfig
    from glm5_jax.rl.inspect import final_words

    (name,), rest = _positional(arguments, verb, ["CONFIG"])
    config = find_config(name or next(iter(recipes)), recipes, RlConfig)

    @dataclasses.dataclass(frozen=True)
    class Options(RlConfig):
        run_dir: str = f"runs/{pathlib.Path((name or 'CONFIG').split(':')[0]).stem}"  # where config, metrics and checkpoints go
        resume: bool = True  # go on from the run directory's newest checkpoint; --no-resume deletes it and starts over

    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(RlConfig)}
    options = parse(Options(**fields), rest, f"glm5 {verb} {name or 'CONFIG'}", about)
    config = RlConfig(**{name: getattr(options, name) for name in fields})
    run_dir = pathlib.Path(options.run_dir)
    return _run(loop, config, run_dir, options.resume, lambda result: final_words(run_dir, result.evaluation))


def run(arguments: list[str]) -> int:
    """Runs all stages of a recipe; status as of `train`."""
    from glm5_jax.cli_options import parse

    (folder,), rest = _positional(arguments, "run", ["FOLDER"])

    @dataclasses.dataclass(frozen=True)
    class Options:
        run_dir: str = f"runs/{pathlib.Path(folder or 'FOLDER').resolve().name}"  # for the runs of all stages and the report
        resume: bool = True  # go on in the stage that was stopped; --no-resume starts over with the first

    about = "Runs the stages of FOLDER/recipe.py, each from the run of the last, and reports before and after of each."
    options = parse(Options(), rest, "glm5 run FOLDER", about)
    from glm5_jax.pipeline.run import load, run_stages
    from glm5_jax.train.session import Stopped

    runs = pathlib.Path(options.run_dir)
    try:
        report = run_stages(load(folder, runs), runs, options.resume)
    except Stopped as stopped:
        return _stopped(stopped, runs, options.resume)
    print(f"\nall stages are done\nreport: {report}")
    return 0


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Settings of `glm5 generate`."""

    prompt: str = "def "  # text to continue; - reads it from standard input
    max_new_tokens: int = 128  # tokens to add at most
    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # draw from the smallest set of tokens with at least this probability
    seed: int = 0  # of the draws
    dtype: str = "float32"  # float32 or bfloat16
    latent_norm_eps: float | None = None  # epsilon of the latent norms; 1e-6 matches transformers


def generate(arguments: list[str]) -> int:
    """Prints the prompt and its continuation as it comes."""
    from glm5_jax.cli_options import parse

    (path,), rest = _positional(arguments, "generate", ["DIR"])
    options = parse(GenerateOptions(), rest, "glm5 generate DIR", "Continues a text.")
    import numpy as np

    from glm5_jax.serve.decode import Sampling, stream

    model, tokenizer = _load_with_tokenizer(path, options.dtype, options.latent_norm_eps)
    prompt = _utf8(sys.stdin.buffer.read() if options.prompt == "-" else os.fsencode(options.prompt))
    check(bool(prompt), "prompt: is empty, there is nothing to continue")
    tokens = np.asarray(tokenizer.encode(prompt), np.int32)[None]
    sampling = Sampling(options.temperature, options.top_p)
    made, shown = [], ""  # nothing is shown before the first token: bad input ends in its one line only
    for step in stream(model, tokens, options.max_new_tokens, sampling, seed=options.seed):
        if step.tokens[0] in model.cfg.eos_token_id:
            break
        if step.tokens[0] < tokenizer.vocab_size:  # the model's vocabulary may be padded
            made.append(int(step.tokens[0]))
        text = prompt + tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is only half there
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print((prompt + tokenizer.decode(made))[len(shown) :])
    return 0


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise UserError("prompt: is not UTF-8") from None


def _load_with_tokenizer(path: str, dtype: str, latent_norm_eps: float | None):
    import glm5_jax
    from glm5_jax.convert.tokenizer import load_tokenizer
    from glm5_jax.train.run_dir import run_tokenizer

    overrides = {} if latent_norm_eps is None else {"latent_norm_eps": latent_norm_eps}
    model = glm5_jax.load(path, dtype, **overrides)
    folder = pathlib.Path(path)
    if (folder / "checkpoints").is_dir():
        tokenizer = run_tokenizer(folder)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    else:
        print(f"note: {path} has no tokenizer.json; text is taken as bytes", file=sys.stderr)
        tokenizer = load_tokenizer("bytes")
    if tokenizer.vocab_size > model.cfg.vocab_size:
        raise UserError(f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model {model.cfg.vocab_size}")
    return model, tokenizer


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Settings of `glm5 eval`."""

    sources: tuple[str, ...] = ()  # folders or files to evaluate on, whole; default for a run: its own held-out part
    extensions: tuple[str, ...] = ()  # endings of the text files a folder contributes; default: the run's
    text_field: str = ""  # field of JSONL and JSON records, column of Parquet; default: the run's
    rows: int = 0  # rows to evaluate at most, 0 = all
    seq_len: int = 0  # tokens per row; 0 = that of the run, 512 for a Hugging Face directory
    batch_rows: int = 8  # rows at once
    retrieval: tuple[str, ...] = ()  # in place of bits per byte: single_needle, multi_key, multi_value, recall; alone = all
    lengths: tuple[int, ...] = ()  # tokens of a retrieval sample; default: 256, 512 ... 4096 within the position limit
    samples: int = 64  # retrieval samples per task and length
    seed: int = 0  # of the retrieval samples
    plot: str = ""  # draw retrieval by length into this PNG file (needs matplotlib)
    dtype: str = "float32"  # float32 or bfloat16
    latent_norm_eps: float | None = None  # epsilon of the latent norms; 1e-6 matches transformers
    json: bool = False  # end with one line of JSON


_TEXT_ONLY = ("sources", "extensions", "text_field", "rows", "seq_len")
_RETRIEVAL_ONLY = ("lengths", "samples", "seed", "plot")


def evaluate(arguments: list[str]) -> int:
    """Prints held-out bits per byte, or retrieval by length."""
    from glm5_jax.cli_options import given, parse

    (path,), rest = _positional(arguments, "eval", ["DIR"])
    options = parse(EvalOptions(), rest, "glm5 eval DIR", "Held-out bits per byte, or retrieval by length.")
    names = given(rest)
    by_retrieval = "retrieval" in names
    for name in sorted(names & set(_TEXT_ONLY if by_retrieval else _RETRIEVAL_ONLY)):
        way = "has no meaning with" if by_retrieval else "needs"
        raise UserError(f"--{name.replace('_', '-')}: {way} --retrieval")
    from glm5_jax.train.evaluate import evaluate_retrieval
    from glm5_jax.train.metrics import check_plot
    from glm5_jax.train.report import evaluate_directory

    if options.plot:
        check_plot(options.plot)
    model, tokenizer = _load_with_tokenizer(path, options.dtype, options.latent_norm_eps)
    if by_retrieval:
        return evaluate_retrieval(model, tokenizer, options)
    return evaluate_directory(pathlib.Path(path), model, tokenizer, options)


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Settings of `glm5 convert`."""

    to: Literal["hf", "run"] = "hf"  # what to write: a Hugging Face directory, or a run that every verb reads, on any mesh
    dtype: str = ""  # float32, bfloat16 or, in a Hugging Face directory, fp8; default: as in DIR, bfloat16 for FP8


def convert(arguments: list[str]) -> int:
    """Converts any directory that `load` reads, tensor by tensor, tokenizer included."""
    from glm5_jax.cli_options import parse

    (source, target), rest = _positional(arguments, "convert", ["DIR", "OUT"])
    about = "Converts a run or a Hugging Face directory tensor by tensor; if it is stopped, the same command goes on."
    options = parse(ConvertOptions(), rest, "glm5 convert DIR OUT", about)
    from glm5_jax.train.convert import convert

    result = convert(pathlib.Path(source), pathlib.Path(target), options.to, options.dtype)
    print(f"{target}: written in {result.dtype}; {result}")
    return 0


@dataclasses.dataclass(frozen=True)
class ShowOptions:
    """Settings of `glm5 show`."""

    tensors: bool = False  # list every published tensor with its shape


def show(arguments: list[str]) -> int:
    """Prints the size of a preset, from abstract shapes: nothing is allocated."""
    from glm5_jax.cli_options import parse
    from glm5_jax.config import PRESETS

    (name,), rest = _positional(arguments, "show", ["PRESET"])
    options = parse(ShowOptions(), rest, "glm5 show PRESET", "Parameters and published tensors of a preset.")
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: one of {', '.join(PRESETS)}")
    from glm5_jax.convert.published import count_parameters, tensor_list

    cfg = PRESETS[name]()
    tensors = tensor_list(cfg)
    without, total = count_parameters(cfg, tensors)
    if options.tensors:
        for tensor, shape in tensors.items():
            print(f"{tensor} {list(shape)}")
    print(f"{name}: {without:,} parameters, {total:,} with the MTP layer, in {len(tensors):,} published tensors")
    return 0


def plan(arguments: list[str]) -> int:
    """Prints what a compiled step needs; status 1 if it does not fit."""
    from glm5_jax.cli_options import parse
    from glm5_jax.config import PRESETS

    (name,), rest = _positional(arguments, "plan", ["PRESET"])
    from glm5_jax import plan

    about = "Compiles the training step for a described TPU topology, without hardware."
    options = parse(plan.PlanOptions(), rest, "glm5 plan PRESET", about)
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: one of {', '.join(PRESETS)}")
    result, table = plan.plan(name, PRESETS[name](), options)
    print(table)
    if options.json:
        print(json.dumps(result))
    return 0 if result["fits"] else 1


def bench(arguments: list[str]) -> int:
    """Runs one benchmark."""
    from glm5_jax.bench import attention, convert, generate, moe, train_step

    modules = {"train-step": train_step, "attention": attention, "moe": moe, "convert": convert, "generate": generate}
    benches = {name: module.main for name, module in modules.items()}
    if {"--help", "-h"} & set(arguments[:1]) or not arguments:
        print(f"usage: glm5 bench NAME [--json]; NAME is one of {', '.join(benches)}")
        return 0 if arguments else 2
    if arguments[0] not in benches:
        raise UserError(f"unknown benchmark {arguments[0]!r}: one of {', '.join(benches)}")
    return benches[arguments[0]](arguments[1:])
