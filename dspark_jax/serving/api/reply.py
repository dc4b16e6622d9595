"""A chat reply's text, taken apart as it arrives: reasoning, content, tool calls."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dspark_jax.serving.api import prompt_text
from dspark_jax.serving.detokenizer import StopFinder

_BEGIN = ("\n\n" + prompt_text.TOOL_CALLS_BEGIN, prompt_text.TOOL_CALLS_BEGIN)
_DSML = re.escape(prompt_text.DSML)
_INVOKE_BEGIN = re.compile(rf'\s*<{_DSML}invoke name="([^"]+)">')
_INVOKE_END = re.compile(rf"\s*</{_DSML}invoke>")
_PARAMETER = re.compile(
    rf'\s*<{_DSML}parameter name="([^"]+)" string="(true|false)">(.*?)</{_DSML}parameter>',
    re.DOTALL,
)


@dataclass(frozen=True)
class ParsedCall:
    """One tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class ReplyPiece:
    """What a piece of text adds to the reply."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


class ReplyParser:
    """Splits the text of one reply.

    In thinking mode the text up to `</think>` is reasoning. With `parses_tools` complete tool-call
    blocks become calls; a malformed or unfinished block stays content.
    """

    def __init__(self, *, is_thinking: bool, parses_tools: bool) -> None:
        self._reasoning = StopFinder([prompt_text.THINK_END]) if is_thinking else None
        self._content = StopFinder(_BEGIN if parses_tools else ())
        self._block = StopFinder([prompt_text.TOOL_CALLS_END])
        self._block_begin = ""
        self._block_parts: list[str] | None = None  # None outside a block

    def push(self, text: str) -> ReplyPiece:
        """Add text. What may be the beginning of a marker is held back."""
        reasoning, content, calls = "", [], []
        if self._reasoning is not None:
            reasoning, marker = self._reasoning.push(text)
            if marker is None:
                return ReplyPiece(reasoning)
            text = self._reasoning.release()
            self._reasoning = None
        while text:
            if self._block_parts is None:
                before, marker = self._content.push(text)
                content.append(before)
                if marker is None:
                    break
                text = self._content.release()
                self._block_begin, self._block_parts = marker, []
            else:
                inside, marker = self._block.push(text)
                self._block_parts.append(inside)
                if marker is None:
                    break
                text = self._block.release()
                block = "".join(self._block_parts)
                self._block_parts = None
                parsed = parse_calls(block)
                if parsed is None:
                    content.append(self._block_begin + block + marker)
                else:
                    calls.extend(parsed)
        return ReplyPiece(reasoning, "".join(content), tuple(calls))

    def finish(self) -> ReplyPiece:
        """What was held back, as text."""
        if self._reasoning is not None:
            return ReplyPiece(self._reasoning.release())
        if self._block_parts is None:
            return ReplyPiece(content=self._content.release())
        unfinished = "".join(self._block_parts) + self._block.release()
        return ReplyPiece(content=self._block_begin + unfinished)


def parse_calls(block: str) -> list[ParsedCall] | None:
    """The calls inside a tool-call block, or None if it is malformed or empty."""
    calls, position = [], 0
    while invoke := _INVOKE_BEGIN.match(block, position):
        arguments, position = {}, invoke.end()
        while parameter := _PARAMETER.match(block, position):
            name, is_string, value = parameter.groups()
            position = parameter.end()
            if name in arguments:
                return None
            try:
                arguments[name] = value if is_string == "true" else _json_value(value)
            except (ValueError, RecursionError):
                return None
        if (end := _INVOKE_END.match(block, position)) is None:
            return None
        position = end.end()
        calls.append(ParsedCall(invoke[1], json.dumps(arguments, ensure_ascii=False)))
    return calls if calls and not block[position:].strip() else None


def _json_value(text: str) -> Any:
    """Parse strict JSON that can be written out again; `ValueError` otherwise."""
    value = json.loads(text, parse_constant=_refuse_constant)
    json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
