"""Trains the same thing with `smidgen` and with PyTorch + PEFT, in turns, and prints how they compare.

    python compare.py SMIDGEN_BINARY [--compute f32|bf16] [--stored f32|bf16] [--rounds 3] [--steps 8] [--threads N] [--inputs DIR]
                      [--out results/cpu-smollm2-135m.json]

Both get the same checkpoint (SmolLM2-135M shapes, random weights in the type of `--stored`, as a rule that of `--compute`), the same rows (4 x 256 tokens per
step) and the same initial adapter; every round is a fresh process, smidgen first, then the peer, so that
a slow minute of the machine hits both. Speed is the median over the steps after two warm-ups, then the
median over rounds; memory is the largest resident set of the process. Both use all cores by default.
In bf16 the peer runs as whichever is faster in a first, uncounted run of each: with PEFT's f32 adapters, or with
adapters in bf16; smidgen keeps f32 adapters. Left out: other models, other devices.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe_cpu, version_of

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 2
BATCH_ROWS = 4
ROW_TOKENS = 256

RECIPE = """\
[model]
path = "{inputs}/model"
base = "as-stored"
compute = "{compute}"

[adapter]
kind = "lora"
rank = 16
alpha = 32
targets = "all-linear"
init = "{inputs}/adapter"

[data]
train = "{inputs}/tokens.jsonl"
format = "tokens"
max_tokens = 256
overflow = "error"
shuffle = false

[train]
batch = 4
steps = {steps}
lr = 2e-4
schedule = "constant"
warmup = 0
weight_decay = 0.0
clip = 1.0
save_every = 0

[memory]
device = "cpu"
threads = {threads}
budget = "{budget}"
recompute = "{recompute}"

