"""Invalid requests are refused with one sentence that states the remedy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import models


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("lama", {}, "did you mean llama"),
        ("cogvideo5b", {}, "did you mean cogvideo-5b"),
        ("zzz", {}, r"choose from cogvideo, .* FILE\.py:FUNCTION"),
        ("mine.py", {}, "is a file without a function: write mine.py:FUNCTION"),
        ("llama", {"size": "huge"}, "--size is 'huge': choose from tiny, full"),
        ("llama", {"weights": "good"}, "--weights is 'good': choose from random, pretrained"),
        ("llama", {"dtype": "float8"}, "--dtype is 'float8': choose from float32, bfloat16"),
        ("llama", {"steps": 0}, "must be at least 1"),
        ("llama", {"device": "cuda:99"}, "PyTorch finds"),
        ("llama", {"device": "abacus"}, "--device is 'abacus'"),
        ("llama", {"device": "mps"}, "--device is 'mps': only cpu and cuda"),
        ("llama", {"device": "meta"}, "--device is 'meta': only cpu and cuda"),
        ("llama", {"device": "cpu:7"}, "--device is 'cpu:7': there is one, write --device cpu"),
        ("llama", {"size": "tiny", "prompt": ""}, "--prompt has no tokens"),
        ("nowhere.py:make", {}, r"nowhere\.py does not exist"),
        ("llama", {"checkpoint": "/no/such/directory"}, "neither a directory nor a hub id"),
        ("llama-3.1-8b", {"size": "tiny", "weights": "pretrained"}, "no pretrained weights"),
    ],
)
def test_invalid_request_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.load(model, **options)


def test_importing_the_package_and_naming_its_models_needs_no_torch() -> None:
    code = (
        "import sys, models; models.NAMES\n"
        "try: models.load('lama')\n"
        "except models.ModelError: pass\n"
        "loaded = {'torch', 'diffusers', 'transformers'} & sys.modules.keys()\n"
        "assert not loaded, loaded"
    )
    root = Path(models.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
