"""Train the built-in Llama on the text that Python ships: python -m benchmarks.training.llama"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from benchmarks.training import card, corpus, figures, options
from benchmarks.training.corpus import Document
from benchmarks.training.loop import Stage, train
from benchmarks.training.ngram import KneserNey

PASSES = 20  # passes over the text; with more, the model memorises it
HELD_OUT_CHARACTERS = 6000  # characters of each document in the shipped prompt
HELD_OUT_DOCUMENTS = 4
PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """Return',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "The following expression is evaluated from left to right. If the",
)


@dataclass(frozen=True)
class Scale:
    """Size of the run."""

    context: int
    batch: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    documents: int | None
    held_out_tokens: int
    stage: Stage


FULL = Scale(
    context=1152,  # 1,024 tokens for a prompt, and some to generate
    batch=32,
    vocabulary=2048,
    hidden=256,
    intermediate=384,
    layers=4,
    documents=None,
    held_out_tokens=10**9,
    stage=Stage("llama", steps=10_000, seconds=300, learning_rate=2e-3, weight_decay=0.1),
)
SMOKE = Scale(
    context=64,
    batch=4,
    vocabulary=512,
    hidden=64,
    intermediate=128,
    layers=2,
    documents=40,
    held_out_tokens=2000,
    stage=Stage("llama", steps=12, seconds=20, learning_rate=5e-3, weight_decay=0.1, average=0.9),
)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, measure, and write the card."""
    given = options.parse("llama", __doc__, arguments)
    scale = SMOKE if given.smoke else FULL
    texts = corpus.read(given.library)
    train_documents = texts.train[: scale.documents]
    tokenizer = make_tokenizer(train_documents, scale)
    tokens = {
        "train": encode(tokenizer, train_documents),
        "validation": encode(tokenizer, texts.validation)[: scale.held_out_tokens],
        "test": encode(tokenizer, texts.test)[: scale.held_out_tokens],
    }
    model = make_model(scale, tokenizer).to(given.device)
    stream = tokens["train"].to(given.device)
    most = math.ceil(PASSES * len(stream) / (scale.batch * scale.context))
    stage = replace(scale.stage, steps=min(scale.stage.steps, most))

    def loss(generator: torch.Generator, _: float) -> Tensor:
        starts = torch.randint(
            len(stream) - scale.context - 1,
            (scale.batch, 1),
            generator=generator,
            device=given.device,
        )
        windows = stream[starts + torch.arange(scale.context, device=given.device)].long()
        value: Tensor = model(input_ids=windows, labels=windows, use_cache=False).loss
        return value

    history = train(
        stage,
        model,
        loss,
        seed=given.seed,
        device=given.device,
        validate=lambda: log_loss(model, tokens["validation"], scale.context, given.device),
    )
    model.to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    prompts = held_out_text(texts.test)
    (given.out / "held_out.txt").write_text(prompts, encoding="utf-8")
    if texts.licence:
        (given.out / "PYTHON-LICENSE.txt").write_text(texts.licence, encoding="utf-8")

    # From here on, use the saved model, loaded the way a user would load it.
    saved = LlamaForCausalLM.from_pretrained(given.out, dtype=torch.bfloat16).to(given.device)
    reloaded = AutoTokenizer.from_pretrained(given.out)
    perplexity = math.exp(log_loss(saved, tokens["test"], scale.context, given.device))
    counting = KneserNey(as_array(tokens["train"]), vocabulary=len(reloaded))
    baseline = counting.perplexity(as_array(tokens["test"]))
    bytes_per_token = sum(len(d.text.encode()) for d in texts.test) / len(
        encode(tokenizer, texts.test)
    )
    figures.loss_curve(
        given.out / "loss.png",
        {"training": history.losses, "validation": history.validations},
        "Llama: cross-entropy per token",
    )
    bits = [math.log2(value) / bytes_per_token for value in (perplexity, baseline)]
    card.write(
        given.out,
        "Built-in Llama",
        {
            "What it is": (
                "A `LlamaForCausalLM` trained by `python -m benchmarks.training.llama` to continue "
                f"Python source and its documentation: {scale.layers} layers, 4 heads of 128 over "
                f"2 key/value heads, {scale.hidden} wide, {len(reloaded)} byte-pair tokens, "
                f"trained on windows of {scale.context:,} tokens."
            ),
            "Data and licence": (
                f"{texts.describe()}. The text ships with Python, under the PSF licence "
                "(`PYTHON-LICENSE.txt`, https://docs.python.org/3/license.html); `held_out.txt` "
                "quotes documents that were held out. Nothing was downloaded. "
                "The weights are under this package's licence."
            ),
            "Size": card.sizes(given.out),
            "Training": (
                f"{card.machine(given.device)}, seed {given.seed}. "
                f"{history.describe(stage)}. Batches of {scale.batch} windows: "
                f"{history.steps * scale.batch * scale.context / len(stream):.1f} passes over the "
                "text.\n\n![loss](loss.png)"
            ),
            "Measured": (
                f"On {len(tokens['test']):,} tokens of held-out documents; the model predicts "
                f"those with at least {scale.context // 2} tokens before them:\n\n"
                + card.table(
                    ["", "perplexity per token", "bits per byte"],
                    [
                        ["this model, bfloat16", f"{perplexity:.2f}", f"{bits[0]:.3f}"],
                        [
                            "5-gram, modified Kneser–Ney, same data",
                            f"{baseline:.2f}",
                            f"{bits[1]:.3f}",
                        ],
                    ],
                )
            ),
            "Samples": samples(saved, reloaded, given.device, given.seed),
            "Limits": (
                "It has read one library. It writes what looks like Python, not programs that "
                "work, and knows no facts. It exists so that attention kernels can be judged on "
                "the inputs of a trained model without a download."
            ),
        },
    )
    print(f"perplexity {perplexity:.2f}, 5-gram {baseline:.2f}; card in {given.out}")


def make_tokenizer(documents: tuple[Document, ...], scale: Scale) -> PreTrainedTokenizerFast:
    """Train a byte-pair encoding on the training text; ``<s>`` starts every document."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (document.text for document in documents),
        trainers.BpeTrainer(
            vocab_size=scale.vocabulary,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, documents: tuple[Document, ...]) -> Tensor:
    """Encode all documents as one stream (N,) of int16 ids, ``<s>`` before each."""
    encoded = tokenizer([document.text for document in documents], add_special_tokens=False)
    start = tokenizer.bos_token_id
    stream = [token for ids in encoded["input_ids"] for token in (start, *ids)]
    return torch.tensor(stream, dtype=torch.int16)


