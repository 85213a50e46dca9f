"""Every name in docs/kernel-notes.md exists in the code."""

import re
from pathlib import Path

from replay.kernels.registry import find

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "kernel-notes.md"
KERNELS = REPOSITORY / "attention_kernels"


def wrong_names(page: str) -> list[str]:
    """Return the names in backticks that stand for no file, kernel or name in the code."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    wrong = []
    for name in re.findall(r"`([^`\n]+)`", page.replace("```", "")):
        if name.endswith(".py"):
            is_known = (KERNELS / name).is_file()
        elif name.startswith("triton-"):
            is_known = find(name).name == name
        elif name.endswith("/"):
            is_known = (REPOSITORY / name).is_dir()
        else:
            is_known = known.issuperset(re.findall(r"\w+", name))
        if not is_known:
            wrong.append(name)
    return wrong


def test_every_name_is_in_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## What was tried")[0]
    assert wrong_names(page) == []
    assert wrong_names("`_attend` `gone.py` `pass_the_turn`") == ["gone.py", "pass_the_turn"]
