"""Trains Phi-4-multimodal on sound with `smidgen` and with transformers + PEFT, one after the other on one GPU.

    python speech.py SMIDGEN_BINARY WORK [--encoder] [--clips 16] [--seconds 15] [--steps 8] [--tiny] [--out FILE]

Shapes are those of the published model (decoder 3072 x 32, encoder 1024 x 24), weights are random and made from the
config, clips are noise with tones; nothing is downloaded. LoRA r 16 on the decoder with a frozen encoder, or with
`--encoder` also on the linears of the encoder's blocks. bf16, AdamW, clip 1.0, one clip and 96 tokens of text per row, a
step of `--clips` rows. `smidgen` encodes frozen clips once before training, and that time is stated apart; the peer
encodes in every step, as transformers does. Printed and written: tokens and seconds of audio per second (median step after
warm-up), the peak of device memory as the driver sees it, and the losses of both.
`--tiny` has small shapes, for trying the script on a CPU. Left out: gradient checkpointing, which the peer needs at larger
batches.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import wave
from pathlib import Path

from machine import describe_cpu, describe_gpu, version_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

AUDIO_TOKEN = 200_011
PROMPT, ANSWER = 32, 64
WARM_UP = 3
SEED = 7
RATE = 16_000
DECODER = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
BLOCKS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "feed_forward_in.gate_up_proj", "feed_forward_in.down_proj",
          "feed_forward_out.gate_up_proj", "feed_forward_out.down_proj"]

RECIPE = """\
[model]
path = "{model}"

[adapter]
rank = 16
targets = {targets}

[data]
train = "{rows}"
format = "tokens"
max_tokens = {tokens}
max_audio_seconds = {most_seconds}
shuffle = false

[train]
batch = {batch}
steps = {steps}
lr = 1e-5
schedule = "constant"
warmup = 0
save_every = 0

[memory]
device = "{device}"
threads = {threads}

