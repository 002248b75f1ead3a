"""A model that answers: `smidgen serve` on the loopback address, for this process alone."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import subprocess
import tempfile
import urllib.parse
import weakref
from types import TracebackType
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Type, Union

from ._errors import Error
from ._program import command_line, environment, error
from ._recipes import PathLike
from ._runs import Run

#: A user's message, or a conversation of mappings with `role` and `content`.
Prompt = Union[str, Sequence[Mapping[str, Any]]]


class Answer(str):
    """The text of an answer, with why it ended (`stop` or `length`) and the tokens that it has."""

    finish_reason: str
    tokens: int

    def __new__(cls, text: str, finish_reason: str, tokens: int) -> "Answer":
        answer = super().__new__(cls, text)
        answer.finish_reason = finish_reason
        answer.tokens = tokens
        return answer


class Session:
    """A model that is loaded, from `load`. It frees its memory when it is closed, or at the end of a `with`."""

    #: The address of OpenAI's interface, and the key for it.
    url: str
    api_key: str
    #: The names of the base and of its adapters, and the one that answers unless another is named.
    models: List[str]
    model: str
    planned_bytes: int
    #: Tokens of a prompt and its answer together.
    context: int

    def __init__(self, arguments: List[str], more_adapters: int = 0) -> None:
        self.api_key = secrets.token_urlsafe(32)
        self._messages = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            command_line(["serve", *arguments, "--port", "0", "--token", "-", "--json"]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True, encoding="utf-8",
            start_new_session=True, env=environment(),
        )
        # At the latest when this object or the interpreter goes.
        self._end = weakref.finalize(self, _end, self._process, self._messages)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            try:
                self._process.stdin.write(self.api_key + "\n")
                self._process.stdin.close()
            except BrokenPipeError:
                pass
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                raise error(self._said(), code)
            started = json.loads(line)
        except BaseException:
            self.close()
            raise
        self.url = started["url"] + "/v1"
        self.models = started["models"]
        # The base comes first, then the adapter of the target, then the others.
        self.model = self.models[-1 - more_adapters]
        self._has_template = started["has_template"]
        self.planned_bytes = started["planned_bytes"]
        self.context = started["context"]

    def generate(
        self,
        prompt: Prompt,
        *,
        model: Optional[str] = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        raw: bool = False,
        on_text: Optional[Callable[[str], Any]] = None,
    ) -> Answer:
        """The answer to a prompt, formatted as the model was trained on, or with `raw` as it is. A model without a template
        gets the prompt as it is.

        `on_text` is called with each piece of the answer as it is generated. `model` is one of `models`.
        """
        asked: Dict[str, Any] = {
            "model": model or self.model, "max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p,
            "top_k": top_k, "repetition_penalty": repetition_penalty, "seed": seed, "stop": list(stop), "stream": True,
            "stream_options": {"include_usage": True},
        }
        if raw or (isinstance(prompt, str) and not self._has_template):
            path, asked["prompt"] = "/completions", prompt
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            path, asked["messages"] = "/chat/completions", messages
        text: List[str] = []
        reason, tokens = "", 0
        for event in self._events(path, asked):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text.append(_piece(choice))
                reason = choice["finish_reason"] or reason
                if on_text is not None and text[-1]:
                    on_text(text[-1])
        return Answer("".join(text), reason, tokens)

    def _events(self, path: str, asked: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port)
        try:
            headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
            try:
                connection.request("POST", address.path + path, json.dumps(asked), headers)
                response = connection.getresponse()
            except OSError as failure:
                raise Error(f"the session is closed, or its process has ended: {failure}") from failure
            if response.status != 200:
                raise Error(json.loads(response.read())["error"]["message"], 2)
            for line in response:
                text = line.decode("utf-8").strip()
                if not text.startswith("data: ") or text == "data: [DONE]":
                    continue
                event = json.loads(text[len("data: "):])
                if "error" in event:
                    raise Error(event["error"]["message"])
                yield event
        finally:
            connection.close()

    def close(self) -> None:
        """Ends the process and frees its memory."""
        self._end()

    def _said(self) -> str:
        self._messages.seek(0)
        return self._messages.read()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<smidgen.Session: {', '.join(self.models)} at {self.url}>"


def load(
    target: Union[PathLike, Run],
    /,
    *,
    adapters: Optional[Mapping[str, PathLike]] = None,
    device: Optional[str] = None,
    budget: Optional[str] = None,
    context: Optional[int] = None,
    compute: Optional[str] = None,
    threads: Optional[int] = None,
) -> Session:
    """Loads a model (`hf:org/name`, a folder, a .gguf file) or a run with its adapter, inside a memory budget.

    `adapters` are more adapters of the same base, by name.
    """
    arguments = [os.fspath(target.folder if isinstance(target, Run) else target)]
    for name, folder in (adapters or {}).items():
        arguments += ["--adapter", f"{name}={os.fspath(folder)}"]
    options = {"device": device, "budget": budget, "context": context, "compute": compute, "threads": threads}
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    return Session(arguments, len(adapters or {}))


def _end(process: "subprocess.Popen[str]", messages: IO[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
    messages.close()


def _piece(choice: Mapping[str, Any]) -> str:
    """The text of a streamed choice, of either endpoint."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""
