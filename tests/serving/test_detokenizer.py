"""Incremental text: whole characters, stop strings, and independence of how tokens arrive."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.config import ConfigError
from dspark_jax.serving.detokenizer import Detokenizer, StopFinder
from dspark_jax.serving.tokenizer import TextTokenizer
from tests.serving.tiny_tokenizer import raw_tokenizer, save_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
NUM_TOKENS = raw_tokenizer().get_vocab_size()


def stream(token_ids, groups=None, **options):
    """Push in groups of the given sizes; the pieces, the last one from `finish`."""
    detokenizer = Detokenizer(TOKENIZER, **options)
    rest, pieces = list(token_ids), []
    for size in itertools.chain(groups or [], itertools.repeat(1)):
        if not rest:
            break
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
        if pieces[-1].stop is not None:
            return pieces
    return [*pieces, detokenizer.finish()]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_concatenate_to_the_tokenizers_own_decoding(token_ids):
    pieces = stream(token_ids)
    assert text_of(pieces) == raw_tokenizer().decode(token_ids, skip_special_tokens=False)
    skipped = stream(token_ids, skipped_ids=TOKENIZER.special_ids)
    assert text_of(skipped) == raw_tokenizer().decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_replacement_character(text):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    for piece in stream(token_ids):
        assert piece.text.count("\ufffd") <= text.count("\ufffd")
    assert text_of(stream(token_ids)) == text


def test_a_character_split_over_tokens_appears_once_it_is_whole():
    token_ids = [TOKENIZER.ids_of([c]) for c in "ðŁĺ"]  # F0 9F 98 of U+1F600, one byte each
    token_ids = [next(iter(ids)) for ids in token_ids] + TOKENIZER.encode(
        "x", add_special_tokens=False
    )
    assert [piece.text for piece in stream(token_ids[:3])] == ["", "", "", "\ufffd"]
    assert text_of(stream(token_ids)) == "\ufffdx"


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    groups=st.lists(st.integers(1, 5), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_where_the_first_one_ends_however_tokens_are_grouped(
    text, stop, groups, include
):
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    end, start, found = min(ends, default=(len(text), len(text), None))
    token_ids = [next(iter(TOKENIZER.ids_of([c]))) for c in text]
    pieces = stream(token_ids, groups, stop=stop, include_stop=include)
    assert text_of(pieces) == text[: end if include else start]
    assert pieces[-1].stop == found
    assert sum(piece.num_tokens for piece in pieces) == end
    assert [o for piece in pieces for o in piece.offsets] == list(range(end))


def test_held_back_text_is_released_as_soon_as_it_cannot_match():
    token_ids = [next(iter(TOKENIZER.ids_of([c]))) for c in "xENy"]
    pieces = stream(token_ids, stop=["END"])
    assert [piece.text for piece in pieces] == ["x", "", "", "ENy", ""]


def test_min_tokens_keeps_early_text_out_of_stop_strings():
    token_ids = [next(iter(TOKENIZER.ids_of([c]))) for c in "abab"]
    assert text_of(stream(token_ids, stop=["ab"], min_tokens=1)) == "ab"
    assert text_of(stream(token_ids, stop=["ab"], min_tokens=2)) == "ab"
    assert text_of(stream(token_ids, stop=["ab"])) == ""
    assert text_of(stream(token_ids, stop=["ab"], min_tokens=4)) == "abab"


def test_the_token_that_ended_the_request_is_hidden_but_counted():
    token_ids = TOKENIZER.encode("ab", add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER)
    piece = detokenizer.push(token_ids, is_last_hidden=True)
    assert (piece.text, piece.num_tokens) == ("a", len(token_ids))


def test_time_per_token_does_not_grow_with_the_text():
    token_id = TOKENIZER.encode("a", add_special_tokens=False)[0]
    detokenizer = Detokenizer(TOKENIZER, stop=["aab" * 3])

    def fastest_ms():
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            detokenizer.push([token_id] * 200)
            times.append(time.perf_counter() - begin)
        return min(times)

    early = fastest_ms()
    detokenizer.push([token_id] * 50_000)
    assert fastest_ms() < 5 * early


def test_stop_finder_keeps_the_text_behind_a_match():
    finder = StopFinder(["--"])
    assert finder.push("a--b") == ("a", "--")
    assert finder.release() == "b"


def test_token_text_names_bytes_that_are_no_whole_character():
    (token_id,) = TOKENIZER.ids_of(["ð"])
    assert TOKENIZER.token_text(token_id) == "bytes:\\xf0"
    assert TOKENIZER.token_text(10**6) == ""


def test_from_folder_reads_add_bos_token(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path, bos_token_id=0)
    save_tokenizer(tmp_path)
    tokenizer = TextTokenizer.from_folder(tmp_path, bos_token_id=0)
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a", add_special_tokens=True) == [0, *plain]
    written_out = "<｜begin▁of▁sentence｜>a"
    assert tokenizer.encode(written_out, add_special_tokens=True) == [0, *plain]
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = TextTokenizer.from_folder(tmp_path, bos_token_id=0)
    assert tokenizer.encode("a", add_special_tokens=True) == plain
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        TextTokenizer.from_folder(tmp_path, bos_token_id=0)
