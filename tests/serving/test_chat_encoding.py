"""Conversations to prompts, against strings written out by hand from the released format."""

import json

import pytest

from dspark_jax.serving.api import prompt_text
from dspark_jax.serving.api.chat import ChatMode, encode_chat, mode_of
from dspark_jax.serving.api.errors import ApiError
from dspark_jax.serving.api.schema import ChatBody, Message, Tool

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A = "<｜User｜>", "<｜Assistant｜>"
THINKING = ChatMode(is_thinking=True)
KEEPING = ChatMode(is_thinking=True, drops_reasoning=False)
TOOL = Tool(type="function", function={"name": "f", "parameters": {"type": "object"}})
TOOLS_TEXT = "\n\n" + prompt_text.TOOLS.format(
    schemas='{"name": "f", "parameters": {"type": "object"}}'
)


def say(role, content=None, **fields):
    return Message.model_validate({"role": role, "content": content, **fields})


def call(name, arguments, call_id):
    return {"id": call_id, "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    ("messages", "mode", "expected"),
    [
        ([say("user", "hi")], ChatMode(), f"{B}{U}hi{A}</think>"),
        ([say("user", "hi")], THINKING, f"{B}{U}hi{A}<think>"),
        (
            [say("system", "Be."), say("user", "hi")],
            ChatMode(),
            f"{B}Be.{U}hi{A}</think>",
        ),
        (
            [say("user", "a"), say("assistant", "b", reasoning="r"), say("user", "c")],
            ChatMode(),
            f"{B}{U}a{A}</think>b{E}{U}c{A}</think>",
        ),
        (
            [say("user", "a"), say("assistant", "b", reasoning="r"), say("user", "c")],
            THINKING,
            f"{B}{U}a{A}</think>b{E}{U}c{A}<think>",
        ),
        (
            [say("user", "a"), say("assistant", "b", reasoning_content="r"), say("user", "c")],
            KEEPING,
            f"{B}{U}a{A}<think>r</think>b{E}{U}c{A}<think>",
        ),
        (
            [say("developer", "d"), say("assistant", "b"), say("user", "c")],
            THINKING,
            f"{B}b{E}{U}c{A}<think>",
        ),
        (
            [say("developer", "d"), say("assistant", "b"), say("user", "c")],
            ChatMode(),
            f"{B}{U}d{A}</think>b{E}{U}c{A}</think>",
        ),
        (
            [say("user", "a"), say("latest_reminder", "today")],
            ChatMode(),
            f"{B}{U}a{A}</think><｜latest_reminder｜>today",
        ),
        ([say("user", "a"), say("user", "b")], ChatMode(), f"{B}{U}a\n\nb{A}</think>"),
        ([say("user", "q", task="title")], ChatMode(), f"{B}{U}q<｜title｜>"),
        ([say("user", "q", task="action")], THINKING, f"{B}{U}q{A}<think><｜action｜>"),
        (
            [
                say("user", "q", task="query"),
                say("assistant", "words", reasoning="r"),
            ],
            KEEPING,
            f"{B}{U}q<｜query｜>words{E}",
        ),
        (
            [say("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
            ChatMode(),
            f"{B}{U}a\nb{A}</think>",
        ),
        (
            [say("system", "s", response_format={"a": "ä"}), say("user", "u")],
            ChatMode(),
            f"{B}s\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to "
            f'reply:\n{{"a": "ä"}}{U}u{A}</think>',
        ),
    ],
)
def test_conversations(messages, mode, expected):
    assert encode_chat(messages, mode) == expected


def test_tools_follow_the_system_text_or_come_first():
    hi = say("user", "hi")
    assert encode_chat([hi], ChatMode(), [TOOL]) == f"{B}{TOOLS_TEXT}{U}hi{A}</think>"
    system = [say("system", "s"), hi]
    assert encode_chat(system, ChatMode(), [TOOL]) == f"{B}s{TOOLS_TEXT}{U}hi{A}</think>"
    developer = [say("developer", "d", tools=[TOOL.model_dump()])]
    assert encode_chat(developer, THINKING) == f"{B}{U}d{TOOLS_TEXT}{A}<think>"


def test_tools_keep_all_reasoning():
    messages = [say("user", "a"), say("assistant", "b", reasoning="r"), say("user", "c")]
    expected = f"{B}{TOOLS_TEXT}{U}a{A}<think>r</think>b{E}{U}c{A}<think>"
    assert encode_chat(messages, THINKING, [TOOL]) == expected


def test_tool_calls_and_results_in_the_order_of_the_calls():
    messages = [
        say("user", "weather?"),
        say(
            "assistant",
            tool_calls=[call("f", {"city": "Köln", "days": 2}, "c1"), call("g", {}, "c2")],
        ),
        say("tool", "second", tool_call_id="c2"),
        say("tool", "first", tool_call_id="c1"),
        say("user", "well?"),
    ]
    calls = (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    )
    results = "<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nwell?"
    assert encode_chat(messages, ChatMode()) == (
        f"{B}{U}weather?{A}</think>\n\n{calls}{E}{U}{results}{A}</think>"
    )


def test_maximum_effort_comes_before_everything_and_only_when_thinking():
    hi = [say("system", "s"), say("user", "hi")]
    prompt = encode_chat(hi, ChatMode(is_thinking=True, has_max_effort=True))
    assert prompt.startswith(
        f"{B}Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    )
    assert prompt.endswith(f"unchecked.\n\ns{U}hi{A}<think>")
    assert encode_chat(hi, ChatMode(has_max_effort=True)) == encode_chat(hi, ChatMode())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ChatMode()),
        ({"chat_template_kwargs": {"thinking": True}}, THINKING),
        ({"chat_template_kwargs": {"enable_thinking": True, "drop_thinking": False}}, KEEPING),
        ({"reasoning_effort": "high"}, THINKING),
        ({"reasoning_effort": "max"}, ChatMode(is_thinking=True, has_max_effort=True)),
        ({"reasoning_effort": "none"}, ChatMode()),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}, ChatMode()),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "none"}}, ChatMode()),
    ],
)
def test_mode_of_a_request(fields, expected):
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
    assert mode_of(body) == expected


@pytest.mark.parametrize("arguments", ["[1]", "{", "", '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments):
    tool_call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError, match="not a JSON object"):
        encode_chat([say("assistant", tool_calls=[tool_call]), say("user", "x")], ChatMode())


def test_a_developer_message_needs_text():
    with pytest.raises(ApiError, match="needs text"):
        encode_chat([say("developer", "")], ChatMode())
