#!/usr/bin/env python3
"""Runs the tests that need a GPU, each in a process of its own, and writes which of them passed.

    python benches/gpu_tests.py BUNDLE [--out FILE] [--filter TEXT] [--jobs N]

BUNDLE is the folder that scripts/bundle_gpu.sh makes; `run.sh test` in it calls this script. FILE (results/gpu-tests.json
in the repository) is written after every test. Tests that passed in a FILE of the same commit are not run again, so a
run that was cut short continues. With `--jobs`, several tests run at a time; one that fails then runs again alone,
because some measure the memory of the GPU. The exit status is 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at the same time")
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
    to_run = {
        f"{program.name} {name}": (program, name)
        for program in sorted((bundle / "tests").iterdir()) for name in list_tests(program)
    }
    to_run = {full: test for full, test in to_run.items() if full not in tests and options.filter in full}

    def run(full: str) -> tuple[str, str, float]:
        started = time.monotonic()
        result, output = run_test(*to_run[full], environment)
        return result, output, time.monotonic() - started

    def record(full: str, result: str, output: str, seconds: float) -> None:
        tests[full] = result
        print(f"{result}: {full} ({seconds:.1f} s)", flush=True)
        if result == "failed":
            print("\n".join(output.splitlines()[-30:]), flush=True)
        counts = {result: list(tests.values()).count(result) for result in ("passed", "failed", "skipped")}
        written = {**built, "machine": machine, **counts, "tests": dict(sorted(tests.items()))}
        options.out.write_text(json.dumps(written, indent=1) + "\n")

    again = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run, full): full for full in to_run}
        for done in as_completed(running):
            if done.result()[0] == "failed" and options.jobs > 1:
                again.append(running[done])
            else:
                record(running[done], *done.result())
    for full in again:
        record(full, *run(full))
    failed = [name for name, result in tests.items() if result == "failed"]
    print(f"{len(tests)} tests, {len(failed)} failed: {options.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
