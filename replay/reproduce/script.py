"""`reproduce.py`: a script that shows a kernel's failure without this project.

The script needs only PyTorch, safetensors and the kernel's library. Its directory also contains the
call, the expected output with its tolerances (`EXPECTED`), and the files of a kernel that belongs
to no library (`kernel/`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import torch
from safetensors.torch import load_file, save_file

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import VARIANT_TENSORS
from capture.storage.standalone import restored
from replay.accuracy.thresholds import Thresholds
from replay.accuracy.verdict import Expected
from replay.kernels.libraries import is_interpreted
from replay.kernels.own_files import own_files
from replay.reproduce.kernel_call import KernelCall
from replay.reproduce.trials import TrialOutcome

SCRIPT = "reproduce.py"
EXPECTED = "expected.safetensors"
KERNEL = "kernel"
"""Folder for a kernel's own files."""


class ScriptError(Error):
    """Reason why no script can show the failure."""


@dataclass(frozen=True)
class Shown:
    """Failure that a script shows."""

    kernel: str
    source: KernelCall
    call: AttentionCall
    file: str
    """Name of the call's file, in the script's directory."""
    outcome: TrialOutcome
    device: torch.device
    timeout: float
    """Seconds after which a kernel counts as hanging."""


def write_script(shown: Shown, directory: Path, stored: Path, thresholds: Thresholds) -> None:
    """Write the script and the files that it needs into the call's directory.

    Args:
        stored: file that `replay.reproduce.kernel_call` wrote.
    """
    constants = _write_expected(shown, directory / EXPECTED, stored, thresholds)
    copied = _copy_kernel(shown, directory / KERNEL)
    (directory / SCRIPT).write_text(_script(shown, constants, copied), encoding="utf-8")


def _write_expected(
    shown: Shown, path: Path, stored: Path, thresholds: Thresholds
) -> dict[str, float]:
    """Write the expected output and the limits by row; return the limits that are numbers."""
    outcome, tensors = shown.outcome, load_file(stored)
    chosen = tensors.pop("chosen", None)
    if chosen is not None:
        chosen = chosen.to(shown.device).expand(*tensors.pop("chosen_sizes").tolist())
    expected = Expected.of(shown.call.to(shown.device), chosen)
    tensors["output"] = expected.reference
    constants: dict[str, float] = {}
    if outcome.accuracy_class == "quantised":
        by = thresholds.quantised
        constants["MINIMUM_COSINE"] = by.minimum_cosine
        largest, noise = by.maximum_relative_l1, expected.quantised
        if noise is not None:
            largest = min(largest, noise.whole_limit(by))
            tensors |= {"heads": noise.head_limits(by), "rows": noise.row_limits(by)}
        constants["LARGEST_RELATIVE_L1"] = largest
    else:
        factors = thresholds.sparse if chosen is not None else thresholds.exact
        constants["LARGEST_ERROR"] = expected.tolerance.limit(factors)
        if expected.tolerance.rows is not None:
            tensors["rows"] = expected.tolerance.rows.limits(factors)
    save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, path)
    return constants


def _copy_kernel(shown: Shown, folder: Path) -> bool:
    """Copy the files of a kernel that belongs to no library; return True if there were any."""
    user, _, function = shown.kernel.rpartition(":")
    if function and user.endswith(".py"):
        path = Path(user).resolve()
        files: dict[str, Path | None] = dict(own_files(path, path.parent, _OUR_PACKAGES))
    elif adapter := shown.source.adapter:
        root = Path(__file__).resolve().parents[2]
        files = dict(own_files(root / f"{adapter.replace('.', '/')}.py", root))
        # `__init__.py` files are left empty, so that nothing else of this project is imported.
        for name in list(files):
            files.update((str(parent / "__init__.py"), None) for parent in Path(name).parents[:-1])
    else:
        return False
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"" if source is None else source.read_bytes())
    return True


_OUR_PACKAGES = ("attention_replay", "attention_kernels", "capture", "replay")


def _script(shown: Shown, constants: dict[str, float], is_copied: bool) -> str:
    source, outcome, call = shown.source, shown.outcome, shown.call
    inputs = [name for name in call.tensors() if name != "output"]
    dimensions = {name: VARIANT_TENSORS[name] for name in inputs if name in VARIANT_TENSORS}
    columns = call.value.shape[-1] if call.value_is_in_key else 0
    return _TEMPLATE.format(
        kernel=shown.kernel,
        shape=call.shape,
        dtype=call.dtype,
        status=outcome.status,
        needs=", ".join(filter(None, ["torch", "safetensors", source.library])),
        watch=_WATCHES.get(outcome.status, "").format(seconds=shown.timeout),
        path=(_FOLDER if is_copied else "") + (_INTERPRETED if is_interpreted() else ""),
        imports="".join(f"{line}\n" for line in source.imports),
        device=shown.device,
        file=shown.file,
        limits="".join(f'{name} = float("{value!r}")\n' for name, value in constants.items()),
        parameters=", ".join([*inputs, "stored"]),
        body=indent("\n".join(source.lines), "    "),
        dimensions=dimensions,
        in_key=f'    found["value"] = found["key"][..., :{columns}]\n' if columns else "",
        restored=inspect.getsource(restored),
        verdict=_QUANTISED if outcome.accuracy_class == "quantised" else _EXACT,
    )


