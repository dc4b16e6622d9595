"""Prompts: reproducible, in order, with the right lengths."""

import pytest

from dspark_jax.serving.bench.dataset import (
    Prompt,
    cycle_to,
    file_prompts,
    parse_jsonl,
    random_prompts,
)


def _random(count: int = 6, **changes):
    return random_prompts(count, **{"input_len": 20, "output_len": 8, **changes})


def test_random_prompts_have_exact_lengths_and_ids_in_range():
    prompts = _random(token_range=(300, 310))
    assert [(len(p.content), p.output_len) for p in prompts] == [(20, 8)] * 6
    assert {token for p in prompts for token in p.content} == set(range(300, 310))


def test_a_longer_random_set_extends_a_shorter_one():
    assert _random(9)[:6] == _random(6)
    assert len({tuple(p.content) for p in _random(9)}) == 9
    assert _random(seed=1) != _random(seed=2)


def test_random_lengths_vary_within_the_ratio():
    prompts = _random(400, range_ratio=0.5)
    assert {len(p.content) for p in prompts} == set(range(10, 31))
    assert {p.output_len for p in prompts} == set(range(4, 13))


def test_random_prefix_is_shared_and_extra():
    prompts = _random(prefix_len=5)
    assert {tuple(p.content[:5]) for p in prompts} == {tuple(prompts[0].content[:5])}
    assert {len(p.content) for p in prompts} == {25}
    assert [p.content[5:] for p in prompts] == [p.content for p in _random()]


LINES = ['{"prompt": "one", "output_len": 3}', "", '{"prompt_token_ids": [1, 2], "kind": "x"}']


def test_jsonl():
    assert parse_jsonl(LINES, output_len=None, default_len=9) == [
        Prompt("one", 3),
        Prompt([1, 2], 9),
    ]
    assert [p.output_len for p in parse_jsonl(LINES, output_len=5, default_len=9)] == [5, 5]


@pytest.mark.parametrize("bad", ["[]", '{"text": "x"}', "{", "3"])
def test_bad_lines_are_named(tmp_path, bad):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*LINES, bad]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts\.jsonl: line 4: expected an object"):
        file_prompts(path, output_len=None, default_len=9)


def test_an_empty_file_is_an_error(tmp_path):
    path = tmp_path / "none.jsonl"
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no prompts"):
        file_prompts(path, output_len=None, default_len=9)


def test_cycle_keeps_the_order():
    first, second = Prompt("a", 1), Prompt("b", 1)
    assert cycle_to([first, second], 5) == [first, second, first, second, first]
    assert cycle_to([first, second], 1) == [first]
