"""What each memory technique saves and costs on a GPU: model shapes with random weights, by `smidgen bench`.

    python gpu_memory.py SMIDGEN_BINARY [--only WORD] [--out results/memory-h200.json]

A row is one technique or one budget. `planned` and `measured` are bytes of the device without the driver's context,
`elsewhere` is pinned host memory; `predicted` is the speed that the plan predicted.
The script fails if a run takes more than its plan.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import describe_gpu, version_of

PINS = ["recompute", "tile_tokens", "weights", "activations", "optimizer_state"]
HERE = {"weights": "device", "activations": "device", "optimizer_state": "device", "tile_tokens": "none"}
QWEN = {"model": "qwen2.5-7b", "base": "bf16", "batch": 4, "tokens": 4096, "steps": 3, "warm-up": 2}
NF4 = {**QWEN, "base": "nf4", "tokens": 2048}
LLAMA = {"model": "llama3.1-8b", "base": "nf4", "rank": 32, "batch": 1, "steps": 2, "warm-up": 1}
LONG = {"recompute": "all", "activations": "host", "optimizer_state": "host", "tile_tokens": 4096}

ROWS = [
    ("everything on the GPU", {**QWEN, **HERE, "recompute": "none"}),
    ("recompute all layers", {**QWEN, **HERE, "recompute": "all"}),
    ("recompute all layers, tiles of 4096 tokens", {**QWEN, **HERE, "recompute": "all", "tile_tokens": 4096}),
    ("recompute all layers, activations offloaded", {**QWEN, **HERE, "recompute": "all", "activations": "host"}),
    ("recompute all layers, weights offloaded", {**QWEN, **HERE, "recompute": "all", "weights": "host"}),
    ("recompute all layers, optimizer state offloaded", {**QWEN, **HERE, "recompute": "all", "optimizer_state": "host"}),
    ("recompute all layers, all of it offloaded", {**QWEN, "recompute": "all", "weights": "host", "activations": "host", "optimizer_state": "host", "tile_tokens": "none"}),
    ("budget 6 GiB", {**QWEN, "budget": "6GiB"}),
    ("2048 tokens per sample, budget 24 GiB", {**QWEN, "tokens": 2048, "budget": "24GiB"}),
    ("2048 tokens per sample, budget 17 GiB", {**QWEN, "tokens": 2048, "budget": "17GiB"}),
    ("budget 8 GiB", {**NF4, "budget": "8GiB"}),
    ("one sample, budget 5.9 GiB", {**NF4, "batch": 1, "budget": "5.9GiB"}),
    ("one sample, layers on the GPU, budget 5.9 GiB", {**NF4, "batch": 1, "budget": "5.9GiB", "weights": "host:0.01"}),
    ("one sample, budget 2.5 GiB", {**NF4, "batch": 1, "budget": "2.5GiB"}),
    ("one sample of 16384 tokens", {**LLAMA, **LONG, "tokens": 16384, "budget": "7.4GiB"}),
    ("one sample of 32768 tokens", {**LLAMA, **LONG, "tokens": 32768, "budget": "8.5GiB"}),
    ("one sample of 65536 tokens", {**LLAMA, **LONG, "tokens": 65536, "budget": "10.9GiB"}),
]


def run(binary, row):
    pins = [f"memory.{key}={value}" for key, value in row.items() if key in PINS]
    options = [word for key, value in row.items() if key not in PINS for word in (f"--{key}", str(value))]
    words = pins + options
    done = subprocess.run([binary, "bench", "--json", *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{words}: {done.stderr}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name, row in ROWS:
        if args.only not in f"{row['model']} {row['base']} {name}":
            continue
        found = run(args.binary, row)
        tokens = found["batch"] * found["tokens"]
        rows.append({
            "name": name,
            **{key: found[key] for key in ["model", "base", "rank", "batch", "tokens", "micro_tokens", "recompute", "policy", "tokens_per_s", "planned_bytes", "measured_bytes", "context_bytes", "elsewhere_bytes"]},
            "predicted_tokens_per_s": 1e3 * tokens / found["predicted_step_ms"],
        })
        print(f"{found['model']} {found['base']} {name}: {found['tokens_per_s']:.0f} tokens/s, predicted {rows[-1]['predicted_tokens_per_s']:.0f}, planned {found['planned_bytes'] / 2**30:.3f} GiB, measured {found['measured_bytes'] / 2**30:.3f}", flush=True)
        if args.out:
            report = {"smidgen": version_of(args.binary), "machine": describe_gpu(), "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    above = [row["name"] for row in rows if row["measured_bytes"] > row["planned_bytes"]]
    if above:
        sys.exit(f"more than planned: {above}")


if __name__ == "__main__":
    main()
