"""Trains SmolLM2-135M on OpenBookQA with `smidgen` and compares it with what `real_task.py` recorded.

    python real_task.py MODEL.gguf DATA_DIR --write-adapter WORK/initial
    python real_task.py MODEL.gguf DATA_DIR --out reference.json --device cuda      # perhaps elsewhere
    python real_task_compare.py SMIDGEN_BINARY MODEL.gguf DATA_DIR WORK --reference reference.json
                                --where TEXT [--compute f32|bf16] [--out results/real-task.json]

Everything is kept in WORK and made once: the initial adapter, the run, `eval.json`, the preview whose ids and
labels are compared with the reference's own; so it can be stopped and called again. Without `--reference` it
does smidgen's part and ends. Printed and written: differences of the losses step by step, of the
log-likelihoods of the answers row by row before and after training, accuracies with their standard errors.
Left out: speed (`compare.py`).
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from machine import version_of

HERE = Path(__file__).resolve().parent
PREVIEW_ROWS = 64

RECIPE = """\
[model]
path = "{gguf}"
base = "as-stored"
compute = "{compute}"

[adapter]
kind = "lora"
rank = 16
alpha = 32
targets = "all-linear"
init = "{work}/initial"

[data]
train = "{train}"
eval = "{test}"
format = "alpaca"
loss_on = "completion"
max_tokens = 1024
overflow = "error"
shuffle = false

[train]
batch = 16
epochs = 1
lr = {lr}
schedule = "linear"
warmup = 0
weight_decay = 0.0
clip = 1.0
save_every = 50

[eval]
task = "choice"
answer = "answer[1-5]"

[memory]
device = "cpu"
budget = "{budget}"

[output]
dir = "{run}"
"""


def run_to_end(command: list, out: Path | None = None) -> None:
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(map(str, command))}` exited with {done.returncode}")
    if out:
        out.write_text(done.stdout)


def first_rows(source: Path, count: int | None, target: Path) -> Path:
    """The file itself, or a copy of its first rows."""
    if count is None:
        return source.resolve()
    target.write_text(json.dumps(json.loads(source.read_text())[:count], indent=1))
    return target


def run_smidgen(arguments: argparse.Namespace) -> tuple[list[dict], dict, dict]:
    work, run = arguments.work, arguments.work / "run"
    work.mkdir(parents=True, exist_ok=True)
    reference = [sys.executable, HERE / "real_task.py", arguments.gguf, arguments.data]
    if not (work / "initial").exists():
        run_to_end([*reference, "--write-adapter", work / "initial"])
    recipe = work / "recipe.toml"
    recipe.write_text(RECIPE.format(
        gguf=arguments.gguf.resolve(), compute=arguments.compute, work=work.resolve(), run=run.resolve(), lr=arguments.lr,
        budget=arguments.budget, train=first_rows(arguments.data / "train.json", arguments.train_rows, work.resolve() / "train.json"),
        test=first_rows(arguments.data / "test.json", arguments.test_rows, work.resolve() / "test.json"),
    ))
    preview = work / "preview.json"
    if not preview.exists():
        run_to_end([arguments.smidgen, "preview", recipe, "--json", "--rows", PREVIEW_ROWS], preview)
    if not (run / "adapter").exists():
        resume = ["--resume"] if run.exists() else []
        run_to_end([arguments.smidgen, "train", recipe, *resume])
    if not (work / "eval.json").exists():
        run_to_end([arguments.smidgen, "eval", run, "--task", "choice", "--out", work / "eval.json"])
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "loss" in row]
    return steps, json.loads((work / "eval.json").read_text()), json.loads(preview.read_text())


def spread(differences: list[float]) -> dict:
    sizes = sorted(abs(difference) for difference in differences)
    return {
        "mean": sum(sizes) / len(sizes), "median": sizes[len(sizes) // 2], "max": sizes[-1],
        "root_mean_square": math.sqrt(sum(size * size for size in sizes) / len(sizes)),
    }


def accuracy(predictions: list[int], golds: list[int]) -> dict:
    mean = sum(a == b for a, b in zip(predictions, golds, strict=True)) / len(golds)
    return {"accuracy": mean, "stderr": math.sqrt(mean * (1 - mean) / max(len(golds) - 1, 1)), "rows": len(golds)}


def compare_choices(ours: list[dict], theirs: list[dict], golds: list[int]) -> dict:
    """Row by row; `margins` are what decides: each likelihood less the row's mean."""
    if [row["gold"] for row in theirs] != golds:
        raise SystemExit("error: the reference scored other rows, or its right answers differ")
    centred = lambda values: [value - sum(values) / len(values) for value in values]
    pairs = [(a["log_likelihoods"], b["log_likelihoods"]) for a, b in zip(ours, theirs, strict=True)]
    return {
        "log_likelihood_differences": spread([x - y for a, b in pairs for x, y in zip(a, b, strict=True)]),
        "margin_differences": spread([x - y for a, b in pairs for x, y in zip(centred(a), centred(b), strict=True)]),
        "same_prediction": sum(a["prediction"] == b["prediction"] for a, b in zip(ours, theirs)),
        "smidgen": accuracy([row["prediction"] for row in ours], golds),
        "reference": accuracy([row["prediction"] for row in theirs], golds),
    }


