"""Benchmarks that need a GPU fail clearly without one. mypy checks the names that they use."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"


def needs_a_gpu(path: Path) -> bool:
    text = " ".join(path.read_text(encoding="utf-8").split())
    says_so = "needs a GPU" in text or "Needs a GPU" in text
    return "def main(" in text and (says_so or "import gpu" in text)


NEED_A_GPU = [
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("attention_kernels/*.py")])
    if needs_a_gpu(path)
]
WITHOUT_ONE = """
import importlib, sys, torch
torch.cuda.is_available = lambda: False
for name in {benchmarks!r}:
    sys.argv = [name]
    try:
        importlib.import_module("benchmarks." + name).main()
    except SystemExit as said:
        print(name, said, sep=": ")
"""


def test_benchmarks_without_a_gpu_fail_with_one_sentence() -> None:
    """Each benchmark fails before it writes or empties a file."""
    # One benchmark replaces functions of the replay, so the script runs in another process.
    script = WITHOUT_ONE.format(benchmarks=NEED_A_GPU)
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    sentence = "this benchmark needs a CUDA GPU, and PyTorch finds none here"
    assert ran.stdout.splitlines() == [f"{name}: {sentence}" for name in NEED_A_GPU]
    assert len(NEED_A_GPU) > 10
