"""`/v1/completions` through the real OpenAI client."""

import openai
import pytest

from tests.serving.clients import openai_client
from tests.serving.fake_engine import EOS, MODEL, FakeEngine, logprob_of, make_backend
from tests.serving.tiny_tokenizer import raw_tokenizer


def ids_of(text):
    return raw_tokenizer().encode(text).ids


async def complete(engine, **body):
    async with openai_client(make_backend(engine)) as client:
        return await client.completions.create(**{"model": MODEL, "prompt": "ab", **body})


async def stream(engine, **body):
    async with openai_client(make_backend(engine)) as client:
        chunks = await client.completions.create(
            **{"model": MODEL, "prompt": "ab", "stream": True, **body}
        )
        return [chunk async for chunk in chunks]


async def test_text_usage_and_finish_reason():
    engine = FakeEngine("hello world")
    reply = await complete(engine, max_tokens=100)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hello world", "stop", None)
    num_tokens = len(ids_of("hello world")) + 1  # the end of sequence counts
    assert reply.usage.completion_tokens == num_tokens
    assert reply.usage.prompt_tokens == len(ids_of("ab"))
    assert reply.usage.total_tokens == num_tokens + len(ids_of("ab"))
    assert engine.num_aborted == 0


async def test_default_max_tokens_is_sixteen():
    reply = await complete(FakeEngine(), extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("chunk_len", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", [None, "wor", ["zzz", "o w", "ld"]])
async def test_streamed_text_equals_the_whole_one(chunk_len, stop):
    text = "hello wörld 😀 你好 again"
    whole = await complete(FakeEngine(text, chunk_len=chunk_len), max_tokens=200, stop=stop)
    options = {"include_usage": True}
    engine = FakeEngine(text, chunk_len=chunk_len)
    *chunks, last = await stream(engine, max_tokens=200, stop=stop, stream_options=options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage == whole.usage


async def test_a_stop_string_ends_the_text_and_aborts_the_request():
    engine = FakeEngine("hello world and more", chunk_len=1)
    reply = await complete(engine, stop=["wor"], max_tokens=100)
    assert reply.choices[0].text == "hello "
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].stop_reason == "wor"
    assert (engine.num_running, engine.num_aborted) == (0, 1)


async def test_include_stop_str_in_output():
    body = {"include_stop_str_in_output": True}
    reply = await complete(FakeEngine("hello world"), stop="wor", max_tokens=50, extra_body=body)
    assert reply.choices[0].text == "hello wor"


async def test_tokens_behind_a_stop_string_count_neither_in_usage_nor_in_logprobs():
    lengths = set()
    for chunk_len in (1, 4, 100):
        engine = FakeEngine("hello world", chunk_len=chunk_len)
        reply = await complete(engine, stop="l", max_tokens=50, logprobs=0)
        assert len(reply.choices[0].logprobs.tokens) == reply.usage.completion_tokens
        lengths.add(reply.usage.completion_tokens)
    assert len(lengths) == 1


async def test_stop_token_ids_are_reported_and_hidden():
    token_id = ids_of("w")[0]
    engine = FakeEngine("abw")
    reply = await complete(engine, max_tokens=50, extra_body={"stop_token_ids": [token_id]})
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", token_id)


async def test_prompts_of_every_kind_are_answered_in_order():
    engine = FakeEngine("x")
    ids = ids_of("cd")
    for prompt, expected in [
        ("cd", [ids]),
        (ids, [ids]),
        (["cd", "ab"], [ids, ids_of("ab")]),
        ([ids, [5]], [ids, [5]]),
    ]:
        engine.requests.clear()
        reply = await complete(engine, prompt=prompt, n=2)
        assert [choice.index for choice in reply.choices] == list(range(2 * len(expected)))
        prompts = [list(request.prompt_token_ids) for request in engine.requests]
        assert prompts == [prompt for prompt in expected for _ in range(2)]
        assert reply.usage.prompt_tokens == sum(map(len, expected))


async def test_choices_of_one_prompt_get_seeds_of_their_own():
    engine = FakeEngine("x")
    await complete(engine, n=3, seed=-1)
    assert [r.sampling.seed for r in engine.requests] == [2**64 - 1, 0, 1]


async def test_sampling_fields_reach_the_engine():
    engine = FakeEngine("x")
    body = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [7, 9],
    }  # fmt: skip
    await complete(
        engine, temperature=0, top_p=0.5, presence_penalty=-1, frequency_penalty=1.5, seed=3,
        max_tokens=4, extra_body=body,
    )  # fmt: skip
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        5,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 1.5)
    assert (sampling.repetition_penalty, sampling.seed) == (1.2, 3)
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 4)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (7, 9)
    await complete(engine, extra_body={"top_k": -1})
    assert engine.requests[-1].sampling.top_k == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_logprobs(streams):
    text = "ab 😀"
    if streams:
        chunks = await stream(FakeEngine(text, chunk_len=2), logprobs=2)
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        tokens, values, tops, offsets = (
            [x for part in parts for x in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
    else:
        reply = await complete(FakeEngine(text), logprobs=2)
        logprobs = reply.choices[0].logprobs
        tokens, values = logprobs.tokens, logprobs.token_logprobs
        tops, offsets = logprobs.top_logprobs, logprobs.text_offset
    token_ids = [*ids_of(text), EOS]
    assert values == pytest.approx([logprob_of(i) for i in token_ids])
    assert tokens[-1] == "<｜end▁of▁sentence｜>"
    assert [top[token] for token, top in zip(tokens, tops)] == pytest.approx(values)
    for token, offset in zip(tokens, offsets):
        if not token.startswith(("bytes:", "<")):
            assert text[offset:].startswith(token)
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text)


@pytest.mark.parametrize("prompt", ["ab cd", ids_of("ab cd")])
async def test_echo_with_logprobs_covers_prompt_and_reply(prompt):
    reply = await complete(FakeEngine("xy"), prompt=prompt, echo=True, logprobs=1)
    choice = reply.choices[0]
    assert choice.text == "ab cdxy"
    token_ids = [*ids_of("ab cd"), *ids_of("xy"), EOS]
    values = choice.logprobs.token_logprobs
    assert values[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert values[1:] == pytest.approx([logprob_of(i) for i in token_ids[1:]])
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset))[:-1]
    assert all(choice.text[offset:].startswith(token) for token, offset in pairs)