def as_array(tokens: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = tokens.to(torch.int64).numpy()
    return array


def make_model(scale: Scale, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=scale.hidden,
            intermediate_size=scale.intermediate,
            num_hidden_layers=scale.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=scale.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            initializer_range=scale.hidden**-0.5,
        )
    )


@torch.no_grad()
def log_loss(
    model: LlamaForCausalLM, tokens: Tensor, context: int, device: torch.device, batch: int = 32
) -> float:
    """Return the mean −log p, in nats, of tokens with at least half a ``context`` before them."""
    half = context // 2
    windows = tokens.unfold(0, context, half)
    total, count = 0.0, 0
    for start in range(0, len(windows), batch):
        ids = windows[start : start + batch].to(device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits[:, half - 1 : -1]
        value = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, half:].flatten(), reduction="sum"
        )
        total += float(value)
        count += ids[:, half:].numel()
    return total / count


def held_out_text(documents: tuple[Document, ...]) -> str:
    """Return the beginnings of the longest held-out documents that are not tests.

    asyncio is excluded: parts of it came from elsewhere under their own licence.
    """
    chosen = [
        document
        for document in documents
        if "test" not in document.name and not document.name.startswith("asyncio/")
    ]
    chosen.sort(key=lambda document: len(document.text), reverse=True)
    return "\n\n".join(
        document.text[:HELD_OUT_CHARACTERS] for document in chosen[:HELD_OUT_DOCUMENTS]
    )


@torch.no_grad()
def samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, device: torch.device, seed: int
) -> str:
    """Continue ``PROMPTS`` at temperature 0.6, as fenced text."""
    torch.manual_seed(seed)
    blocks = []
    room = model.config.max_position_embeddings
    for prompt in PROMPTS:
        ids = tokenizer("<s>" + prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        written = model.generate(
            ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=min(120, room - ids.shape[1]),
            do_sample=True,
            temperature=0.6,
            pad_token_id=tokenizer.eos_token_id,
        )
        text = tokenizer.decode(written[0], skip_special_tokens=True)
        # Five backquotes, so that no sample closes the fence.
        blocks.append(f"`````\n{text}\n`````")
    return f"The prompts are {list(PROMPTS)!r}; temperature 0.6.\n\n" + "\n\n".join(blocks)


if __name__ == "__main__":
    main()
