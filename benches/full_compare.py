"""Trains weights of SmolLM2-135M themselves with `smidgen` and with a PyTorch AdamW loop, and compares ten losses.

    python full_compare.py SMIDGEN_BINARY MODEL.gguf WORK [--layers last:2 all] [--steps 10] [--out results/full.json]

Both begin with the decoded weights of the GGUF file and compute in f32; the frozen layers of `smidgen` stay in
blocks. Rows are the project's own documents in the model's tokens, all supervised. AdamW, clipping and the two
groups of weight decay are those of the Trainer of transformers. Printed and written: every loss of both, their
largest difference, and the memory that was planned and measured. Files in WORK are reused, so the
script can be stopped and called again.
Left out: speed (`compare.py`).
"""

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

from read_gguf import GgufFile, load_model, load_tokenizer

HERE = Path(__file__).resolve().parent
TOKENS, ROWS, BATCH = 96, 16, 4
LR, DECAY = 2e-5, 0.01

RECIPE = """\
[model]
path = "{gguf}"
compute = "f32"

[adapter]
kind = "full"
layers = "{layers}"

[data]
train = "{work}/tokens.jsonl"
format = "tokens"
max_tokens = {tokens}
shuffle = false

[train]
batch = {batch}
steps = {steps}
lr = {lr}
schedule = "constant"
warmup = 0
weight_decay = {decay}
clip = 1.0
save_every = 0

[memory]
device = "cpu"

[output]
dir = "{work}/{name}"
"""


def write_rows(file: GgufFile, path: Path) -> list[list[int]]:
    text = "".join((HERE.parent / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "docs/interop.md"))
    ids = load_tokenizer(file).encode(text).ids
    rows = [ids[TOKENS * row : TOKENS * (row + 1)] for row in range(ROWS)]
    assert all(len(row) == TOKENS for row in rows), "the documents are too short"
    path.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    return rows


def torch_losses(file: GgufFile, rows: list[list[int]], layers: str, steps: int, kept: Path) -> list[float]:
    if kept.exists():
        return json.loads(kept.read_text())
    import torch
    import transformers

    model = load_model(file).eval()
    count = model.config.num_hidden_layers
    first = 0 if layers == "all" else count - int(layers.removeprefix("last:"))
    for name, parameter in model.named_parameters():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        parameter.requires_grad_(layers == "all" if layer is None else int(layer[1]) >= first)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name in decayed], "weight_decay": DECAY},
        {"params": [p for name, p in trained.items() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(steps):
        batch = torch.tensor([rows[(step * BATCH + row) % len(rows)] for row in range(BATCH)])
        optimizer.zero_grad()
        logits = model(input_ids=batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimizer.step()
        losses.append(loss.item())
    kept.write_text(json.dumps(losses))
    return losses


def smidgen_run(binary: str, gguf: Path, work: Path, layers: str, steps: int) -> dict:
    name = "run-" + layers.replace(":", "-")
    recipe = work / f"{name}.toml"
    recipe.write_text(RECIPE.format(
        gguf=gguf.resolve(), layers=layers, work=work.resolve(), tokens=TOKENS, batch=BATCH, steps=steps, lr=LR,
        decay=DECAY, name=name,
    ))
    run = work / name
    if not (run / "model").exists():
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([binary, "train", str(recipe)], check=True)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run / "plan.json").read_text())
    return {
        "losses": [row["loss"] for row in metrics],
        "planned_bytes": plan["peak_bytes"],
        "rows": plan["rows"],
        "measured_bytes": max(row["device_peak_bytes"] for row in metrics),
        "step_ms": sorted(row["step_ms"] for row in metrics)[len(metrics) // 2],
    }


def check_model(folder: Path) -> int:
    """transformers loads what the run made, with every tensor in its place."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", nargs="*", default=["last:2", "all"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    file = GgufFile(arguments.gguf)
    rows = write_rows(file, arguments.work / "tokens.jsonl")
    results = {"setting": {"tokens": TOKENS, "batch": BATCH, "lr": LR, "weight_decay": DECAY, "compute": "f32"}}
    for layers in arguments.layers:
        run = smidgen_run(arguments.binary, arguments.gguf, arguments.work, layers, arguments.steps)
        kept = arguments.work / f"torch-{layers.replace(':', '-')}.json"
        run["torch_losses"] = torch_losses(file, rows, layers, arguments.steps, kept)
        run["largest_difference"] = max(abs(a - b) for a, b in zip(run["losses"], run["torch_losses"], strict=True))
        run["parameters_of_the_model"] = check_model(arguments.work / ("run-" + layers.replace(":", "-")) / "model")
        results[layers] = run
        for step, (own, other) in enumerate(zip(run["losses"], run["torch_losses"]), 1):
            print(f"{layers:8} step {step:2}  smidgen {own:.6f}  torch {other:.6f}  {abs(own - other):.1e}")
        print(f"{layers:8} largest difference {run['largest_difference']:.1e}, measured "
              f"{run['measured_bytes']:,} of {run['planned_bytes']:,} planned bytes")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
