"""Names of calls are listed without loading the dataset."""

import json
from pathlib import Path

import pytest

from capture.storage.listing import listed_files
from capture.storage.names import MANIFEST


def test_files_are_listed_in_the_manifests_order(tmp_path: Path) -> None:
    files = [{"file": name} for name in ("b-000002.safetensors", "a-000001.safetensors")]
    (tmp_path / MANIFEST).write_text(json.dumps({"files": files}))
    assert listed_files(tmp_path) == ["b-000002.safetensors", "a-000001.safetensors"]
    (tmp_path / "c.journal").touch()
    assert listed_files(tmp_path) is None


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": [1]}', '{"files": [{}]}', None])
def test_what_lists_no_files(tmp_path: Path, manifest: str | None) -> None:
    if manifest is not None:
        (tmp_path / MANIFEST).write_text(manifest)
    assert listed_files(tmp_path) is None
