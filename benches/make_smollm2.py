"""Writes a checkpoint with the shapes of SmolLM2-135M and random weights, for benchmarks.

    python make_smollm2.py DIR [--rows 32] [--tokens 256] [--base f32|bf16]

DIR gets `model/` (config.json, safetensors in f32 or rounded to bf16), `adapter/` (an initial PEFT adapter: r 16, alpha 32,
all linears, B = 0 as PEFT starts) and `tokens.jsonl` (rows of random tokens, every one supervised).
Seeds are fixed: the same files every time. Left out: tokenizer, trained weights.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 7
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def smollm2_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, rms_norm_eps=1e-5,
        initializer_range=1 / 24, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )


def random_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(smollm2_config())


def random_rows(rows: int, tokens: int) -> list[dict]:
    draw = random.Random(SEED)
    samples = [[draw.randrange(49152) for _ in range(tokens)] for _ in range(rows)]
    return [{"input_ids": ids, "labels": ids} for ids in samples]


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def write_benchmark_inputs(folder: Path, rows: int, tokens: int, base: str) -> None:
    model = random_model().to(DTYPES[base])
    model.save_pretrained(folder / "model")
    (folder / "model/generation_config.json").unlink(missing_ok=True)
    torch.manual_seed(SEED)
    get_peft_model(model, LoraConfig(**LORA)).save_pretrained(folder / "adapter")
    (folder / "adapter/README.md").unlink(missing_ok=True)
    # PEFT writes a set in the order of its hashes; sorted, the file is the same every time.
    path = folder / "adapter/adapter_config.json"
    saved = json.loads(path.read_text())
    saved["target_modules"] = sorted(saved["target_modules"])
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
    with open(folder / "tokens.jsonl", "w") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in random_rows(rows, tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--base", choices=sorted(DTYPES), default="f32")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    write_benchmark_inputs(arguments.dir, arguments.rows, arguments.tokens, arguments.base)
