"""glm5 plan: the true training step, or a decode step, compiled for a TPU pod that is not there.

libtpu compiles ahead of time for a described topology, on any machine: whether the step compiles, what it holds on each chip,
what it computes and what it sends are facts of the compiled program. The step time is an estimate from the chip's rates.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import sys
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax.compiling import compiler_options
from glm5_jax.config import ModelConfig, check
from glm5_jax.errors import UserError
from glm5_jax.layers.mla import pieces
from glm5_jax.model import Cache, abstract, empty_cache, layer_groups, merge, template
from glm5_jax.program import by_axes, collectives, instructions
from glm5_jax.sharding.mesh import ROWS, MeshConfig, check_rows, local, make_mesh, shardings_of
from glm5_jax.sharding.rules import parameter_specs, place_parameters
from glm5_jax.sparse.dense import mean_turns
from glm5_jax.train.flops import decode_flops, flops_per_token, kernel_flops, step_flops
from glm5_jax.train.optimizer import OptimizerConfig, make_optimizer
from glm5_jax.train.step import LossConfig, Rates, flat, init_state, make_step, state_specs, trainable_specs

GIB = 1 << 30
MOST_SLICES = 256  # libtpu takes minutes to describe more
HEADROOM = 0.1  # of a device's memory: what a run needs besides the step, and what fragments


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one JAX device, and what libtpu has to be told to compile for it.

    Attributes:
      accelerator: TPU_ACCELERATOR_TYPE of any such machine. per_chip: JAX devices on a chip. flops: bfloat16 FLOP/s.
      memory: bytes that a program may use, as libtpu says when one does not fit. hbm: bytes/s. link: bytes/s one way over one
        ICI link; a torus axis has two at each chip. network: bytes/s one way between slices.
    """

    accelerator: str
    per_chip: int
    flops: float
    memory: float
    hbm: float
    link: float
    network: float = 6.25e9


