"""Runs the table of GPU benchmarks: `smidgen bench` and HF transformers + PEFT, in turns, on one GPU.

    python gpu_compare.py SMIDGEN_BINARY [--rows a,b] [--rounds 1] [--no-peer] [--peer-nf4] [--peers DIR]
                          [--keep] --out results/gpu-h200.json
    python gpu_compare.py --table results/gpu-h200.json

Every measurement is a fresh process with a time limit; one that fails is recorded with its error, and the others go on.
Odd rounds run smidgen first, even rounds the peer. A row that smidgen splits into several micro-batches is run once
more as one, with all the memory there is. Speed is the median over steps, then over rounds; memory is the largest.
With `--peers`, a folder of unpacked wheels, Unsloth and Liger run too if they are in it, Unsloth on a random checkpoint
that smidgen writes. `--keep` leaves the other rows of the results file as they are.
Otherwise Unsloth's figures are those recorded once on an H200 (`Recorded`), with HF + PEFT's, and a row has two ratios to
it: to the recorded figure, which decides `reached`, and through the peer that ran now.
The file holds every round, and is written after each process. Left out: loading from disk, other GPUs' targets.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from machine import describe_gpu, version_of

HERE = Path(__file__).resolve().parent
# The least size of the driver's context that the planner assumes; memory limits do not include it.
PLANNED_CONTEXT_GIB = 0.53
# Granularity of device memory.
GRANULE_BYTES = 2 << 20
WHICH = ("chosen", "one_micro_batch")


@dataclass(frozen=True)
class Recorded:
    """Medians on one H200, driver 580: torch 2.11, transformers 5.17, peft 0.21, unsloth 2026.10."""

    tokens_per_s: float
    gib: float


@dataclass(frozen=True)
class Row:
    name: str
    model: str
    base: str
    batch: int
    tokens: int
    recompute: str
    adapter: str = "lora"
    # At most this much memory, without the driver's context.
    limit_gib: float | None = None
    # Multiples of the speed of Unsloth, or of LoRA where the row is another adapter.
    must: float | None = None
    aim: float | None = None
    unsloth: Recorded | None = None
    # HF + PEFT in the same setting, with checkpointing or without.
    peer: Recorded | None = None
    peer_checkpointing: bool = False

    @property
    def title(self) -> str:
        adapter = "" if self.adapter == "lora" else f", {self.adapter}"
        return f"{self.model} {self.base}{adapter}, {self.batch} x {self.tokens}, recompute {self.recompute}"


QWEN_7B, QWEN_1_5B = "qwen2.5-7b", "qwen2.5-1.5b"
ROWS = [
    Row("bf16-4x2048", QWEN_7B, "bf16", 4, 2048, "none", limit_gib=40.0, must=1.05, aim=1.15,
        unsloth=Recorded(16_875, 43.6), peer=Recorded(12_061, 80.0)),
    Row("bf16-1x2048", QWEN_7B, "bf16", 1, 2048, "auto", limit_gib=22.0, must=1.15, aim=1.35,
        unsloth=Recorded(13_623, 22.0), peer=Recorded(10_848, 31.1)),
    Row("bf16-4x4096", QWEN_7B, "bf16", 4, 4096, "all", limit_gib=20.5, must=1.05, aim=1.15,
        unsloth=Recorded(11_536, 19.6), peer=Recorded(8_444, 45.8), peer_checkpointing=True),
    # 22,000 and 24,000, 20,000 and 22,500, 15,500 and 17,500 tokens/s; the peers compute in bf16.
    Row("fp8-4x2048", QWEN_7B, "fp8", 4, 2048, "none", must=1.304, aim=1.422,
        unsloth=Recorded(16_875, 43.6), peer=Recorded(12_061, 80.0)),
    Row("fp8-1x2048", QWEN_7B, "fp8", 1, 2048, "auto", must=1.468, aim=1.652,
        unsloth=Recorded(13_623, 22.0), peer=Recorded(10_848, 31.1)),
    Row("fp8-4x4096", QWEN_7B, "fp8", 4, 4096, "all", limit_gib=11.4, must=1.344, aim=1.517,
        unsloth=Recorded(11_536, 19.6), peer=Recorded(8_444, 45.8), peer_checkpointing=True),
    Row("nf4-4x2048", QWEN_7B, "nf4", 4, 2048, "all", limit_gib=8.8, must=1.05, aim=1.15,
        unsloth=Recorded(11_564, 8.2), peer=Recorded(9_084, 21.0), peer_checkpointing=True),
    Row("nf4-4x2048-none", QWEN_7B, "nf4", 4, 2048, "none", aim=1.4,
        unsloth=Recorded(11_564, 8.2), peer=Recorded(9_084, 21.0), peer_checkpointing=True),
    Row("nf4-1x2048", QWEN_7B, "nf4", 1, 2048, "auto", limit_gib=6.8, must=1.25, aim=1.4,
        unsloth=Recorded(8_934, 6.43), peer=Recorded(4_486, 9.35), peer_checkpointing=True),
    Row("1.5b-4x2048", QWEN_1_5B, "bf16", 4, 2048, "auto", must=1.3, aim=1.8,
        unsloth=Recorded(35_748, 4.3), peer=Recorded(23_166, 17.8), peer_checkpointing=True),
    # "At most 20 % slower" as the time of a step: 1.20 times LoRA's.
    Row("ls-lora-4x2048", QWEN_7B, "bf16", 4, 2048, "none", adapter="ls-lora", must=1 / 1.2, aim=1 / 1.08),
]


# ── running ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Session:
    """The settings of one call of this script, and the results of this round."""

    arguments: argparse.Namespace
    began: float
    done: dict[tuple[str, ...], dict]

    def run(self, command: list[str]) -> dict:
        """The JSON object that the command prints last, or `error`; the same command runs once per round."""
        key = tuple(command)
        if key not in self.done:
            self.done[key] = run_process(command, self.arguments.timeout_s, self.began + self.arguments.limit_s)
        return self.done[key]


def without_folders(text: str) -> str:
    """Paths of this machine are not recorded, only the names of their files."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


