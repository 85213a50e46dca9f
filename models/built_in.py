"""The weights that come with this package: small models of the real classes, trained by us.

``models/pretrained/NAME`` is a directory that ``save_pretrained`` wrote, with a model card. How it
was made: ``python -m training.NAME`` in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which asks here what there is
    from transformers import PreTrainedTokenizerBase

    from .request import Request

ROOT = Path(__file__).parent / "pretrained"


def trained(name: str) -> Path | None:
    """The directory of the weights for ``name``; None where nobody trained any."""
    directory = ROOT / name
    return directory if (directory / "README.md").is_file() else None


def describe(request: Request) -> str:
    """Which weights a built-in model of a trained configuration has, for people and manifests."""
    if request.weights == "pretrained":
        return f"built-in, trained; model card models/pretrained/{request.name}/README.md"
    return f"random, seed {request.seed} (built-in configuration of the trained {request.name})"


def unknown_words(request: Request, tokenizer: PreTrainedTokenizerBase) -> str:
    """Which words of the prompt a trained picture model never saw, in a sentence; empty for none.

    ``tokenizer`` is of the words that it was trained on (``offline_tokenizers.t5_tokenizer``).
    """
    if request.weights != "pretrained" or request.prompt is None:
        return ""
    words = request.prompt.split()
    spelt = [word for word in words if tokenizer.tokenize(word)[:1] == ["▁"]]
    if not spelt:
        return ""
    unknown = ", ".join(dict.fromkeys(spelt))
    return (
        f"the built-in {request.name} knows a few words, and none of these: {unknown}; for "
        f"captions that it knows see models/pretrained/{request.name}/README.md"
    )