CHIPS = {
    "v5p": Chip("v5p-8", 1, 459e12, 95.74 * GIB, 2.46e12, 90e9),
    "v6e": Chip("v6e-4", 1, 920e12, 31.25 * GIB, 1.64e12, 90e9),
    "tpu7x": Chip("tpu7x-8", 2, 1155e12, 94.75 * GIB, 3.7e12, 50e9, 3.1e9),
}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Settings of `glm5 plan PRESET`."""

    topology: str = "v5p:8x8x8"  # chips of one slice: v5p:8x8x8, v6e:16x16, tpu7x:8x8x8
    slices: int = 1  # slices of that topology, joined along mesh data
    mesh: str = ""  # data=8,expert=64,context=1: devices along each axis; data may be left out
    stage: Literal["pretrain", "dsa_sparse"] = "dsa_sparse"  # pretrain: dense attention, also of mid-training
    serve: bool = False  # a decode step in place of a training step: one token for each row, whose cache holds `seq`
    seq: int = 4096  # tokens of a row
    batch: int = 0  # rows of a step; 0 = one for each data x expert
    micro: int = 0  # rows whose activations exist at once, over all devices; 0 = all of the batch
    mtp_steps: int = 3  # tokens beyond the next one to predict
    remat: Literal["block", "offload"] = "block"  # offload = what layers keep for the backward pass waits in the host's memory
    layers: int = 0  # decoder layers; 0 = those of the preset
    hlo: str = ""  # file for the compiled program's text
    json: bool = False  # end with one line of JSON

    def __post_init__(self):
        for name, least in dict(slices=1, seq=1, batch=0, micro=0, mtp_steps=0, layers=0).items():
            check(getattr(self, name) >= least, f"{name}={getattr(self, name)}: must be at least {least}")
        check(self.slices <= MOST_SLICES, f"slices={self.slices}: more than {MOST_SLICES} are not described")
        folder = pathlib.Path(self.hlo or ".").absolute().parent
        check(folder.is_dir() and os.access(folder, os.W_OK), f"hlo={self.hlo}: no directory that can be written to")


def parse_mesh(text: str) -> MeshConfig:
    """MeshConfig of "data=8,expert=64,context=1".

    Raises:
      UserError: another form, or an unknown axis.
    """
    pairs = [part.split("=") for part in text.split(",") if part]
    good = all(len(pair) == 2 and pair[0] in ("data", "expert", "context") and pair[1].isdecimal() for pair in pairs)
    check(good and len({pair[0] for pair in pairs}) == len(pairs), f"mesh={text}: need data=N,expert=N,context=N")
    return MeshConfig(**{name: int(n) for name, n in pairs})


def describe(topology: str, slices: int = 1) -> tuple[Chip, list]:
    """(chip, devices of the described slices).

    Raises:
      UserError: no such chip, a topology that libtpu does not know, or no libtpu.
    """
    kind = topology.split(":")[0]
    check(kind in CHIPS, f"topology={topology}: the chip is one of {', '.join(CHIPS)}")
    check(importlib.util.find_spec("libtpu") is not None, "libtpu is not installed: pip install 'glm5_jax[tpu]'")
    chip = CHIPS[kind]
    os.environ.update(  # what libtpu would otherwise ask a TPU machine's metadata server for, or lock a file over
        TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE=chip.accelerator,
    )  # fmt: skip
    from jax.experimental import topologies  # loads libtpu: the environment must be set before

    more = {"num_slices": slices} if slices > 1 else {}
    try:
        return chip, list(topologies.get_topology_desc(topology, platform="tpu", **more).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"topology={topology}: libtpu does not know it ({str(error).splitlines()[0]})") from None


def training_config(cfg: ModelConfig, options: PlanOptions) -> tuple[ModelConfig, LossConfig, tuple[str, ...]]:
    """(network, loss, frozen parts) of a stage."""
    sparse = options.stage == "dsa_sparse"
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    cfg = dataclasses.replace(cfg, attention="sparse" if sparse else "dense", remat=options.remat, dtype="bfloat16", **layers)
    check(
        options.seq <= cfg.max_position_embeddings,
        f"seq={options.seq}: the position limit is {cfg.max_position_embeddings}",
    )
    mtp = options.mtp_steps if cfg.num_nextn_predict_layers else 0
    return cfg, LossConfig(mtp_steps=mtp, index_weight=float(sparse)), () if sparse else ("indexer",)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step lowered for a mesh, and what is known of it without compiling, each for one device.

    Attributes:
      lowered: jax.stages.Lowered. held: what -> abstract arrays with shardings that the step is given.
      rows, micro_rows: of the whole batch, and how many of them at once. kept: bytes of activations for the backward pass.
      expected: part of the network -> FLOPs of its products by closed form. kernels: those of the kernels of sparse attention.
      useful: FLOPs of the model itself. turns: see `program.products`.
    """

    lowered: jax.stages.Lowered
    held: dict
    mesh: Mesh
    rows: int
    micro_rows: int
    kept: float
    expected: dict[str, float]
    kernels: float
    useful: float
    turns: dict[str, float]