async def test_echo_streams_the_prompt_once_per_choice():
    chunks = await stream(FakeEngine("xy", chunk_len=1), prompt=["p", "q"], n=2, echo=True)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["pxy", "pxy", "qxy", "qxy"]


async def test_scoring_a_prompt_generates_nothing():
    engine = FakeEngine("xy")
    reply = await complete(engine, prompt="ab cd", echo=True, logprobs=0, max_tokens=0)
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("ab cd", "length")
    assert len(choice.logprobs.tokens) == len(ids_of("ab cd"))
    assert reply.usage.completion_tokens == 0
    assert engine.num_aborted == 0
    engine.requests.clear()
    reply = await complete(engine, prompt="ab cd", echo=True, max_tokens=0)
    assert reply.choices[0].text == "ab cd"
    assert engine.requests == []


async def test_usage_can_come_with_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(FakeEngine("hello world", chunk_len=2), stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 2


async def test_cached_tokens_are_summed_over_prompts_not_over_choices():
    engine = FakeEngine("hello")
    engine.num_cached_tokens = [1, 2, 1, 2]
    usage = (await complete(engine, prompt=["ab", "cde"], n=2)).usage
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert (await complete(engine)).usage.prompt_tokens_details is None


async def test_cached_tokens_come_with_every_chunk_that_has_usage():
    engine = FakeEngine("hello world", chunk_len=2)
    engine.num_cached_tokens = [2]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(engine, stream_options=options)
    assert {chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks} == {2}


async def test_a_failing_request_gets_a_500_with_the_reason_and_others_go_on():
    engine = FakeEngine()
    engine.error = "the logits were not finite"
    for call in (complete, stream):
        with pytest.raises(openai.InternalServerError, match="not finite"):
            await call(engine)
    engine.error = None
    assert (await complete(engine)).choices[0].text == "hello world"


async def test_a_failure_in_mid_stream_is_the_last_event():
    engine = FakeEngine("hello world", chunk_len=1)
    engine.error, engine.fails_at_chunk = "not finite", 2
    async with openai_client(make_backend(engine)) as client:
        chunks = await client.completions.create(model=MODEL, prompt="ab", stream=True)
        received = [(await anext(chunks)).choices[0].text for _ in range(2)]
        with pytest.raises(openai.APIError, match="not finite"):
            await anext(chunks)
    assert "hello world".startswith("".join(received))


async def test_speculation_counts_are_reported_on_request():
    backend = make_backend(FakeEngine("x", chunk_len=1), reports_speculation=True)
    async with openai_client(backend) as client:
        reply = await client.completions.create(model=MODEL, prompt="ab", n=2)
        counts = reply.metrics["speculative_decoding"]
        chunks = await client.completions.create(model=MODEL, prompt="ab", n=2, stream=True)
        *_, last = [chunk async for chunk in chunks]
    assert counts["num_drafts"] == 4
    assert counts["num_draft_tokens"] == 28
    assert counts["num_admitted_tokens"] == 16
    assert counts["num_accepted_tokens"] == 12
    assert counts["mean_acceptance_length"] == pytest.approx(4)
    assert last.metrics["speculative_decoding"] == counts
