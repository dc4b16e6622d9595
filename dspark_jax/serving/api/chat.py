"""Messages to prompt: DeepSeek-V4's conversation format, which ships without a template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspark_jax.serving.api import prompt_text
from dspark_jax.serving.api.errors import ApiError
from dspark_jax.serving.api.schema import ChatBody, Message, Tool, ToolCall


@dataclass(frozen=True, kw_only=True)
class ChatMode:
    """How a conversation is encoded.

    `is_thinking` lets the reply begin with reasoning. `drops_reasoning` leaves the reasoning of
    earlier turns out. `has_max_effort` asks for the longest reasoning.
    """

    is_thinking: bool = False
    drops_reasoning: bool = True
    has_max_effort: bool = False


@dataclass(frozen=True)
class _Turn:
    """One stretch of the prompt: a message, or several that went into one user turn."""

    message: Message
    results: tuple[tuple[str | None, str], ...] = field(default=())  # (call id or None, text)

    @property
    def asks(self) -> bool:
        """Whether an assistant's reply may follow."""
        return self.message.role in ("user", "developer")


def mode_of(body: ChatBody) -> ChatMode:
    """The encoding that a request asks for: chat mode unless it names an effort or thinking."""
    options = body.chat_template_kwargs
    thinking = drop = effort = None
    if options is not None:
        named = (options.thinking, options.enable_thinking)
        thinking = next((value for value in named if value is not None), None)
        drop, effort = options.drop_thinking, options.reasoning_effort
    effort = body.reasoning_effort or effort
    if thinking is None:
        thinking = effort is not None
    return ChatMode(
        is_thinking=thinking and effort != "none",
        drops_reasoning=drop is not False,
        has_max_effort=effort in ("max", "xhigh"),
    )


def encode_chat(
    messages: Sequence[Message], mode: ChatMode, tools: Sequence[Tool] | None = None
) -> str:
    """The prompt of a conversation, beginning-of-sentence token included.

    `tools` go to a leading system or developer message, or to a system message put in front.
    Raises `ApiError` for a developer message without text and for tool-call arguments that are no
    JSON object.
    """
    messages = list(messages)
    if tools:
        if messages[0].role in ("system", "developer"):
            messages[0] = messages[0].model_copy(update={"tools": list(tools)})
        else:
            messages.insert(0, Message(role="system", tools=list(tools)))
    if any(message.tools for message in messages):
        mode = replace(mode, drops_reasoning=False)
    turns = _merge(messages)
    last_asking = max((i for i, turn in enumerate(turns) if turn.asks), default=-1)
    if mode.is_thinking and mode.drops_reasoning:
        # Earlier developer turns fall away together with the reasoning they steered.
        kept = [t for i, t in enumerate(turns) if i >= last_asking or t.message.role != "developer"]
        last_asking -= len(turns) - len(kept)
        turns = kept
    effort = prompt_text.MAX_EFFORT if mode.is_thinking and mode.has_max_effort else ""
    rendered = [_render(turns, position, last_asking, mode) for position in range(len(turns))]
    return prompt_text.BOS + effort + "".join(rendered)


def _merge(messages: Iterable[Message]) -> list[_Turn]:
    """Gather tool results and adjacent user texts into user turns, results in the calls' order."""
    turns: list[_Turn] = []
    call_order: dict[str, int] = {}
    for message in messages:
        if message.role not in ("user", "tool"):
            turns.append(_Turn(message))
            if message.tool_calls:
                call_order = {c.id: i for i, c in enumerate(message.tool_calls) if c.id}
            continue
        if message.role == "user":
            part = (None, message.text)
        else:
            text = prompt_text.TOOL_RESULT.format(text=_result_text(message))
            part = (message.tool_call_id or "", text)
        last = turns[-1] if turns else None
        if last is not None and last.results and last.message.task is None:
            turns[-1] = replace(last, results=_sorted_results([*last.results, part], call_order))
        else:
            holder = message if message.role == "user" else Message(role="user")
            turns.append(_Turn(holder, (part,)))
    return turns


