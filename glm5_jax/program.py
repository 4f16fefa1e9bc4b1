"""What a compiled program sends between devices, read from its text: each collective, the mesh axes it runs over, its bytes.

XLA's own cost analysis counts the body of a loop once and says nothing of axes. Here a body counts as often as it runs, where
the compiler knows that; loops whose length depends on data are listed as such.
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
    times: int
    bounded: bool
    name: str
    shape: str


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """All collectives that a compiled program (`Compiled.as_text()`) runs on the devices of a mesh."""
    computations, entry = _computations(text)
    groups = _groups_by_axes(mesh)
    found = []
    for computation, times, bounded in _visits(computations, entry):
        for line in computations[computation]:
            match = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([a-z-]+?)(-start)?\(", line)
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


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(name -> lines of each computation, name of the one that is run)."""
    computations, entry, lines = {}, "", []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{\s*$", line)
        if head and not line.startswith(" "):
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _visits(computations: dict, name: str, times: int = 1, bounded: bool = True):
    """(computation, how often it runs, whether that is known) for all that `name` calls, itself included."""
    yield name, times, bounded
    for line in computations[name]:
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        loop = " while(" in line
        for kind, names in re.findall(_CALLS + r"=(\{[^}]*\}|%?[\w.-]+)", line):
            for called in re.findall(r"[\w.-]+", names):
                if called not in computations or (loop and kind == "condition"):
                    continue
                more = int(trips[1]) if loop and trips else 1
                yield from _visits(computations, called, times * more, bounded and not (loop and trips is None))


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
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
    if listed:
        rows = [[int(n) for n in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif counted:
        shape, source = ([int(n) for n in counted[i].split(",")] for i in (1, 2))
        numbers = np.arange(math.prod(source)).reshape(source)
        if counted[3]:
            numbers = numbers.transpose([int(n) for n in counted[3].split(",")])
        rows = numbers.reshape(shape).tolist()
    elif pairs:
        return ("?",), 2
    else:  # all devices
        rows = [list(range(mesh.size))]
    key = frozenset(frozenset(row) for row in rows)
    return groups.get(key, ("?",)), len(rows[0])


def _size(shape: str) -> float:
    """Bytes of all arrays in a type."""
    arrays = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape)
    return sum(_BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)


def _sent(kind: str, result: float, n: int) -> float:
    """Bytes that each of n devices of a ring sends, given the size of a device's result."""
    share = (n - 1) / n
    return {"all-gather": share, "reduce-scatter": n - 1, "all-reduce": 2 * share, "all-to-all": share}.get(kind, 1) * result
