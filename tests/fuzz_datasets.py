"""Corrupts datasets in many ways and reads them: reading may raise only our own errors.

    python -m tests.fuzz_datasets --count 10000

One or several `HARMS` are applied to a dataset of seven calls. The operations of the command lines
then run on the dataset, in a process with limited memory and a timeout. A failure is printed with
the seed and number that reproduce it: `--seed 7 --first 123 --count 1`.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import secrets
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention_replay.errors import Error
from capture import load
from capture.call.attention_call import AttentionCall, Origin
from capture.call.attention_variant import AttentionVariant
from capture.cli.dataset_tables import show, show_file_checks
from capture.cli.file_checks import check_files
from capture.storage.call_file import FileEntry, PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import MANIFEST, Dataset
from capture.storage.journal import Journal
from capture.storage.nonfinite_values import NonfiniteValues, TensorPlace
from capture.storage.repair import repair
from capture.storage.tensor_file import write_safetensors
from replay.accuracy.reference import attention
from replay.plan.call_matching import match
from replay.workloads.recorded import from_directory
from tests.factories import census, normal, random_call

MEMORY = 5 << 30
"""Bytes of address space in addition to the imports, enough for two copies of a call."""
SECONDS = 20
"""Timeout for one dataset in seconds; even a busy machine needs less."""

Random = random.Random

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**20, 200_000_000, 2**31, 2**40, 2**63, 2**70),
    *(0.0, -0.5, 1e308, float("inf"), float("nan"), "", "a", "../a", "/", ".", "\0", "query"),
    *("\x1b[2J", "\ud800", "é" * 300, "float64", "bool", "meta", "cuda", "F64", "I8"),
    *([], {}, [0], [1, 2, 3, 4], [[1]], {"a": 1}, ["a"], [0, 0, 0, 0], [2**40] * 4),
]


class Hung(BaseException):
    """Raised when a dataset takes too long; none of our handlers catches it."""


def make(directory: Path) -> None:
    """Write the dataset to corrupt: five calls of a complete capture and two of a killed one."""
    directory.mkdir()
    expanded = normal(1, 1, 9, 32).expand(1, 2, 9, 32)
    calls = [
        random_call(with_output=True, origin={"module": "a.0", "phase": "denoise"}),
        random_call(
            q_len=5,
            kv_len=5,
            kv_heads=1,
            dtype=torch.bfloat16,
            attn_mask=normal(5, 5, dtype=torch.bfloat16)[None, None].expand(1, 2, 5, 5),
            origin={"module": "a.1", "phase": "decode", "call_index": 1},
        ),
        random_call(kv_len=9, origin={"module": "a.2", "call_index": 2}).with_tensors(
            {"query": normal(1, 9, 2, 32).transpose(1, 2), "key": expanded, "value": expanded}
        ),
        random_call(
            is_causal=True,
            sinks=normal(2),
            cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32),
            cu_seqlens_k=torch.tensor([0, 6, 13], dtype=torch.int32),
            seqused_k=torch.tensor([5, 7], dtype=torch.int32),
            variant=AttentionVariant(
                bottom_right=True, window=(3, None), softcap=2.0, max_seqlen_q=5
            ),
            origin={"module": "a.3", "entry_point": "flash_attn", "call_index": 6},
        ),
        in_pages(),
    ]
    entries = [
        PackedCall.of(call).write(directory / f"model-{index}.safetensors")
        for index, call in enumerate(calls)
    ]
    place = TensorPlace("a.0", "output", 1, "denoise", 2, "float16", largest=2.0)
    record = CaptureRecord(
        model="model",
        weights="random",
        first_nonfinite=NonfiniteValues(replace(place, holds="NaN"), place),
        settings={"model": "llama", "given": {"steps": 2}},
        census=census(("a.0", "denoise", 13, 2), ("a.1", "decode", 5, 3), mask=True),
    )
    Dataset(directory, entries, [record]).save_manifest()
    killed = CaptureRecord(model="other", weights="random")
    journal = Journal.begin(directory / "other.journal", killed.to_json(), replaces=False)
    for index in (3, 4):
        call = random_call(origin={"module": "a.3", "call_index": index})
        call = replace(call, origin=replace(call.origin, model="other"))
        journal.append(sampled=index)
        entry = PackedCall.of(call).write(directory / f"other-{index:06d}.safetensors")
        journal.append(**entry.to_json())
    journal.append(sampled=5)
    journal.close()


def in_pages() -> AttentionCall:
    """Return a call with two sequences that share a page; its value is a slice of its key."""
    pool = normal(3, 1, 4, 24)
    return AttentionCall(
        normal(2, 2, 1, 24),
        pool,
        pool[..., :16],
        enable_gqa=True,
        seqused_k=torch.tensor([7, 3], dtype=torch.int32),
        page_table=torch.tensor([[2, 0], [2, 1]], dtype=torch.int32),
        origin=Origin(model="model", module="a.4", call_index=7),
    )


def harm(directory: Path, chance: Random) -> str:
    """Corrupt a dataset in one way; return the name of this way."""
    name = chance.choice(list(HARMS))
    files = sorted(filter(is_small_file, directory.iterdir()))
    if files:
        with contextlib.suppress(RecursionError):  # recursion in data that an earlier harm nested
            HARMS[name](directory, chance.choice(files), chance)
    return name


def is_small_file(path: Path) -> bool:
    """Return whether a path is a file that no earlier change has made huge."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 2**22


