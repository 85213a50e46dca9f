"""Measures how a power limit affects timing, alone and among slower kernels (needs a GPU).

    python -m benchmarks.power_limit

Times two torch backends three ways: alone by `triton.testing.do_bench` (back to back), alone by our
`measure`, and by `measure` between slower kernels. The SM clock is read every 5 ms during each
measurement. Writes `benchmarks/results/power_limit.csv`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from triton.testing import do_bench

from benchmarks import results
from benchmarks.gpu import gpu
from replay.kernels.registry import find
from replay.timing.flops import tflops
from replay.timing.gpu_state import read_gpu_state
from replay.timing.machine import describe
from replay.timing.rounds import measure
from replay.workloads.random_calls import Spec

SPECS = {
    "1×24×4608×128": Spec(1, 24, 24, 4608, 4608, 128, 128),
    "2×30×17776×64": Spec(2, 30, 30, 17776, 17776, 64, 64),
    "1×32/8×8192×128 causal": Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True),
}
KERNELS = ("torch-flash", "torch-cudnn")
COLUMNS = (
    "B×H×S×D",
    "kernel",
    "do_bench alone, TFLOPS",
    "SM MHz",
    "measure alone, TFLOPS",
    "SM MHz ",
    "measure among slower, TFLOPS",
    "SM MHz  ",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "power_limit.csv")
    out = parser.parse_args().out
    device = gpu()
    with out.open("w", newline="") as file, torch.no_grad():
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "machine"])
        for shape, spec in SPECS.items():
            call = spec.call(device, torch.Generator(device).manual_seed(0))
            arguments = call.arguments()

            def runner(name: str, arguments: dict[str, object] = arguments) -> Callable[[], object]:
                attention = find(name).attention
                return lambda: attention(**arguments)

            everyone = {name: runner(name) for name in (*KERNELS, "flex")}
            with clock() as together:
                among = measure(everyone, device)
            for name in KERNELS:
                with clock() as alone_back_to_back:
                    loop = do_bench(everyone[name], warmup=200, rep=1000, return_mode="median")
                with clock() as alone:
                    ours = measure({name: everyone[name]}, device, rounds=100)[name].ms
                times = (loop, statistics.median(ours), statistics.median(among[name].ms))
                clocks = (alone_back_to_back, alone, together)
                cells = []
                for milliseconds, readings in zip(times, clocks, strict=True):
                    cells += [
                        f"{tflops(call, milliseconds):.0f}",
                        f"{statistics.median(readings):.0f}",
                    ]
                machine = describe(device)
                writer.writerow([shape, name, *cells, f"{machine.device}, torch {machine.torch}"])


@contextmanager
def clock() -> Iterator[list[int]]:
    """Read the SM clock in MHz every 5 ms while the block runs."""
    readings: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            state = read_gpu_state("cuda")
            if state is not None and state.sm_clock_mhz is not None:
                readings.append(state.sm_clock_mhz)
            time.sleep(0.005)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield readings
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
