"""What a compiled program computes, moves and sends, read from its text: products with their FLOPs, instructions with their
bytes of memory, collectives with mesh axes and bytes.

XLA's own cost analysis counts the body of a loop once and says nothing of axes. Here a body counts as often as it runs, where
that is a constant; for loops whose length depends on data, and branches taken now and then, the caller says how often they
run on average.
"""

import itertools
import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_INSTRUCTION = re.compile(r"(.*?) ([a-z-]+)\((.*?)\)")  # type, kind, operands
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")  # type, sizes, layout
_CALLERS = re.compile(r" (while|conditional|call|call-start|async-start)\(")  # run the computations that they name
_CALLS = r"(calls|to_apply|body|condition|branch_computations|\w+_computation)"
# What moves nothing itself: names of values, waiting for what a "-start" began, and calls, whose bodies are looked at.
_STILL = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "while", "conditional", "call", "call-start", "async-start", "opt-barrier", "add-dependency", "get-dimension-size",
)  # fmt: skip
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`. axes: mesh axes it runs over, "?" if its groups are none of the mesh's. bytes: what each device
        sends per run on a ring. times: how often it runs. bounded: False inside a loop whose length depends on data, which
        `times` counts once. name: where it comes from in the traced program. shape: of its result.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    times: float
    bounded: bool
    name: str
    shape: str


class Product(NamedTuple):
    """One matrix product, convolution or Pallas kernel.

    Attributes:
      flops: of one run, on one device; those of a kernel are its own estimate. times: how often it runs. bounded: as in
        `Collective`. name: where it comes from in the traced program. shape: of its result.
    """

    flops: float
    times: float
    bounded: bool
    name: str
    shape: str


def products(text: str, turns: dict[str, float] | None = None) -> list[Product]:
    """All products that a compiled program (`Compiled.as_text()`) computes. Elementwise arithmetic is not listed.

    Args:
      turns: scope that a loop or branch is traced in -> how often it runs, for loops whose length depends on data and branches
        that are not taken each time. A branch that is not named counts once, and so does the other one.
    """
    computations, entry = _computations(text)
    found = []
    for computation, times, bounded in _visits(computations, entry, turns or {}):
        lines = computations[computation]
        for line in lines.values():
            match = _INSTRUCTION.match(line)
            if match is None or match[2] not in _FLOPS:
                continue
            name = re.search(r'op_name="([^"]*)"', line)
            flops = _FLOPS[match[2]](line, lines, match)
            if flops:
                found.append(Product(flops, times, bounded, name[1] if name else "", match[1]))
    return found


class Instruction(NamedTuple):
    """One instruction that a device runs, a fusion counting as one.

    Attributes:
      flops: of the products in it. bytes: read from and written to the device's main memory in one run; operands and results in
        a faster memory (TPU: those marked S(1)) count nothing. times, bounded, name, shape: as in `Product`.
    """

    flops: float
    bytes: float
    times: float
    bounded: bool
    name: str
    shape: str


def instructions(text: str, turns: dict[str, float] | None = None) -> list[Instruction]:
    """All instructions with FLOPs or bytes, in the order of the schedule; text and turns as in `products`.

    Of what only slices of an operand are used, the slices count; a kernel counts what it estimates, or else each operand and
    result once.
    """
    computations, entry = _computations(text)
    found = []
    for computation, times, bounded in _visits(computations, entry, turns or {}, fused=False):
        lines = computations[computation]
        for line in lines.values():
            match = _INSTRUCTION.match(line)
            if match is None or match[2] in _STILL or match[2].endswith("-done"):
                continue
            name = re.search(r'op_name="([^"]*)"', line)
            flops, size = _flops_inside(line, lines, match, computations), _moved(line, lines, match, computations)
            if flops or size:
                found.append(Instruction(flops, size, times, bounded, name[1] if name else "", match[1]))
    return found


def collectives(text: str, mesh: Mesh, turns: dict[str, float] | None = None) -> list[Collective]:
    """All collectives that a compiled program runs on the devices of a mesh; text and turns as in `products`."""
    computations, entry = _computations(text)
    groups = _groups_by_axes(mesh)
    found = []
    for computation, times, bounded in _visits(computations, entry, turns or {}):
        for line in computations[computation].values():
            match = re.match(r"(.*?) ([a-z-]+?)(-start)?\(", line)
            if match is None or match[2] not in KINDS:
                continue
            shape, kind = match[1], match[2]
            axes, n = _axes(line, groups, mesh)
            size = _size(shape) / (2 if match[3] and shape.startswith("((") else 1)
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(kind, axes, _sent(kind, size, n), times, bounded, name[1] if name else "", shape))
    return found


def by_axes(found: list[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """(kind, axes) -> (how many run, bytes that each device sends) in all, loops of unknown length counted once."""
    sums: dict = {}
    for c in found:
        runs, sent = sums.get((c.kind, c.axes), (0, 0.0))
        sums[c.kind, c.axes] = (runs + c.times, sent + c.times * c.bytes)
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def _computations(text: str) -> tuple[dict[str, dict[str, str]], str]:
    """(name of a computation -> name of an instruction -> its text, name of the computation that is run)."""
    computations, entry, lines = {}, "", {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{\s*$", line)
        if head and not line.startswith(" "):
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif instruction := re.match(r"\s*(?:ROOT )?%?(\S+) = (.*)", line):
            lines[instruction[1]] = instruction[2] + (" ROOT" if line.lstrip().startswith("ROOT ") else "")
    return computations, entry


def _visits(computations: dict, name: str, turns: dict, times: float = 1, bounded: bool = True, fused: bool = True):
    """(computation, how often it runs, whether that is known) for all that `name` calls, itself included; those inside of
    single instructions (fusions, reductions) only if `fused`."""
    yield name, times, bounded
    for line in computations[name].values():
        if not fused and not _CALLERS.search(line):
            continue
        trips = 1
        if " while(" in line:
            trips = _trips(line, computations, name, turns)
        elif " conditional(" in line:
            told = _told(line, turns)
            trips = 1 if told is None else told
        for kind, names in re.findall(_CALLS + r"=(\{[^}]*\}|%?[\w.-]+)", line):
            for called in re.findall(r"[\w.-]+", names):
                if called not in computations or (" while(" in line and kind == "condition"):
                    continue
                more, known = (1, False) if trips is None else (trips, True)
                if more:
                    yield from _visits(computations, called, turns, times * more, bounded and known, fused)


def _trips(line: str, computations: dict, caller: str, turns: dict) -> float | None:
    """How often a loop's body runs: as the compiler says, or a counter's way from one constant to another, or as told."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
        return int(known[1])
    condition = computations[re.search(r"condition=%?([\w.-]+)", line)[1]]
    carry = re.search(r" while\(%?([\w.-]+)\)", line)[1]
    items = re.search(r" tuple\((.*?)\)", computations[caller].get(carry, "") or "")

    def value(name: str) -> int | None:  # of a scalar of the condition
        if at := re.search(r" get-tuple-element\(.*index=(\d+)", condition.get(name, "")):
            return _constant(_names(items[1])[int(at[1])], computations[caller]) if items else None
        return _constant(name, condition)

    root = next((text for text in condition.values() if text.endswith(" ROOT")), "")
    if compare := re.search(r" compare\((.*?)\), direction=LT", root):
        start, end = (value(name) for name in _names(compare[1]))
        if start is not None and end is not None:
            return max(0, end - start)
    return _told(line, turns)


def _told(line: str, turns: dict) -> float | None:
    """What the caller says of a loop or branch: the scope right around it counts."""
    name = re.search(r'op_name="([^"]*)"', line)
    around = "/".join(name[1].split("/")[-2:]) if name else ""
    return next((n for scope, n in turns.items() if scope in around), None)


def _names(operands: str) -> list[str]:
    """The instructions in a list of operands, whose types may be given before them."""
    operands = re.sub(r"/\*.*?\*/", "", operands)
    return [part.split()[-1].lstrip("%") for part in re.split(r",(?![^\[{(]*[\]})])", operands) if part.strip()]


def _constant(name: str, lines: dict[str, str]) -> int | None:
    """The value of an integer scalar, None if it is not a constant."""
    line = lines.get(name, "")
    if number := re.search(r" constant\((-?\d+)\)", line):
        return int(number[1])
    same = re.search(r" (?:copy|bitcast|copy-start|copy-done)\((.*?)\)", line)
    return _constant(_names(same[1])[0], lines) if same else None


def _dims(shape: str) -> list[int]:
    """Sizes of an array type."""
    return [int(n) for n in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if n]


def _dot_flops(line: str, lines: dict, match) -> float:
    left = _dims(lines[_names(match[3])[0]])
    summed = [left[int(i)] for i in re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1].split(",") if i]
    return 2.0 * math.prod(_dims(match[1])) * math.prod(summed)


def _convolution_flops(line: str, lines: dict, match) -> float:
    """2 x outputs x input features of a group x places of the window that lie on data, not on padding or holes."""
    left, right = (_dims(lines[name]) for name in _names(match[3]))
    out = _dims(match[1])
    labels_left, labels_right, labels_out = re.search(r"dim_labels=(\w+?)_(\w+?)->(\w+)", line).groups()
    window = dict(re.findall(r"(\w+)=(\S+?)(?=[ }])", re.search(r"window=\{([^}]*\})", line)[1])) if "window=" in line else {}
    get = lambda key, i, default: window[key].split("x")[i] if key in window else default  # noqa: E731
    flops = 2.0 * out[labels_out.index("b")] * out[labels_out.index("f")] * right[labels_right.index("i")]
    for i in range(len(labels_out) - 2):
        low = int(get("pad", i, "0_0").split("_")[0])
        stride, inside, between = (int(get(key, i, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        size, places = left[labels_left.index(str(i))], right[labels_right.index(str(i))]
        at = np.arange(out[labels_out.index(str(i))])[:, None] * stride + np.arange(places) * between - low
        flops *= np.sum((at >= 0) & (at % inside == 0) & (at // inside < size))
    return flops


def _kernel_flops(line: str, lines: dict, match) -> float:
    estimate = re.search(r'"cost_estimate":\{"flops":"(\d+)"', line)
    return float(estimate[1]) if estimate else 0.0


_FLOPS = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _kernel_flops}


def _flops_inside(line: str, lines: dict, match, computations: dict) -> float:
    """FLOPs of an instruction, those of the products in a fusion added up."""
    if match[2] != "fusion":
        return _FLOPS[match[2]](line, lines, match) if match[2] in _FLOPS else 0.0
    inner = computations[_called(line)]
    matches = ((text, _INSTRUCTION.match(text)) for text in inner.values())
    return sum(_flops_inside(text, inner, m, computations) for text, m in matches if m)


def _moved(line: str, lines: dict, match, computations: dict) -> float:
    """Bytes of main memory that one run of an instruction reads and writes."""
    shape, kind, operands = match[1], match[2], _names(match[3])
    if kind == "fusion":
        inner = computations[_called(line)]
        read = sum(_main(lines[name]) and _read(inner, i, computations) for i, name in enumerate(operands))
        return read + _written(shape, inner, computations)
    if kind == "custom-call":
        if estimate := re.search(r'"bytes_accessed":"(\d+)"', line):
            return float(estimate[1])
        return 0.0 if "tpu_custom_call" not in line else _main(shape) + sum(_main(lines[name]) for name in operands)
    if kind.endswith("-start"):  # its result names the source too
        return _main(shape)
    if kind in _SLICES:
        return 2 * _main(shape)
    if kind in _UPDATES:
        return 2 * _main(lines[operands[_UPDATES[kind]]])
    return _main(shape) + sum(_main(lines[name]) for name in operands)


_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first one, in place


def _read(lines: dict, number: int, computations: dict) -> float:
    """Bytes that a fusion reads of a parameter: all of it, or what its slices take."""
    name, own = next((n, text) for n, text in lines.items() if f" parameter({number})" in text)
    return _used(lines, name, _size(_type(own)), computations)


def _used(lines: dict, name: str, size: float, computations: dict) -> float:
    total = 0.0
    for user, text in lines.items():
        match = _INSTRUCTION.match(text)
        if match is None or name not in (operands := _names(match[3])):
            continue
        if match[2] in _SLICES and operands[0] == name:
            total += _size(match[1])
        elif match[2] in _UPDATES and operands[0] == name:
            continue
        elif match[2] == "bitcast":
            total += _used(lines, user, size, computations)
        elif match[2] == "fusion":
            total += sum(_read(computations[_called(text)], i, computations) for i, n in enumerate(operands) if n == name)
        else:
            return size
    return min(size, total)


def _written(shape: str, lines: dict, computations: dict) -> float:
    """Bytes that a fusion of a result type writes: all of it, or what it puts into an operand in place."""
    roots = [next(text for text in lines.values() if text.endswith(" ROOT"))]
    match = _INSTRUCTION.match(roots[0])
    if match[2] == "tuple":
        roots = [lines[name] for name in _names(match[3])]
    arrays = [array[0] for array in _ARRAY.finditer(shape)]
    if len(roots) != len(arrays):
        return _main(shape)
    return sum(min(_main(array), _put(text, lines, computations)) for array, text in zip(arrays, roots))


def _put(text: str, lines: dict, computations: dict) -> float:
    match = _INSTRUCTION.match(text)
    if match[2] == "bitcast":
        return _put(lines[_names(match[3])[0]], lines, computations)
    if match[2] in _UPDATES:
        return _size(_type(lines[_names(match[3])[_UPDATES[match[2]]]]))
    if match[2] == "fusion":
        return _written(match[1], computations[_called(text)], computations)
    return _size(match[1])


def _main(text: str) -> float:
    """Bytes in main memory of an instruction's result, or of a type."""
    return _size(_type(text), elsewhere="S(")


def _type(text: str) -> str:
    match = _INSTRUCTION.match(text)
    return match[1] if match else text


def _called(line: str) -> str:
    return re.search(r"calls=%?([\w.-]+)", line)[1]


def _groups_by_axes(mesh: Mesh) -> dict[frozenset, tuple[str, ...]]:
    """Groups of devices, by number in the mesh -> the axes along which they differ."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    names = [a for a in mesh.axis_names if mesh.shape[a] > 1]
    found = {}
    for axes in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1)):
        at = [mesh.axis_names.index(a) for a in axes]
        rows = np.moveaxis(numbers, at, range(-len(at), 0)).reshape(-1, math.prod(mesh.shape[a] for a in axes))
        found[frozenset(frozenset(row.tolist()) for row in rows)] = axes
    return found


def _axes(line: str, groups: dict, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """(mesh axes, size of a group) of a collective."""
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]*)\]T\(([\d,]*)\)\))? \{([\w',]*)\}", line)
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
    if listed:
        rows = [_numbers(row) for row in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif counted:
        rows = _turned(_numbers(counted[2]), counted[3]).reshape(_numbers(counted[1])).tolist()
    elif named:  # axes of a mesh of its own, over numbers that may be turned
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        at = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", named[4])]
        devices = _turned(_numbers(named[2] or str(mesh.size)), named[3]).reshape([int(n) for n in sizes.values()])
        devices = np.moveaxis(devices, at, range(-len(at), 0))
        rows = devices.reshape(-1, math.prod(devices.shape[-len(at) :])).tolist()
    elif pairs:
        ends = np.array([_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
        differ = np.any(np.diff(np.unravel_index(ends, mesh.devices.shape)) != 0, axis=(1, 2))
        return tuple(name for name, d in zip(mesh.axis_names, differ) if d) or ("?",), 2
    elif "replica_groups=" in line and "replica_groups={}" not in line:
        return ("?",), mesh.size
    else:  # all devices
        rows = [list(range(mesh.size))]
    key = frozenset(frozenset(row) for row in rows)
    return groups.get(key, ("?",)), len(rows[0])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _turned(shape: list[int], order: str | None) -> np.ndarray:
    """The numbers 0, 1, ... as an array of a shape, its dimensions then in another order."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_numbers(order)) if order else numbers


def _size(shape: str, elsewhere: str = "") -> float:
    """Bytes of all arrays in a type, or of those whose layout does not name another memory."""
    arrays = (array for array in _ARRAY.findall(shape) if not elsewhere or elsewhere not in array[2])
    return sum(_BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims, _ in arrays)


def _sent(kind: str, result: float, n: int) -> float:
    """Bytes that each of n devices of a ring sends, given the size of a device's result."""
    share = (n - 1) / n
    return {"all-gather": share, "reduce-scatter": n - 1, "all-reduce": 2 * share, "all-to-all": share}.get(kind, 1) * result
