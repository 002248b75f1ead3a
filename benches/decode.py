"""Generates with `smidgen` and with llama.cpp from the same GGUF file, in turns, and prints how they compare.

    python decode.py SMIDGEN_BINARY MODEL.gguf [--threads 2] [--rounds 5] [--tokens 128] [--out results/decode-cpu.json]
                     [--peer-python PYTHON] [--prompt TEXT]

Every round is a fresh process, smidgen first, then the peer, so that a slow minute of the machine hits both. Both get the
same tokens of the same prompt, choose the most likely token, and use as many threads. The rate is that of the tokens after
the first, by the clock of each; both include choosing the token.
The peer is xllamacpp, which carries llama.cpp; `--peer-python` names an interpreter that has it. llama.cpp rounds activations
to 8 bits and smidgen does not, so their texts part at some point. Left out: prompts, and several sequences.
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
    import importlib.metadata

    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = work["model"]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = work["threads"]
    parameters.n_ctx = len(work["ids"]) + work["tokens"] + 1
    parameters.n_parallel = 1
    server = xllamacpp.Server(parameters)
    answer = server.handle_completions(
        {"prompt": work["ids"], "n_predict": work["tokens"], "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    )
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    print(json.dumps({
        "tokens_per_s": answer["timings"]["predicted_per_second"],
        "text": answer["choices"][0]["text"],
        "version": importlib.metadata.version("xllamacpp"),
        "system": str(xllamacpp.get_system_info()),
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
        same = len(os.path.commonprefix([ours["text"].strip(), theirs["text"].strip()]))
        rounds.append({
            "load": load,
            "smidgen_tokens_per_s": ours["tokens_per_s"],
            "peer_tokens_per_s": theirs["tokens_per_s"],
            "ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
            "same_characters": same,
        })
        print(f"round {number + 1}: smidgen {ours['tokens_per_s']:.1f}, llama.cpp {theirs['tokens_per_s']:.1f} tokens/s, ratio {rounds[-1]['ratio']:.2f}, the same text for {same} characters")
    median = lambda key: statistics.median(row[key] for row in rounds)
    result = {
        "machine": describe_cpu(),
        "smidgen": version_of(arguments.smidgen),
        "peer": {"name": "xllamacpp", "version": theirs["version"], "system": theirs["system"]},
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
