"""Rows that the command `replay` writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from replay.cli.main import main


def replayed_rows(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run `replay` with these arguments, which must succeed, and return the rows that it writes."""
    file = directory / "rows.jsonl"
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--json", str(file)])
    assert stopped.value.code == 0
    return [json.loads(line) for line in file.read_text().splitlines()]
