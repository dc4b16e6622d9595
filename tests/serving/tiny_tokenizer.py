"""A byte-level BPE with DeepSeek-V4's special tokens, trained in a blink."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_jax.serving.tokenizer import TextTokenizer

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜title｜>",
)
MARKERS = ("<think>", "</think>", "｜DSML｜")
CORPUS = (
    "def add(left, right): return left + right",
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "größer naïve 你好世界 😀😀 emoji",
)


@functools.cache
def raw_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def tiny_tokenizer(*, adds_bos: bool = False) -> TextTokenizer:
    return TextTokenizer(raw_tokenizer(), bos_token_id=0, adds_bos=adds_bos)


def save_tokenizer(folder: Path) -> None:
    raw_tokenizer().save(str(folder / "tokenizer.json"))
