"""The reference of the real task: PyTorch + PEFT train SmolLM2-135M on OpenBookQA, one epoch, in f32.

    python real_task.py MODEL.gguf DATA_DIR --out reference.json [--device cpu|cuda] [--lr 2e-4]
                        [--train-rows N] [--test-rows N] [--check preview.json]
                        [--write-adapter DIR | --score-adapter DIR]

LoRA r 16, alpha 32, all linears; AdamW, clip 1.0, linear schedule without warm-up; 16 rows per step in file
order; the model's own chat template, loss on the completion: the sum over a step's supervised tokens divided
by their number. TF32 is off. Before and after, the log-likelihood of each answer of every test row, scored as
lm-eval does: tokens of the continuation, no end of turn. The start of the adapter is drawn by numpy, so that
every machine draws the same; `--write-adapter` writes it for smidgen's `adapter.init` and ends.
`--score-adapter` scores a trained adapter instead of training. `--check` compares ids and labels with what
`smidgen preview --json` printed. Needs torch, transformers, peft, numpy. Left out: bf16, dropout, packing.
"""

import argparse
import hashlib
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from read_gguf import GgufFile, load_model, load_tokenizer, render_chat

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
BATCH_ROWS = 16
CLIP = 1.0
ADAPTER_SEED = 7
NOT_SUPERVISED = -100


