"""How fast a GPU generates: model shapes with random weights, by `smidgen bench --decode`.

    python gpu_decode.py SMIDGEN_BINARY [--model qwen2.5-7b] [--steps 64] [--out results/decode-h200.json]

A row is a storage of the weights, a number of sequences and the tokens that each has before the measurement. Rates are
those of the median step, over all sequences; the bandwidth is that of reading the weights once per step.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import describe_gpu, version_of

ROWS = [(base, sequences, tokens) for base in ("bf16", "fp8", "nf4") for sequences, tokens in ((1, 128), (1, 2048), (4, 2048), (8, 2048))]
KEPT = ["decode_tokens_per_s", "decode_step_ms", "prompt_tokens_per_s", "weight_bytes_per_step", "weight_gb_per_s", "planned_bytes"]


def run(arguments: argparse.Namespace, base: str, sequences: int, tokens: int) -> dict:
    command = [
        str(arguments.smidgen), "bench", "--decode", "--json", "--model", arguments.model, "--base", base,
        "--batch", str(sequences), "--tokens", str(tokens), "--steps", str(arguments.steps),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: `{' '.join(command)}` exited with {done.returncode}\n{done.stderr.strip()}")
    figures = json.loads(done.stdout)
    return {"base": base, "sequences": sequences, "tokens": tokens, **{name: figures[name] for name in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen", type=Path)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for base, sequences, tokens in ROWS:
        row = run(arguments, base, sequences, tokens)
        rows.append(row)
        print(f"{base}, {sequences} x {tokens} tokens: {row['decode_tokens_per_s']:.0f} tokens/s, {row['decode_step_ms']:.2f} ms, {row['weight_gb_per_s']:.0f} GB/s of weights", flush=True)
    result = {"machine": describe_gpu(), "smidgen": version_of(arguments.smidgen), "model": arguments.model, "steps": arguments.steps, "rows": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
