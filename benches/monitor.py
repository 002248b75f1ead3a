#!/usr/bin/env python3
"""What measuring memory after every step costs: by its own clock, and by alternating runs with and without it.

    python3 benches/monitor.py --smidgen target/release/smidgen [--out results/monitor.json] [RECIPE [KEY=VALUE ...]]

Every row of `metrics.jsonl` says how long measuring took (`monitor_ms`): divided by the time of the steps it is the cost,
and other load on the machine affects both equally. In addition, each pair is a normal run and one with `--unmonitored`,
in alternating order; the time of a step is the lower quartile of a run, and the cost is the median of the pairs'
differences, with the spread of their middle half: if that is wider than the cost, the pairs only show that it is small.
Without a recipe a tiny fixture is trained, whose steps are so short that the cost is visible; `--out` adds the
result to a file under the name of the device and the recipe.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = """[model]
path = "model"
compute = "f32"
[adapter]
rank = 4
[data]
train = "data.jsonl"
format = "tokens"
max_tokens = 64
[train]
batch = 4
lr = 1e-4
save_every = 0
[memory]
device = "cpu"
threads = 1
budget = "64MiB"
[output]
dir = "run"
"""


def timed_run(smidgen, recipe, overrides, folder, is_monitored):
    """The rows of one run after its first steps, which look for tensors that do not learn."""
    output = folder / "timed"
    shutil.rmtree(output, ignore_errors=True)
    flags = [] if is_monitored else ["--unmonitored"]
    subprocess.run([smidgen, "train", recipe, f"output.dir={output}", *overrides, *flags, "--quiet"], check=True)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_ms" in row]
    assert (rows[-1]["host_rss_bytes"] is not None) == is_monitored
    plan = json.loads((output / "plan.json").read_text())
    return rows[min(5, len(rows) // 4):], plan


def quartile(values, part):
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--smidgen", type=Path, default=ROOT / "target/release/smidgen")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3000, help="of the fixture")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, recipe, overrides = Path(scratch), args.recipe, args.overrides
        name = recipe.stem if recipe else "fixture"
        if recipe is None:
            shutil.copytree(ROOT / "fixtures/llama-gqa-tied", folder, dirs_exist_ok=True)
            recipe, overrides = folder / "recipe.toml", [f"train.steps={args.steps}"]
            recipe.write_text(TINY)
        with_it, without, inside = [], [], []
        for pair in range(args.pairs):
            for is_monitored in [True, False] if pair % 2 == 0 else [False, True]:
                rows, plan = timed_run(args.smidgen.resolve(), recipe, overrides, folder, is_monitored)
                ms = quartile([row["step_ms"] for row in rows], 0.25)
                (with_it if is_monitored else without).append(ms)
                if is_monitored:
                    inside += [(1e3 * row["monitor_ms"], row["step_ms"]) for row in rows]
                print(f"  {'with   ' if is_monitored else 'without'} {ms:10.4f} ms per step", file=sys.stderr)
        costs = [1e3 * (one - other) for one, other in zip(with_it, without)]
        step = statistics.median(without)
        result = {
            "step_ms": step,
            "monitor_us": statistics.median(us for us, _ in inside),
            "monitor_us_99": quartile([us for us, _ in inside], 0.99),
            # Relative to the whole time, the slowest measurements included.
            "monitor_of_time": sum(us for us, _ in inside) / 1e3 / sum(ms for _, ms in inside),
            "pairs": args.pairs,
            "pairs_cost_us": statistics.median(costs),
            "pairs_cost_us_middle_half": [quartile(costs, 0.25), quartile(costs, 0.75)],
            "pairs_cost_of_step": statistics.median(costs) / 1e3 / step,
        }
        print(json.dumps(result, indent=1))
        if args.out:
            device = plan["policy"]["device"]
            device = "cpu" if device == "cpu" else plan.get("profile", {}).get("name", device)
            known = json.loads(args.out.read_text()) if args.out.exists() else {}
            known[f"{device} {name}"] = result
            args.out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
