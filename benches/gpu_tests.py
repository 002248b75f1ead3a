#!/usr/bin/env python3
"""Runs the tests that need a GPU, each in a process of its own, and writes which of them passed.

    python benches/gpu_tests.py BUNDLE [--out FILE] [--filter TEXT]

BUNDLE is the folder that scripts/bundle_gpu.sh makes; `run.sh test` in it calls this script. FILE (results/gpu-tests.json
in the repository) is written after every test. Tests that passed in a FILE of the same commit are not run again, so a
run that was cut short continues. The exit status is 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from machine import describe_gpu

# The gate runs these, because NVRTC needs no GPU.
WITHOUT_GPU = ["--skip", "kernels_compile"]
LIMIT_S = 300


def list_tests(program: Path) -> list[str]:
    listed = subprocess.run([program, "--list", "--ignored", *WITHOUT_GPU], capture_output=True, text=True, check=True)
    return [line.removesuffix(": test") for line in listed.stdout.splitlines() if line.endswith(": test")]


def run_test(program: Path, name: str, environment: dict) -> tuple[str, str]:
    """`passed`, `skipped` or `failed`, and what the test printed."""
    command = [program, "--ignored", "--exact", name, "--nocapture", "--test-threads", "1"]
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return "failed", f"it ran for more than {LIMIT_S} s"
    if done.returncode != 0 or "1 passed" not in done.stdout:
        return "failed", done.stdout
    is_skipped = any(line.startswith("skipped") for line in done.stdout.splitlines())
    return "skipped" if is_skipped else "passed", done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-tests.json"))
    parser.add_argument("--filter", default="", help="a part of the names of the tests to run")
    options = parser.parse_args()
    bundle = options.bundle.resolve()
    built = json.loads((bundle / "built.json").read_text())
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {}
    is_same = all(earlier.get(key) == value for key, value in built.items())
    tests = {name: result for name, result in earlier.get("tests", {}).items() if is_same and result == "passed"}
    # Fixtures are looked for from here; kernels are compiled once for all tests.
    environment = {
        **os.environ,
        "CARGO_MANIFEST_DIR": str(bundle / "crates/smidgen"),
        "SMIDGEN_CACHE": os.environ.get("SMIDGEN_CACHE", str(bundle / "cache")),
    }
    (bundle / "crates/smidgen").mkdir(parents=True, exist_ok=True)
    gpu = describe_gpu()
    machine = {key: gpu[key] for key in ("gpu", "driver") if key in gpu}
    for program in sorted((bundle / "tests").iterdir()):
        for name in list_tests(program):
            full = f"{program.name} {name}"
            if full in tests or options.filter not in full:
                continue
            started = time.monotonic()
            tests[full], output = run_test(program, name, environment)
            print(f"{tests[full]}: {full} ({time.monotonic() - started:.1f} s)", flush=True)
            if tests[full] == "failed":
                print("\n".join(output.splitlines()[-30:]), flush=True)
            counts = {result: list(tests.values()).count(result) for result in ("passed", "failed", "skipped")}
            record = {**built, "machine": machine, **counts, "tests": dict(sorted(tests.items()))}
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    failed = [name for name, result in tests.items() if result == "failed"]
    print(f"{len(tests)} tests, {len(failed)} failed: {options.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
