"""How long a user waits: from the start of the process to the end of step 1, on a GPU.

    python first_step.py SMIDGEN_BINARY SHAPE_FOLDER [--base bf16 nf4] [--device cuda:0] [--out FILE]

SHAPE_FOLDER has a `config.json`, such as `recipes/shapes/qwen2.5-7b-instruct`; its weights are written once, random, in
bf16, into `--work`. A cold run starts with an empty kernel cache, a warm one with the cache of the cold run; the weights
are in the page cache in both. Lines of the program are printed with the seconds since its start.
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

from machine import describe_gpu, version_of

SHARD_BYTES = 4 << 30


def tensors(config):
    """Names and shapes of a Qwen2 or Llama decoder."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    has_bias = config["model_type"] == "qwen2"
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in [("q", queries), ("k", keys), ("v", keys)]:
            yield f"{prefix}.self_attn.{name}_proj.weight", [rows, hidden]
            if has_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", [rows]
        yield f"{prefix}.self_attn.o_proj.weight", [hidden, queries]
        yield f"{prefix}.mlp.gate_proj.weight", [inner, hidden]
        yield f"{prefix}.mlp.up_proj.weight", [inner, hidden]
        yield f"{prefix}.mlp.down_proj.weight", [hidden, inner]
        yield f"{prefix}.input_layernorm.weight", [hidden]
        yield f"{prefix}.post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", [config["vocab_size"], hidden]


def size(shape):
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_model(shape, folder):
    """Small random weights in bf16: random bytes with the exponent of about 0.02, the same block over and over."""
    config = json.loads((shape / "config.json").read_text())
    folder.mkdir(parents=True)
    shutil.copy(shape / "config.json", folder)
    low = os.urandom(32 << 20)
    high = bytes([0x3C if byte & 1 else 0xBC for byte in os.urandom(32 << 20)])
    block = bytearray(64 << 20)
    block[0::2], block[1::2] = low, high
    shards, held = [[]], 0
    for name, dimensions in tensors(config):
        if held + size(dimensions) > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append((name, dimensions))
        held += size(dimensions)
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, dimensions in shard:
            header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, offset + size(dimensions)]}
            offset += size(dimensions)
            index[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            while offset > 0:
                out.write(block[: min(offset, len(block))])
                offset -= len(block)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_rows(path, vocabulary):
    with open(path, "w") as out:
        for row in range(8):
            ids = [(17 * row + 31 * place) % min(vocabulary, 32000) for place in range(2048)]
            out.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def run(binary, work, base, device):
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    recipe = work / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "model"\nbase = "{base}"\n[data]\ntrain = "rows.jsonl"\nmax_tokens = 2048\n'
        f'[train]\nbatch = 4\nsteps = 2\nsave_every = 0\nlog_every = 1\n[memory]\ndevice = "{device}"\n[output]\ndir = "{out}"\n'
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache")}
    begun = time.monotonic()
    process = subprocess.Popen([binary, "train", recipe], stderr=subprocess.PIPE, text=True, env=environment)

    def talk():
        for line in process.stderr:
            print(f"  {time.monotonic() - begun:6.2f}  {line}", end="", flush=True)

    talker = threading.Thread(target=talk)
    talker.start()
    metrics, seconds = out / "metrics.jsonl", None
    while process.poll() is None:
        if seconds is None and metrics.exists() and metrics.stat().st_size > 0:
            seconds = time.monotonic() - begun
        time.sleep(0.01)
    talker.join()
    if process.returncode != 0 or seconds is None:
        sys.exit(f"{base}: the run ended with {process.returncode}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("shape", type=Path)
    parser.add_argument("--base", nargs="+", default=["bf16", "nf4"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "first-step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = args.work.resolve()
    if not (work / "model").exists():
        write_model(args.shape, work / "model")
    write_rows(work / "rows.jsonl", json.loads((args.shape / "config.json").read_text())["vocab_size"])
    for file in (work / "model").iterdir():
        with open(file, "rb") as stored:
            while stored.read(64 << 20):
                pass
    rows = []
    for base in args.base:
        shutil.rmtree(work / "cache", ignore_errors=True)
        for state in ["cold", "warm"]:
            seconds = run(args.binary.resolve(), work, base, args.device)
            rows.append({"model": args.shape.name, "base": base, "cache": state, "seconds": round(seconds, 2)})
            print(f"{args.shape.name} {base}, {state}: {seconds:.1f} s to the end of step 1", flush=True)
    if args.out:
        report = {"smidgen": version_of(args.binary.resolve()), "machine": describe_gpu(), "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
