"""Tiny runnables and their checkpoints, each made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

import models
from models.request import Request, from_user


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], models.Runnable]:
    """`tiny(name)` returns a tiny model with the defaults of ``load``, on the CPU; each is built
    once.

    ``llama-3.1-8b`` has no trained weights; its 258 tokens include one for each byte.
    """
    built: dict[str, models.Runnable] = {}

    def get(name: str) -> models.Runnable:
        if name not in built:
            steps = None if name.startswith("llama") else 2  # runs of the other models are long
            built[name] = models.load(name, size="tiny", device="cpu", steps=steps)
        return built[name]

    return get


def tiny_request(name: str) -> Request:
    return from_user(
        name,
        named=True,
        size="tiny",
        weights=None,
        checkpoint=None,
        prompt=None,
        steps=None,
        seed=0,
        dtype=None,
        device="cpu",
    )


@pytest.fixture(scope="session")
def cogvideo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny CogVideoX for 128×96 videos, as save_pretrained writes it."""
    from models.built_in import cogvideo

    directory = tmp_path_factory.mktemp("cogvideo")
    pipeline = cogvideo.tiny_pipeline(cogvideo.VARIANTS["cogvideo"], tiny_request("cogvideo"))
    pipeline.transformer.register_to_config(sample_height=12, sample_width=16)
    pipeline.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def llama_directory(
    tiny: Callable[[str], models.Runnable], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Directory of a tiny Llama and its tokenizer, as save_pretrained writes them."""
    from models.offline_tokenizers import byte_tokenizer

    directory = tmp_path_factory.mktemp("llama")
    tiny("llama-3.1-8b").roots[""].save_pretrained(directory)  # type: ignore[operator]
    byte_tokenizer().save_pretrained(directory)
    return directory
