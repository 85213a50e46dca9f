"""Arguments that a user's function declares: all of SDPA's, or only some.

An argument may have SDPA's name or another common one, such as `q`, `causal` or `sm_scale`. A call
that needs an argument which the function lacks is refused with a reason, never run without it.
Imports no torch, so that a file can be checked before anything runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from capture.call.attention_call import AttentionCall

NAMES: dict[str, tuple[str, ...]] = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "attn_mask": ("attn_mask", "mask", "attention_mask", "attn_bias", "bias"),
    "dropout_p": ("dropout_p", "dropout"),
    "is_causal": ("is_causal", "causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "enable_gqa": ("enable_gqa",),
}
"""Names under which a function may declare each argument of SDPA, in lower case."""
BEYOND = {
    "window": "window",
    "bottom-right": "bottom_right",
    "softcap": "softcap",
    "sinks": "sinks",
    "packed": "cu_seqlens_q",
    "key-lengths": "seqused_k",
    "paged": "page_table",
    "scaled": "key_scale",
}
"""Argument of each feature beyond SDPA, without which a function cannot support it."""
HINTS = ("max_seqlen_q", "max_seqlen_k")
"""Arguments of packed calls that a kernel may do without."""
STUB = (
    "def {}(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, "
    "enable_gqa=False): ..."
)
_TENSORS = ("query", "key", "value")
_BY_ALIAS = {alias: name for name, aliases in NAMES.items() for alias in aliases}
_BEYOND = (*BEYOND.values(), "cu_seqlens_k", "query_scale", "value_scale")


class SignatureError(ValueError):
    """Raised for a function that cannot take a call; the message ends with a stub to paste."""


class DeclaredArguments:
    """Arguments of a function, by SDPA's names."""

    def __init__(
        self, name: str, parameters: Sequence[Parameter], features: Collection[str] | None = ()
    ) -> None:
        """Match parameters to arguments of a call.

        Args:
            name: the function's name.
            features: features beyond SDPA that the kernel has; None if they are unknown.

        Raises:
            SignatureError: the function requires other arguments, or lacks some that it needs.
        """
        kinds = {each.kind for each in parameters}
        self._takes_more = Parameter.VAR_KEYWORD in kinds
        self._own: dict[str, Parameter] = {}
        self._positions: list[tuple[str | None, Parameter]] = []
        unknown = []
        for place, each in enumerate(parameters):
            if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                continue
            known = _argument(each.name, place)
            known = None if known in self._own else known
            is_required = each.default is Parameter.empty
            if known is not None:
                self._own[known] = each
            if is_required and (known is None or (known in _BEYOND and features == ())):
                unknown.append(each.name)
            if each.kind == Parameter.POSITIONAL_ONLY:
                self._positions.append((known, each))
        if Parameter.VAR_POSITIONAL in kinds and not self._own and not self._takes_more:
            self._positions = [
                (each, Parameter(each, Parameter.POSITIONAL_ONLY)) for each in _TENSORS
            ]
            self._own = {each: own for each, own in self._positions if each is not None}
        beyond = [BEYOND[each] for each in features or () if each in BEYOND]
        needed = [] if self._takes_more else [*_TENSORS, *beyond]
        missing = [each for each in needed if each not in self._own]
        if unknown or missing:
            wrong = f"has no argument {missing[0]}: add it" if missing else ""
            if unknown:
                wrong = f"requires {unknown[0]}: give it a default or drop it"
            stub = STUB.format(name if name.isidentifier() else "attention")
            raise SignatureError(f"{name} {wrong}; a kernel may have any arguments of {stub}")

    @property
    def are_sdpas(self) -> bool:
        """True if the function can be called with every argument of a call, by SDPA's names."""
        is_named = not self._positions and all(
            name == each.name for name, each in self._own.items()
        )
        return is_named and (self._takes_more or NAMES.keys() <= self._own.keys())

    def passed(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the function's positional and named arguments for a call's arguments."""
        given = {"enable_gqa": False, **given} if "enable_gqa" in self._own else {**given}
        scale = self._own.get("scale")
        if scale is not None and given["scale"] is None and scale.default is not None:
            given["scale"] = given["query"].shape[-1] ** -0.5
        positions = [given.get(name or "", own.default) for name, own in self._positions]
        placed = {name for name, _ in self._positions}
        named = {}
        for name, value in given.items():
            if name in self._own:
                if name not in placed:
                    named[self._own[name].name] = value
            elif self._takes_more or name not in (*NAMES, *HINTS):
                named[name] = value
        return positions, named

    def refusal(self, call: AttentionCall) -> str | None:
        """Return the reason why a call needs more than the function's arguments; else None."""
        from replay.kernels import constraints  # imports torch

        checks = {
            "attn_mask": constraints.no_mask,
            "dropout_p": constraints.no_dropout,
            "is_causal": constraints.no_causal,
            "scale": constraints.default_scale,
            "enable_gqa": constraints.no_gqa,
        }
        for name, check in checks.items():
            if name not in self._own and not self._takes_more and (reason := check(call)):
                return reason
        mask = self._own.get("attn_mask")
        if mask is not None and "bias" in mask.name and (reason := constraints.no_bool_mask(call)):
            return reason
        given = call.arguments()
        lacking = [
            name
            for name, own in self._own.items()
            if name in _BEYOND and own.default is Parameter.empty and name not in given
        ]
        if lacking:
            return f"for calls with {lacking[0]} only"
        unknown = [name for name in _BEYOND if name in given and name not in self._own]
        return f"takes no {unknown[0]}" if unknown and not self._takes_more else None


class Adapted:
    """Function with SDPA's signature that passes a user's function the arguments it declares."""

    def __init__(self, function: Callable[..., Any], declared: DeclaredArguments) -> None:
        self.function, self.declared = function, declared
        functools.update_wrapper(self, function, updated=())

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        **others: Any,
    ) -> Any:
        """Call the function; `others` are `enable_gqa` and arguments beyond SDPA's."""
        sdpas = (query, key, value, attn_mask, dropout_p, is_causal, scale)
        positions, named = self.declared.passed(dict(zip(NAMES, sdpas, strict=False)) | others)
        return self.function(*positions, **named)


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's own function if `function` only adapts its arguments."""
    return function.function if isinstance(function, Adapted) else function