def run_process(command: list[str], timeout_s: float, end: float) -> dict:
    begin = time.monotonic()
    seconds = min(timeout_s, end - begin)
    about = {"command": " ".join(Path(part).name if part.startswith("/") else part for part in command)}
    if seconds <= 0:
        return {**about, "error": "not run: the time for all was used up"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {**about, "error": f"stopped after {seconds:.0f} s"}
    except OSError as error:
        return {**about, "error": str(error)}
    about["wall_s"] = time.monotonic() - begin
    if done.returncode:
        return {**about, "error": f"exit status {done.returncode}: {without_folders(done.stderr.strip()[-1500:])}"}
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {**about, "error": f"printed no JSON object: {done.stdout.strip()[-300:]}"}
    if "skipped" in result:
        return {**about, "error": f"skipped: {result['skipped']}"}
    return {**about, **result}


def smidgen_command(arguments: argparse.Namespace, row: Row, adapter: str, whole: bool) -> list[str]:
    """As planned within the row's limit, or in one micro-batch with all the memory there is."""
    command = [
        str(arguments.smidgen), "bench", "--json", "--device", arguments.device, "--model", row.model, "--base", row.base,
        "--compute", "fp8" if row.base == "fp8" else "auto",
        "--adapter", adapter, "--rank", "16", "--batch", str(row.batch), "--tokens", str(row.tokens),
        f"memory.recompute={row.recompute}", "--steps", str(arguments.steps), "--warm-up", str(arguments.warm_up),
    ]
    if whole:
        command += ["--together", str(row.batch)]
    elif row.limit_gib:
        command += ["--budget", f"{row.limit_gib + PLANNED_CONTEXT_GIB:.3f}GiB"]
    return command


def run_smidgen(session: Session, row: Row) -> dict:
    arguments = session.arguments
    if row.adapter != "lora":
        # Both must have the same micro-batches to be comparable.
        return {
            "chosen": session.run(smidgen_command(arguments, row, row.adapter, whole=True)),
            "lora": session.run(smidgen_command(arguments, row, "lora", whole=True)),
        }
    turn = {"chosen": session.run(smidgen_command(arguments, row, row.adapter, whole=False))}
    if turn["chosen"].get("micro_tokens") != row.batch * row.tokens:
        turn["one_micro_batch"] = session.run(smidgen_command(arguments, row, row.adapter, whole=True))
    return turn


def peer_command(arguments: argparse.Namespace, row: Row, checkpointing: bool) -> list[str]:
    return [
        sys.executable, str(HERE / "gpu_peer.py"), "--device", arguments.device, "--model", row.model,
        "--base", "bf16" if row.base == "fp8" else row.base,
        "--batch", str(row.batch), "--tokens", str(row.tokens), "--steps", str(arguments.peer_steps), "--warm-up", "2",
        "--checkpointing" if checkpointing else "--no-checkpointing",
    ]


def run_peers(session: Session, row: Row) -> dict:
    arguments, turn = session.arguments, {}
    if arguments.peer and row.peer and (row.base != "nf4" or arguments.peer_nf4):
        turn["peer"] = session.run(peer_command(arguments, row, row.peer_checkpointing))
    has = {name: arguments.peers and (arguments.peers / name).is_dir() for name in ("liger_kernel", "unsloth")}
    if any(has.values()) and row.unsloth:
        with_packages = ["--packages", str(arguments.peers)]
        if has["liger_kernel"] and row.base != "nf4":
            turn["liger"] = session.run(
                [*peer_command(arguments, row, row.peer_checkpointing), *with_packages, "--by", "liger"])
        if not has["unsloth"]:
            return turn
        checkpoint = arguments.checkpoints / row.model
        if not (checkpoint / "config.json").exists():
            session.run([str(arguments.smidgen), "bench", "--model", row.model, "--write-model", str(checkpoint), "--json"])
        # The faster of its settings in which smidgen's row is measured too.
        turn["unsloth"] = session.run(
            [*peer_command(arguments, row, row.recompute == "all"), *with_packages, "--by", "unsloth",
             "--checkpoint", str(checkpoint)])
    return turn


# ── judging ────────────────────────────────────────────────────────────────────────────────────────


def median_of(turns: list[dict], who: str, key: str) -> float | None:
    numbers = [turn[who][key] for turn in turns if turn.get(who, {}).get(key) is not None]
    return statistics.median(numbers) if numbers else None


def largest_of(turns: list[dict], who: str, key: str) -> float | None:
    return max((turn[who][key] for turn in turns if turn.get(who, {}).get(key) is not None), default=None)


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def judge_memory(planned: int | None, measured: int | None) -> str:
    """The plan against the measured memory: within 1 %, and never below."""
    if planned is None or measured is None:
        return "not measured"
    if measured > planned + GRANULE_BYTES:
        return "above the plan"
    if planned - measured < GRANULE_BYTES:
        return "exact"
    return "within 1 %" if planned <= measured * 1.01 else "plan too large"


def judge(row: dict, tokens_per_s: float | None, speed: float | None, gib: float | None) -> str:
    """`aim`, `must` or what is missing; `speed` is the ratio to what the row is held against."""
    if tokens_per_s is None:
        return "failed"
    if not row["must"] and not row["aim"]:
        return "no target"
    if speed is None:
        return "nothing to compare with"
    missed = []
    if row["must"] and speed < row["must"]:
        missed.append(f"speed {speed:.2f} of {row['must']:.2f}")
    if row["limit_gib"] and (gib is None or gib > row["limit_gib"]):
        missed.append(f"memory {'unknown' if gib is None else f'{gib:.2f}'} of {row['limit_gib']:.1f} GiB")
    if missed:
        return "no: " + ", ".join(missed)
    if row["aim"] and speed >= row["aim"]:
        return "aim"
    return "must" if row["must"] else f"no: speed {speed:.2f} of {row['aim']:.2f}"


def summarize(row: dict, turns: list[dict]) -> dict:
    """A summary of the rounds of a row, for each setting."""
    peer_speed = median_of(turns, "peer", "tokens_per_s")
    unsloth, recorded_peer = row["unsloth"], row["peer"]
    ran = median_of(turns, "unsloth", "tokens_per_s")
    if ran:
        unsloth = {"tokens_per_s": ran, "gib": largest_of(turns, "unsloth", "peak_allocated_gib")}
    summary: dict = {"peer": {
        "tokens_per_s": peer_speed,
        "gib": largest_of(turns, "peer", "peak_allocated_gib"),
        "ratio_to_recorded": ratio(peer_speed, recorded_peer["tokens_per_s"] if recorded_peer else None),
    }}
    for who in ("liger", "unsloth"):
        if any(who in turn for turn in turns):
            summary[who] = {"tokens_per_s": median_of(turns, who, "tokens_per_s"),
                            "gib": largest_of(turns, who, "peak_allocated_gib")}
    if row["adapter"] == "lora":
        against_speed = unsloth["tokens_per_s"] if unsloth else None
    else:
        against_speed = median_of(turns, "lora", "tokens_per_s")
    unsloth_now = None
    if peer_speed and unsloth and recorded_peer and not ran:
        unsloth_now = peer_speed * unsloth["tokens_per_s"] / recorded_peer["tokens_per_s"]
    for which in WHICH:
        if not any(which in turn for turn in turns):
            continue
        speed = median_of(turns, which, "tokens_per_s")
        planned, measured = (largest_of(turns, which, key) for key in ("planned_bytes", "measured_bytes"))
        peak = max((number for number in (planned, measured) if number is not None), default=None)
        gib = None if peak is None else peak / 2**30
        speed_ratio = ratio(speed, against_speed)
        summary[which] = {
            "tokens_per_s": speed,
            "model_tflops": median_of(turns, which, "model_tflops"),
            "step_ms": median_of(turns, which, "step_ms"),
            "micro_tokens": largest_of(turns, which, "micro_tokens"),
            "recomputed_layers": largest_of(turns, which, "recompute"),
            "against_tokens_per_s": against_speed,
            "ratio": speed_ratio,
            "ratio_to_peer": ratio(speed, peer_speed),
            "ratio_to_unsloth_through_peer": ratio(speed, unsloth_now),
            "planned_bytes": planned,
            "measured_bytes": measured,
            "context_bytes": largest_of(turns, which, "context_bytes"),
            "memory": judge_memory(planned, measured),
            "reached": judge(row, speed, speed_ratio, gib),
        }
    summary["errors"] = sorted({
        f"{who}: {result['error']}" for turn in turns for who, result in turn.items() if "error" in result
    })
    return summary


# ── showing ────────────────────────────────────────────────────────────────────────────────────────


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def in_gib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}"


