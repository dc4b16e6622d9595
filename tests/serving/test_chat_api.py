"""`/v1/chat/completions` through the real OpenAI client."""

import json

import pytest

from tests.serving.clients import openai_client
from tests.serving.fake_engine import EOS, MODEL, FakeEngine, logprob_of, make_backend
from tests.serving.test_reply import BLOCK
from tests.serving.tiny_tokenizer import raw_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def chat(engine, **body):
    async with openai_client(make_backend(engine)) as client:
        return await client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, **body}
        )


async def chat_stream(engine, **body):
    async with openai_client(make_backend(engine)) as client:
        chunks = await client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "stream": True, **body}
        )
        return [chunk async for chunk in chunks]


async def test_prompt_reply_and_usage():
    engine = FakeEngine("hello")
    reply = await chat(engine)
    prompt = "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    expected = raw_tokenizer().encode(prompt).ids
    assert list(engine.requests[0].prompt_token_ids) == expected
    assert engine.requests[0].sampling.max_tokens == engine.max_model_len - len(expected)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello"
    assert choice.finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(expected)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_either_limit_is_taken(limit):
    reply = await chat(FakeEngine("hello world"), **{limit: 2})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (2, "length")


@pytest.mark.parametrize("chunk_len", [1, 3, 100])
async def test_reasoning_is_separate_whole_and_streamed(chunk_len):
    engine = FakeEngine("so 😀</think>answer", chunk_len=chunk_len)
    options = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    message = (await chat(engine, **options)).choices[0].message
    assert (message.reasoning_content, message.content) == ("so 😀", "answer")
    assert list(engine.requests[0].prompt_token_ids)[-1] in raw_tokenizer().encode("<think>").ids
    deltas = [chunk.choices[0].delta for chunk in await chat_stream(engine, **options)]
    assert deltas[0].role == "assistant"
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == "so 😀"
    assert "".join(delta.content or "" for delta in deltas) == "answer"


@pytest.mark.parametrize("chunk_len", [1, 7, 1000])
async def test_tool_calls_whole_and_streamed(chunk_len):
    engine = FakeEngine(f"Look:\n\n{BLOCK}", chunk_len=chunk_len)
    engine.max_model_len = 4096
    choice = (await chat(engine, tools=TOOLS)).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look:")
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("f", {"city": 'Köln\n"x"', "days": [1, 2]}), ("g", {})]
    chunks = await chat_stream(engine, tools=TOOLS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Look:"
    streamed = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [c.index for c in streamed] == [0, 1]
    assert len({c.id for c in streamed}) == 2
    assert [(c.function.name, json.loads(c.function.arguments)) for c in streamed] == calls
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_tools_are_left_out_when_none_may_be_called():
    engine = FakeEngine(BLOCK)
    engine.max_model_len = 4096
    choice = (await chat(engine, tools=TOOLS, tool_choice="none")).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (BLOCK, None)
    assert len(engine.requests[0].prompt_token_ids) < 20


async def test_an_assistant_message_of_the_client_can_be_sent_back():
    engine = FakeEngine(BLOCK)
    engine.max_model_len = 4096
    message = (await chat(engine, tools=TOOLS)).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    messages = [*MESSAGES, message.model_dump(), *results]
    await chat(engine, messages=messages, tools=TOOLS)
    prompt = raw_tokenizer().decode(
        list(engine.requests[-1].prompt_token_ids), skip_special_tokens=False
    )
    assert f"\n\n{BLOCK}<｜end▁of▁sentence｜>" in prompt
    assert prompt.count("<tool_result>sunny</tool_result>") == 2


async def test_logprobs_name_bytes_and_alternatives():
    engine = FakeEngine("a 😀", chunk_len=2)
    reply = await chat(engine, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    token_ids = [*engine.reply_ids, EOS]
    assert [item.logprob for item in content] == pytest.approx([logprob_of(i) for i in token_ids])
    assert b"".join(bytes(item.bytes) for item in content[:-1]).decode() == "a 😀"
    for item in content:
        assert [top.logprob for top in item.top_logprobs] == [item.logprob, item.logprob - 1]
        assert item.top_logprobs[0].token == item.token
    streamed = [
        item
        for chunk in await chat_stream(engine, logprobs=True, top_logprobs=2)
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    assert (await chat(engine, logprobs=True)).choices[0].logprobs.content[0].top_logprobs == []


async def test_several_choices_stream_side_by_side():
    chunks = await chat_stream(
        FakeEngine("hello", chunk_len=1), n=3, stream_options={"include_usage": True}
    )
    texts, finished = ["", "", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == ["hello"] * 3
    assert sorted(finished) == [0, 1, 2]
    assert chunks[-1].usage.completion_tokens == 3 * (len(raw_tokenizer().encode("hello").ids) + 1)


async def test_usage_says_how_much_of_the_prompt_was_cached():
    engine = FakeEngine("hello")
    assert (await chat(engine)).usage.prompt_tokens_details is None
    # Several choices have one prompt, and the first of them speaks for it.
    engine.num_cached_tokens = [3, 6, 6]
    assert (await chat(engine, n=3)).usage.prompt_tokens_details.cached_tokens == 3
    engine.num_cached_tokens = [0]
    chunks = await chat_stream(engine, stream_options={"include_usage": True})
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
