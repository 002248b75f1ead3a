"""Keyword arguments as the text of a recipe, and rows as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Union

Rows = Iterable[Mapping[str, Any]]
PathLike = Union[str, "os.PathLike[str]"]

# The key that a plain value of a section stands for.
_MAIN_KEY = {"model": "path", "data": "train", "output": "dir"}
SECTIONS = ("model", "adapter", "data", "train", "memory", "eval", "expect", "output")


def _literal(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, os.PathLike)):
        # TOML's basic strings have the escapes of JSON, and characters beyond ASCII as they are.
        return json.dumps(os.fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_literal(part)}" for key, part in value.items()) + " }"
    if isinstance(value, (list, tuple, set)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    raise TypeError(f"a recipe has no values like {value!r}")


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def sections_of(keywords: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """The sections of a recipe from keyword arguments, without those that are None."""
    sections: Dict[str, Dict[str, Any]] = {}
    for name, value in keywords.items():
        if name not in SECTIONS:
            raise TypeError(f"unexpected argument `{name}`; the sections of a recipe are {', '.join(SECTIONS)}")
        if value is None:
            continue
        if not isinstance(value, Mapping):
            if name not in _MAIN_KEY:
                raise TypeError(f"`{name}` is a section of the recipe, such as {name}={{...}}, not {value!r}")
            value = {_MAIN_KEY[name]: value}
        sections[name] = dict(value)
    return sections


def recipe_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The recipe in TOML."""
    lines: List[str] = []
    for name, keys in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{_key(key)} = {_literal(value)}" for key, value in keys.items() if value is not None]
    return "\n".join(lines) + "\n"


def overrides_of(sections: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """The keys of sections as `section.key=value` arguments."""
    overrides: List[str] = []
    for name, keys in sections.items():
        for key, value in keys.items():
            if isinstance(value, Mapping) or (
                isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value)
            ):
                raise TypeError(f"`{name}.{key}` is a table and belongs into the recipe's file")
            if value is None:
                continue
            is_text = isinstance(value, (str, os.PathLike))
            overrides.append(f"{name}.{key}={os.fspath(value) if is_text else _literal(value)}")
    return overrides


def write_rows(path: Path, rows: Rows) -> int:
    """Writes rows as JSON lines and returns how many there are. The file appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    count = 0
    with open(unfinished, "w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {count} is not a mapping: {row!r}")
            file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
    unfinished.replace(path)
    return count


def _is_rows(data: Any) -> bool:
    """Whether `data` are rows, such as a list or a `datasets.Dataset`, and not the path of a file or several paths."""
    if isinstance(data, (str, bytes, os.PathLike, Mapping)) or not isinstance(data, Iterable):
        return False
    return not (isinstance(data, (list, tuple)) and data and all(isinstance(path, (str, os.PathLike)) for path in data))


def with_rows_in_files(data: Dict[str, Any], stem: Optional[Path]) -> Dict[str, Any]:
    """The section with paths instead of rows, which are written into files named after `stem`."""
    data = dict(data)
    for name in ("train", "eval"):
        if not _is_rows(data.get(name)):
            continue
        if stem is None:
            raise TypeError("rows need `output`, the folder of the run: they are kept beside it")
        file = stem.with_name(f"{stem.name}.{name}.jsonl")
        if write_rows(file, data[name]) == 0:
            raise ValueError(f"`data` has no rows to {name} on" if name == "train" else "`data.eval` has no rows")
        data[name] = str(file)
    return data
