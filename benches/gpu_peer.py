"""The peers of the GPU benchmarks: HF transformers + PEFT, alone, with Liger's kernels, or Unsloth, train LoRA on the
shapes of a named model, on one GPU.

    python gpu_peer.py [--by peft|liger|unsloth] [--packages DIR] [--checkpoint DIR] [--model qwen2.5-7b]
                       [--base bf16|nf4] [--batch 4] [--tokens 2048] [--checkpointing] [--no-autocast] [--steps 6]
                       [--warm-up 2] [--device cuda|cpu]

`--packages` is a folder of unpacked wheels that are not installed. Unsloth loads a model from a folder: `--checkpoint`,
which `smidgen bench --model M --write-model DIR` writes; a tokenizer of a few words is added to it.

Weights are random, made on the device in bf16; nothing is downloaded. r 16, alpha 32, all linears but the head, fused
AdamW, clip 1.0, SDPA attention, labels = ids, one micro-batch per step. Adapters are f32 as PEFT makes them; by default
they are multiplied under bf16 autocast, as HF's Trainer does with `bf16=True`; `--no-autocast` leaves PEFT's casts.
`nf4` is bitsandbytes' double-quantized format without `prepare_model_for_kbit_training`, which would turn the embedding
and the head to f32. Prints one JSON object; steps are timed by CUDA events, without a synchronization in between.
Left out: torch.compile, packing, accumulation.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Names as in crates/smidgen/src/bench/shapes.rs.
SHAPES = {
    "qwen2.5-7b": "qwen2.5-7b-instruct",
    "qwen2.5-1.5b": "qwen2.5-1.5b-instruct",
    "qwen2.5-0.5b": "qwen2.5-0.5b-instruct",
    "llama3.1-8b": "llama-3.1-8b-instruct",
    "phi3-mini": "phi-3-mini-4k-instruct",
    "phi4-mini": "phi-4-mini-instruct",
    "smollm2-135m": "smollm2-135m",
}
SHAPES_FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "shapes"
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SEED = 7
LR = 1e-5
CLIP = 1.0


def missing_packages(by: str, base: str) -> list[str]:
    own = {"peft": [], "liger": ["liger_kernel"], "unsloth": ["unsloth", "unsloth_zoo", "bitsandbytes"]}[by]
    needed = ["torch", "transformers", "peft", *own] + (["bitsandbytes"] if base == "nf4" else [])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def read_config(model: str) -> dict:
    folder = SHAPES_FOLDER / SHAPES[model] if model in SHAPES else Path(model)
    try:
        return json.loads((folder / "config.json").read_text())
    except OSError as error:
        names = ", ".join(SHAPES)
        raise SystemExit(f"error: `--model {model}` has no readable config.json ({error})\n\nhint: shapes are {names}")


def random_base(config: dict, device: "torch.device"):
    """Random bf16 weights, created on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **sizes), dtype=torch.bfloat16, attn_implementation="sdpa",
        )
    model.config.use_cache = False
    return model


def quantize_linears(model, device: "torch.device") -> None:
    """Every linear but the head as bitsandbytes' NF4, double-quantized, in place."""
    import bitsandbytes
    import torch

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name, linear in linears:
        if name == "lm_head":
            continue
        with torch.device("meta"):
            quantized = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=linear.bias is not None,
                compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4",
            )
        quantized.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4",
        ).to(device)
        quantized.bias = linear.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantized)
    # PEFT looks at this to choose its 4-bit layers.
    model.is_loaded_in_4bit = True


def build_with_unsloth(arguments: argparse.Namespace):
    """As its documentation says: `from_pretrained`, then `get_peft_model`."""
    # Imported before transformers, which it changes.
    from unsloth import FastLanguageModel

    add_tokenizer(arguments.checkpoint)
    model, _ = FastLanguageModel.from_pretrained(
        str(arguments.checkpoint), max_seq_length=arguments.tokens, load_in_4bit=arguments.base == "nf4",
        dtype=None if arguments.base == "nf4" else "bfloat16",
    )
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model, r=LORA["r"], lora_alpha=LORA["lora_alpha"], lora_dropout=0, bias="none", target_modules=modules,
        use_gradient_checkpointing="unsloth" if arguments.checkpointing else False, random_state=SEED,
    )
    return model.train()