def render_cut(row: dict, result: dict) -> str:
    if result["micro_tokens"] is None:
        return ""
    parts = -(-row["batch"] * row["tokens"] // result["micro_tokens"])
    cut = "whole" if parts == 1 else f"{parts} micro-batches"
    return f"{cut}, {result['recomputed_layers']} layers recomputed"


def render_row(entry: dict) -> list[str]:
    row, summary, lines = entry["row"], entry["summary"], []
    against = "Unsloth" if row["adapter"] == "lora" else "LoRA"
    for which in (which for which in WHICH if which in summary):
        result = summary[which]
        limit = f" / {row['limit_gib']:.1f}" if row["limit_gib"] else ""
        cells = [
            entry["title"] if which == "chosen" else "the same in one micro-batch, any memory",
            render_cut(row, result),
            number(result["tokens_per_s"], ",.0f"),
            number(result["model_tflops"], ".0f"),
            f"{number(result['ratio'], '.2f')} x {against}" if result["ratio"] else "",
            f"{number(row['must'], '.2f') or '–'} / {number(row['aim'], '.2f') or '–'}",
            number(result["ratio_to_peer"], ".2f"),
            number(result["ratio_to_unsloth_through_peer"], ".2f"),
            in_gib(result["planned_bytes"]) + limit,
            in_gib(result["measured_bytes"]),
            result["memory"],
            result["reached"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def render_table(results: dict) -> str:
    """The results file as Markdown: our rows, the peer's, and what failed."""
    machine, setting = results["machine"], results["setting"]
    lines = [
        f"{machine['gpu']}, {results['versions'].get('smidgen', 'smidgen')}, LoRA r=16 on all linears, AdamW, "
        f"{setting['rounds']} round(s) of {setting['steps']} steps.",
        "",
        "| row | cut | tok/s | TFLOP/s | speed | must / aim | x HF + PEFT here | x Unsloth through it "
        "| GiB planned / limit | measured | plan | reached |",
        "|---|---|--:|--:|--:|---|--:|--:|--:|--:|---|---|",
    ]
    for entry in results["rows"].values():
        lines += render_row(entry)
    peers = [entry for entry in results["rows"].values() if entry["summary"]["peer"]["tokens_per_s"]]
    if peers:
        lines += ["", "| HF + PEFT | checkpointing | tok/s here | recorded | GiB here | recorded |",
                  "|---|---|--:|--:|--:|--:|"]
    for entry in peers:
        row, peer = entry["row"], entry["summary"]["peer"]
        cells = [
            f"{row['model']} {row['base']}, {row['batch']} x {row['tokens']}", "yes" if row["peer_checkpointing"] else "no",
            number(peer["tokens_per_s"], ",.0f"), number(row["peer"]["tokens_per_s"], ",.0f"),
            number(peer["gib"], ".1f"), number(row["peer"]["gib"], ".1f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    errors = [(name, error) for name, entry in results["rows"].items() for error in entry["summary"]["errors"]]
    if errors:
        lines.append("")
    for name, error in errors:
        lines.append(f"- `{name}`, {' '.join(error.split())}")
    return "\n".join(lines)


def write_results(results: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(path)


# ── the command ────────────────────────────────────────────────────────────────────────────────────


def choose_rows(parser: argparse.ArgumentParser, names: str | None) -> list[Row]:
    known = {row.name: row for row in ROWS}
    asked = names.split(",") if names else list(known)
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"no row `{unknown[0]}`; rows are {', '.join(known)}")
    return [known[name] for name in asked]


def try_out(rows: list[Row]) -> list[Row]:
    """The same rows, small enough for a CPU; without targets, which would mean nothing."""
    small = {"model": "smollm2-135m", "tokens": 32, "limit_gib": None, "must": None, "aim": None, "unsloth": None}
    return [replace(row, batch=min(row.batch, 2), peer=row.peer and Recorded(0, 0), **small) for row in rows]


def read_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smidgen", type=Path, nargs="?", metavar="SMIDGEN_BINARY")
    parser.add_argument("--rows", help="names, with commas; default: " + ",".join(row.name for row in ROWS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peer-nf4", action="store_true", help="the peer for NF4 rows too, where bitsandbytes is installed")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="Unsloth and Liger too, from this folder of unpacked wheels")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "smidgen-checkpoints", metavar="DIR",
                        help="where the models are written that Unsloth loads")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=90, help="of each process")
    parser.add_argument("--limit-s", type=float, default=540, help="of all together; what is left over is recorded as not run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--try", dest="try_out", action="store_true", help="tiny rows, to try the script on any machine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the results file")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="print the table of a results file, and run nothing")
    return parser, parser.parse_args()


def main() -> None:
    parser, arguments = read_arguments()
    if arguments.table:
        print(render_table(json.loads(arguments.table.read_text())))
        return
    if arguments.smidgen is None or arguments.out is None:
        parser.error("name the smidgen binary and `--out`, or a results file with `--table`")
    rows = choose_rows(parser, arguments.rows)
    if arguments.try_out:
        rows = try_out(rows)
    arguments.smidgen = arguments.smidgen.resolve()
    # The peer must not wait for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"

    session = Session(arguments, time.monotonic(), {})
    setting = {key: getattr(arguments, key) for key in ("rounds", "steps", "warm_up", "peer_steps", "device", "try_out")}
    results: dict = {
        "machine": describe_gpu(), "versions": {"smidgen": version_of(arguments.smidgen)}, "setting": setting,
        "rows": {row.name: {"title": row.title, "row": asdict(row), "rounds": [], "summary": {}} for row in rows},
    }
    for entry in results["rows"].values():
        entry["summary"] = summarize(entry["row"], [])
    if arguments.keep and arguments.out.exists():
        kept = json.loads(arguments.out.read_text())
        if kept["versions"]["smidgen"] != results["versions"]["smidgen"]:
            parser.error(f"`--keep`: {arguments.out} is of {kept['versions']['smidgen']}")
        results["versions"] = kept["versions"] | results["versions"]
        both = kept["rows"] | results["rows"]
        results["rows"] = {row.name: both[row.name] for row in ROWS if row.name in both}
    for index in range(arguments.rounds):
        session.done.clear()
        for row in rows:
            entry = results["rows"][row.name]
            turn: dict = {}
            entry["rounds"].append(turn)
            for run in (run_smidgen, run_peers) if index % 2 == 0 else (run_peers, run_smidgen):
                turn.update(run(session, row))
                for who in ("peer", "liger", "unsloth"):
                    results["versions"].update(turn.get(who, {}).get("versions", {}))
                entry["summary"] = summarize(entry["row"], entry["rounds"])
                results["seconds"] = time.monotonic() - session.began
                write_results(results, arguments.out)
            shown = ", ".join(
                f"{who} {result['tokens_per_s']:,.0f} tok/s" if "error" not in result else f"{who} failed"
                for who, result in turn.items()
            )
            print(f"round {index + 1} {row.name}: {shown}", file=sys.stderr, flush=True)
    print(render_table(results))


if __name__ == "__main__":
    main()
