"""The `smidgen` program: where it is, and how it is run.

A run is a process of its own. Its memory is the memory of its plan, without what a notebook holds; when it ends, the memory
of the GPU is free; and a crash takes nothing else with it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ._errors import Error, Interrupted

#: The program to run, instead of the one that was installed with this package.
VARIABLE = "SMIDGEN_PROGRAM"
INTERRUPTED = 130


def environment() -> Dict[str, str]:
    """That of this process, and each message in one line."""
    return {**os.environ, "COLUMNS": "100000"}


def program() -> str:
    """The path of the program."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return chosen
    schemes = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]
    places = [Path(folder) / "smidgen" for folder in [*schemes, str(Path(sys.executable).parent)] if folder]
    for place in places:
        if place.is_file():
            return str(place)
    found = shutil.which("smidgen")
    if found is None:
        raise Error("the program `smidgen` is not installed; `pip install --force-reinstall smidgen` installs it")
    return found


def version() -> str:
    """The version of this package and of its program."""
    try:
        return importlib.metadata.version("smidgen")
    except importlib.metadata.PackageNotFoundError:
        return output(["--version"]).split()[1]


def error(text: str, code: int) -> Error:
    """The exception for a program that ended with this text and exit code."""
    text = text[text.rfind("error:"):] if "error:" in text else text
    text = text.strip() or f"smidgen ended with the exit code {code}"
    return (Interrupted if code == INTERRUPTED else Error)(text, code)


def output(arguments: Sequence[str], stdin: Optional[str] = None) -> str:
    """What a command prints. Messages of a command that succeeds go to stderr."""
    done = _run(arguments, stdin)
    if done.returncode != 0:
        raise error(done.stderr, done.returncode)
    sys.stderr.write(done.stderr)
    return done.stdout


def json_output(arguments: Sequence[str], stdin: Optional[str] = None) -> Any:
    """The JSON that a command prints, also if the exit code then says that what it tells is no success."""
    done = _run(arguments, stdin)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise error(done.stderr, done.returncode) from None


def _run(arguments: Sequence[str], stdin: Optional[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [program(), *arguments], input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True, text=True, encoding="utf-8", errors="replace", check=False,
        env=environment(),
    )


def schema() -> Any:
    """The JSON schema of recipes: every key with its meaning and its default."""
    return json_output(["schema"])


def command_line(arguments: Sequence[str]) -> List[str]:
    """The program with its arguments."""
    return [program(), *arguments]
