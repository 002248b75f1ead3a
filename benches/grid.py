"""Plans against measurement on a grid of runs: families, storages, adapters, optimizers, budgets, lengths.

    python grid.py SMIDGEN_BINARY [--device cpu|cuda:0] [--out results/grid-cpu.json] [--only WORD]

Random checkpoints are written by `smidgen bench --write-model` from small configs of every family, tokens by a counter; GGUF
files are those of `fixtures/`. Each run is a plain `smidgen train`. Budgets are `auto`, the least that
a plan of an impossible budget names (`tight`), and the middle between that and the roomy plan. A row has the planned and
the measured peak, their difference as a share of the plan, and what the process or the device held at the tenth and at
the last step. The exit code is 1 if a run takes more than its plan, leaks more than 1 %, or fails.
Left out: speed (`memory.py`, `gpu_compare.py`), and whether results are right (the tests).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_cpu, describe_gpu, version_of

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
VOCABULARY = 4096

SHARED = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
              num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=65536,
              tie_word_embeddings=False, torch_dtype="bfloat16")
FAMILIES = {
    "llama": dict(model_type="llama"),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=True),
    "mistral": dict(model_type="mistral", sliding_window=1024),
    "phi3": dict(model_type="phi3", original_max_position_embeddings=65536, rope_scaling=None),
    "gemma2": dict(model_type="gemma2", sliding_window=512, query_pre_attn_scalar=64, attn_logit_softcapping=50.0,
                   final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True),
    "gemma3": dict(model_type="gemma3_text", sliding_window=512, query_pre_attn_scalar=64, sliding_window_pattern=3,
                   rope_local_base_freq=10000.0, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True),
}
# A model whose runs of tens of thousands of tokens take seconds on a processor.
NARROW = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
              head_dim=32, vocab_size=1024)
GGUF = ["gguf-llama", "gguf-qwen2", "gguf-qwen3", "gguf-phi3", "gguf-gemma2", "gguf-gemma3", "gguf-kquants"]

RECIPE = """\
[model]
path = "{model}"
base = "{base}"
compute = "{compute}"
[adapter]
kind = "{adapter}"
rank = 8
[data]
train = "{tokens}"
format = "tokens"
max_tokens = {length}
[train]
batch = {batch}
steps = {steps}
optimizer = "{optimizer}"
lr = 1e-4
save_every = 0
log_every = 0
[memory]
device = "{device}"
threads = {threads}
budget = "{budget}"
[output]
dir = "{output}"
"""

BASE = dict(family="llama", base="as-stored", compute="auto", adapter="lora", optimizer="adamw", budget="auto", length=512,
            batch=8, steps=3, size="small")


def grid(is_gpu):
    """Every run: changes to `BASE`."""
    runs = []
    for family in FAMILIES:
        runs += [dict(family=family, budget=budget) for budget in ("auto", "middle", "tight")]
        runs.append(dict(family=family, base="nf4", length=2048, batch=4, steps=2, budget="middle"))
    for base in ("f32", "int8", "nf4", "nf4-single"):
        runs += [dict(base=base, budget=budget, adapter=adapter)
                 for budget, adapter in (("auto", "lora"), ("tight", "lora"), ("middle", "dora"))]
    for adapter in ("rslora", "dora", "ls-lora"):
        runs += [dict(adapter=adapter, family=family, budget=budget)
                 for family, budget in (("llama", "auto"), ("qwen2", "tight"), ("phi3", "middle"))]
    for budget in ("auto", "middle", "tight"):
        runs.append(dict(optimizer="adamw-8bit", budget=budget))
    runs += [dict(family=name, size="fixture", length=64, batch=5) for name in GGUF]
    runs.append(dict(family="gguf-llama", size="fixture", length=64, batch=5, budget="tight"))
    runs += [dict(length=length, batch=1, steps=2, size="narrow", budget=budget, family=family)
             for family, length in (("llama", 8192), ("gemma3", 8192), ("llama", 32768), ("mistral", 32768))
             for budget in ("auto", "tight")]
    runs.append(dict(length=32768, batch=1, steps=2, size="narrow", base="nf4", adapter="dora", optimizer="adamw-8bit"))
    runs += [dict(steps=200, batch=2, length=64, budget=budget) for budget in ("auto", "tight")]
    runs.append(dict(steps=200, batch=2, length=64, base="nf4", adapter="ls-lora", optimizer="adamw-8bit"))
    if is_gpu:
        runs += [dict(compute=compute, budget=budget) for compute in ("f32", "f16") for budget in ("auto", "tight")]
    else:
        runs += [dict(compute="f32", budget=budget) for budget in ("auto", "tight")]
    return [BASE | run for run in runs]


def name_of(run):
    words = [run["family"], run["base"], run["adapter"], run["optimizer"], f"{run['batch']}x{run['length']}",
             run["budget"], f"{run['steps']} steps"]
    return " ".join(words + ([run["compute"]] if run["compute"] != "auto" else []))


def model_path(binary, folder, run):
    if run["size"] == "fixture":
        return FIXTURES / run["family"] / "model.gguf"
    path = folder / f"{run['family']}-{run['size']}"
    if not path.exists():
        config = SHARED | FAMILIES[run["family"]] | (NARROW if run["size"] == "narrow" else {})
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        subprocess.run([binary, "bench", "--model", str(path), "--write-model", str(path)], check=True, capture_output=True)
    return path


def tokens_path(folder, length, vocabulary):
    """Samples of `length` tokens and of somewhat fewer."""
    path = folder / f"tokens-{length}-{vocabulary}.jsonl"
    if not path.exists():
        rows = []
        for sample in range(24 if length < 4096 else 4):
            count = length if sample % 3 == 0 else length - (sample * 7) % (length // 4)
            rows.append(json.dumps({"input_ids": [(sample * 31 + 7 * place) % vocabulary for place in range(count)]}))
        path.write_text("\n".join(rows) + "\n")
    return path


def plan(binary, recipe, budget):
    done = subprocess.run([binary, "plan", str(recipe), "--json", f"memory.budget={budget}"], capture_output=True, text=True)
    if not done.stdout.strip().startswith("{"):
        raise RuntimeError(f"no plan for {budget}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def least_and_roomy(binary, recipe):
    return plan(binary, recipe, "1MiB")["peak_bytes"], plan(binary, recipe, "100GiB")["peak_bytes"]


def measure(binary, folder, run, device, threads):
    vocabulary = 100 if run["size"] == "fixture" else (NARROW["vocab_size"] if run["size"] == "narrow" else VOCABULARY)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scratch = Path(scratch)
        recipe, output = scratch / "recipe.toml", scratch / "run"
        values = {key: run[key] for key in ("base", "compute", "adapter", "optimizer", "length", "batch", "steps")}
        recipe.write_text(RECIPE.format(model=model_path(binary, folder, run), device=device, threads=threads, budget="auto",
                                        tokens=tokens_path(folder, run["length"], vocabulary), output=output, **values))
        words = []
        if run["budget"] != "auto":
            least, roomy = least_and_roomy(binary, recipe)
            words = [f"memory.budget={least if run['budget'] == 'tight' else (least + roomy) // 2}"]
        done = subprocess.run([binary, "train", str(recipe), "--quiet", *words], capture_output=True, text=True)
        if done.returncode:
            return dict(run=name_of(run), failed=f"ended with {done.returncode}: {done.stderr.strip()[-600:]}")
        planned = json.loads((output / "plan.json").read_text())
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    is_gpu = device != "cpu"
    peak = rows[-1]["device_peak_bytes" if is_gpu else "host_peak_bytes"]
    held = [row["device_bytes" if is_gpu else "host_rss_bytes"] for row in rows]
    result = dict(run=name_of(run), planned_bytes=planned["peak_bytes"], measured_bytes=peak,
                  below_plan=round(1 - peak / planned["peak_bytes"], 5), steps=len(rows),
                  early_bytes=held[min(9, len(held) - 1)], last_bytes=held[-1])
    policy = planned["policy"]
    result["policy"] = {key: policy[key] for key in ("micro_tokens", "loss_chunk", "weights", "activations", "optimizer_state")}
    result["policy"]["recompute"] = len(policy["recompute"])
    if peak > planned["peak_bytes"]:
        result["failed"] = f"took {peak - planned['peak_bytes']} bytes more than planned"
    elif held[-1] > 1.01 * held[min(9, len(held) - 1)]:
        result["failed"] = f"grew from {held[min(9, len(held) - 1)]} to {held[-1]} bytes"
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    binary = str(Path(args.binary).resolve())
    runs = [run for run in grid(args.device != "cpu") if args.only in name_of(run)]
    if args.seconds < float("inf"):
        # So that what is left out is of every kind.
        runs = [run for first in range(4) for run in runs[first::4]]
    results, started = [], time.time()
    with tempfile.TemporaryDirectory() as folder:
        for index, run in enumerate(runs):
            if time.time() - started > args.seconds:
                break
            try:
                result = measure(binary, Path(folder), run, args.device, args.threads)
            except (RuntimeError, subprocess.CalledProcessError, OSError, KeyError) as error:
                result = dict(run=name_of(run), failed=f"{type(error).__name__}: {error}")
            results.append(result)
            said = result.get("failed") or (f"planned {result['planned_bytes'] / 2**20:.2f} MiB, "
                                            f"{100 * result['below_plan']:.2f} % below")
            print(f"{index + 1}/{len(runs)} {result['run']}: {'FAILED ' if 'failed' in result else ''}{said}", flush=True)
    failed = [result for result in results if "failed" in result]
    shares = sorted(result["below_plan"] for result in results if "below_plan" in result)
    summary = dict(runs=len(results), of=len(runs), failed=len(failed), seconds=round(time.time() - started),
                   within_1_percent=sum(1 for share in shares if 0 <= share <= 0.01),
                   least_below=shares[0] if shares else None, median_below=shares[len(shares) // 2] if shares else None,
                   most_below=shares[-1] if shares else None)
    print(json.dumps(summary))
    if args.out:
        machine = dict(**(describe_cpu() if args.device == "cpu" else describe_gpu()), threads=args.threads)
        report = dict(smidgen=version_of(binary), device=args.device, machine=machine, summary=summary, rows=results)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
