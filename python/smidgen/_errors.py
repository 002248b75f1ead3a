"""What the program reports when it fails."""

from __future__ import annotations

from typing import List

_ERROR = "error: "
_HINT = "hint: "


class Error(Exception):
    """What went wrong, with the program's exit code: 1 failed, also a run that does not fit; 2 a wrong recipe."""

    message: str
    hints: List[str]
    exit_code: int

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        lines = [line for line in text.strip().splitlines() if line.strip()]
        self.hints = [line.strip()[len(_HINT):] for line in lines if line.strip().startswith(_HINT)]
        message = "\n".join(line for line in lines if not line.strip().startswith(_HINT))
        self.message = message[len(_ERROR):] if message.startswith(_ERROR) else message
        self.exit_code = exit_code


class Interrupted(Error):
    """The run was stopped before its end, by `on_step` or a signal. Its state is saved: `smidgen.resume` continues it."""
