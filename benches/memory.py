"""Trains the same steps under many memory policies, and writes what each took and how fast it was.

    python memory.py SMIDGEN_BINARY MODEL TOKENS.jsonl [--rounds 2] [--steps 4] [--out results/memory-cpu.json] [KEY=VALUE ...]

A row is one technique or one budget; keys are those of recipes, for all rows. Rounds alternate over all rows, so that a
slow minute of the machine hits several; each begins with `smidgen doctor`, so that predictions and measurements are of the same time.
Speed is the median over all steps but the first, memory the largest resident set of the process. Losses of rows
with the same micro-batches, tiles and pieces of the head must be equal to the last bit, or the script fails.
Left out: GPUs.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from machine import describe_cpu, version_of

RECIPE = """\
[model]
path = "{model}"
compute = "f32"
[adapter]
rank = 16
[data]
train = "{tokens}"
format = "tokens"
max_tokens = 256
shuffle = false
[train]
batch = 4
steps = {steps}
lr = 2e-4
schedule = "constant"
warmup = 0
save_every = 0
[memory]
device = "cpu"
[output]
dir = "{output}"
"""

HERE = [
    "memory.weights=device",
    "memory.activations=device",
    "memory.optimizer_state=device",
    "memory.micro_tokens=1024",
    "memory.tile_tokens=none",
]


def pinned(*changes):
    keys = {change.split("=")[0] for change in changes}
    return [word for word in HERE if word.split("=")[0] not in keys] + list(changes)


ROWS = {
    "everything in RAM": pinned("memory.recompute=none"),
    "recompute all layers": pinned("memory.recompute=all"),
    "recompute all layers, tiles of 256 tokens": pinned("memory.recompute=all", "memory.tile_tokens=256"),
    "activations on disk": pinned("memory.recompute=none", "memory.activations=host"),
    "recompute all layers, their inputs on disk": pinned("memory.recompute=all", "memory.activations=host"),
    "weights on disk": pinned("memory.recompute=none", "memory.weights=disk"),
    "optimizer state on disk": pinned("memory.recompute=none", "memory.optimizer_state=host"),
    "micro-batches of one sample": pinned("memory.recompute=none", "memory.micro_tokens=256"),
    "budget 400 MiB": ["memory.budget=400MiB"],
    "budget 320 MiB": ["memory.budget=320MiB"],
    "budget 200 MiB": ["memory.budget=200MiB"],
    "budget 150 MiB": ["memory.budget=150MiB"],
}


def run(binary, recipe, output, words):
    arguments = [binary, "train", str(recipe), "--quiet", f"output.dir={output}", *words]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    plan = json.loads((output / "plan.json").read_text())
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return plan, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    binary = str(Path(args.binary).resolve())
    results = {name: {"tokens_per_s_all": [], "predicted_all": []} for name in ROWS}
    losses = {}
    for _ in range(args.rounds):
        subprocess.run([binary, "doctor", "--device", "cpu"], check=True, capture_output=True)
        for name, words in ROWS.items():
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                folder = Path(folder)
                recipe = folder / "recipe.toml"
                values = dict(model=args.model.resolve(), tokens=args.tokens.resolve(), steps=args.steps)
                recipe.write_text(RECIPE.format(output=folder / "run", **values))
                plan, rows = run(binary, recipe, folder / "run", [*words, *args.keys])
            row = results[name]
            row["tokens_per_s_all"] += [step["tokens_per_s"] for step in rows[1:]]
            row["planned_bytes"] = plan["peak_bytes"]
            row["measured_bytes"] = max(row.get("measured_bytes", 0), rows[-1]["host_peak_bytes"])
            row["disk_bytes"] = plan["spaces"]["disk"]
            row["predicted_all"].append(plan["tokens_per_s"])
            policy = plan["policy"]
            row["policy"] = {key: policy[key] for key in ("recompute", "micro_tokens", "tile_tokens", "loss_chunk",
                                                          "weights", "activations", "optimizer_state")}
            row["policy"]["recompute"] = len(policy["recompute"])
            curve = [step["loss"] for step in rows]
            kind = (plan["extent"]["tokens"], policy["tile_tokens"], policy["head_pieces"])
            first = losses.setdefault(kind, (name, curve))
            if curve != first[1]:
                raise SystemExit(f"`{name}` has other losses than `{first[0]}`: {curve} {first[1]}")
            print(f"{name}: planned {plan['peak_bytes'] / 2**20:.1f} MiB, measured {row['measured_bytes'] / 2**20:.1f}, "
                  f"{statistics.median(row['tokens_per_s_all']):.0f} tokens/s, predicted {plan['tokens_per_s']:.0f}",
                  flush=True)
    for row in results.values():
        row["tokens_per_s"] = statistics.median(row["tokens_per_s_all"])
        row["predicted_tokens_per_s"] = statistics.median(row["predicted_all"])
    report = {
        "smidgen": version_of(binary),
        "machine": describe_cpu(),
        "model": args.model.name,
        "batch": "4 x 256 tokens, LoRA r=16, AdamW, f32",
        "rounds": args.rounds,
        "rows": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
