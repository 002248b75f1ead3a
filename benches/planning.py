"""Times `smidgen plan` on large Llama shapes from a config.json alone, and reports how full the arena is.

    python planning.py SMIDGEN_BINARY [--rounds 5] [--out results/planning.json]

Each shape is planned at 2048 tokens with LoRA r=16 on all linears, recompute `none` and `all`, and once
under a budget between the two, so that the solver has to search. Utilization is the peak of
the live bytes ÷ the reserved bytes of the transient region. Times are wall-clock of the whole process,
the median over rounds. Then 70B under many budgets, some too small for any plan: for a CPU, an H200 and a GPU of
24 GB, in bf16 and in 4 bits, with one size of micro-batch and with twelve; for these the smallest processor time over
rounds is recorded too, which other programs disturb less.
Left out: devices and weights, which planning does not need.
"""

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from machine import describe_cpu, version_of

SHAPES = {
    "llama-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                     num_key_value_heads=8, tie_word_embeddings=True),
    "llama-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                     num_key_value_heads=8, tie_word_embeddings=False),
    "llama-70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                      num_key_value_heads=8, tie_word_embeddings=False),
}
SHARED = dict(model_type="llama", vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5,
              max_position_embeddings=8192, torch_dtype="bfloat16")

RECIPE = """\
[model]
path = "model"
[data]
train = "absent.jsonl"
max_tokens = 2048
[train]
batch = {batch}
[memory]
device = "{device}"
budget = "4000GiB"
[output]
dir = "unused"
"""


def plan(binary, recipe, *overrides):
    started = time.perf_counter()
    done = subprocess.run([binary, "plan", str(recipe), "--json", *overrides], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, json.loads(done.stdout)


def measure(binary, recipe, rounds, *overrides):
    runs = [plan(binary, recipe, *overrides) for _ in range(rounds)]
    report, arena = runs[0][1], runs[0][1]["arena"]
    assert all(report == other for _, other in runs), "one request, two plans"
    used = arena["transient_peak_live_bytes"] / arena["transient_reserved_bytes"]
    return dict(seconds=round(statistics.median(s for s, _ in runs), 4), utilization=round(used, 5),
                peak_bytes=report["peak_bytes"], recomputed_layers=len(report["policy"]["recompute"]))


BUDGETS = {
    "cpu": ("cpu", [], [400, 300, 170, 120, 60, 30, 12, 6, 3]),
    "h200": ("cuda:0", ["memory.profile=h200"], [139, 80, 48, 40]),
    "rtx-4090": ("cuda:0", ["memory.profile=rtx-4090"], [23, 16, 12, 8, 5, 2]),
}


def under_budgets(binary, rounds):
    """Seconds for 70B under each budget, and what was chosen."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model, recipe = Path(folder) / "model", Path(folder) / "recipe.toml"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHARED | SHAPES["llama-70b"]))
        for name, (device, words, budgets) in BUDGETS.items():
            for base in ("as-stored", "nf4"):
                for batch in (1, 12):
                    recipe.write_text(RECIPE.format(batch=batch, device=device))
                    for budget in budgets:
                        key = f"{name} {base} batch {batch} {budget} GiB"
                        rows[key] = once(binary, recipe, rounds, f"model.base={base}", f"memory.budget={budget}GiB", *words)
                        print(f"{key:40} {json.dumps(rows[key])}", flush=True)
    return rows


def once(binary, recipe, rounds, *words):
    wall, processor = [], []
    for _ in range(rounds):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([binary, "plan", str(recipe), "--json", *words], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - started)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    report = json.loads(done.stdout)
    return dict(seconds=round(statistics.median(wall), 2), processor_seconds=round(min(processor), 2), fits=report["fits"],
                peak_bytes=report["peak_bytes"], step_ms=round(report["step_ms"], 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    results = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHARED | shape))
            recipe = Path(folder) / "recipe.toml"
            recipe.write_text(RECIPE.format(batch=1, device="cpu"))
            rows = {key: measure(arguments.binary, recipe, arguments.rounds, f"memory.recompute={key}")
                    for key in ("none", "all")}
            between = (rows["none"]["peak_bytes"] + rows["all"]["peak_bytes"]) // 2
            rows["solved"] = measure(arguments.binary, recipe, arguments.rounds, f"memory.budget={between}")
            results[name] = rows
        for key, row in results[name].items():
            print(f"{name:10} {key:7} {row['seconds']:.3f} s  utilization {row['utilization']:.4f}  "
                  f"peak {row['peak_bytes'] / 2**30:.1f} GiB  {row['recomputed_layers']} layers recomputed")
    budgets = under_budgets(arguments.binary, min(arguments.rounds, 2))
    slowest = sorted(row["processor_seconds"] for row in budgets.values())
    print(f"{len(slowest)} budgets: {slowest[0]} to {slowest[-1]} s of a processor, {slowest[len(slowest) // 2]} in the median, "
          f"{sum(seconds > 1.5 for seconds in slowest)} above 1.5 s")
    if arguments.out:
        report = dict(smidgen=version_of(arguments.binary), machine=describe_cpu(), shapes=results, budgets=budgets)
        Path(arguments.out).write_text(json.dumps(report, indent=2) + "\n")


main()
