"""Tokens per second of the rollout engine: `glm5 bench generate [PRESET|DIR]`.

Requests with prompts of their own, none of which ends early, alone and together; prompts count in the time. With an MTP layer
also with guesses, alternating; then the time to read one long prompt. Where torch and transformers are installed the same
weights answer there too, with its cache and greedy decoding.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
import time
from json import dumps

import jax
import numpy as np
from flax import nnx

from glm5_jax.cli_options import parse
from glm5_jax.config import PRESETS, check
from glm5_jax.convert.hf import save_hf
from glm5_jax.model import Glm5
from glm5_jax.serve.engine import Engine, Request


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of `glm5 bench generate`."""

    prompt: int = 256  # tokens of a prompt
    new: int = 64  # tokens generated for each
    requests: tuple[int, ...] = (1, 32)  # how many at the same time
    draft_steps: int = 3  # tokens that the MTP layer guesses ahead, if there is one
    temperature: float = 1.0  # 0 = greedy
    prefill: int = 8192  # tokens of the long prompt; 0 = none
    rounds: int = 3  # of which the median is taken
    transformers: bool = True  # compare with transformers where it is installed
    json: bool = False  # end with one line of JSON


def main(arguments: list[str]) -> int:
    """Runs the benchmark from the command line."""
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "small"
    about = "Tokens per second of the rollout engine."
    options = parse(Options(), arguments, "glm5 bench generate [PRESET|DIR]", about)
    result = run(_model(name), options)
    if options.json:
        print(dumps(result))
    return 0


def _model(name: str) -> Glm5:
    if name in PRESETS:
        return Glm5(PRESETS[name](), nnx.Rngs(0))
    import glm5_jax

    return glm5_jax.load(name)


def run(model: Glm5, options: Options) -> dict:
    """Measures, prints a table, and returns its numbers.

    Returns:
      {"rows": [{"requests", and tokens/s by name: "engine", "guessing", "transformers"}, ..], "prefill_s": {name: seconds}}.
    """
    context, limit = options.prompt + options.new, model.cfg.max_position_embeddings
    check(context <= limit, f"prompt + new = {context}: the position limit is {limit}")
    check(options.prefill <= limit, f"prefill={options.prefill}: the position limit is {limit}")
    other = options.transformers and all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    torch = _Torch(model) if other else None
    drafts = options.draft_steps if model.mtp else 0
    columns = ["engine", *(["guessing"] if drafts else []), *(["transformers"] if torch else [])]
    print(f"tokens/s, prompts of {options.prompt:,} tokens, {options.new:,} new; {jax.devices()[0].device_kind}")
    print(f"{'requests':>9}" + "".join(f"{name:>14}" for name in columns))
    result = {"rows": [], "prefill_s": {}}
    for n in options.requests:
        prompts = np.random.default_rng(n).integers(1, model.cfg.vocab_size, (n, options.prompt))
        engines = {"engine": Engine(model, n, context)} | ({"guessing": Engine(model, n, context, drafts)} if drafts else {})
        runs = {name: functools.partial(_generate, engine, prompts, options) for name, engine in engines.items()}
        if torch:
            runs["transformers"] = functools.partial(torch.generate, prompts, options.new)
        seconds = _alternate(runs, options.rounds)
        row = {"requests": n} | {name: n * options.new / s for name, s in seconds.items()}
        row |= engines["guessing"].acceptance() if drafts else {}
        result["rows"].append(row)
        print(f"{n:>9}" + "".join(f"{row[name]:>14,.0f}" for name in columns))
        if drafts:
            print(f"{'':>9}" + "  ".join(f"{k} {v:.3f}" for k, v in row.items() if k.startswith("accept")))
    if options.prefill:
        prompt = np.random.default_rng(0).integers(1, model.cfg.vocab_size, (1, options.prefill - 1))
        engine = Engine(model, 1, options.prefill)
        one = dataclasses.replace(options, new=1)
        runs = {"engine": functools.partial(_generate, engine, prompt, one)}
        if torch:
            runs["transformers"] = functools.partial(torch.generate, prompt, 1)
        seconds = result["prefill_s"] = _alternate(runs, min(options.rounds, 2))
        print(f"a prompt of {options.prefill:,} tokens, s: " + ", ".join(f"{name} {s:.2f}" for name, s in seconds.items()))
    return result


def _generate(engine: Engine, prompts, options: Options, turn: int) -> None:
    engine.update(engine.version + 1, engine.params)  # forgets the prompts
    seeds = range(1000 * turn, 1000 * turn + len(prompts))
    engine.generate(Request(p, options.new, options.temperature, seed=s, stop=()) for p, s in zip(prompts, seeds))


def _alternate(runs: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each function, called in turns, the first turn (it compiles) left out."""
    times = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, function in runs.items():
            began = time.perf_counter()
            function(turn)
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(seconds[1:])) for name, seconds in times.items()}


class _Torch:
    """The same weights in transformers."""

    def __init__(self, model: Glm5):
        import torch
        import transformers

        self.torch = torch
        with tempfile.TemporaryDirectory() as folder:
            save_hf(model, pathlib.Path(folder))
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts, new: int, turn: int) -> None:
        tokens = self.torch.tensor(np.asarray(prompts))
        with self.torch.inference_mode():
            self.model.generate(
                tokens, attention_mask=self.torch.ones_like(tokens), min_new_tokens=new, max_new_tokens=new, do_sample=False
            )
