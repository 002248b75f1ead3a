"""Generates with `smidgen` and with llama.cpp from the same GGUF file, in turns, and prints how they compare.

    python decode.py SMIDGEN_BINARY MODEL.gguf [--threads 2] [--rounds 5] [--tokens 128] [--out results/decode-cpu.json]
                     [--peer-python PYTHON] [--prompt TEXT]

Every round is a fresh process, smidgen first, then the peer, so that a slow minute of the machine hits both. Both get the
same tokens of the same prompt, choose the most likely token, and use as many threads. The rate is that of the tokens after
the first: smidgen's includes choosing the token, the peer's is llama.cpp's own clock and does not.
The peer is llama-cpp-python; `--peer-python` names an interpreter that has it. Left out: prompts, and several sequences.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from machine import describe_cpu, version_of

PROMPT = "Write a long story about a lighthouse keeper who finds a map."


def run_to_end(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(command)}` exited with {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


def run_smidgen(arguments: argparse.Namespace) -> dict:
    out = run_to_end([
        str(arguments.smidgen), "generate", str(arguments.model), "--device", "cpu", "--json", "--prompt", arguments.prompt,
        "--threads", str(arguments.threads), "--max-new", str(arguments.tokens),
    ])
    report = json.loads(out)
    if len(report["ids"]) < arguments.tokens:
        raise SystemExit(f"error: the text ended after {len(report['ids'])} tokens; choose another `--prompt`")
    return report


def run_peer(arguments: argparse.Namespace, prompt_ids: list[int]) -> dict:
    work = json.dumps({"model": str(arguments.model), "threads": arguments.threads, "tokens": arguments.tokens, "ids": prompt_ids})
    return json.loads(run_to_end([arguments.peer_python, str(Path(__file__).resolve()), "--be-the-peer", work]).splitlines()[-1])


def be_the_peer(work: dict) -> None:
    import ctypes

    import llama_cpp
    import numpy

    context = len(work["ids"]) + work["tokens"] + 1
    model = llama_cpp.Llama(
        work["model"], n_ctx=context, n_threads=work["threads"], n_threads_batch=work["threads"], verbose=False
    )
    model.eval(work["ids"])
    llama_cpp.llama_perf_context_reset(model.ctx)
    ids = []
    for _ in range(work["tokens"]):
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        values = (ctypes.c_float * model.n_vocab()).from_address(ctypes.addressof(logits.contents))
        ids.append(int(numpy.frombuffer(values, dtype=numpy.float32).argmax()))
        model.eval(ids[-1:])
    clock = llama_cpp.llama_perf_context(model.ctx)
    print(json.dumps({
        "tokens_per_s": clock.n_eval / clock.t_eval_ms * 1e3,
        "ids": ids,
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
    }))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        load = os.getloadavg()[0]
        ours = run_smidgen(arguments)
        theirs = run_peer(arguments, ours["prompt_ids"])
        same = sum(1 for pair in zip(ours["ids"], theirs["ids"]) if pair[0] == pair[1])
        rounds.append({
            "load": load,
            "smidgen_tokens_per_s": ours["tokens_per_s"],
            "peer_tokens_per_s": theirs["tokens_per_s"],
            "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
            "same_tokens": same,
        })
        print(f"round {number + 1}: smidgen {ours['tokens_per_s']:.1f}, llama.cpp {theirs['tokens_per_s']:.1f} tokens/s, ratio {rounds[-1]['ratio']:.2f}, {same} of {arguments.tokens} tokens the same")
    median = lambda key: statistics.median(row[key] for row in rounds)
    result = {
        "machine": describe_cpu(),
        "smidgen": version_of(arguments.smidgen),
        "peer": {"name": "llama-cpp-python", "version": theirs["version"], "system": theirs["system"]},
        "model": arguments.model.name,
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "prompt_tokens": len(ours["prompt_ids"]),
        "smidgen_tokens_per_s": median("smidgen_tokens_per_s"),
        "peer_tokens_per_s": median("peer_tokens_per_s"),
        "ratio": median("ratio"),
        "rounds": rounds,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"median: smidgen {result['smidgen_tokens_per_s']:.1f}, llama.cpp {result['peer_tokens_per_s']:.1f} tokens/s, ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-the-peer"]:
        be_the_peer(json.loads(sys.argv[2]))
    else:
        main()