_FOLDER = """\
sys.path.insert(0, str(HERE / "kernel"))  # the kernel's own files
if importlib.util.find_spec("attention_replay") is None:  # where a user's kernel may be registered
    sys.modules["attention_replay"] = types.ModuleType("attention_replay")
    sys.modules["attention_replay"].register_kernel = lambda *_, **__: lambda function: function
"""

_INTERPRETED = """\
os.environ["TRITON_INTERPRET"] = "1"  # as it was when the kernel failed
"""

_WATCHES = {
    "crash": """
if child := os.fork():  # the kernel ends its process, so this one watches
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        print(f"FAILS: the process was ended by {{signal.Signals(os.WTERMSIG(status)).name}}")
        sys.exit(1)
    sys.exit(os.WEXITSTATUS(status))
""",
    "timeout": """
faulthandler.dump_traceback_later({seconds:g}, exit=True)  # the kernel hangs: exits with 1 then
""",
}

_EXACT = """\
    failed = LARGEST_ERROR < float(error.abs().max())
    print(f"max abs error {float(error.abs().max()):.3g}, {LARGEST_ERROR:.3g} is allowed")
"""

_QUANTISED = """\
    cosine = float((output * expected).sum() / (output.norm() * expected.norm()))
    relative_l1 = float(error.abs().sum() / expected.abs().sum())
    failed = not (cosine >= MINIMUM_COSINE and relative_l1 <= LARGEST_RELATIVE_L1)
    print(f"cosine {cosine:.5f}, at least {MINIMUM_COSINE} is asked")
    print(f"relative L1 {relative_l1:.3g}, {LARGEST_RELATIVE_L1:.3g} is allowed")
    if "heads" in limits:
        heads = error.abs().sum((2, 3)) / expected.abs().sum((2, 3))
        failed = failed or bool((heads > limits["heads"]).any())
        print(f"worst head: relative L1 {float(heads.max()):.3g}")
"""

_TEMPLATE = '''\
"""{kernel} on one attention call, {shape} (B, H, S, D) in {dtype}: {status}.

Needs {needs}. Exits with 1 as long as the kernel fails, with 0 when it does not.
`attention` is what is called; the rest loads the call and compares.
"""

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
{path}{watch}
import torch
import torch.nn.attention
from safetensors import safe_open
from safetensors.torch import load_file

{imports}
DEVICE = torch.device("{device}")
DTYPE = {dtype}
CALLS = 3
{limits}

def attention({parameters}):
{body}


def load():
    """The recorded tensors, with the strides that they had in the model."""
    with safe_open(HERE / "{file}", "pt") as file:
        layouts = json.loads(file.metadata()["attention-replay"])["layouts"]
        values = {{name: file.get_tensor(name) for name in layouts}}
    found = {{name: restored(values[name], DEVICE, **layouts[name]) for name in layouts}}
    for name, dimensions in {dimensions}.items():
        found[name] = found[name][(0,) * (4 - dimensions)]
{in_key}    found.pop("output", None)
    return found


{restored}

def fails(output, limits):
    """Compare with attention in high precision; print the worst error and where it is."""
    expected = limits["output"].double()
    if output.shape != expected.shape or output.dtype != DTYPE:
        print(f"returned {{list(output.shape)}} in {{output.dtype}}, not {{list(expected.shape)}}")
        return True
    output = output.detach().cpu().double()
    agreed = (output == expected) | (output.isnan() & expected.isnan())
    odd = ~(output.isfinite() & expected.isfinite()) & ~agreed
    if odd.any():
        place = odd.nonzero()[0].tolist()
        print(f"{{int(odd.sum())}} elements are NaN or infinite, the first at {{place}}")
        return True
    same = agreed & ~output.isfinite()
    output, expected = output.masked_fill(same, 0), expected.masked_fill(same, 0)
    error = output - expected
{verdict}    rows = error.norm(dim=-1)
    allowed = limits.get("rows", torch.full_like(rows, float("inf"))).nan_to_num(float("inf"))
    share = torch.where(rows > 0, rows / allowed, 0)
    failed = failed or bool((share > 1).any())
    worst = share if share.any() else rows
    batch, head, query = (int(each[0]) for each in torch.where(worst == worst.max()))
    row, most = float(rows[batch, head, query]), float(allowed[batch, head, query])
    print(f"worst row: batch {{batch}}, head {{head}}, query {{query}}: "
          f"error norm {{row:.3g}}, {{most:.3g}} is allowed")
    return failed


def main():
    limits = load_file(HERE / "expected.safetensors")
    stored = {{name: each.to(DEVICE) for name, each in limits.items()}}
    for number in range(CALLS):
        inputs = load()
        memory = [torch.full_like(limits["output"], float("nan"), dtype=DTYPE, device=DEVICE)
                  for _ in range(4)]
        del memory  # what the kernel does not write is NaN
        try:
            with torch.no_grad():
                output = attention(**inputs, stored=stored)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            print(f"FAILS: {{type(error).__name__}}: {{error}}")
            return 1
        if fails(output, limits):
            print(f"FAILS: wrong in call {{number + 1}} of {{CALLS}}")
            return 1
    print("does not fail")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''
