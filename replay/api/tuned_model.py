"""Function `tuned`, which applies a stored plan that suits a live model, or tunes the model."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_replay.errors import check_type
from replay.api.choices import joined_names
from replay.api.messages import say
from replay.api.tune_model import live_runnable, tune_runnable
from replay.timing.defaults import ROUNDS

if TYPE_CHECKING:
    from replay.kernels.registry import Kernel
    from replay.patch.apply import Applied
    from replay.plan.plan import Plan


def tuned(
    pipe: Any,
    run: Callable[..., Any],
    quality: str = "psnr=35",
    *,
    prompts: Sequence[Any] | None = None,
    kernels: str | Sequence[str | Kernel] | None = None,
    sparse: bool = False,
    directory: str | os.PathLike[str] | None = None,
    max_time: float | None = None,
    rounds: int = ROUNDS,
    name: str | None = None,
    progress: bool | None = None,
) -> Applied:
    """Apply the stored plan that suits a live model, or tune the model and store its plan.

    A plan suits if it was tuned under the same conditions: configuration and weights of the model,
    number and key lengths of its attention calls, device, versions of libraries and kernels,
    prompts, and quality budget. The model runs once, so that its calls are known. If no plan suits,
    a sentence on stderr names what changed, and `tune` makes one.

    If no plan is faster, the model keeps its own attention. A sentence on stderr says so, and later
    calls find it stored, unless noise or `max_time` may have been the reason.

    Args:
        pipe: the model that `run` uses, as for `tune`.
        run: a function without arguments, or of a prompt, that runs the model once and returns what
            is judged, as for `tune`.
        quality: the budget, as for `tune`.
        prompts: arguments of `run`, at least two; None if it takes none.
        kernels: names and globs of the kernels to choose from; None for the default kernels, "all"
            for every kernel.
        sparse: True to choose from block-sparse attention too, as for `tune`.
        directory: directory of the stored plans; None for `attention-replay/plans` in the user's
            cache (`$XDG_CACHE_HOME`, or else `~/.cache`).
        max_time: seconds after which comparing and searching stop; the best plan so far is kept.
        rounds: samples per kernel and call.
        name: name of the model in the plan; None for its class name.
        progress: False to hide progress, and the sentences on stderr.

    Returns:
        The plan, applied until `remove` is called. Its `plan` is None if no plan is faster.

    Raises:
        Error: an argument cannot be used, the model cannot be tuned, or its plan not be applied.
        RuntimeError: a plan is applied already, or a recording or swap is active.
        TypeError: an argument is of the wrong type.

    Example:
        >>> applied = tuned(pipe, lambda: pipe("a panda", generator=seeded()), quality="psnr=35")
        >>> print(applied.plan.measured)
        >>> pipe("a panda playing guitar")
        >>> applied.remove()
    """
    from capture.storage.cache import user_cache
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.conditions import conditions, digest_of
    from replay.tune.judged_runs import check_arguments, judged_runs
    from replay.tune.quality import parse_quality

    if directory is not None:
        check_type("directory", directory, (str, os.PathLike), "the path of a directory")
    names, quiet = joined_names(kernels), progress is False
    budget = str(parse_quality(quality))
    check_arguments(run, prompts)
    runs = judged_runs(live_runnable(pipe, run, name), prompts, None)
    roots = runs.runnable.roots
    census = _census(runs.runnable)
    now = conditions(roots, census, budget, names, runs.names, is_sparse=sparse)
    store = user_cache("plans") if directory is None else Path(directory)
    plan, reason = _stored(store, Path(runs.runnable.name).name, now)
    if plan is not None:
        return _applied(plan, roots, names)
    path = store / f"{digest_of(now)}.json"
    verdict = path.with_suffix(".txt")
    if os.path.isfile(verdict):
        return _own_attention(verdict.read_text(encoding="utf-8"), quiet=quiet)
    if not quiet:
        say(reason)
    tuning = tune_runnable(
        live_runnable(pipe, run, name),
        quality,
        prompts=prompts,
        kernels=names,
        sparse=SparseKernel() if sparse else None,
        out=path,
        max_time=max_time,
        rounds=rounds,
        quiet=quiet,
    )
    is_final = tuning.plan is not None or not (tuning.is_undecided or max_time)
    if is_final:
        shutil.rmtree(f"{path}.tuning")
    if tuning.plan is not None:
        return _applied(tuning.plan, roots, names)
    if is_final:
        verdict.write_text(tuning.sentence, encoding="utf-8")
    return _own_attention(tuning.sentence, quiet=quiet)


def _census(runnable: Any) -> dict[str, Any]:
    """Run a model once, and return the census of its attention calls."""
    import torch

    from replay.end_to_end.census_check import counting

    with counting(runnable.roots) as census, torch.no_grad():
        runnable.run()
    return census.to_json()


def _stored(store: Path, model: str, now: Mapping[str, str]) -> tuple[Plan | None, str]:
    """Return the plan of these conditions, or else the reason why no stored plan is reused."""
    from replay.plan.plan import Plan, PlanError
    from replay.tune.conditions import changes

    differing: list[list[str]] = []
    for path in sorted(store.glob("*.json")) if os.path.isdir(store) else []:
        with contextlib.suppress(PlanError):  # the directory may hold other files
            plan = Plan.load(path)
            if plan.measured is None or plan.model != model:
                continue
            changed = changes(plan.measured.conditions, now)
            if not changed:
                return plan, ""
            differing.append(changed)
    if not differing:
        return None, f"no plan for {model} is stored in {store}: tuning it"
    nearest = min(differing, key=len)
    return None, f"the stored plan is not reused: {', '.join(nearest)}; tuning again"


def _applied(plan: Plan, roots: Mapping[str, Any], names: str | None) -> Applied:
    """Apply a plan, whose code may run if the caller named it."""
    from replay.kernels.registry import select
    from replay.patch.apply import apply

    named = {kernel.name for kernel in select(names)[0]}
    # The conditions contain the type of device, and an offloaded model appears to be on the CPU.
    return apply(plan, dict(roots), any_device=True, trust_code=named.issuperset(plan.code))


def _own_attention(sentence: str, *, quiet: bool) -> Applied:
    from replay.patch.apply import Applied
    from replay.patch.call_counts import Swap

    if not quiet:
        say(sentence)
    return Applied(None, contextlib.nullcontext(Swap({})))
