"""The process that judges outputs: kernels cannot reach it, and it runs none."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file

from capture.call import AttentionCall
from replay.bench.referee import LocalReferee, Sample
from replay.bench.settings import Settings
from replay.workers.sources import workload_of
from replay.workers.worker import Hear, Say

_referees: dict[str, LocalReferee] = {}
"""The last call's referee: a worker that died and begins again asks for the same."""

_loaded: dict[str, AttentionCall] = {}
"""The next call, by its workload."""


def handle(request: dict[str, Any], say: Say, _hear: Hear) -> None:
    """Answer `{"do": "expect", …}`, `{"do": "open", …}`, `{"do": "judge", …}` or
    `{"do": "samples", …}`.

    Raises:
        DatasetError: the call cannot be read.
    """
    settings = Settings.from_json(request["settings"])
    if request["do"] == "expect":
        say(expecting=True)
        _expect(request, settings)
        return
    if request["do"] == "open":
        _open(request, settings)
        say(opened=True)
        return
    (referee,) = _referees.values()
    tensors = load_file(request["path"], device=str(settings.device))
    kernel, accuracy_class = request["kernel"], request["accuracy_class"]
    chosen = tensors.get("chosen") if accuracy_class == "sparse" else None
    if request["do"] == "judge":
        judged = referee.judge(kernel, accuracy_class, tensors["output"], chosen)
        say(judged=asdict(judged))
    else:
        samples = [
            Sample(number, tensors[f"changed.{place}"], tensors[f"others.{place}"], of_walk)
            for place, (number, of_walk) in enumerate(request["numbers"])
        ]
        say(wrong=referee.judge_samples(kernel, accuracy_class, samples, chosen))
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # the kernels need the memory next


def _expect(request: dict[str, Any], settings: Settings) -> None:
    """Load a call that will be opened, unless its referee is there already."""
    if _key(request, settings) not in _referees:
        _referees.clear()
        _loaded.clear()
        _loaded[json.dumps(request["workload"])] = _load(request, settings)


def _open(request: dict[str, Any], settings: Settings) -> None:
    key, compared = _key(request, settings), None
    if request["compared"]:
        compared = load_file(request["compared"], device=str(settings.device))["output"]
    if key not in _referees or compared is not None:
        _referees.clear()
        expected = _loaded.pop(json.dumps(request["workload"]), None)
        _loaded.clear()
        with torch.no_grad():
            _referees[key] = LocalReferee(
                _load(request, settings) if expected is None else expected,
                request["seed"],
                settings.errors_against,
                settings.compare_stats,
                compared,
                settings.tolerances,
            )
    _referees[key].seed = request["seed"]


def _key(request: dict[str, Any], settings: Settings) -> str:
    """What a referee was made from, but for the seed and what is compared with."""
    asked = settings.to_json()
    how = [asked[name] for name in ("errors_against", "compare_stats", "tolerances")]
    return json.dumps([request["workload"], *how])


def _load(request: dict[str, Any], settings: Settings) -> AttentionCall:
    return workload_of(request["workload"]).load(settings.device)
