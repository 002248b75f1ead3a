"""Ranks on a machine with one GPU: what exchanging costs, and whether several ranks train what one trains.

    python gpu_ranks.py SMIDGEN_BINARY [--mpiexec PATH] [--shape qwen2.5-1.5b] [--steps 20] [--only NAME ...] [--out FILE]

Part 1, `nccl`: `smidgen bench` with and without gradients summed through NCCL by one rank, alternating: tokens/s and
losses. Part 2, the others: two ranks share `cuda:0`, which NCCL refuses, so they exchange by MPI through pinned memory
(`--mpiexec` names an `mpiexec` of MPICH 5; `scripts/install_mpich.sh` installs one). Each case is a recipe and what is
divided or offloaded; it is trained by one rank and by two. Printed and written: the largest relative difference of the
losses, memory of each rank on the GPU beside its plan, pinned memory and how much of it is shared, host memory of the
machine while both ranks train, and seconds. Weights are random, in `--work`, and reused. Fails if losses differ by more
than `--most`, if a rank takes more than its plan, or if anything is left in `/dev/shm`.
Left out: the speed of two ranks, which share one GPU here.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from machine import describe_gpu, version_of

RECIPE = """\
[model]
path = "{model}"

[data]
train = "{data}"
format = "tokens"
max_tokens = 512

[train]
batch = 16
steps = {steps}
lr = 1e-4
log_every = 0
save_every = 10
seed = 7

[memory]
device = "cuda:0"
threads = 4

[output]
dir = "{output}"
"""

HOST = ["memory.weights=host"]
# Name, what both the one rank and the two have, and what the two have besides.
CASES = [
    ("bf16", [], ["memory.shard=none"]),
    ("bf16-moments", [], ["memory.shard=moments"]),
    ("bf16-gradients", [], ["memory.shard=gradients"]),
    ("bf16-weights", [], ["memory.shard=weights"]),
    ("nf4", ["model.base=nf4"], ["memory.shard=none"]),
    ("nf4-weights", ["model.base=nf4"], ["memory.shard=weights"]),
    ("bf16-shared-host", HOST, ["memory.shard=none"]),
    ("nf4-shared-host", ["model.base=nf4", *HOST], ["memory.shard=none"]),
    ("dora-shared-host", ["adapter.kind=dora", *HOST], ["memory.shard=none"]),
    ("full-none", ["adapter.kind=full", "train.lr=1e-5"], ["memory.shard=none"]),
    ("full-weights", ["adapter.kind=full", "train.lr=1e-5"], ["memory.shard=weights"]),
    ("full-bf16-weights", ["adapter.kind=full", "train.lr=1e-5", "train.master=bf16"], ["memory.shard=weights"]),
]
# Weights in bf16 are rounded at random: a gradient that differs by rounding shows.
LOOSE = {"full-bf16-weights": 2e-2}


def machine_bytes():
    """Memory of the machine that is in use; what is shared counts once."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["MemTotal"] - fields["MemAvailable"]


