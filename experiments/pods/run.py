"""Steps of GLM-5, training and one of decoding, compiled for TPU pods: every row of the table in README.md.

    python experiments/pods/run.py                  # all rows, one after another; those with a result are passed over
    python experiments/pods/run.py glm5-4k-v5p      # one of them, anew
    python experiments/pods/run.py --table          # the table, from results/

Each row is one `glm5 plan` command in a process of its own; its JSON lands in results/NAME.json.
"""

import json
import pathlib
import shlex
import subprocess
import sys

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS = {
    "glm5-4k-v5p": "glm5 --stage pretrain --topology v5p:8x8x8 --mesh data=8,expert=64 --seq 4096 --batch 512",
    "glm5-4k-7x": "glm5 --stage pretrain --topology tpu7x:4x8x8 --mesh data=8,expert=64 --seq 4096 --batch 512",
    "glm5-4k-v6e": "glm5 --stage pretrain --topology v6e:16x16 --slices 4 --mesh data=16,expert=64 --seq 4096 --batch 1024",
    "glm5-32k-v5p": "glm5 --stage pretrain --topology v5p:8x8x16 --mesh data=2,expert=64,context=8 --seq 32768 --batch 128",
    "glm5-128k-v5p": "glm5 --stage pretrain --topology v5p:8x8x16 --mesh data=1,expert=64,context=16 --seq 131072 --batch 64",
    "glm5-200k-v5p": "glm5 --topology v5p:8x8x16 --mesh data=1,expert=64,context=16 --seq 202752 --batch 64",
    "glm5-200k-7x": "glm5 --topology tpu7x:8x8x8 --mesh data=1,expert=64,context=16 --seq 202752 --batch 64",
    "glm5_2-200k-v5p": "glm5_2 --topology v5p:8x8x16 --mesh data=1,expert=64,context=16 --seq 202752 --batch 64",
    "glm5_2-200k-7x": "glm5_2 --topology tpu7x:8x8x8 --mesh data=1,expert=64,context=16 --seq 202752 --batch 64",
    "flash-128k-v5p": "glm47_flash --topology v5p:4x4x4 --mesh data=1,expert=8,context=8 --seq 131072 --batch 8",
    "glm5-decode-v5p": "glm5 --serve --topology v5p:4x4x4 --mesh data=1,expert=64,context=1 --seq 65536 --batch 64",
}


def compile_row(name: str) -> None:
    """Runs the command of a row and keeps its result."""
    command = [sys.executable, "-m", "glm5_jax", "plan", *shlex.split(ROWS[name]), "--json"]
    print(f"{name}: glm5 plan {ROWS[name]}", flush=True)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if not lines or not lines[-1].startswith("{"):
        sys.exit(f"{name}: glm5 plan ended with status {process.returncode}")
    RESULTS.mkdir(exist_ok=True)
    result = {"command": f"glm5 plan {ROWS[name]}"} | json.loads(lines[-1])
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def table() -> str:
    """Markdown, one line for each result."""
    head = "| row | chips | mesh data x expert x context | compiled, s | arguments, GiB | temporaries, GiB | headroom "
    head += "| TFLOP of a device; to closed form | GB sent by a device | step, s: without / full overlap | utilisation |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for name in ROWS:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        r = json.loads(path.read_text())
        start = f"| {name} | {r['chips']:,} {r['topology'].split(':')[0]} | {' x '.join(map(str, r['mesh'].values()))} "
        start += f"| {r['compile_s']:.0f} "
        if "flops" not in r:
            lines.append(f"{start}| does not fit: {r['compiler']} |" + " |" * 6)
            continue
        m, f = r["memory"], r["flops"]
        sent = sum(row["bytes"] for row in r["sent"]) / 1e9
        times, use = r["seconds"], r["utilisation"]
        lines.append(
            f"{start}| {m['all arguments'] / 2**30:.1f} | {m['temporaries'] / 2**30:.1f} | {m['headroom']:.0%} "
            f"| {f['compiled'] / 1e12:,.1f}; {f['compiled'] / f['closed form'] - 1:+.1%} | {sent:,.0f} "
            f"| {times['without overlap']:.3g} / {times['full overlap']:.3g} "
            f"| {use['without overlap']:.0%} / {use['full overlap']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--table"]
    if unknown := [name for name in names if name not in ROWS]:
        sys.exit(f"unknown row {unknown[0]}: one of {', '.join(ROWS)}")
    if "--table" not in sys.argv:
        for name in names or [name for name in ROWS if not (RESULTS / f"{name}.json").exists()]:
            compile_row(name)
    print(table())


if __name__ == "__main__":
    main()
