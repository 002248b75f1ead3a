"""The peer of the benchmarks: PyTorch + PEFT train LoRA on the shapes of SmolLM2-135M, on the CPU.

    python peer_torch.py [--dtype f32|bf16] [--adapter-dtype f32|base] [--checkpointing] [--steps 8] [--threads 2]
                         [--model DIR --adapter DIR --data tokens.jsonl]

r 16, alpha 32, all linears, AdamW, clip 1.0, constant lr, batches of 4 rows x 256 tokens in file order.
Prints one JSON line. A step is timed from the tensors of the batch to the end of the optimizer's update.
It runs as PyTorch is meant to: SDPA attention, fused AdamW, no padding. `bf16` is a bf16 base with
PEFT's f32 adapters, into which PEFT casts; `--adapter-dtype base` leaves them in the base's type
(`autocast_adapter_dtype=False`), which rounds every update. Left out: torch.compile, accumulation, packing.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from make_smollm2 import LORA, random_model, random_rows

BATCH_ROWS = 4
ROW_TOKENS = 256
WARM_UP_STEPS = 2
LR = 2e-4
CLIP = 1.0


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("`/proc/self/status` has no `VmHWM`")


def reset_peak_rss() -> None:
    # "5" resets VmHWM to the present resident set, see proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")


def load_trainable(arguments: argparse.Namespace) -> torch.nn.Module:
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    if arguments.model:
        base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    else:
        base = random_model().to(dtype)
    base.config.use_cache = False
    if arguments.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    to_f32 = arguments.adapter_dtype == "f32"
    if arguments.adapter:
        model = PeftModel.from_pretrained(base, arguments.adapter, is_trainable=True, autocast_adapter_dtype=to_f32)
    else:
        model = get_peft_model(base, LoraConfig(**LORA), autocast_adapter_dtype=to_f32)
    return model.train()


def read_rows(arguments: argparse.Namespace) -> list[dict]:
    if not arguments.data:
        return random_rows(BATCH_ROWS * arguments.steps, ROW_TOKENS)
    rows = [json.loads(line) for line in open(arguments.data)]
    if len({len(row["input_ids"]) for row in rows}) != 1:
        raise SystemExit(f"error: the rows of `{arguments.data}` differ in length")
    if len(rows) % BATCH_ROWS:
        raise SystemExit(f"error: `{arguments.data}` has {len(rows)} rows, not a multiple of {BATCH_ROWS}")
    return rows


def train(model: torch.nn.Module, rows: list[dict], steps: int) -> tuple[list[float], list[float]]:
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True)
    losses, step_ms = [], []
    for step in range(steps):
        start = step * BATCH_ROWS % len(rows)
        batch = rows[start : start + BATCH_ROWS]
        input_ids = torch.tensor([row["input_ids"] for row in batch])
        labels = torch.tensor([row["labels"] for row in batch])
        began = time.perf_counter()
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step_ms.append((time.perf_counter() - began) * 1e3)
    return losses, step_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--adapter-dtype", choices=["f32", "base"], default="f32")
    parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward pass")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    parser.add_argument("--model", help="a checkpoint folder; default: random weights")
    parser.add_argument("--adapter", help="an initial PEFT adapter; default: PEFT's own start")
    parser.add_argument("--data", help="token rows, jsonl; default: random tokens")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} warm-up steps")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.disable_progress_bar()

    rows = read_rows(arguments)
    model = load_trainable(arguments)
    load_peak_bytes = peak_rss_bytes()
    reset_peak_rss()
    losses, step_ms = train(model, rows, arguments.steps)
    train_peak_bytes = peak_rss_bytes()
    step_tokens = BATCH_ROWS * len(rows[0]["input_ids"])
    print(json.dumps({
        "tokens_per_s": step_tokens / statistics.median(step_ms[WARM_UP_STEPS:]) * 1e3,
        "step_ms": step_ms,
        "peak_rss_bytes": max(load_peak_bytes, train_peak_bytes),
        "load_peak_rss_bytes": load_peak_bytes,
        "train_peak_rss_bytes": train_peak_bytes,
        "losses": losses,
        "dtype": arguments.dtype,
        "adapter_dtype": str(next(p.dtype for p in model.parameters() if p.requires_grad)).removeprefix("torch."),
        "checkpointing": arguments.checkpointing,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "peft": peft.__version__,
        },
    }))


main()
