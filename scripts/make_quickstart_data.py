"""Chooses the rows of OpenBookQA that come with the quickstart.

    python scripts/make_quickstart_data.py OPENBOOKQA_DIR [--train 480] [--test 150]

OPENBOOKQA_DIR holds `train.json` (4,957 rows), `test.json` (500 rows) and `LICENSE`, the rows in the format of
LLM-Adapters. The choice depends only on the text: rows are sorted by the SHA-256 of their instruction and the
first ones are taken, so it is the same everywhere and no result influenced it. Duplicate questions count once.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "recipes/data/openbookqa"


def chosen(rows: list[dict], count: int) -> list[dict]:
    by_digest = {hashlib.sha256(row["instruction"].encode()).hexdigest(): row for row in rows}
    return [by_digest[digest] for digest in sorted(by_digest)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("openbookqa", type=Path)
    parser.add_argument("--train", type=int, default=480)
    parser.add_argument("--test", type=int, default=150)
    arguments = parser.parse_args()
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", arguments.train), ("test", arguments.test)):
        rows = chosen(json.loads((arguments.openbookqa / f"{name}.json").read_text()), count)
        (TARGET / f"{name}.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        print(f"{name}.json: {len(rows)} rows")
    shutil.copyfile(arguments.openbookqa / "LICENSE", TARGET / "LICENSE")


main()