def add_tokenizer(folder: Path) -> None:
    """A tokenizer that nobody uses: the rows are random ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>")
    fast.save_pretrained(folder)


def build_trainable(arguments: argparse.Namespace, device: "torch.device"):
    if arguments.by == "unsloth":
        return build_with_unsloth(arguments)
    from peft import LoraConfig, get_peft_model

    if arguments.by == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_llama()
        apply_liger_kernel_to_qwen2()
    base = random_base(read_config(arguments.model), device)
    if arguments.base == "nf4":
        quantize_linears(base, device)
    if arguments.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(base, LoraConfig(**LORA)).train()


class Clock:
    """Timestamps between steps: CUDA events, or the host's clock on a CPU."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.marks = []

    def mark(self) -> None:
        import torch

        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        pairs = zip(self.marks, self.marks[1:])
        return [a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3 for a, b in pairs]


def train(model, arguments: argparse.Namespace, device: "torch.device") -> dict:
    import torch

    on_gpu = device.type == "cuda"
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=LR, weight_decay=0.0, fused=True)
    steps = arguments.warm_up + arguments.steps
    vocabulary = model.get_base_model().config.vocab_size
    ids = torch.randint(vocabulary, (steps, arguments.batch, arguments.tokens), device=device)  # (steps, N, S)
    clock, losses = Clock(on_gpu), []
    began = time.perf_counter()
    first_step_s = None
    clock.mark()
    for batch in ids:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=arguments.autocast):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        clock.mark()
        if first_step_s is None:
            losses[0].item()
            first_step_s = time.perf_counter() - began
    if on_gpu:
        torch.cuda.synchronize()
    step_ms = clock.intervals_ms()
    median_ms = statistics.median(step_ms[arguments.warm_up :])
    return {
        "tokens_per_s": arguments.batch * arguments.tokens / median_ms * 1e3,
        "step_ms": step_ms,
        "warm_up_steps": arguments.warm_up,
        "first_step_s": first_step_s,
        "losses": [loss.item() for loss in losses],
        "adapter_dtype": str(adapter[0].dtype).removeprefix("torch."),
        "adapter_parameters": sum(parameter.numel() for parameter in adapter),
    }


def memory(on_gpu: bool) -> dict:
    import torch

    if not on_gpu:
        return {"peak_allocated_gib": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    peak_bytes = torch.cuda.max_memory_allocated()
    return {
        "peak_allocated_gib": peak_bytes / 2**30, "peak_allocated_bytes": peak_bytes,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def versions(by: str, base: str) -> dict:
    from importlib.metadata import version

    import torch

    own = {"peft": [], "liger": ["liger_kernel"], "unsloth": ["unsloth"]}[by] + (["bitsandbytes"] if base == "nf4" else [])
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return found | {name: version(name) for name in ["transformers", "peft", *own]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["peft", "liger", "unsloth"], default="peft")
    parser.add_argument("--packages", type=Path, help="a folder of unpacked wheels")
    parser.add_argument("--checkpoint", type=Path, help="the model that Unsloth loads")
    parser.add_argument("--model", default="qwen2.5-7b", help="a shape by name, or a folder with a config.json")
    parser.add_argument("--base", choices=["bf16", "nf4"], default="bf16")
    parser.add_argument("--batch", type=int, default=4, help="samples per step")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.warm_up < 1:
        parser.error("--steps and --warm-up must be at least 1")
    if arguments.by == "unsloth" and not arguments.checkpoint:
        parser.error("--by unsloth needs --checkpoint, which `smidgen bench --model M --write-model DIR` writes")
    if arguments.packages:
        sys.path.insert(0, str(arguments.packages.resolve()))
    if missing := missing_packages(arguments.by, arguments.base):
        names = ", ".join(f"`{name}`" for name in missing)
        print(json.dumps({"skipped": f"not installed: {names}"}))
        return

    if arguments.by == "unsloth":
        os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
        import unsloth  # noqa: F401, before transformers
    import torch
    import transformers

    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("error: PyTorch sees no GPU\n\nhint: `--device cpu` tries the script on small shapes")
    transformers.logging.set_verbosity_error()
    device = torch.device(arguments.device)
    began = time.perf_counter()
    model = build_trainable(arguments, device)
    if on_gpu:
        torch.cuda.synchronize()
        # Building, and above all quantizing, briefly needs more memory than loading a checkpoint.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    load_s = time.perf_counter() - began
    result = train(model, arguments, device)
    print(json.dumps({
        **result,
        **memory(on_gpu),
        "load_s": load_s,
        "by": arguments.by, "model": arguments.model, "base": arguments.base, "batch": arguments.batch, "tokens": arguments.tokens,
        "checkpointing": arguments.checkpointing, "autocast": arguments.autocast, "optimizer": "AdamW, fused",
        "attention": model.get_base_model().config._attn_implementation,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "timed_by": "CUDA events" if on_gpu else "host clock",
        "versions": versions(arguments.by, arguments.base),
    }))


if __name__ == "__main__":
    main()