def compare(steps: list[dict], evaluated: dict, preview: dict, reference: dict) -> dict:
    theirs = reference["steps"]
    if [step["supervised_tokens"] for step in steps] != [step["supervised_tokens"] for step in theirs]:
        raise SystemExit(f"error: {len(steps)} steps here and {len(theirs)} there, or of other sizes")
    losses = [step["loss"] for step in steps]
    their_losses = [step["loss"] for step in theirs]
    samples = evaluated["samples"]
    golds = [sample["gold"] for sample in samples]
    last = max(len(losses) // 10, 1)
    return {
        "setting": reference["setting"],
        "versions": reference["versions"],
        "initial_adapter_sha256": reference["initial_adapter_sha256"],
        "samples_with_equal_tokens": len(preview["samples"]),
        "steps": len(losses),
        "loss_differences": spread([a - b for a, b in zip(losses, their_losses, strict=True)]),
        "loss_differences_first_10": spread([a - b for a, b in zip(losses[:10], their_losses[:10])]),
        "mean_loss_of_last_tenth": {
            "smidgen": sum(losses[-last:]) / last, "reference": sum(their_losses[-last:]) / last,
        },
        "before": compare_choices([sample["base"] for sample in samples], reference["before"], golds),
        "after": compare_choices([sample["adapter"] for sample in samples], reference["after"], golds),
        "losses": {"smidgen": losses, "reference": their_losses},
    }


def render(results: dict) -> str:
    losses, first = results["loss_differences"], results["loss_differences_first_10"]
    lines = [
        f"loss over {results['steps']} steps: differences {losses['mean']:.2e} on average, {losses['max']:.2e} at most; "
        f"first ten {first['max']:.2e} at most",
        f"{'':<8}{'accuracy':>20}{'reference':>20}{'same picks':>12}{'Δ log-likelihood mean':>23}{'max':>10}{'Δ margin max':>14}",
    ]
    for when in ("before", "after"):
        row = results[when]
        said = [f"{row[who]['accuracy']:.3f} ± {row[who]['stderr']:.3f}" for who in ("smidgen", "reference")]
        differences = row["log_likelihood_differences"]
        lines.append(
            f"{when:<8}{said[0]:>20}{said[1]:>20}{row['same_prediction']:>6}/{row['smidgen']['rows']:<5}"
            f"{differences['mean']:>23.2e}{differences['max']:>10.2e}{row['margin_differences']['max']:>14.2e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen", type=Path, metavar="SMIDGEN_BINARY")
    parser.add_argument("gguf", type=Path, metavar="MODEL.gguf")
    parser.add_argument("data", type=Path, metavar="DATA_DIR")
    parser.add_argument("work", type=Path, metavar="WORK")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--compute", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--budget", default="auto")
    parser.add_argument("--train-rows", type=int)
    parser.add_argument("--test-rows", type=int)
    parser.add_argument("--where", required=True, help="which machines the two ran on, in words")
    parser.add_argument("--out", type=Path, default=Path("results/real-task.json"))
    arguments = parser.parse_args()
    arguments.smidgen = arguments.smidgen.resolve()

    steps, evaluated, preview = run_smidgen(arguments)
    if not arguments.reference:
        return
    reference = json.loads(arguments.reference.read_text())
    if reference["setting"]["lr"] != arguments.lr:
        raise SystemExit(f"error: the reference was trained with a rate of {reference['setting']['lr']}, not {arguments.lr}")
    # Tokens are compared here, where both the preview and the reference's own tokenizer are.
    from real_task import Encoder, check_samples
    from read_gguf import GgufFile

    rows = json.loads((arguments.data / "train.json").read_text())[: arguments.train_rows]
    check_samples(Encoder(GgufFile(arguments.gguf)), rows, arguments.work / "preview.json")
    results = {"compute": arguments.compute, **compare(steps, evaluated, preview, reference), "where": arguments.where}
    results["versions"]["smidgen"] = version_of(arguments.smidgen)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))


if __name__ == "__main__":
    main()
