"""Builds attention_kernels for the Hugging Face Hub's `kernels` package.

python -m compatibility.hub  write the Hub's repository to build/hub

`kernels` loads a folder as one module with a name of its own, so that several versions can run in
one process. The package therefore imports itself by relative names there, and its operators are in
a namespace of that name.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "attention_kernels"
VARIANT = "torch-cuda"
"""Folder that `kernels` chooses for every CUDA build of PyTorch: Python alone, for any GPU."""
VERSION = 1
"""Version that users pass to `get_kernel`. A change that breaks their calls increases it."""
CARD = f"""\
---
library_name: kernels
license: apache-2.0
tags: [kernels, attention]
---

# attention-kernels

Attention kernels for NVIDIA GPUs, in Triton and, for Hopper, in Triton's Gluon.

```python
from kernels import get_kernel

attention_kernels = get_kernel(
    "<owner>/attention-kernels", version={VERSION}, trust_remote_code=True
)
output = attention_kernels.attention(query, key, value, is_causal=True)
```

`attention` takes the arguments of `torch.nn.functional.scaled_dot_product_attention` and runs the
fastest exact kernel for the call. `dir(attention_kernels)` lists the other functions; their
docstrings give shapes, types and errors. There is no backward pass. The kernels need PyTorch 2.8,
Triton 3.4 and compute capability 8.0.
"""


def main() -> None:
    """Replace build/hub, and print the path of the folder that `kernels` loads."""
    folder = REPOSITORY / "build" / "hub"
    shutil.rmtree(folder, ignore_errors=True)
    print(build(folder))


def build(folder: Path) -> Path:
    """Write the Hub's repository into a new folder, and return the variant in it.

    `kernels` imports the variant by the `id` in its metadata, which contains a hash of its files.
    """
    variant = folder / "build" / VARIANT
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] == "build":
            continue  # what building a wheel leaves
        text = with_relative_imports(path.read_text(encoding="utf-8"), len(name.parts))
        digest.update(f"{name.as_posix()}\n{text}".encode())
        (variant / name).parent.mkdir(parents=True, exist_ok=True)
        (variant / name).write_text(text, encoding="utf-8")
    metadata = {
        "name": "attention-kernels",
        "id": f"_attention_kernels_cuda_{digest.hexdigest()[:10]}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],  # `kernels` accepts few names; PyTorch's CUDA builds bring Triton
        "backend": {"type": "cuda", "archs": ["8.0+PTX"]},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "README.md").write_text(CARD)
    shutil.copy(PACKAGE / "LICENSE", folder)
    return variant


def with_relative_imports(text: str, depth: int) -> str:
    """Return a module's text whose imports of attention_kernels have `depth` leading dots."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            if package == PACKAGE.name:
                at, relative = node.lineno - 1, "." * depth + module
                lines[at] = lines[at].replace(f"from {node.module} ", f"from {relative} ", 1)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
