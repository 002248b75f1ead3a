"""What products in fp8 cost in quality: SmolLM2-135M on OpenBookQA, in fp8 and in bf16, with several seeds.

    python fp8_quality.py SMIDGEN_BINARY MODEL.gguf DATA_DIR WORK [--seeds 3] [--limit ROWS] [--out results/fp8-quality.json]

One epoch of 16 rows per step, LoRA r 16, lr 2e-4, as in `real_task.py`; the two differ in `model.compute` alone, and a
seed has the same data order and the same initial adapter in both. Printed and written: the mean training loss of the last
50 steps, the loss on the test rows, the accuracy of choosing the most likely answer with its standard error, and tokens/s.
Needs a GPU that multiplies in fp8. Left out: other models, whose tensors may have larger outliers.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path

from machine import describe_gpu, version_of

RECIPE = """\
[model]
path = "{gguf}"
compute = "{compute}"

[adapter]
rank = 16

[data]
train = "{train}"
eval = "{test}"
format = "alpaca"
max_tokens = 1024
limit = {limit}

[train]
batch = 16
epochs = 1
lr = 2e-4
warmup = 0
seed = {seed}
save_every = 0

[memory]
device = "cuda:0"
threads = 4

[output]
dir = "{run}"
"""
LAST_STEPS = 50


def run(arguments, compute: str, seed: int) -> dict:
    folder = arguments.work / f"{compute}-{seed}"
    recipe = arguments.work / f"{compute}-{seed}.toml"
    recipe.write_text(RECIPE.format(
        gguf=arguments.model.resolve(), compute=compute, seed=seed, run=folder.resolve(), limit=arguments.limit,
        train=arguments.data.resolve() / "train.json", test=arguments.data.resolve() / "test.json",
    ))
    subprocess.run([arguments.binary, "train", str(recipe)], check=True, capture_output=True)
    for task in ("loss", "choice"):
        subprocess.run([arguments.binary, "eval", str(folder), "--task", task], check=True, capture_output=True)
    scores = {task: found["adapter"] for task, found in json.loads((folder / "eval.json").read_text()).items()}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "compute": compute, "seed": seed, "steps": len(metrics),
        "last_losses": statistics.mean(row["loss"] for row in metrics[-LAST_STEPS:]),
        "test_loss": scores["loss"]["loss"],
        "accuracy": scores["choice"]["acc"],
        "standard_error": scores["choice"]["acc_stderr"],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in metrics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(1, arguments.seeds + 1):
        for compute in ("bf16", "fp8"):
            found = run(arguments, compute, seed)
            results.append(found)
            print(f"{compute} seed {seed}: last losses {found['last_losses']:.4f}, test loss {found['test_loss']:.4f}, "
                  f"accuracy {found['accuracy']:.3f} ± {found['standard_error']:.3f}, {found['tokens_per_s']:.0f} tokens/s",
                  flush=True)
    for bf16, fp8 in zip(results[::2], results[1::2]):
        print(f"seed {bf16['seed']}: last losses {fp8['last_losses'] / bf16['last_losses'] - 1:+.2%}, "
              f"test loss {fp8['test_loss'] / bf16['test_loss'] - 1:+.2%}, "
              f"accuracy {fp8['accuracy'] - bf16['accuracy']:+.3f}")
    if arguments.out:
        found = {"machine": describe_gpu(), "version": version_of(arguments.binary), "runs": results}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
