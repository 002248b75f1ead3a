#!/usr/bin/env python3
"""What looking at memory after every step costs: alternating runs with and without it.

    python3 benches/monitor.py --smidgen target/release/smidgen RECIPE [KEY=VALUE ...]

Each pair is a run as it is and one with `--unmonitored`, in changing order; the time of a step is the median of a run,
and the cost the median of the pairs' differences. Without a recipe a tiny fixture is trained, whose steps are so short
that the cost shows in microseconds: it is the same for every model on a machine.
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


def step_ms(smidgen, recipe, overrides, folder, is_monitored):
    """The median step of one run."""
    output = folder / "timed"
    shutil.rmtree(output, ignore_errors=True)
    flags = [] if is_monitored else ["--unmonitored"]
    subprocess.run([smidgen, "train", recipe, f"output.dir={output}", *overrides, *flags, "--quiet"], check=True)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_ms" in row]
    assert (rows[-1]["host_rss_bytes"] is not None) == is_monitored
    # The first steps look for tensors that do not learn.
    return statistics.median(row["step_ms"] for row in rows[min(5, len(rows) // 4):])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--smidgen", type=Path, default=ROOT / "target/release/smidgen")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3000, help="of the fixture")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, recipe, overrides = Path(scratch), args.recipe, args.overrides
        if recipe is None:
            shutil.copytree(ROOT / "fixtures/llama-gqa-tied", folder, dirs_exist_ok=True)
            recipe, overrides = folder / "recipe.toml", [f"train.steps={args.steps}"]
            recipe.write_text(TINY)
        with_it, without = [], []
        for pair in range(args.pairs):
            for is_monitored in [True, False] if pair % 2 == 0 else [False, True]:
                ms = step_ms(args.smidgen.resolve(), recipe, overrides, folder, is_monitored)
                (with_it if is_monitored else without).append(ms)
                print(f"  {'with   ' if is_monitored else 'without'} {ms:10.4f} ms a step", file=sys.stderr)
        costs = [one - other for one, other in zip(with_it, without)]
        cost, step = statistics.median(costs), statistics.median(without)
        print(json.dumps({
            "pairs": args.pairs, "step_ms": step, "cost_us": 1e3 * cost, "cost_of_step": cost / step,
            "cost_us_of_pairs": [round(1e3 * it, 1) for it in costs],
        }))


if __name__ == "__main__":
    main()
