"""Small tokenizers of Hugging Face, whose tokens are whole words."""

from __future__ import annotations

from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, FIRST, LAST, MASK = range(5)


def word_tokenizer(words: int = 20) -> Any:
    """Make tokens of the words w0, w1, ..., which have the numbers 5, 6, ...; [CLS] and [SEP] stand around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = [*SPECIAL, *(f"w{number}" for number in range(words))]
    model = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", LAST), ("[CLS]", FIRST))
    return tokenizer


def text_of(*numbers: int) -> str:
    """Return the text of these words."""
    return " ".join(f"w{number}" for number in numbers)