[output]
dir = "{run}"
"""


def config(tiny: bool):
    from transformers import Phi4MultimodalConfig

    # Rows are far shorter than what longrope's factors are for.
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    sizes = dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=24)
    audio = dict(hidden_size=1024, intermediate_size=1536, num_blocks=24, num_attention_heads=16, nemo_conv_channels=1024)
    if tiny:
        sizes = dict(hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        audio = dict(hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=2, nemo_conv_channels=16)
    own = {"bias_max_distance": 500, "audio_token_id": AUDIO_TOKEN, "ext_pw_out_channel": audio["hidden_size"],
           "depthwise_separable_out_channel": audio["hidden_size"]}
    # What sees is not used, and as small as it can be.
    vision = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    return Phi4MultimodalConfig(
        vocab_size=200_064, num_key_value_heads=2 if tiny else 8, max_position_embeddings=131_072,
        rope_parameters=rope, tie_word_embeddings=True, sliding_window=None,
        audio_config=audio | own, vision_config=vision,
        dtype="bfloat16", use_cache=False, **sizes,
    )


def write_model(folder: Path, tiny: bool, device: str) -> None:
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import Phi4MultimodalForCausalLM

    torch.manual_seed(SEED)
    with torch.device(device):
        model = Phi4MultimodalForCausalLM._from_config(config(tiny), dtype=torch.bfloat16)
    embedding = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    embedding.global_mean.fill_(12.0)
    embedding.global_invstd.fill_(0.25)
    model.save_pretrained(folder)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()


def write_rows(work: Path, clips: int, seconds: float) -> int:
    """One step of rows; each step trains on the same ones. Returns the tokens of a row."""
    import numpy as np

    random = np.random.default_rng(SEED)
    samples = int(RATE * seconds)
    heard = -(-((samples - 400) // 160 + 1) // 8)
    (work / "clips").mkdir(parents=True, exist_ok=True)
    lines = []
    for clip in range(clips):
        t = np.arange(samples) / RATE
        sound = 0.1 * random.standard_normal(samples) + 0.3 * np.sin(2 * np.pi * (200 + 40 * clip) * t)
        with wave.open(str(work / "clips" / f"{clip}.wav"), "wb") as out:
            out.setnchannels(1), out.setsampwidth(2), out.setframerate(RATE)
            out.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
        text = random.integers(10, 190_000, PROMPT + ANSWER).tolist()
        ids = text[: PROMPT // 2] + [AUDIO_TOKEN] * heard + text[PROMPT // 2 :]
        labels = [-100] * (PROMPT + heard) + text[PROMPT:]
        lines.append(json.dumps({"input_ids": ids, "labels": labels, "audio": f"clips/{clip}.wav"}))
    (work / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return PROMPT + ANSWER + heard


def run_smidgen(arguments, tokens: int) -> dict:
    work, run = arguments.work.resolve(), arguments.work.resolve() / f"run-{'encoder' if arguments.encoder else 'frozen'}"
    shutil.rmtree(run, ignore_errors=True)
    # Names of the encoder's linears make every name count as PEFT matches it; these endings are of one part each.
    blocks = arguments.blocks if arguments.encoder else 0
    targets = ["self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    decoder_o = [f"layers.{layer}.self_attn.o_proj" for layer in range(arguments.layers)]
    targets += decoder_o if arguments.encoder else ["o_proj"]
    targets += [f"encoders.{block}.{module}" for block in range(blocks) for module in BLOCKS]
    recipe = work / "recipe.toml"
    recipe.write_text(RECIPE.format(
        model=work / "model", targets=json.dumps(targets), rows=work / "rows.jsonl", tokens=tokens, batch=arguments.clips,
        steps=WARM_UP + arguments.steps, device=arguments.device, run=run, threads=os.cpu_count(),
        most_seconds=arguments.seconds + 1,
    ))
    began = time.perf_counter()
    done = subprocess.run([arguments.binary, "train", str(recipe)], capture_output=True, text=True,
                          env=os.environ | {"SMIDGEN_CACHE": str(work / "cache")})
    if done.returncode:
        raise SystemExit(f"smidgen failed:\n{done.stderr}")
    took = time.perf_counter() - began
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((run / "plan.json").read_text())
    step_ms = [row["step_ms"] for row in metrics]
    return figures(arguments, tokens, step_ms) | {
        "peak_bytes": max(row["device_peak_bytes"] or 0 for row in metrics),
        "planned_bytes": plan["peak_bytes"],
        "whole_run_s": took,
        "before_and_after_steps_s": took - sum(step_ms) / 1e3,
        "losses": [row["loss"] for row in metrics],
    }


def figures(arguments, tokens: int, step_ms: list[float]) -> dict:
    median_s = statistics.median(step_ms[WARM_UP:]) / 1e3
    return {
        "step_ms": step_ms,
        "tokens_per_s": arguments.clips * tokens / median_s,
        "audio_seconds_per_s": arguments.clips * arguments.seconds / median_s,
    }


def run_peer(arguments, tokens: int) -> dict:
    """In a process of its own, so that its memory is its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peer-tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def peer(arguments, tokens: int) -> dict:
    import numpy as np
    import peft
    import torch
    import transformers
    from transformers import Phi4MultimodalForCausalLM
    from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import Phi4MultimodalFeatureExtractor

    device = "cuda" if arguments.device.startswith("cuda") else "cpu"
    on_gpu = device == "cuda"
    model = Phi4MultimodalForCausalLM.from_pretrained(
        arguments.work / "model", dtype=torch.bfloat16, attn_implementation="sdpa", device_map=device)
    layers = r"model\.layers\.\d+\.(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)"
    blocks = r".*audio_embed\.encoder\.encoders\.\d+\.(self_attn\.[qkvo]_proj|feed_forward_(in|out)\.(gate_up|down)_proj)"
    targets = f"({layers})|({blocks})" if arguments.encoder else layers
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    rows = [json.loads(line) for line in (arguments.work / "rows.jsonl").read_text().splitlines()]
    clips = []
    for row in rows:
        with wave.open(str(arguments.work / row["audio"])) as sound:
            clips.append(np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768)
    heard = Phi4MultimodalFeatureExtractor()(clips, sampling_rate=RATE, return_tensors="pt")
    features = heard["audio_input_features"].to(device, torch.bfloat16)
    sizes = heard["audio_embed_sizes"].to(device)
    ids = torch.tensor([row["input_ids"] for row in rows], device=device)
    labels = torch.tensor([row["labels"] for row in rows], device=device)
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=1e-5, weight_decay=0.0, fused=on_gpu)
    step_ms, losses = [], []
    for _ in range(WARM_UP + arguments.steps):
        began = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, audio_input_features=features, audio_embed_sizes=sizes,
                         use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step_ms.append((time.perf_counter() - began) * 1e3)
    return figures(arguments, tokens, step_ms) | {
        "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "losses": losses,
        "trained_parameters": sum(parameter.numel() for parameter in adapter),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("work", type=Path)
    parser.add_argument("--encoder", action="store_true")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer-tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.layers, arguments.blocks = (2, 2) if arguments.tiny else (32, 24)
    if arguments.peer_tokens:
        print(json.dumps(peer(arguments, arguments.peer_tokens)))
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    write_model(arguments.work / "model", arguments.tiny, "cuda" if arguments.device.startswith("cuda") else "cpu")
    tokens = write_rows(arguments.work, arguments.clips, arguments.seconds)
    result = {
        "setting": {"clips": arguments.clips, "seconds": arguments.seconds, "tokens_of_row": tokens,
                    "encoder_adapted": arguments.encoder, "tiny": arguments.tiny},
        "machine": describe_cpu() | describe_gpu(),
        "version": version_of(arguments.binary),
        "smidgen": run_smidgen(arguments, tokens),
        "peer": run_peer(arguments, tokens),
    }
    for name in ("smidgen", "peer"):
        found = result[name]
        if "failed" in found:
            print(f"{name:8} failed: {found['failed'].splitlines()[-1] if found['failed'] else ''}")
            continue
        print(f"{name:8} {found['tokens_per_s']:>10.0f} tokens/s  {found['audio_seconds_per_s']:>8.1f} s of audio per s  "
              f"{found['peak_bytes'] / 2**30:>6.2f} GiB  first loss {found['losses'][0]:.4f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
