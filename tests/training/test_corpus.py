"""What goes into the corpus, on which side, and how it is rendered as ids."""

from __future__ import annotations

import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.corpus import Document, exchanges, read_library, split
from dspark_jax.training.data import RowSampler, Share, gather_rows, held_out_windows
from dspark_jax.training.tokenizer import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    NOISE,
    USER,
    TokenStream,
    document_ids,
    exchange_ids,
    load_stream,
    save_stream,
    special_id,
    train_tokenizer,
)

MODULE = textwrap.dedent('''
    """Tools for paths."""

    def join(a, *paths):
        """Join two or more paths.

        A later absolute path wins.
        """
        return a + "/".join(paths)

    class Walker:
        """Walks a tree."""

        def step(self, depth: int = 1):
            """Go one level down."""

        def _hidden(self):
            """Not public."""
''')


def body(number: int) -> str:
    return "".join(f"value_{number}_{i} = compute_something({i})\n" for i in range(20))


def test_reading_skips_duplicates_undecodable_and_build_files(tmp_path):
    files = {
        "a.py": "x = 1\n",
        "copy.py": "x = 1\n",
        "_sysconfigdata_x.py": "p = '/home/builder'\n",
        "site-packages/q.py": "y = 2\n",
        "empty.py": "\n",
        "pkg/b.py": "z = 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.py").write_bytes(b"# -*- coding: utf-8 -*-\ns = '\xff'\n")
    assert [d.name for d in read_library(tmp_path)] == ["a.py", "pkg/b.py"]


def test_likenesses_stay_on_one_side():
    twins = [
        Document(name=f"test/test_twin{i}.py", text=body(1) + f"last = {i}\n") for i in range(2)
    ]
    others = [Document(name=f"m{i}.py", text=body(i + 10)) for i in range(300)]
    tests = [Document(name=f"test/test_{i}.py", text=body(i + 500)) for i in range(300)]
    sides = []
    for seed in range(8):
        corpus = split([*others, *tests, *twins], held_out_share=0.3, drafting_share=0.2, seed=seed)
        side_of = {d.name: side for side, docs in corpus.sides().items() for d in docs}
        assert sum(map(len, corpus.sides().values())) == len(side_of) == 602
        for kind in (tests, others):
            for side, share in (("held_out", 0.3), ("drafting", 0.2)):
                reached = np.mean([side_of[d.name] == side for d in kind])
                assert share - 0.03 < reached <= share
        sides.append(tuple(side_of[d.name] for d in twins))
    assert {first for first, second in sides if first == second} >= {"train", "held_out"}
    assert all(first == second for first, second in sides)


def test_exchanges_ask_about_public_documented_things():
    found = exchanges([Document(name="os/path.py", text=MODULE)], seed=0)
    asked = {e.question.split("`")[1] for e in found}
    assert asked == {"os.path", "os.path.join", "os.path.Walker", "os.path.Walker.step"}
    answers = {e.answer for e in found if "`os.path.join`" in e.question}
    assert any(
        a.startswith("`os.path.join(a, *paths)`\n\nJoin two or more paths.\n\nA later")
        for a in answers
    )
    assert any("```python\nos.path.join(a, *paths)\n```" in a for a in answers)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([MODULE * 3, body(3)], vocab_size=330)


def test_tokenizer_is_lossless_and_knows_the_control_tokens(tokenizer):
    text = MODULE + "\tπ = 3.14  # ½\r\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < len(MODULE) / 1.8
    assert [special_id(tokenizer, t) for t in (BOS, EOS, NOISE)] == [0, 1, 329]
    with pytest.raises(KeyError, match="nothing"):
        special_id(tokenizer, "<nothing>")


def test_rendering_of_documents_and_exchanges(tokenizer):
    document = Document(name="a.py", text="x = 1\n")
    inner = tokenizer.encode(document.text).ids
    assert document_ids(tokenizer, document) == [0, *inner, 1]
    exchange = exchanges([Document(name="a.py", text='"""Doc."""\n')], seed=0)[0]
    rendered = exchange_ids(tokenizer, exchange)
    expected = f"{BOS}{USER}{exchange.question}{ASSISTANT}{END_THINK}{exchange.answer}{EOS}"
    assert tokenizer.decode(rendered, skip_special_tokens=False) == expected


def test_rows_cover_the_text_and_start_as_prompts_do(tmp_path):
    assert save_stream(tmp_path / "s.npz", [[0, *range(10, 17), 1]] * 40, num_bytes=123) == 360
    stream = load_stream(tmp_path / "s.npz")
    assert stream.num_bytes == 123
    np.testing.assert_array_equal(stream.starts, np.arange(40) * 9)
    other = TokenStream(tokens=np.full(200, 40, np.uint16), starts=np.array([0, 100]), num_bytes=1)
    shares = {
        "a": Share(rows=0.5, at_document_start=1.0),
        "b": Share(rows=0.5, at_document_start=0.0),
    }
    sampler = RowSampler({"a": stream, "b": other}, 16, seed=0, shares=shares)
    starts = sampler.starts(200)
    in_first = starts < 360
    assert 70 < in_first.sum() < 130
    assert (starts[in_first] % 9 == 0).all()
    assert len(set(starts[~in_first] - 360)) > 30
    ids, labels = gather_rows(jnp.asarray(sampler.tokens), starts, 16, bos=0)
    assert (ids[:, 0] == 0).all()
    np.testing.assert_array_equal(ids[:, 1:], labels[:, :-1])


def test_held_out_windows_count_every_token_once():
    stream = TokenStream(tokens=np.arange(5, 42, dtype=np.uint16), starts=np.zeros(1), num_bytes=1)
    inputs, labels, counted = held_out_windows(stream, 8, bos=0)
    np.testing.assert_array_equal(labels[counted], np.arange(6, 42))
    assert (inputs[:, 0] == 0).all()
    np.testing.assert_array_equal(inputs[counted][1:7], labels[0, :6])