class Watch(threading.Thread):
    """The most memory of the machine while a run goes on, above what was in use before."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.most, self.over = machine_bytes(), 0, threading.Event()

    def run(self):
        while not self.over.wait(0.2):
            self.most = max(self.most, machine_bytes() - self.before)


def write_rows(path):
    source = random.Random(5)
    with path.open("w") as out:
        for _ in range(64):
            ids = [source.randrange(1000, 30000) for _ in range(source.randrange(200, 512))]
            out.write(json.dumps({"input_ids": ids}) + "\n")


def run(command, log, environment):
    watch, begun = Watch(), time.time()
    watch.start()
    with log.open("w") as out:
        code = subprocess.call(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    watch.over.set()
    watch.join()
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {code}\n{log.read_text()[-4000:]}")
    return watch.most, time.time() - begun


def train(args, work, name, ranks, overrides):
    output = work / f"{name}-{ranks}"
    recipe = work / f"{name}-{ranks}.toml"
    text = RECIPE.format(model=work / args.shape, data=work / "rows.jsonl", steps=args.steps, output=output)
    recipe.write_text(text)
    if not (output / "metrics.jsonl").exists() or args.again:
        subprocess.call(["rm", "-rf", str(output)])
        command = [args.binary, "train", recipe, *overrides]
        environment = dict(os.environ)
        if ranks > 1:
            command += ["--ranks", str(ranks)]
            environment["SMIDGEN_MPIEXEC"] = args.mpiexec
        machine, seconds = run(command, work / f"{name}-{ranks}.log", environment)
        (output / "measured.json").write_text(json.dumps({"machine_bytes": machine, "seconds": seconds}))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    plan = json.loads((output / "plan.json").read_text())
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "rank_bytes": rows[-1].get("rank_bytes") or [rows[-1]["device_bytes"]],
        "pinned_bytes": max(row.get("pinned_bytes", 0) for row in rows),
        "peak_bytes": plan["peak_bytes"],
        "base_weights_bytes": plan["rows"]["base_weights"],
        "trained_bytes": sum(plan["rows"][row] for row in ("adapters", "gradients", "optimizer")),
        "shared_bytes": (plan.get("host_memory") or {}).get("shared_bytes", 0),
        "planned_host_bytes": (plan.get("host_memory") or {}).get("needed_bytes", 0),
        "shard": plan["policy"]["shard"],
        **json.loads((output / "measured.json").read_text()),
    }


def mib(count):
    return f"{count / 2**20:,.0f} MiB"


def compare(args, work, case):
    name, common, divided = case
    one = train(args, work, name, 1, common)
    two = train(args, work, name, 2, [*common, *divided])
    pairs = zip(one["losses"], two["losses"], strict=True)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    print(f"{name}: {len(one['losses'])} losses within {difference:.1e}")
    for ranks, figures in [("one rank", one), ("two ranks", two)]:
        taken = ", ".join(mib(count) for count in figures["rank_bytes"])
        print(
            f"  {ranks}: GPU {taken} (plan {mib(figures['peak_bytes'])}, base weights "
            f"{mib(figures['base_weights_bytes'])}, trained {mib(figures['trained_bytes'])}), pinned "
            f"{mib(figures['pinned_bytes'])} per rank, shared {mib(figures['shared_bytes'])}, machine "
            f"{mib(figures['machine_bytes'])} (plan {mib(figures['planned_host_bytes'])}), {figures['seconds']:.0f} s"
        )
    problems = []
    if difference > LOOSE.get(name, args.most):
        problems.append(f"losses differ by {difference:.1e}")
    # What a run may show above its plan before it stops itself.
    most = two["peak_bytes"] * 1.01 + 8 * 2**20
    problems += [f"rank {rank} takes {mib(taken)}" for rank, taken in enumerate(two["rank_bytes"]) if taken > most]
    if "shared-host" in name:
        if not two["shared_bytes"]:
            problems.append("nothing is shared")
        elif two["machine_bytes"] > one["machine_bytes"] + two["shared_bytes"] // 2 + 6 * 2**30:
            problems.append("the machine takes as much as for two copies")
    return {"name": name, "difference": difference, "one": one, "two": two}, problems


def bench(args, *more):
    command = [args.binary, "bench", "--model", args.bench, "--batch", "4", "--tokens", "2048", "--device", "cuda:0", "--json"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bench {more}: {done.stderr}")
    return json.loads(done.stdout)


def nccl(args):
    pairs = [(bench(args), bench(args, "--sum-through-nccl")) for _ in range(args.pairs)]
    rates = [[figures["tokens_per_s"] for figures in pair] for pair in pairs]
    print("nccl: tokens/s without and with one rank through NCCL: " + "; ".join(f"{a:,.0f} {b:,.0f}" for a, b in rates))
    means = [sum(column) / len(rates) for column in zip(*rates)]
    losses = [[figures["losses"] for figures in pair] for pair in pairs]
    print(f"  {100 * (means[1] / means[0] - 1):+.2f} %, last losses {[[own[-1] for own in pair] for pair in losses]}")
    problems = [] if means[1] > 0.99 * means[0] else ["NCCL with one rank costs more than 1 %"]
    problems += ["losses differ" for pair in losses if pair[0] != pair[1]]
    return {"name": "nccl", "tokens_per_s": rates, "losses": losses}, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--mpiexec", default="target/mpich/bin/mpiexec")
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--bench", default="qwen2.5-7b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--most", type=float, default=2e-6, help="largest relative difference of losses")
    parser.add_argument("--only", nargs="*", help="names of cases: nccl, " + ", ".join(name for name, *_ in CASES))
    parser.add_argument("--again", action="store_true", help="train again what --work has")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "smidgen-ranks"))
    parser.add_argument("--out")
    args = parser.parse_args()
    args.binary = str(Path(args.binary).resolve())
    args.mpiexec = str(Path(args.mpiexec).resolve())
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    wanted = lambda name: not args.only or name in args.only
    before = set(os.listdir("/dev/shm"))
    results, problems = [], []
    if wanted("nccl"):
        result, found = nccl(args)
        results.append(result)
        problems += [f"nccl: {problem}" for problem in found]
    cases = [case for case in CASES if wanted(case[0])]
    if cases:
        write_rows(work / "rows.jsonl")
        if not (work / args.shape / "config.json").exists():
            subprocess.check_call([args.binary, "bench", "--model", args.shape, "--write-model", str(work / args.shape)])
    for case in cases:
        result, found = compare(args, work, case)
        results.append(result)
        problems += [f"{case[0]}: {problem}" for problem in found]
        if args.out:
            report = {"gpu": describe_gpu(), "smidgen": version_of(args.binary), "cases": results}
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    left = [name for name in set(os.listdir("/dev/shm")) - before if "smidgen" in name]
    problems += [f"left in /dev/shm: {name}" for name in left]
    for problem in problems:
        print(f"problem: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
