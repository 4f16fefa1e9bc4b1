"""RUNS/report.html: one file with the curves, the settings and the before and after of every stage of a pipeline.

It needs nothing else, no network either: figures are SVG in the page, which follow its light or dark colours.
"""

import dataclasses
import html
import json
import math
import os
import pathlib
from collections.abc import Sequence

import jax

from glm5_jax.config import check
from glm5_jax.errors import UserError
from glm5_jax.model import abstract, split
from glm5_jax.train.metrics import read as metrics_of
from glm5_jax.train.run_dir import network_class

# Panels: title -> {name in metrics.jsonl: (words in the legend, colour)}; those without a record are left out.
CURVES = {
    "training loss, nats per token": {"ce": ("next token", "a"), "mtp": ("MTP", "b")},
    "held-out bits per byte": {"bits_per_byte": ("", "b")},
    "KL of the indexer, nats per query": {"index_kl": ("", "c")},
    "reward": {
        "reward": ("answers it learns from", "a"),
        "eval_greedy": ("held out, greedy", "b"),
        "eval_sampled": ("held out, sampled", "c"),
    },
    "entropy, nats per token": {"entropy": ("", "a")},
    "KL to the teachers, nats per token": {"teacher_k1": ("", "b")},
}
# Settings worth a line, by their dotted names; what a config lacks is left out.
SETTINGS = (
    "steps", "init.run", "data.sources", "data.seq_len", "lengths", "batch_rows", "data.packing", "data.template",
    "rollout.tasks", "rollout.prompts", "rollout.group", "rollout.max_new_tokens", "objective", "teachers",
    "model.attention", "model.index_topk", "model.rope_theta", "freeze", "optimizer.name", "optimizer.indexer_rate",
    "lr.kind", "lr.peak", "lr.final", "loss.mtp_steps", "loss.detach_mtp", "loss.index_weight",
)  # fmt: skip
WIDTH, HEIGHT, LEFT, BOTTOM = 360, 200, 48, 28  # of a figure and its margins, in units of SVG

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --text: #1c1d1f; --dim: #63666b; --line: #d9dadc; --box: #f1f1ef;
  --a: #1f5fbf; --b: #b3541e; --c: #2e7d4f; --mark: #fff2c9; }
