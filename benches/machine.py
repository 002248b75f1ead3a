"""What the other scripts write next to their figures: which program and which machine they were measured on."""

import os
import subprocess
from pathlib import Path


def describe_cpu() -> dict:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    meminfo = Path("/proc/meminfo").read_text().split()
    return {
        "cpu": next((line.split(": ", 1)[1] for line in cpuinfo if line.startswith("model name")), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024,
    }


def describe_gpu() -> dict:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,power.limit", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        name, driver, total, used, power = (part.strip() for part in text.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"gpu": "unknown: nvidia-smi gave no answer"}
    return {"gpu": name, "driver": driver, "memory": total, "used_before": used, "power_limit": power}


def version_of(binary: str | Path) -> str:
    """The first line of `smidgen --version`; the lines below it name the libraries found."""
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0].strip()