def lower_step(cfg: ModelConfig, loss: LossConfig, freeze: tuple[str, ...], mesh: Mesh, options: PlanOptions) -> Program:
    """The training step as `glm5 train` runs it: Muon Split, float32 parameters and moments, donated state."""
    groups, sizes = math.prod(mesh.shape[a] for a in ROWS), dict(mesh.shape)
    batch = options.batch or groups
    micro = options.micro or batch
    check(batch % micro == 0, f"batch={batch}: must be a multiple of micro={micro}")
    check_rows(mesh, micro, options.seq, "micro" if options.micro else "batch")
    model = place_parameters(abstract(cfg), sizes)
    cuts = flat(parameter_specs(model))
    optimizer = make_optimizer(OptimizerConfig(), lambda _: jnp.float32(1e-4), trainable_specs(model, freeze), cuts, mesh)
    rates = Rates(lambda _: jnp.float32(0.3), lambda _: jnp.float32(0.001))
    step = make_step(model, optimizer, rates, loss, freeze, mesh)
    state = jax.eval_shape(lambda: init_state(abstract(cfg), optimizer, freeze))
    shardings = shardings_of(mesh, state_specs(state, model))
    state = jax.tree.map(lambda x, s: x.update(sharding=s), state, shardings)
    rows = NamedSharding(mesh, PartitionSpec(None, ROWS))
    shape = (batch // micro, micro, options.seq)
    inputs = {n: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows) for n in ("tokens", "segment_ids", "positions")}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # how kernels learn the chip's facts
        lowered = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, inputs)
        turns, key_block = mean_turns(options.seq, sizes["context"], cfg.num_attention_heads, cfg.query_chunk)
    tokens, mtp = batch * options.seq / mesh.size, loss.mtp_steps
    many, _ = pieces(cfg, micro / groups, options.seq // sizes["context"])
    return Program(
        lowered, {"parameters": state.params, "optimizer state": state.opt_state}, mesh, batch, micro,
        kept=kept_activations(cfg, micro / groups, options.seq / sizes["context"]),
        expected=step_flops(model, freeze, sizes, micro, batch // micro, options.seq, loss, turns["visible_keys"] * key_block),
        kernels=kernel_flops(cfg, freeze, tokens, options.seq, mtp, forward=3 if many > 1 else 2),
        useful=tokens * flops_per_token(model, options.seq, mtp),
        turns=turns | {"more_rounds": 0, "own_indexer": owner_share(cfg)},  # of experts no more rounds, under even routing
    )  # fmt: skip


def lower_decode(cfg: ModelConfig, mesh: Mesh, options: PlanOptions) -> Program:
    """One token for each row: experts over "expert", rows over "data" and "expert", all other parameters whole on every device,
    which a step that small has no time to gather. Parameters and cache in bfloat16, the cache donated."""
    check(mesh.shape["context"] == 1, "mesh: a decode step splits rows, not their tokens; set context=1")
    check(not options.micro, f"micro={options.micro}: a decode step takes all its rows at once; set batch")
    groups = math.prod(mesh.shape[a] for a in ROWS)
    batch = options.batch or groups
    check_rows(mesh, batch, options.seq, "batch")
    cfg = dataclasses.replace(cfg, remat="none")
    placed = place_parameters(abstract(cfg), {"expert": mesh.shape["expert"]}, experts_only=True)
    graphdef, params = template(cfg, cfg.dtype)
    cuts = parameter_specs(placed)
    params = jax.tree.map(lambda x, s: x.update(sharding=s), params, shardings_of(mesh, cuts))
    cache = jax.eval_shape(lambda: empty_cache(cfg, batch, options.seq))
    keys = jax.tree.map(lambda x: PartitionSpec(*[None] * (x.ndim - 3), ROWS), cache.keys)
    places = Cache(keys, PartitionSpec(ROWS), PartitionSpec(ROWS))
    cache = jax.tree.map(lambda x, s: x.update(sharding=s), cache, shardings_of(mesh, places))
    rows = PartitionSpec(ROWS)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=NamedSharding(mesh, rows))

    def step(params, tokens, cache):
        model = merge(graphdef, params)
        hidden, _, cache = model.trunk(tokens, cache=cache)
        return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32), cache

    run = local(step, mesh, (cuts, rows, places), (rows, places))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(run, donate_argnums=2).lower(params, tokens, cache)
    parts, kernels, useful = decode_flops(placed, mesh.shape["expert"], batch / groups, options.seq)
    return Program(
        lowered, {"parameters": params, "cache": cache}, mesh, batch, batch, kept=0.0, expected=parts, kernels=kernels,
        useful=useful, turns={"more_rounds": 0, "own_indexer": owner_share(cfg)},
    )  # fmt: skip