def passed(
    function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that a user's own function gets for a call's arguments."""
    return function.declared.passed(given) if isinstance(function, Adapted) else ([], {**given})


def adapted(
    function: Callable[..., Any], features: Collection[str] = ()
) -> tuple[Callable[..., Any], DeclaredArguments | None]:
    """Return a function with SDPA's signature, and the arguments that the given one declares.

    The function itself is returned if it takes all of SDPA's arguments. The second result is None
    if the arguments are unknown, as for C functions.

    Raises:
        SignatureError: the function cannot take a call.
    """
    name = getattr(function, "__name__", type(function).__name__)
    parameters = _parameters(function)
    if parameters is None:
        return function, None
    declared = DeclaredArguments(name, parameters, tuple(features))
    return function if declared.are_sdpas else Adapted(function, declared), declared


def check_source(tree: ast.Module, function: str) -> None:
    """Raise SignatureError if a file's function cannot take a call.

    Only functions whose signature is certain are checked: those bound once, without decorators
    other than `register_kernel`.
    """
    found = [node for node in ast.walk(tree) if function in _bound(node)]
    if len(found) != 1 or found[0] not in tree.body or not isinstance(found[0], ast.FunctionDef):
        return
    given, decorators = found[0].args, [ast.unparse(each) for each in found[0].decorator_list]
    if not all("register_kernel(" in each for each in decorators):
        return
    none = ast.Constant(None)  # no code of the file runs
    given.defaults = [none for _ in given.defaults]
    given.kw_defaults = [each and none for each in given.kw_defaults]
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    alike = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, none)))
    parameters = _parameters(eval(compile(alike, "<signature>", "eval")))
    DeclaredArguments(function, parameters or (), None if decorators else ())


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a statement binds as a function, a class, or by assignment."""
    targets = [getattr(each, "id", "") for each in getattr(node, "targets", ())]
    return {str(getattr(node, "name", "")), *targets}


def _argument(own: str, place: int) -> str | None:
    """Return the argument of a call that a parameter's name and place mean; None if unknown."""
    if own in _BEYOND or own in HINTS:
        return own
    name = _BY_ALIAS.get(own.lower())
    if name is None and place < len(_TENSORS) and own.lower().startswith(_TENSORS[place][0]):
        return _TENSORS[place]
    return name


def _parameters(function: Callable[..., Any]) -> list[Parameter] | None:
    """Return the parameters of a function; None if they are unknown."""
    owner = getattr(function, "__self__", None)
    is_autograd = getattr(function, "__name__", "") == "apply" and hasattr(owner, "forward")
    called: Any = owner.forward if is_autograd and owner else function
    try:
        # `apply` of an autograd function takes the arguments of `forward` by position.
        taken = inspect.signature(called, follow_wrapped=False)
    except (TypeError, ValueError):  # C functions have no signature
        return None
    parameters = list(taken.parameters.values())
    if not is_autograd:
        return parameters
    has_context = "setup_context" not in vars(owner)
    return [each.replace(kind=Parameter.POSITIONAL_ONLY) for each in parameters[has_context:]]