@media (prefers-color-scheme: dark) { :root { --page: #17181a; --text: #e6e6e4; --dim: #9c9fa4; --line: #3a3c40;
  --box: #212326; --a: #7db0ff; --b: #f0a070; --c: #7fce9f; --mark: #4a3f16; } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto;
  padding: 1rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin-bottom: .25rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .25rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
.dim { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--dim); font-weight: 600; vertical-align: bottom; }
.overview td:first-child { white-space: nowrap; }
.moves { background: var(--mark); font-weight: 600; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; flex: 0 1 22.5rem; }
figcaption { font-size: .85rem; color: var(--dim); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .8em; }
.settings { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 0 1.5rem; font-size: .85rem;
  margin: 0; }
.settings div { display: flex; gap: .75rem; justify-content: space-between; border-bottom: 1px solid var(--line); }
.settings dt { color: var(--dim); }
.settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.settings .changed dd { font-weight: 700; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
pre { background: var(--box); padding: .75rem; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.45 ui-monospace, monospace; margin: .25rem 0; }
"""


def write_report(title: str, stages: Sequence, runs: pathlib.Path) -> pathlib.Path:
    """Writes RUNS/report.html of what there is so far, in one move, and returns its path.

    Args:
      stages: of `run.Stage`, chained.
    Raises:
      UserError: the folder takes no file.
    """
    known = [json.loads(path.read_text()) if (path := runs / s.name / "measured.json").exists() else None for s in stages]
    done = sum(k is not None for k in known)
    state = f"All {len(stages)} stages are done." if done == len(stages) else f"{done} of {len(stages)} stages are done."
    parts = [f"<h1>{_text(title)}</h1>", f"<p class=dim>{state}</p>", _overview(stages, known, runs)]
    for i, (stage, measured) in enumerate(zip(stages, known)):
        parts.append(_stage(i + 1, stage, stages[i - 1].config if i else None, measured, runs / stage.name))
    page = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )
    path = runs / "report.html"
    try:
        new = path.with_suffix(".new")
        new.write_text(page, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def _text(value) -> str:
    return html.escape(str(value))


def _number(name: str, value: float) -> str:
    """Four digits, fewer behind the point the larger it is; percentages have one behind it."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 or "%" in name else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """head, rows: cells as HTML, `<td>` and `<th>` included where a cell has a class of its own."""
    cell = lambda text, tag: text if text.startswith(f"<{tag}") else f"<{tag}>{text}</{tag}>"  # noqa: E731
    line = lambda cells, tag: "<tr>" + "".join(cell(c, tag) for c in cells) + "</tr>"  # noqa: E731
    body = "".join(line(row, "td") for row in rows)
    return f"<div class=wide><table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _overview(stages, known: list[dict | None], runs: pathlib.Path) -> str:
    """One row for each stage that is done, and one for the fresh weights: all numbers, the time."""
    first = next((k for k in known if k), None)
    if first is None:
        return ""
    names = list(first["before"]["numbers"])
    rows = [["fresh weights", "", "", *(_number(n, known[0]["before"]["numbers"][n]) for n in names)]] if known[0] else []
    for stage, measured in zip(stages, known):
        if measured is None:
            continue
        values = [
            f"<td class=moves>{_number(n, measured['after']['numbers'][n])}</td>"
            if n in stage.moves
            else _number(n, measured["after"]["numbers"][n])
            for n in names
        ]
        wall, cpu = _times(runs / stage.name)
        rows.append([f'<a href="#{stage.name}">{_text(stage.title)}</a>', wall, cpu, *values])
    note = "<p class=dim>Measured in the same way after every stage; marked: what the stage is to move. Times in minutes.</p>"
    table = _table(["after", "wall time", "CPU time", *map(_text, names)], rows)
    return f"{note}<div class=overview>{table}</div>"


def _times(run_dir: pathlib.Path) -> tuple[str, str]:
    """Wall and CPU time of a stage as minutes and seconds, empty where none is known."""
    path = run_dir / "times.json"
    times = json.loads(path.read_text()) if path.exists() else {}
    return tuple("{}:{:02}".format(*divmod(round(times[n]), 60)) if n in times else "" for n in ("wall_seconds", "cpu_seconds"))


def _stage(number: int, stage, before, measured: dict | None, run_dir: pathlib.Path) -> str:
    """The section of one stage. before: the config of the stage before it."""
    wall, cpu = _times(run_dir)
    model = split(abstract(stage.config.model, network_class(stage.config)))[1]
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)) / 1e6
    took = f"; took {wall} minutes, {cpu} of CPU time" if wall else ""
    parts = [
        f'<h2 id="{stage.name}">{number}. {_text(stage.title)}</h2>',
        f"<p class=dim>Paper, section {_text(stage.section)}; run {_text(run_dir)}; {size:,.2f}M parameters{took}</p>",
        f"<p>{_text(stage.about)}</p>",
    ]
    if (run_dir / "metrics.jsonl").exists():
        parts.append(f"<div class=curves>{''.join(_curves(metrics_of(run_dir)))}</div>")
    if measured:
        parts += [_before_after(stage, measured), _samples(measured)]
    parts.append("<h3>Settings</h3><p class=dim>Bold: other than in the stage before.</p>" + _settings(stage.config, before))
    return "".join(parts)


def _before_after(stage, measured: dict) -> str:
    rows, (old, new) = [], (measured[when]["numbers"] for when in ("before", "after"))
    for name in old:
        mark = " class=moves" if name in stage.moves else ""
        change = ("+" if new[name] >= old[name] else "−") + _number(name, abs(new[name] - old[name]))
        values = (_number(name, old[name]), _number(name, new[name]), change)
        rows.append([f"<td{mark}>{_text(text)}</td>" for text in (name, *values)])
    return "<h3>Before and after</h3>" + _table(["", "before", "after", "change"], rows)


def _samples(measured: dict) -> str:
    parts = ["<h3>Samples</h3><p class=dim>The model goes on behind the bar.</p>"]
    for name in measured["after"]["samples"]:
        both = (
            f"<div><div class=dim>{when}</div><pre>{_text(measured[when]['samples'][name])}</pre></div>"
            for when in ("before", "after")
        )
        parts.append(f"<p>{_text(name)}</p><div class=samples>{''.join(both)}</div>")
    return "".join(parts)


def _settings(config, before) -> str:
    old = _dotted(dataclasses.asdict(before)) if before else {}
    new = _dotted(dataclasses.asdict(config))
    lines = []
    for name in SETTINGS:
        changed = " class=changed" if before and new.get(name) != old.get(name, ()) else ""
        if name in new and (changed or new[name] not in ("", ())):
            value = ", ".join(map(str, new[name])) or "none" if isinstance(new[name], tuple) else new[name]
            lines.append(f"<div{changed}><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>")
    return f"<dl class=settings>{''.join(lines)}</dl>"


def _dotted(tree: dict, prefix: str = "") -> dict:
    items = {}
    for key, value in tree.items():
        items |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


def _curves(lines: list[dict]) -> list[str]:
    """The panels of which a run has a record of at least two steps."""
    figures, partly = [], any(line.get("held_out_rows") for line in lines)
    # The last evaluation takes all held-out rows, those before it the first few: no curve goes through both.
    lines = [line for line in lines if not partly or line.get("held_out_rows") != 0]
    for title, names in CURVES.items():
        known = {n: [(x["step"], x[n]) for x in lines if n in x and math.isfinite(x[n])] for n in names}
        known = {n: points for n, points in known.items() if len(points) > 1}
        if known:
            keys = "".join(
                f'<span class=key style="background:var(--{names[n][1]})"></span>{names[n][0]}' for n in known if names[n][0]
            )
            series = [(points, names[n][1]) for n, points in known.items()]
            figures.append(f"<figure>{svg(series, title)}<figcaption>{title}{keys}</figcaption></figure>")
    return figures


def svg(series: Sequence[tuple[list[tuple[float, float]], str]], title: str) -> str:
    """Lines through points (step, value), one for each series, of the colour that its second entry names."""
    check(all(points for points, _ in series), f"{title}: a series without points")
    xs, ys = zip(*(point for points, _ in series for point in points))
    low, high = _padded(min(ys), max(ys))
    first, last = min(xs), max(max(xs), min(xs) + 1)
    at_x = lambda x: LEFT + (x - first) / (last - first) * (WIDTH - LEFT - 12)  # noqa: E731
    at_y = lambda y: 8 + (high - y) / (high - low) * (HEIGHT - BOTTOM - 8)  # noqa: E731
    parts = []
    for y in ticks(low, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in (x for x in ticks(first, last) if x == int(x)):
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    for points, colour in series:
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="var(--{colour})" stroke-width="1.6"/>')
        if len(points) <= 25:
            parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.5" fill="var(--{colour})"/>' for x, y in points]
    label = html.escape(f"{title}, by step", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or max(abs(low), 1.0) * 0.05
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Round numbers in [low, high], three to eight of them, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = max(m * power for m in (1, 2, 5, 10) if m * power <= (high - low) / 3 or m == 1)
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