def _result_text(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n\n".join(part.text for part in message.content)
    return message.text


def _sorted_results(
    parts: Sequence[tuple[str | None, str]], call_order: dict[str, int]
) -> tuple[tuple[str | None, str], ...]:
    """Put the tool results among `parts` into the calls' order; texts keep their places."""
    results = iter(
        sorted(
            (part for part in parts if part[0] is not None),
            key=lambda part: call_order.get(part[0] or "", 0),
        )
    )
    return tuple(part if part[0] is None else next(results) for part in parts)


def _render(turns: Sequence[_Turn], position: int, last_asking: int, mode: ChatMode) -> str:
    turn = turns[position]
    message = turn.message
    match message.role:
        case "system":
            text = message.text + _blocks(message)
        case "developer":
            if not message.text:
                raise ApiError("A developer message needs text.", param="messages")
            text = prompt_text.USER + message.text + _blocks(message)
        case "user":
            text = prompt_text.USER + "\n\n".join(text for _, text in turn.results)
        case "latest_reminder":
            text = prompt_text.LATEST_REMINDER + message.text
        case _:
            follows_task = position > 0 and turns[position - 1].message.task is not None
            keeps = not mode.drops_reasoning or position > last_asking
            text = _assistant(message, mode.is_thinking and keeps and not follows_task)
    following = turns[position + 1].message.role if position + 1 < len(turns) else "assistant"
    if following not in ("assistant", "latest_reminder"):
        return text
    is_open = mode.is_thinking and (not mode.drops_reasoning or position >= last_asking)
    return text + _transition(turn, is_open, mode)


def _transition(turn: _Turn, is_open: bool, mode: ChatMode) -> str:
    """What leads over to the reply."""
    opening = prompt_text.THINK_BEGIN if is_open else prompt_text.THINK_END
    task = turn.message.task
    if task is None:
        return prompt_text.ASSISTANT + opening if turn.asks else ""
    token = prompt_text.TASK_TOKENS[task]
    if task != "action":
        return token
    opening = prompt_text.THINK_BEGIN if mode.is_thinking else prompt_text.THINK_END
    return prompt_text.ASSISTANT + opening + token


def _blocks(message: Message) -> str:
    text = ""
    if message.tools:
        schemas = "\n".join(_json(tool.function) for tool in message.tools)
        text += "\n\n" + prompt_text.TOOLS.format(schemas=schemas)
    if message.response_format:
        schema = _json(message.response_format)
        text += "\n\n" + prompt_text.RESPONSE_FORMAT.format(schema=schema)
    return text


def _assistant(message: Message, shows_reasoning: bool) -> str:
    text = message.text
    if shows_reasoning:
        reasoning = message.reasoning_content or message.reasoning or ""
        text = reasoning + prompt_text.THINK_END + text
    if message.tool_calls:
        text += "\n\n" + _tool_calls(message.tool_calls)
    return text + prompt_text.EOS


def _tool_calls(calls: Sequence[ToolCall]) -> str:
    lines = [prompt_text.TOOL_CALLS_BEGIN]
    for call in calls:
        lines.append(prompt_text.INVOKE_BEGIN.format(name=call.function.name))
        lines.append("\n".join(_parameters(call)))
        lines.append(prompt_text.INVOKE_END)
    return "\n".join([*lines, prompt_text.TOOL_CALLS_END])


def _parameters(call: ToolCall) -> list[str]:
    try:
        arguments = json.loads(call.function.arguments)
        _json(arguments).encode()  # an escape may stand for half a surrogate pair
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"The arguments of the call of {call.function.name!r} are not a JSON object."
        raise ApiError(message, param="messages")
    return [
        prompt_text.PARAMETER.format(
            name=name,
            is_string="true" if isinstance(value, str) else "false",
            value=value if isinstance(value, str) else _json(value),
        )
        for name, value in arguments.items()
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
