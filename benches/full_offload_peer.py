"""The peer of full training in little memory: HF transformers with torchao's CPUOffloadOptimizer on one GPU.

    python full_offload_peer.py [--model qwen2.5-7b] [--batch 32] [--micro 4] [--tokens 2048] [--steps 2] [--f32]

Weights are random, optimizer state is in host memory, every layer is recomputed; gradients are copied to the host with
`--offload-gradients`, which allows one micro-batch a step. AdamW, SDPA attention, labels = ids. Clipping needs the
gradients on the device, and is left out with `--offload-gradients`. Prints one JSON object.
By default weights, gradients and optimizer state are bf16, half of the bytes that smidgen moves; `--f32` has them in f32
and computes in bf16 by autocast, as smidgen does.
"""

import argparse
import json
import time

from gpu_peer import CLIP, LR, SEED, random_base, read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--offload-gradients", action="store_true")
    parser.add_argument("--f32", action="store_true")
    args = parser.parse_args()

    import torch
    import torchao
    import transformers
    from torchao.optim import CPUOffloadOptimizer

    torch.manual_seed(SEED)
    device = torch.device("cuda")
    config = read_config(args.model)
    model = random_base(config, device)
    if args.f32:
        model = model.float()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.config.use_cache = False
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=args.offload_gradients, fused=True, lr=LR
    )
    micro = args.batch if args.offload_gradients else args.micro
    ids = torch.randint(0, config["vocab_size"], (args.batch, args.tokens), device=device)
    seconds = []
    for step in range(args.steps + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for first in range(0, args.batch, micro):
            part = ids[first : first + micro]
            with torch.autocast("cuda", torch.bfloat16, enabled=args.f32):
                loss = model(input_ids=part, labels=part).loss
            (loss * len(part) / args.batch).backward()
        if not args.offload_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    best = min(seconds[1:])
    print(
        json.dumps(
            {
                "peer": "transformers + torchao CPUOffloadOptimizer",
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "torchao": torchao.__version__},
                "model": args.model,
                "state": "f32" if args.f32 else "bf16",
                "batch": args.batch,
                "micro": micro,
                "tokens": args.tokens,
                "step_s": seconds,
                "tokens_per_s": args.batch * args.tokens / best,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
        )
    )


if __name__ == "__main__":
    main()
