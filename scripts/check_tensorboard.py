"""Checks the event file of a run with TensorBoard itself.

    python scripts/check_tensorboard.py RUN...

RUN is a run folder. Needs the tensorboard package; no network and no GPU.
TensorBoard reads the event file and checks its checksums: every row of `metrics.jsonl` has to be in the curves once,
in order, with the values of the row as f32, and nothing else.
One line per run, `ok` or `FAILED`; the exit code is the number of failed runs.
"""

import json
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {"loss": "train/loss", "reg_loss": "train/reg_loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate",
        "epoch": "train/epoch", "tokens_per_s": "train/tokens_per_s"}
NOT_CURVES = {"step", "epoch", "eval_samples", "eval_tokens", "eval_supervised_tokens", "eval_ms"}


def as_f32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def expected_curves(run):
    curves = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval_loss" in row:
            tags = {name: "eval/" + name.removeprefix("eval_") for name in row if name not in NOT_CURVES}
        else:
            tags = {name: tag for name, tag in TAGS.items() if name in row}
        for name, tag in tags.items():
            curves.setdefault(tag, []).append((row["step"], as_f32(row[name])))
    return curves


def check(run):
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    curves = {tag: [(it.step, as_f32(it.value)) for it in accumulator.Scalars(tag)] for tag in tags}
    expected = expected_curves(run)
    differing = sorted(tag for tag in curves.keys() | expected.keys() if curves.get(tag) != expected.get(tag))
    points = sum(map(len, curves.values()))
    said = f"{len(curves)} curves, {points} points" if not differing else f"these differ: {', '.join(differing)}"
    print(f"{'FAILED' if differing else 'ok'} {run}: {said}")
    return bool(differing)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(sum(check(Path(run)) for run in sys.argv[1:]))
