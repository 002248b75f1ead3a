"""Full training that is killed and resumed: makes a random model of real shapes, trains it once in one go and once with
kills in between, and compares losses, norms and the final model byte by byte.

    python full_resume.py SMIDGEN_BINARY FOLDER [--device cuda:0] [--budget 8GiB] [--steps 200] [--kills 2] [--out FILE]

Shapes are those of Qwen2.5-1.5B; rows are random tokens. The run in one go also says how memory grew: the largest
reading of the last quarter of its steps less that of the first quarter. Needs PyTorch to write the model.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


def write_model(folder):
    import torch
    from safetensors.torch import save_file

    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    generator = torch.Generator().manual_seed(1)
    matrix = lambda rows, columns: (0.02 * torch.randn(rows, columns, generator=generator)).bfloat16()
    ones = lambda: torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden), "model.norm.weight": ones()}
    tensors["lm_head.weight"] = matrix(CONFIG["vocab_size"], hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", keys), ("v", keys)):
            tensors[f"{own}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
            tensors[f"{own}self_attn.{name}_proj.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
        tensors[f"{own}self_attn.o_proj.weight"] = matrix(hidden, hidden)
        tensors[f"{own}mlp.gate_proj.weight"] = matrix(wide, hidden)
        tensors[f"{own}mlp.up_proj.weight"] = matrix(wide, hidden)
        tensors[f"{own}mlp.down_proj.weight"] = matrix(hidden, wide)
        tensors[f"{own}input_layernorm.weight"] = ones()
        tensors[f"{own}post_attention_layernorm.weight"] = ones()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_rows(path, count, tokens):
    chance = random.Random(2)
    with open(path, "w") as out:
        for _ in range(count):
            ids = [chance.randrange(CONFIG["vocab_size"]) for _ in range(tokens)]
            out.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def recipe(args, folder, name, save_every):
    path = folder / f"{name}.toml"
    path.write_text(f"""
[model]
path = "{folder / 'model'}"
[adapter]
kind = "full"
[data]
train = "{folder / 'rows.jsonl'}"
format = "tokens"
max_tokens = {args.tokens}
[train]
steps = {args.steps}
batch = {args.batch}
lr = 1e-5
save_every = {save_every}
keep = 1
[memory]
device = "{args.device}"
budget = "{args.budget}"
[output]
dir = "{folder / name}"
""")
    return path


def metrics(run):
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    return [row for row in rows if "loss" in row and "step" in row and "eval" not in row.get("kind", "")]


def digest(folder):
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as source:
            while piece := source.read(1 << 24):
                found.update(piece)
    return found.hexdigest()


def train(args, command, log):
    with open(log, "a") as out:
        return subprocess.Popen([args.smidgen, *command], stdout=out, stderr=out)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("smidgen")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", default="8GiB")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--save-every", type=int, default=60)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_rows(folder / "rows.jsonl", 64, args.tokens)
    log = folder / "log.txt"

    started = time.time()
    code = train(args, ["train", str(recipe(args, folder, "whole", 0))], log).wait()
    assert code == 0, f"the run in one go ended with {code}: see {log}"
    whole_s = time.time() - started
    want, model = metrics(folder / "whole"), digest(folder / "whole" / "model")
    memory = [row["device_bytes"] for row in want if row.get("device_bytes")]
    quarter = max(1, len(memory) // 4)
    growth = max(memory[-quarter:]) - max(memory[:quarter]) if memory else None
    shutil.rmtree(folder / "whole" / "model")

    path = recipe(args, folder, "killed", args.save_every)
    run, kills = folder / "killed", 0
    chance = random.Random(os.getpid())
    process = train(args, ["train", str(path)], log)
    while process.poll() is None:
        time.sleep(0.2)
        saved = kills < args.kills and list(run.glob("checkpoint-*"))
        if saved:
            time.sleep(chance.uniform(0.5, 8.0))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            process = train(args, ["resume", str(run)], log)
    assert process.returncode == 0, f"a resumed run ended with {process.returncode}: see {log}"
    got = metrics(run)
    last = {row["step"]: row for row in got}
    figures = lambda rows: [(row["step"], row["loss"], row.get("grad_norm")) for row in rows]
    result = {
        "device": args.device,
        "budget": args.budget,
        "steps": args.steps,
        "kills": kills,
        "seconds_in_one_go": round(whole_s, 1),
        "grown_bytes": growth,
        "same_losses_and_norms": figures(want) == figures([last[step] for step in sorted(last)]),
        "same_model": digest(run / "model") == model,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if result["same_losses_and_norms"] and result["same_model"] else 1)


if __name__ == "__main__":
    main()