def flip(directory: Path, path: Path, chance: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 8])):
        if content:
            content[chance.randrange(min(len(content), 4000))] = chance.randrange(256)
    path.write_bytes(content)


def cut(directory: Path, path: Path, chance: Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size + 1)])


def lengthen(directory: Path, path: Path, chance: Random) -> None:
    if chance.random() < 0.5:
        with path.open("ab") as file:
            file.write(bytes(chance.randrange(1, 5000)))
    else:
        os.truncate(path, chance.choice([2**20, 2**33, 2**40]))  # changes only the length


def replace_file(directory: Path, path: Path, chance: Random) -> None:
    kind = chance.choice(
        ["link", "loop", "outside", "device", "fifo", "directory", "nothing", "copy"]
    )
    other = chance.choice(sorted(directory.iterdir()))
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "copy":
        path.write_bytes(other.read_bytes() if is_small_file(other) else content)
    elif kind != "nothing":
        targets = {
            "link": other.name,
            "loop": path.name,
            "outside": "../kept",
            "device": "/dev/zero",
        }
        path.symlink_to(targets[kind])


def header_length(directory: Path, path: Path, chance: Random) -> None:
    length = chance.choice([0, 1, 8, 200, 2**20, 2**31, 2**62, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


def manifest(directory: Path, path: Path, chance: Random) -> None:
    """Change something in the manifest only."""
    file = directory / MANIFEST
    data = json_of(file)
    if data is not None:
        change(data, chance)
        file.write_text(dumped(data, chance))


def journal(directory: Path, path: Path, chance: Random) -> None:
    """Change something in a line of the journal."""
    file = directory / "other.journal"
    if not is_small_file(file):
        return
    lines = file.read_bytes().splitlines(keepends=True)
    number = chance.randrange(len(lines) + 1)
    try:
        data = json.loads(b"".join(lines[number : number + 1]))
    except (ValueError, RecursionError):
        data = {"sampled": None}
    change(data, chance)
    lines[number : number + 1] = [dumped(data, chance).encode("utf-8", "surrogatepass") + b"\n"]
    file.write_bytes(b"".join(lines))


def tensors(directory: Path, path: Path, chance: Random) -> None:
    """Change something in the header of a safetensors file only."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8].ljust(8, b"\0"))
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return
    change(header, chance)
    text = dumped(header, chance).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def signed(directory: Path, path: Path, chance: Random) -> None:
    """Change something in a call's header, in both file and manifest, with a matching checksum."""
    try:
        entry = FileEntry.read(path)
        values = entry._read(check=False)
    except Error:
        return
    header = json.loads(json.dumps(entry.header.to_json()))
    if chance.random() < 0.5:
        change(header, chance)
    else:
        for layout in chance.sample(list(header["layouts"].values()), 2):
            key = chance.choice(["size", "stride"])
            layout[key][chance.randrange(4)] = chance.choice([0, 0, 1, 2, 9, 2**20, 2**40])
    sign(directory, path, header, values, chance)


def reshaped(directory: Path, path: Path, chance: Random) -> None:
    """Replace all sizes, strides and dtypes, and the file's tensors to match."""
    try:
        header = json.loads(json.dumps(FileEntry.read(path).header.to_json()))
    except Error:
        return
    batch, heads, dim, v_dim = (chance.choice([0, 1, 1, 2, 3, 2**20]) for _ in range(4))
    q_len, kv_len = (chance.choice([0, 1, 3, 2**20, 2**20]) for _ in range(2))
    kv_heads = chance.choice([1, heads, heads, 3])
    sizes = {
        "query": [batch, heads, q_len, dim],
        "key": [batch, kv_heads, kv_len, dim],
        "value": [batch, kv_heads, kv_len, v_dim],
        "attn_mask": [chance.choice([1, batch]), chance.choice([1, heads]), q_len, kv_len],
        "output": [batch, heads, q_len, v_dim],
    }
    values = {}
    for name, layout in header["layouts"].items():
        if chance.random() < 0.9:
            layout["size"] = sizes.get(name, layout["size"])
        stride = [
            0 if size == 2**20 else chance.choice([0, 1, 2, 5, 2**30]) for size in layout["size"]
        ]
        layout.update(stride=stride, order=chance.choice([[], [], [0, 2, 1, 3], [3, 2, 1, 0]]))
        dtype = "float32" if chance.random() < 0.8 else chance.choice(["float16", "bool", "int32"])
        header["dtypes"][name] = dtype
        stored = [
            1 if stride[dim] == 0 and layout["size"][dim] > 1 else layout["size"][dim]
            for dim in layout["order"] or range(4)
        ]
        elements = 1
        for size in stored:
            elements *= size
        if elements > 2**16:  # larger tensors only take more time
            return
        values[name] = torch.zeros(stored, dtype=getattr(torch, dtype))
    sign(directory, path, header, values, chance)


def sign(
    directory: Path, path: Path, header: Any, values: dict[str, torch.Tensor], chance: Random
) -> None:
    checksum = write_safetensors(path, values, {"attention-replay": dumped(header, chance)})
    data = json_of(directory / MANIFEST)
    items = data.get("files") if isinstance(data, dict) else None
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("file") == path.name:
            item.update(call=header, bytes=path.stat().st_size, checksum=checksum)
            (directory / MANIFEST).write_text(json.dumps(data))


HARMS: dict[str, Callable[[Path, Path, Random], None]] = {
    "bytes flipped": flip,
    "cut": cut,
    "longer": lengthen,
    "no regular file": replace_file,
    "header length": header_length,
    "manifest": manifest,
    "manifest again": manifest,
    "journal": journal,
    "tensors": tensors,
    "signed header": signed,
    "signed header again": signed,
    "signed sizes": reshaped,
}


def json_of(path: Path) -> Any:
    if not is_small_file(path):
        return None
    try:
        return json.loads(path.read_text("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def change(data: Any, chance: Random) -> None:
    """Replace, remove, copy or repeat something at a random place in a JSON tree."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    if isinstance(data, dict | list):
        collect(data)
    for _ in range(chance.choice([1, 1, 3])):
        if not places:
            return
        node, key = chance.choice(places)
        if isinstance(node, list) and key >= len(node):
            continue
        kind = chance.choice(["value", "value", "value", "remove", "copy", "repeat"])
        if kind == "remove" and key in (node if isinstance(node, dict) else range(len(node))):
            del node[key]
        elif kind == "copy":
            other, place = chance.choice(places)
            if place in (other if isinstance(other, dict) else range(len(other))):
                node[key] = copy.deepcopy(other[place])
        elif kind == "repeat" and isinstance(node, list):
            node += copy.deepcopy(node[key : key + 1]) * chance.choice([1, 20])
        else:
            node[key] = copy.deepcopy(chance.choice(VALUES))


def dumped(data: Any, chance: Random) -> str:
    """Return data as JSON, occasionally with deep nesting."""
    text = json.dumps(data)
    if chance.random() < 0.1:
        depth = chance.choice([100, 800, 100_000])
        value = chance.choice(["null", "false", "0"])
        text = text.replace(f": {value}", ": " + "[" * depth + "]" * depth, 1)
    return text


def use(directory: Path) -> None:
    """Run each operation of the command lines on a dataset, even if other operations fail."""
    screen, errors = io.StringIO(), list[str]()
    console = Console(file=screen, width=80)

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except Error as error:
            errors.append(str(error))

    def opened() -> None:
        dataset = load(directory)
        show(dataset, console)
        show_file_checks(check_files(dataset), console)
        for entry in dataset.entries:
            attempt(lambda entry=entry: attention(entry.load(), torch.float32))
        for record in dataset.captures:
            attempt(lambda record=record: match(record.census, []))
            json.dumps(record.to_json())

    attempt(opened)
    for workload in workloads_of(directory):
        json.dumps(workload.source.to_json())
        attempt(lambda workload=workload: workload.load(torch.device("cpu")))
    attempt(lambda: repair(directory))
    assert all("\n" not in error for error in errors), f"more than a line: {errors}"
    shown = screen.getvalue()
    assert all(line.isprintable() for line in shown.splitlines()), f"to the terminal: {shown!r}"


def workloads_of(directory: Path) -> list[Any]:
    try:
        return from_directory(directory)[0]
    except Error:
        return []


def try_one(pristine: Path, scratch: Path, seed: int, number: int, names: Counter[str]) -> str:
    """Corrupt and use one dataset; describe the failure, if any."""
    chance = Random(f"{seed} {number}")
    directory = scratch / "data"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(pristine, directory)
    names.update(harm(directory, chance) for _ in range(chance.choice([1, 1, 1, 2, 4])))
    signal.alarm(SECONDS)
    try:
        use(directory)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return ""


def hang(number: int, frame: object) -> None:
    raise Hung(f"more than {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="datasets per seed")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, nargs="+", help="default: a fresh one, printed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, hang)
    torch.set_num_threads(1)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    failures, names = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        pristine = Path(scratch, "pristine")
        make(pristine)
        use(pristine)
        Path(scratch, "kept").write_text("never read")
        for seed in arguments.seed or [secrets.randbits(32)]:
            print(f"seed {seed}", flush=True)
            for number in range(arguments.first, arguments.first + arguments.count):
                wrong = try_one(pristine, Path(scratch), seed, number, names)
                if wrong:
                    failures += 1
                    print(f"--seed {seed} --first {number} --count 1\n{wrong}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(names.items())))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{failures} failures; at most {peak:.0f} MiB of memory")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
