"""Reward functions: the program's reward command, answered by functions of another process.

The command is this module, run by the interpreter that trains. It passes each answer to the functions and prints what they
return. Where they are is in the environment, not in the recipe, so a run that is resumed finds those of its new caller.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

#: Called with an answer: `prompt`, `completion`, `tokens`, `stopped_by`, and in `row` the other columns of its row.
Reward = Callable[[Mapping[str, Any]], float]

_VARIABLE = "SMIDGEN_REWARD_FUNCTIONS"


class RewardServer:
    """Answers the reward commands of a run while it is open."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = list(rewards)
        self._key = secrets.token_bytes(32)
        self._listener = Listener(("127.0.0.1", 0), authkey=self._key)
        #: What a function raised.
        self.raised: Optional[BaseException] = None
        threading.Thread(target=self._accept, daemon=True).start()

    def tables(self) -> List[Dict[str, Any]]:
        """The `[[train.reward]]` tables for the functions."""
        return [
            {"kind": "command", "command": f'"{sys.executable}" -m {__name__} {number}'}
            for number in range(len(self._rewards))
        ]

    def environment(self) -> Dict[str, str]:
        """What the commands find this server by."""
        return {_VARIABLE: f"{self._listener.address[1]} {self._key.hex()}"}

    def __enter__(self) -> "RewardServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            except Exception:
                # Somebody else, without the key.
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: "Connection[Any, Any]") -> None:
        with connection:
            while True:
                try:
                    number, answer = connection.recv()
                except (EOFError, OSError):
                    return
                try:
                    connection.send(float(self._rewards[number](answer)))
                except BaseException as exception:
                    self.raised = self.raised or exception
                    return


def main() -> None:
    """The reward command."""
    number = int(sys.argv[1])
    if _VARIABLE not in os.environ:
        sys.exit("the rewards of this run are functions: continue it with `smidgen.resume(folder, rewards=[...])`")
    port, key = os.environ[_VARIABLE].split()
    with Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)) as connection:
        for line in sys.stdin:
            connection.send((number, json.loads(line)))
            try:
                print(repr(connection.recv()), flush=True)
            except EOFError:
                sys.exit("the reward function raised an exception")


if __name__ == "__main__":
    main()
