"""What a compiled program computes and sends, read from its text: products with their FLOPs, collectives with mesh axes and
bytes.

XLA's own cost analysis counts the body of a loop once and says nothing of axes. Here a body counts as often as it runs, where
that is a constant; for loops whose length depends on data the caller says how often they run on average.
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
_CALLS = r"(calls|to_apply|body|condition|branch_computations|\w+_computation)"
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
      turns: part of the traced name of a loop -> how often it runs, for loops whose length depends on data.
    """
    computations, entry = _computations(text)
    found = []
    for computation, times, bounded in _visits(computations, entry, turns or {}):
        lines = computations[computation]
        for line in lines.values():
            match = re.match(r"(.*?) (dot|convolution|custom-call)\((.*?)\)", line)
            if match is None:
                continue
            name = re.search(r'op_name="([^"]*)"', line)
            flops = _FLOPS[match[2]](line, lines, match)
            if flops:
                found.append(Product(flops, times, bounded, name[1] if name else "", match[1]))
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


def _visits(computations: dict, name: str, turns: dict, times: float = 1, bounded: bool = True):
    """(computation, how often it runs, whether that is known) for all that `name` calls, itself included."""
    yield name, times, bounded
    for line in computations[name].values():
        trips = _trips(line, computations, name, turns) if " while(" in line else 1
        for kind, names in re.findall(_CALLS + r"=(\{[^}]*\}|%?[\w.-]+)", line):
            for called in re.findall(r"[\w.-]+", names):
                if called not in computations or (" while(" in line and kind == "condition"):
                    continue
                more, known = (1, False) if trips is None else (trips, True)
                if more:
                    yield from _visits(computations, called, turns, times * more, bounded and known)


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
    name = re.search(r'op_name="([^"]*)"', line)
    return next((n for part, n in turns.items() if name and part in name[1]), None)


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
        return ("?",), 2
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


def _size(shape: str) -> float:
    """Bytes of all arrays in a type."""
    arrays = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape)
    return sum(_BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)


def _sent(kind: str, result: float, n: int) -> float:
    """Bytes that each of n devices of a ring sends, given the size of a device's result."""
    share = (n - 1) / n
    return {"all-gather": share, "reduce-scatter": n - 1, "all-reduce": 2 * share, "all-to-all": share}.get(kind, 1) * result
