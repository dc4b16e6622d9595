"""Replies taken apart, however their text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.serving.api.reply import ReplyParser

BLOCK = (
    "<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="city" string="true">Köln\n"x"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)


def parse(text, cuts=(), *, is_thinking=False, parses_tools=True):
    parser = ReplyParser(is_thinking=is_thinking, parses_tools=parses_tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [parser.push(text[a:b]) for a, b in itertools.pairwise(edges)] + [parser.finish()]
    calls = [(call.name, json.loads(call.arguments)) for piece in pieces for call in piece.calls]
    reasoning = "".join(piece.reasoning for piece in pieces)
    return reasoning, "".join(piece.content for piece in pieces), calls


CUTS = st.lists(st.integers(0, 500), max_size=12)


@given(CUTS)
def test_reasoning_content_and_calls(cuts):
    text = f"because</think>I look.\n\n{BLOCK}"
    calls = [("f", {"city": 'Köln\n"x"', "days": [1, 2]}), ("g", {})]
    assert parse(text, cuts, is_thinking=True) == ("because", "I look.", calls)


@given(CUTS)
def test_text_around_blocks_is_kept(cuts):
    reasoning, content, calls = parse(f"a\n\n{BLOCK}b{BLOCK}c\n\n", cuts)
    assert (reasoning, content, len(calls)) == ("", "abc\n\n", 4)


@given(
    st.sampled_from(
        [
            BLOCK[:-1],
            BLOCK.replace("[1, 2]", "[1, 2"),
            BLOCK.replace("[1, 2]", "NaN"),
            BLOCK.replace("[1, 2]", '"\\ud800"'),
            BLOCK.replace('name="days"', 'name="city"'),
            BLOCK.replace("</｜DSML｜invoke>", "", 1),
            BLOCK.replace(' string="true"', ""),
            "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>",
            "\n\n<｜DSML｜tool_",
            "x\n\n",
        ]
    ),
    CUTS,
)
def test_what_is_malformed_stays_text(block, cuts):
    assert parse(block, cuts) == ("", block, [])


def test_without_tools_a_block_is_text():
    assert parse(BLOCK, parses_tools=False) == ("", BLOCK, [])


def test_unfinished_reasoning_is_reasoning():
    assert parse("hm</thi", is_thinking=True) == ("hm</thi", "", [])
    assert parse("a</think>b") == ("", "a</think>b", [])


@pytest.mark.parametrize("is_thinking", [True, False])
def test_nothing_is_held_back_longer_than_needed(is_thinking):
    parser = ReplyParser(is_thinking=is_thinking, parses_tools=True)
    piece = parser.push("plain text")
    assert piece.reasoning + piece.content == "plain text"