def compile_for(program: Program) -> tuple[jax.stages.Compiled | None, str]:
    """(the compiled step, "") or (None, what libtpu says of the memory it would need)."""
    try:
        with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
            return program.lowered.compile(compiler_options=compiler_options()), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = re.search(r"(Used [\d.]+\w of [\d.]+\w hbm|total memory required .*? \([\d.]+\w\) exceeds.*?\))", str(error))
        return None, said[1] if said else str(error).splitlines()[0]


def bytes_per_device(tree) -> float:
    """Bytes that a device holds of a pytree of abstract arrays with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def dtypes(tree) -> str:
    """The dtypes of a pytree of arrays, the one with most bytes first."""
    sizes: dict[str, float] = {}
    for x in jax.tree.leaves(tree):
        sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.size * x.dtype.itemsize
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))


def owner_share(cfg: ModelConfig) -> float:
    """Of the `mixed_layers`, the share that owns an indexer."""
    mixed = mixed_layers(cfg)
    return sum(mixed) / len(mixed) if mixed else 1.0


def mixed_layers(cfg: ModelConfig) -> list[bool]:
    """Whether each of the layers owns an indexer, of the groups in which some do and others do not."""
    return [own for _, owners in layer_groups(cfg.layer_kinds) if len(set(owners)) == 2 for own in owners]


def kept_activations(cfg: ModelConfig, rows: float, seq: float) -> float:
    """Bytes of the device that the forward pass keeps for the backward pass of `rows` x `seq` of its tokens: the inputs of
    layers, selected positions (not under remat=offload) and its tokens' experts. Index queries, which layers that share hand on
    while indexers are trained, are not counted."""
    kinds, mixed = cfg.layer_kinds, mixed_layers(cfg)
    layers = len(kinds) * cfg.hidden_size * 2
    choosing = sum(full for _, full in kinds) + len(mixed) - sum(mixed)  # in a mixed group every layer keeps what it uses
    chosen = choosing * min(cfg.index_topk, seq) * 4 if cfg.attention == "sparse" else 0
    experts = sum(ffn == "moe" for ffn, _ in kinds) * cfg.num_experts_per_tok * 4
    return rows * seq * (experts + (0 if cfg.remat == "offload" else layers + chosen))


def memory(program: Program, compiled: jax.stages.Compiled, chip: Chip) -> dict[str, float]:
    """What -> bytes on each device."""
    analysis = compiled.memory_analysis()
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    used = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + new
    kept = {"of them activations kept": program.kept} if program.kept else {}
    return {
        **{name: bytes_per_device(tree) for name, tree in program.held.items()},
        "all arguments": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes, **kept,
        "new results": new,
        "used": used,
        **({"host": analysis.host_temp_size_in_bytes} if analysis.host_temp_size_in_bytes else {}),
        "memory": chip.memory,
        "headroom": 1 - used / chip.memory,
    }  # fmt: skip


def seconds(found: dict, chip: Chip, mesh: Mesh) -> dict[tuple, float]:
    """(kind, axes) -> seconds that the links need, from `by_axes`."""
    return {(kind, axes): sent / bandwidth(kind, axes, chip, mesh) for (kind, axes), (_, sent) in found.items()}


def bandwidth(kind: str, axes: tuple[str, ...], chip: Chip, mesh: Mesh) -> float:
    """Bytes/s at which a device gets rid of what it sends along mesh axes.

    Two links for each torus axis over which they extend, or the network where they extend over slices. Rings pass parts from
    neighbour to neighbour; in an all-to-all each byte takes a quarter of each ring on its way, and links of others with it.
    """
    at = [mesh.axis_names.index(a) for a in axes if a in mesh.axis_names] or list(range(len(mesh.axis_names)))
    group = np.moveaxis(mesh.devices, at, range(-len(at), 0)).reshape(-1, math.prod(mesh.devices.shape[i] for i in at))[0]
    if len({getattr(d, "slice_index", 0) for d in group}) > 1:
        return chip.network
    rings = [n for n in (len({d.coords[i] for d in group}) for i in range(3)) if n > 1]
    hops = max(1.0, sum(n / 4 for n in rings)) if kind == "all-to-all" else 1.0
    return max(1, len(rings)) * 2 * chip.link / hops


def plan(preset: str, cfg: ModelConfig, options: PlanOptions) -> tuple[dict, str]:
    """(results as in the table, text of the table) of one compiled step; `fits` says whether it can run."""
    chip, devices = describe(options.topology, options.slices)
    mesh = make_mesh(parse_mesh(options.mesh), devices)
    check(mesh is not None, f"topology={options.topology}: one device needs no plan")
    network, loss, freeze = training_config(cfg, options)
    print(f"compiling for {len(devices):,} devices; the whole of GLM-5 takes 10 minutes or more", file=sys.stderr)
    start = time.monotonic()
    program = lower_decode(network, mesh, options) if options.serve else lower_step(network, loss, freeze, mesh, options)
    text = program.lowered.as_text()
    lowered = time.monotonic()
    compiled, said = compile_for(program)
    params = jax.tree.leaves(program.held["parameters"])
    result = {
        "preset": preset, "stage": "decode" if options.serve else options.stage,
        "topology": options.topology, "slices": options.slices, "devices": len(devices),
        "chips": len(devices) // chip.per_chip, "mesh": dict(mesh.shape), "seq": options.seq, "rows": program.rows,
        **({} if options.serve else {"micro_rows": program.micro_rows}), "parameters": sum(math.prod(x.shape) for x in params),
        "dtypes": {name: dtypes(tree) for name, tree in program.held.items()} | {"products": network.dtype},
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")},
        "program": hashlib.sha256(text.encode()).hexdigest(),
        "trace_s": lowered - start, "compile_s": time.monotonic() - lowered,
    }  # fmt: skip
    if compiled is None:
        held = {name: bytes_per_device(tree) for name, tree in program.held.items()}
        result |= {"fits": False, "compiler": said, "memory": held | {"memory": chip.memory}}
    else:
        text = compiled.as_text()
        result["memory"] = memory(program, compiled, chip)
        result["fits"] = result["memory"]["headroom"] >= HEADROOM
        result |= costs(program, text, chip)
        if options.hlo:
            pathlib.Path(options.hlo).write_text(text)
    return result, table(result)


def costs(program: Program, text: str, chip: Chip) -> dict:
    """FLOPs, bytes moved and sent, and times of a compiled step, for each device.

    Without overlap each instruction takes what its products or its bytes of HBM take, whichever is longer, and links wait for
    it; with full overlap products, HBM and links are three queues that never wait for each other.
    """
    found = instructions(text, program.turns)
    flops, moved = sum(i.flops * i.times for i in found), sum(i.bytes * i.times for i in found)
    alone = sum(max(i.flops / chip.flops, i.bytes / chip.hbm) * i.times for i in found)
    alone += program.kernels / chip.flops
    sent = by_axes(collectives(text, program.mesh, program.turns))
    times = seconds(sent, chip, program.mesh)
    work = {"products": (flops + program.kernels) / chip.flops, "HBM": moved / chip.hbm, "links": sum(times.values())}
    totals = {"without overlap": alone + work["links"], "full overlap": max(work.values())}
    return {
        "flops": {
            "compiled": flops, "closed form": sum(program.expected.values()), "parts": program.expected,
            "kernels": program.kernels, "of the model": program.useful,
        },
        "moved": moved,
        "sent": [
            {"kind": kind, "axes": list(axes), "runs": runs, "bytes": size, "seconds": times[kind, axes]}
            for (kind, axes), (runs, size) in sent.items()
        ],
        "seconds": work | totals,
        "utilisation": {name: program.useful / chip.flops / total for name, total in totals.items()},
    }  # fmt: skip


def table(result: dict) -> str:
    """The results for people."""
    mesh = ", ".join(f"{name} {n}" for name, n in result["mesh"].items())
    decode = result["stage"] == "decode"
    if decode:
        work = f"one token for each of {result['rows']:,} rows, whose caches hold {result['seq']:,}"
    else:
        once = f", {result['micro_rows']:,} at once" if result["micro_rows"] != result["rows"] else ""
        work = f"{result['rows']:,} rows of {result['seq']:,} tokens{once}"
    slices = f" x {result['slices']} slices" if result["slices"] > 1 else ""
    lines = [
        f"{result['preset']}, {result['stage']}: {work}",
        f"{result['topology']}{slices}: {result['chips']:,} chips, {result['devices']:,} devices; mesh {mesh}",
        f"compiled in {result['compile_s']:.0f} s, traced in {result['trace_s']:.0f} s",
        "",
        f"{'on each device':<28}{'GiB':>10}",
    ]
    lines += [f"  {name:<26}{size / GIB:>10.2f}" for name, size in result["memory"].items() if name != "headroom"]
    if not result["fits"]:
        lines += ["", "DOES NOT FIT: " + _what_to_change(result)]
    if "flops" not in result:
        return "\n".join(lines)
    flops, model = result["flops"], result["flops"]["of the model"]
    lines += [
        f"  {'headroom':<26}{result['memory']['headroom']:>9.1%}",
        "",
        f"{'products of a step':<28}{'TFLOP':>10}",
        f"  {'in the compiled program':<26}{flops['compiled'] / 1e12:>10.1f}",
        f"  {'by closed form':<26}{flops['closed form'] / 1e12:>10.1f}  ({flops['compiled'] / flops['closed form'] - 1:+.1%})",
    ]
    lines += [f"    {name:<24}{value / 1e12:>10.1f}" for name, value in flops["parts"].items()]
    if flops["kernels"]:
        lines.append(f"  {'of sparse attention':<26}{flops['kernels'] / 1e12:>10.1f}  (its Pallas kernels, by closed form)")
    lines += [
        f"  {'of the model':<26}{model / 1e12:>10.1f}" + ("" if decode else "  (without recomputation and optimizer)"),
        "",
        f"{'read and written in HBM, GB':<28}{result['moved'] / 1e9:>10.1f}",
        "",
        f"{'sent by each device':<20}{'over':<24}{'runs':>8}{'GB':>10}{'s':>10}",
    ]
    for row in result["sent"]:
        over = ", ".join(row["axes"])
        lines.append(f"  {row['kind']:<18}{over:<24}{row['runs']:>8,.0f}{row['bytes'] / 1e9:>10.3f}{row['seconds']:>10.4f}")
    lines += ["", f"{'estimated time of a step':<28}{'s':>10}"]
    lines += [f"  {name:<26}{value:>10.3f}" for name, value in result["seconds"].items()]
    lines += [f"  utilisation {name:<14}{value:>10.1%}" for name, value in result["utilisation"].items()]
    kinds = "; ".join(f"{name} {value}" for name, value in result["dtypes"].items())
    return "\n".join([*lines, "", kinds])


def _what_to_change(result: dict) -> str:
    memory = result["memory"]
    held = memory["parameters"] + memory.get("optimizer state", 0)
    words = [result["compiler"]] if "compiler" in result else [f"headroom below {HEADROOM:.0%}"]
    full = held > 0.6 * memory["memory"]
    if result["stage"] == "decode":
        rows = "fewer rows (--batch), or more chips"
        words.append("parameters take most of the memory: a larger mesh expert" if full else rows)
    elif full:
        words.append("parameters and optimizer state take most of the memory: more chips")
    else:
        words.append("fewer rows at once (--micro), a larger mesh context for long rows, or more chips")
    return "; ".join(words)
