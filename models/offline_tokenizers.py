"""Builds tokenizers of the official classes without a download.

The tokenizers have one token per character or byte, and one token for each of the given ``words``.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Tokenizer


def t5_tokenizer(words: Sequence[str] = ()) -> T5Tokenizer:
    """Build a tokenizer with unigram pieces for printable ASCII; other text is ``<unk>``."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces = [(character, -3.0) for character in characters]
    # A word is more probable than "▁" and a character, so that no word is split into characters.
    pieces += [(f"▁{word}", -4.0) for word in words]
    return T5Tokenizer(vocab=special + pieces, extra_ids=0)


def clip_tokenizer(max_length: int, words: Sequence[str] = ()) -> CLIPTokenizer:
    """Build a tokenizer with two tokens per byte, as in CLIP: inside and at the end of a word.

    A word that contains the start of another word may be split, because merges compete.
    """
    byte_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *byte_characters]
    tokens += [character + "</w>" for character in byte_characters]
    merges: list[tuple[str, str]] = []
    for word in words:  # merges add one character at a time to the first character
        pieces = [*word[:-1], word[-1] + "</w>"]
        for end in range(1, len(pieces)):
            merge = ("".join(pieces[:end]), pieces[end])
            if merge not in merges:
                merges.append(merge)
    tokens += [token for token in map("".join, merges) if token not in tokens]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte tokenizer: a text of n bytes has n tokens, which decode to the same text."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
