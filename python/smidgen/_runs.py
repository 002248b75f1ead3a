"""Plans, runs and reports, each by the command of the same name."""

from __future__ import annotations

import collections
import html
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, TextIO

from ._program import command_line, environment, error, json_output
from ._recipes import PathLike, overrides_of, recipe_text, sections_of, with_rows_in_files
from ._rewards import Reward, RewardServer

#: A row of `metrics.jsonl`: `step`, `loss`, `grad_norm`, `lr`, `tokens_per_s`, ...
Row = Dict[str, Any]


class Plan:
    """The predicted memory and speed of a run. `print` shows the table of `smidgen plan`; `json` has everything."""

    json: Dict[str, Any]

    def __init__(self, json: Dict[str, Any]) -> None:
        self.json = json

    @property
    def fits(self) -> bool:
        """Whether the run fits its budget. If not, this is the smallest plan, and `advice` says what would fit."""
        return bool(self.json["fits"])

    @property
    def budget_bytes(self) -> int:
        """The memory that the run may use on its device."""
        return int(self.json["budget_bytes"])

    @property
    def peak_bytes(self) -> int:
        """The memory that it will use."""
        return int(self.json["peak_bytes"])

    @property
    def rows(self) -> Dict[str, int]:
        """The memory in use at the peak, by category."""
        return dict(self.json["rows"])

    @property
    def tokens_per_s(self) -> Optional[float]:
        """The predicted speed; None for an unknown GPU."""
        return self.json.get("tokens_per_s")

    @property
    def total_seconds(self) -> Optional[float]:
        """The predicted time of the whole run, if the data are known."""
        return self.json.get("total_seconds")

    @property
    def advice(self) -> List[str]:
        """The smallest changes that would make the run fit."""
        return list(self.json["advice"])

    def __str__(self) -> str:
        return str(self.json["table"])

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<smidgen.Plan: {self.peak_bytes:,} of {self.budget_bytes:,} bytes, {fits}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Run:
    """A run in its folder, with its report as `smidgen report --json` has it."""

    folder: Path
    report: Dict[str, Any]

    def __init__(self, folder: Path, report: Dict[str, Any]) -> None:
        self.folder = folder
        self.report = report

    @property
    def adapter(self) -> Path:
        """The folder of the trained adapter, which PEFT loads as well."""
        return self.folder / "adapter"

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return int(self.report["steps"])

    @property
    def metrics(self) -> List[Row]:
        """Every row of `metrics.jsonl`: a row per step, and a row per evaluation."""
        with open(self.folder / "metrics.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    @property
    def losses(self) -> List[float]:
        """The loss of every step."""
        return [row["loss"] for row in self.metrics if "loss" in row]

    def __repr__(self) -> str:
        return f"<smidgen.Run: {self.report['title']}, {self.report['state']}, in {str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        page = self.folder / "report.html"
        if not page.is_file():
            return f"<pre>{html.escape(repr(self))}</pre>"
        text = html.escape(page.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 640px; border: 0"></iframe>'


class _Recipe:
    """A recipe for the program: its name on the command line, overrides, and what stdin has."""

    def __init__(self, recipe: Optional[PathLike], keywords: Mapping[str, Any], rows_in: Optional[Path]) -> None:
        sections = sections_of(keywords)
        output = sections.get("output", {}).get("dir")
        if rows_in is not None:
            stem: Optional[Path] = rows_in / "rows"
        elif output is not None:
            folder = Path(os.path.abspath(os.fspath(output)))
            stem = folder.with_name(folder.name)
        else:
            stem = None
        if "data" in sections:
            sections["data"] = with_rows_in_files(sections["data"], stem)
        if recipe is None:
            self.name, self.overrides, self.text = "-", [], recipe_text(sections)
        else:
            self.name, self.overrides, self.text = os.fspath(recipe), overrides_of(sections), None

    def arguments(self) -> List[str]:
        return [self.name, *self.overrides]


def plan(recipe: Optional[PathLike] = None, /, **sections: Any) -> Plan:
    """Predicts memory and speed of a run. Nothing is trained, and no weight is read.

    `recipe` is the path of a TOML file; keyword arguments are its sections, or change keys of the file. A run that does not
    fit its budget is not an error: its plan has `fits == False`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if recipe is None:
            # What a recipe must have and a plan can do without: then every sample has `max_tokens` tokens.
            data = sections.get("data")
            if data is None or (isinstance(data, Mapping) and "train" not in data and "mix" not in data):
                sections["data"] = {**(data or {}), "train": os.path.join(folder, "rows.jsonl")}
            sections.setdefault("output", os.path.join(folder, "run"))
        asked = _Recipe(recipe, sections, Path(folder))
        return Plan(json_output(["plan", *asked.arguments(), "--json", "--table"], asked.text))


def train(
    recipe: Optional[PathLike] = None,
    /,
    *,
    on_step: Optional[Callable[[Row], Optional[bool]]] = None,
    rewards: Sequence[Reward] = (),
    resume: bool = False,
    accept_changes: bool = False,
    ranks: int = 1,
    quiet: bool = False,
    **sections: Any,
) -> Run:
    """Plans a run, checks that it fits, trains, and saves the result in `output`.

    `on_step` is called with the row of each step; if it returns False, the run ends the step that it is at, saves its state
    and stops. Ctrl-C does the same. `data` may be rows in memory, a list of mappings or a `datasets.Dataset`: they are kept beside the folder of the
    run, so that it can be resumed. `rewards` are functions for `objective = "grpo"`: each is called with an answer, and
    returns a number.
    """
    flags = ["--resume"] * resume + ["--accept-changes"] * accept_changes
    with ExitStack() as stack:
        server = stack.enter_context(RewardServer(rewards)) if rewards else None
        if server is not None:
            if recipe is not None:
                raise TypeError("`rewards` go with keyword arguments; a recipe's file names its reward commands")
            own = dict(sections.get("train") or {})
            sections["train"] = {**own, "reward": [*own.get("reward", []), *server.tables()]}
        asked = _Recipe(recipe, sections, None)
        if ranks != 1:
            flags += ["--ranks", str(ranks)]
            if asked.text is not None:
                # Every rank reads the recipe. Relative paths in it start at the working directory.
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile("w", suffix=".toml", dir=".", encoding="utf-8")
                )
                file.write(asked.text)
                file.flush()
                asked.name, asked.text = file.name, None
        return _follow(["train", *asked.arguments(), *flags], asked.text, on_step, quiet, server)


def resume(
    folder: PathLike,
    /,
    *,
    on_step: Optional[Callable[[Row], Optional[bool]]] = None,
    rewards: Sequence[Reward] = (),
    accept_changes: bool = False,
    quiet: bool = False,
) -> Run:
    """Continues the run in a folder from its last checkpoint. Reward functions are given again."""
    flags = ["--accept-changes"] * accept_changes
    with ExitStack() as stack:
        server = stack.enter_context(RewardServer(rewards)) if rewards else None
        return _follow(["resume", os.fspath(folder), *flags], None, on_step, quiet, server)


def report(folder: PathLike, /) -> Run:
    """The run in a folder, also while it goes on."""
    return Run(Path(folder), json_output(["report", os.fspath(folder), "--json"]))


def _follow(
    arguments: List[str], stdin: Optional[str], on_step: Optional[Callable[[Row], Optional[bool]]], quiet: bool,
    server: Optional[RewardServer],
) -> Run:
    """Runs the program until it ends, with a call per step."""
    # In a session of its own: Ctrl-C reaches this process alone, which passes it on once.
    process = subprocess.Popen(
        command_line([*arguments, "--json", "--rows", *(["--quiet"] if quiet else [])]),
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", start_new_session=True,
        env={**environment(), **(server.environment() if server is not None else {})},
    )
    assert process.stdout is not None and process.stderr is not None
    said: "collections.deque[str]" = collections.deque(maxlen=200)
    relay = threading.Thread(target=_relay, args=(process.stderr, said), daemon=True)
    relay.start()
    raised: Optional[BaseException] = None
    is_stopping = False
    printed: List[str] = []
    try:
        if stdin is not None and process.stdin is not None:
            _write(process.stdin, stdin)
        while True:
            try:
                line = process.stdout.readline()
                if not line:
                    break
                row = None if printed else _row(line)
                if row is None:
                    printed.append(line)
                elif on_step is not None and not is_stopping and on_step(row) is False:
                    is_stopping = True
                    process.send_signal(signal.SIGINT)
            except BaseException as exception:  # of `on_step`, or Ctrl-C: the run saves its state first
                raised = raised or exception
                is_stopping = True
                process.send_signal(signal.SIGINT)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        relay.join()
        process.stdout.close()
        process.stderr.close()
    if raised is not None:
        raise raised
    if code != 0 and server is not None and server.raised is not None:
        raise server.raised
    if code != 0:
        raise error("".join(said), code)
    found = json.loads("".join(printed))
    return Run(Path(found["page"]).parent, found)


def _row(line: str) -> Optional[Row]:
    """The row in a line of JSON; None if it is the first line of the report."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.close()
    except BrokenPipeError:
        # It ended without reading; its message says why.
        pass


def _relay(stream: Iterable[str], said: "collections.deque[str]") -> None:
    is_error = False
    for line in stream:
        said.append(line)
        # The exception has it.
        is_error = is_error or line.startswith("error:")
        if not is_error:
            sys.stderr.write(line)
            sys.stderr.flush()
