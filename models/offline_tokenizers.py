"""Tokenizers of the real classes with one token per character, made without any download."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Tokenizer


def t5_tokenizer() -> T5Tokenizer:
    """Unigram pieces for printable ASCII; anything else is ``<unk>``."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    characters = string.ascii_letters + string.digits + string.punctuation
    return T5Tokenizer(vocab=special + [(character, -3.0) for character in characters], extra_ids=0)


def clip_tokenizer(max_length: int) -> CLIPTokenizer:
    """Bytes, each alone and as the end of a word, as in CLIP's own vocabulary."""
    byte_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *byte_characters]
    tokens += [character + "</w>" for character in byte_characters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and nothing merged: any text of n bytes is n tokens, and decodes to itself."""
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