[output]
dir = "{run}"
"""


def run_to_end(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(command)}` exited with {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


def run_smidgen(arguments: argparse.Namespace, inputs: Path, folder: Path) -> dict:
    folder.mkdir()
    recipe, run = folder / "recipe.toml", folder / "run"
    recipe.write_text(RECIPE.format(
        inputs=inputs, run=run, steps=arguments.steps, threads=arguments.threads, budget=arguments.budget,
        recompute=arguments.recompute, compute=arguments.compute,
    ))
    run_to_end([str(arguments.smidgen), "train", str(recipe)])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "loss" in row]
    if len(steps) != arguments.steps:
        raise SystemExit(f"error: `{run}/metrics.jsonl` has {len(steps)} steps, not {arguments.steps}")
    if {row["tokens"] for row in steps} != {BATCH_ROWS * ROW_TOKENS}:
        raise SystemExit(f"error: a step of smidgen is not {BATCH_ROWS * ROW_TOKENS} tokens")
    return {
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps[WARM_UP_STEPS:]),
        "peak_bytes": max(row["host_peak_bytes"] for row in steps),
        "planned_peak_bytes": json.loads((run / "plan.json").read_text())["peak_bytes"],
        "step_ms": [row["step_ms"] for row in steps],
        "losses": [row["loss"] for row in steps],
    }


def run_peer(arguments: argparse.Namespace, inputs: Path, adapter_dtype: str) -> dict:
    command = [
        sys.executable, str(HERE / "peer_torch.py"), "--steps", str(arguments.steps), "--threads", str(arguments.threads),
        "--dtype", arguments.compute, "--adapter-dtype", adapter_dtype, "--model", str(inputs / "model"), "--adapter", str(inputs / "adapter"), "--data", str(inputs / "tokens.jsonl"),
    ]
    if arguments.peer_checkpointing:
        command.append("--checkpointing")
    result = json.loads(run_to_end(command).splitlines()[-1])
    return {"peak_bytes": result.pop("peak_rss_bytes"), **result}


def choose_adapter_dtype(arguments: argparse.Namespace, inputs: Path) -> tuple[str, dict]:
    """How the peer is fastest, and how fast it was each way."""
    if arguments.compute == "f32":
        return "f32", {}
    tried = {kind: run_peer(arguments, inputs, kind)["tokens_per_s"] for kind in ("f32", "base")}
    return max(tried, key=tried.get), tried


def max_relative_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def render_table(rounds: list[dict]) -> str:
    lines = [f"{'round':>5}  {'who':<8}{'tokens/s':>10}{'peak GiB':>10}{'planned GiB':>13}{'load':>7}"]
    for index, turn in enumerate(rounds):
        for who in ("smidgen", "peer"):
            result = turn[who]
            planned = f"{result['planned_peak_bytes'] / 2**30:.3f}" if "planned_peak_bytes" in result else ""
            lines.append(
                f"{index + 1:>5}  {who:<8}{result['tokens_per_s']:>10.1f}{result['peak_bytes'] / 2**30:>10.3f}"
                f"{planned:>13}{result['load_before']:>7.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen", type=Path, metavar="SMIDGEN_BINARY")
    parser.add_argument("--compute", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--stored", choices=["f32", "bf16"], help="how the checkpoint has its weights; SmolLM2 is published in bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget", default="auto", help="`memory.budget` of the recipe")
    parser.add_argument("--recompute", default="auto", help="`memory.recompute` of the recipe")
    parser.add_argument("--peer-checkpointing", action="store_true")
    parser.add_argument("--inputs", type=Path, help="what make_smollm2.py wrote, or where it shall write; default: temporary")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.stored = arguments.stored or arguments.compute
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} warm-up steps")
    arguments.smidgen = arguments.smidgen.resolve()

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        inputs = (arguments.inputs or work / "inputs").resolve()
        if not (inputs / "tokens.jsonl").exists():
            rows = BATCH_ROWS * arguments.steps
            run_to_end([sys.executable, str(HERE / "make_smollm2.py"), str(inputs), "--rows", str(rows), "--base", arguments.stored])
        stored = json.loads((inputs / "model/config.json").read_text())["dtype"]
        if stored != {"f32": "float32", "bf16": "bfloat16"}[arguments.stored]:
            raise SystemExit(f"error: the weights in `{inputs}` are {stored}, for another --stored")
        adapter_dtype, tried = choose_adapter_dtype(arguments, inputs)
        rounds = []
        for index in range(arguments.rounds):
            turn = {}
            for who in ("smidgen", "peer"):
                load = os.getloadavg()[0]
                result = run_smidgen(arguments, inputs, work / f"round-{index}") if who == "smidgen" else run_peer(arguments, inputs, adapter_dtype)
                turn[who] = {"load_before": load, **result}
            rounds.append(turn)

    medians = {
        who: {key: statistics.median(turn[who][key] for turn in rounds) for key in ("tokens_per_s", "peak_bytes")}
        for who in ("smidgen", "peer")
    }
    results = {
        "machine": describe_cpu(),
        "versions": {"smidgen": version_of(arguments.smidgen), **rounds[0]["peer"]["versions"]},
        "setting": {
            "model": "SmolLM2-135M shapes, random weights", "compute": arguments.compute, "stored": arguments.stored, "rank": 16, "steps": arguments.steps,
            "batch": BATCH_ROWS, "max_tokens": ROW_TOKENS, "threads": arguments.threads, "budget": arguments.budget, "recompute": arguments.recompute,
            "peer_checkpointing": arguments.peer_checkpointing, "peer_adapters": adapter_dtype,
            "peer_adapters_tried_tokens_per_s": tried,
        },
        "medians": medians,
        "speed_ratio": medians["smidgen"]["tokens_per_s"] / medians["peer"]["tokens_per_s"],
        "memory_ratio": medians["smidgen"]["peak_bytes"] / medians["peer"]["peak_bytes"],
        "losses_max_relative_difference": max(
            max_relative_difference(turn["smidgen"]["losses"], turn["peer"]["losses"]) for turn in rounds
        ),
        "rounds": rounds,
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(render_table(rounds))
    print(f"speed {results['speed_ratio']:.2f} x the peer, memory {results['memory_ratio']:.2f} x the peer, "
          f"losses within {results['losses_max_relative_difference']:.1e}")


main()