class Encoder:
    """Rows of OpenBookQA as tokens of this model."""

    def __init__(self, file: GgufFile):
        self.file, self.tokenizer = file, load_tokenizer(file)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, row: dict) -> str:
        content = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        return render_chat(self.file, [{"role": "user", "content": content}], True)

    def sample(self, row: dict) -> dict:
        """Ids and labels; the completion begins where the tokens of the prompt and of the whole part."""
        content = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": row["output"]}]
        prompt, whole = self.ids(self.prompt(row)), self.ids(render_chat(self.file, messages, False))
        start = next((at for at, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
        return {"ids": whole, "labels": [NOT_SUPERVISED] * start + whole[start:]}

    def choices(self, row: dict) -> list[tuple[list[int], int]]:
        """Of each answer: ids of prompt and answer, and how many of them the prompt has."""
        answers = re.search(r"Answer format: (\S+)$", row["instruction"]).group(1).split("/")
        prompt = self.prompt(row)
        # As lm-eval: white space at the end of the prompt is scored with the answer.
        start = len(self.ids(prompt.rstrip()))
        texts = [row["output"].replace(row["answer"], answer) for answer in answers]
        return [(self.ids(prompt + text), start) for text in texts]

    def gold(self, row: dict) -> int:
        return int(row["answer"].removeprefix("answer")) - 1


def padded(sequences: list[list[int]], filler: int, device: str) -> torch.Tensor:
    longest = max(len(sequence) for sequence in sequences)
    return torch.tensor([sequence + [filler] * (longest - len(sequence)) for sequence in sequences], device=device)


def attended(sequences: list[list[int]], device: str) -> torch.Tensor:
    return padded([[1] * len(sequence) for sequence in sequences], 0, device)


def hidden_states(model: torch.nn.Module, sequences: list[list[int]], device: str) -> torch.Tensor:
    """What the head reads, (rows, longest, C); logits are computed only where they are needed."""
    decoder = model.get_base_model().model
    return decoder(input_ids=padded(sequences, 0, device), attention_mask=attended(sequences, device)).last_hidden_state


@torch.no_grad()
def score_rows(model: torch.nn.Module, encoder: Encoder, rows: list[dict], rows_at_once: int, device: str) -> list[dict]:
    """Log-likelihoods of the answers of each row. Answers that differ only in their last token share a pass."""
    model.eval()
    scored = []
    for first in range(0, len(rows), rows_at_once):
        some = rows[first : first + rows_at_once]
        choices = [encoder.choices(row) for row in some]
        inputs = sorted({tuple(ids[:-1]) for row in choices for ids, _ in row}, key=len)
        sequences = [list(ids) for ids in inputs]
        hidden = hidden_states(model, sequences, device)
        head = model.get_base_model().lm_head
        place = {ids: at for at, ids in enumerate(inputs)}
        for row, its_choices in zip(some, choices, strict=True):
            likelihoods = []
            for ids, start in its_choices:
                # Position t predicts token t + 1.
                predicting = hidden[place[tuple(ids[:-1])], start - 1 : len(ids) - 1]
                wanted = head(predicting).double().log_softmax(-1)
                targets = torch.tensor(ids[start:], device=device)
                likelihoods.append(wanted.gather(1, targets[:, None]).sum().item())
            scored.append({
                "log_likelihoods": likelihoods, "gold": encoder.gold(row), "prediction": int(np.argmax(likelihoods)),
            })
    model.train()
    return scored


def accuracy(scored: list[dict]) -> dict:
    hits = [row["prediction"] == row["gold"] for row in scored]
    mean = sum(hits) / len(hits)
    return {"accuracy": mean, "stderr": math.sqrt(mean * (1 - mean) / max(len(hits) - 1, 1)), "rows": len(hits)}


def initial_adapter(base: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """PEFT's start, A uniform within 1 / sqrt(in) and B zero, with A from a generator that every machine has."""
    model = get_peft_model(base, LoraConfig(**LORA))
    draw = np.random.Generator(np.random.PCG64(ADAPTER_SEED))
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            uniform = draw.random(tuple(parameter.shape), dtype=np.float32) * np.float32(2) - np.float32(1)
            values = uniform / np.sqrt(np.float32(parameter.shape[1]))
            digest.update(values.tobytes())
            parameter.data.copy_(torch.from_numpy(values))
    return model, digest.hexdigest()


def write_adapter(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def train(model: torch.nn.Module, samples: list[dict], arguments: argparse.Namespace) -> list[dict]:
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=arguments.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    steps = math.ceil(len(samples) / BATCH_ROWS)
    log = []
    for step in range(steps):
        began = time.perf_counter()
        batch = samples[step * BATCH_ROWS : (step + 1) * BATCH_ROWS]
        supervised = sum(label != NOT_SUPERVISED for sample in batch for label in sample["labels"][1:])
        loss = 0.0
        for first in range(0, len(batch), arguments.micro_rows):
            micro = batch[first : first + arguments.micro_rows]
            sequences = [sample["ids"] for sample in micro]
            labels = padded([sample["labels"] for sample in micro], NOT_SUPERVISED, arguments.device)
            hidden = hidden_states(model, sequences, arguments.device)[:, :-1]
            wanted = labels[:, 1:] != NOT_SUPERVISED
            logits = model.get_base_model().lm_head(hidden[wanted])  # (S, V)
            part = torch.nn.functional.cross_entropy(logits, labels[:, 1:][wanted], reduction="sum") / supervised
            part.backward()
            loss += part.item()
        rate = arguments.lr * (steps - step) / steps
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(adapter, CLIP).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.append({
            "step": step + 1, "loss": loss, "lr": rate, "grad_norm": norm, "supervised_tokens": supervised,
            "tokens": sum(len(sample["ids"]) for sample in batch), "seconds": time.perf_counter() - began,
        })
        if step % 10 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {loss:.4f}  norm {norm:.3f}", flush=True)
    return log


def check_samples(encoder: Encoder, rows: list[dict], preview: Path) -> int:
    shown = json.loads(preview.read_text())["samples"]
    for row, theirs in zip(rows, shown):
        ours = encoder.sample(row)
        if ours["ids"] != theirs["ids"] or ours["labels"] != theirs["labels"]:
            raise SystemExit(f"error: `{theirs['place']}` has other tokens here:\n  {ours}\nand there\n  {theirs}")
    return len(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, metavar="MODEL.gguf")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="holds train.json and test.json")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--train-rows", type=int)
    parser.add_argument("--test-rows", type=int)
    parser.add_argument("--micro-rows", type=int, default=BATCH_ROWS, help="rows of a forward and backward pass")
    parser.add_argument("--check", type=Path, help="what `smidgen preview --json` printed for the same rows")
    parser.add_argument("--write-adapter", type=Path)
    parser.add_argument("--score-adapter", type=Path)
    arguments = parser.parse_args()
    if not (arguments.out or arguments.write_adapter):
        parser.error("--out or --write-adapter is needed")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)

    file = GgufFile(arguments.gguf)
    encoder = Encoder(file)
    train_rows = json.loads((arguments.data / "train.json").read_text())[: arguments.train_rows]
    test_rows = json.loads((arguments.data / "test.json").read_text())[: arguments.test_rows]
    result = {
        "setting": {"lr": arguments.lr, "batch": BATCH_ROWS, "device": arguments.device, **LORA,
                    "train_rows": len(train_rows), "test_rows": len(test_rows)},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
    }
    if arguments.check:
        result["samples_checked"] = check_samples(encoder, train_rows, arguments.check)
        print(f"ids and labels of {result['samples_checked']} samples agree")

    base = load_model(file).to(arguments.device)
    if arguments.score_adapter:
        model = PeftModel.from_pretrained(base, str(arguments.score_adapter)).to(arguments.device)
        result["after"] = score_rows(model, encoder, test_rows, arguments.micro_rows, arguments.device)
        result["accuracy_after"] = accuracy(result["after"])
        print(f"after: {result['accuracy_after']}")
    else:
        model, result["initial_adapter_sha256"] = initial_adapter(base)
        model.train()
        if arguments.write_adapter:
            write_adapter(model, arguments.write_adapter)
        if not arguments.out:
            return
        result["before"] = score_rows(model, encoder, test_rows, arguments.micro_rows, arguments.device)
        result["accuracy_before"] = accuracy(result["before"])
        print(f"before: {result['accuracy_before']}", flush=True)
        result["steps"] = train(model, [encoder.sample(row) for row in train_rows], arguments)
        result["after"] = score_rows(model, encoder, test_rows, arguments.micro_rows, arguments.device)
        result["accuracy_after"] = accuracy(result["after"])
        print(f"after: {result['accuracy_after']}")
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
