"""Makes Triton's interpreter more than twice as fast by skipping redundant work.

The interpreter replaces the functions of `triton.language` at each kernel launch, and again in
every function that the kernel calls. It checks each integer sum and product for overflow, and
ignores the result outside Triton's debug mode. Each operation describes its shape and type again,
and converts operands that already have one type.
"""

import dataclasses
import functools
import math
from typing import Any

import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter


def hasten() -> None:
    """Make the interpreter skip redundant work until the process ends."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    function = interpreter.InterpretedFunction
    function.__call__ = _once(function.__call__)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    same = tl.core.dtype.__eq__
    tl.core.dtype.__eq__ = lambda self, other: self is other or same(self, other)
    tl.core.tensor.__init__ = _tensor
    tl.core.block_type.__init__ = _remembered(tl.core.block_type.__init__)
    checked = semantic.TritonSemantic
    checked.binary_op_type_checking_impl = _unless_alike(checked.binary_op_type_checking_impl)


def _once(patch_and_call: Any) -> Any:
    @functools.wraps(patch_and_call)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if _is_patched(self.fn):
            return self.rewrite()(*arguments, **named)
        return patch_and_call(self, *arguments, **named)

    return call


def _is_patched(function: Any) -> bool:
    """Return whether the function's `tl` is already patched for Triton's interpreter."""
    functions = [tl.tensor.__add__, *(language.load for language in _languages(function))]
    return not any(map(tl.core.is_builtin, functions))


@functools.cache
def _languages(function: Any) -> list[Any]:
    """Return the modules whose functions Triton replaces, such as `tl` and `core`."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def _by_name(function: Any) -> Any:
    """Return a function that caches its result by its Triton type's name: some have no hash."""
    results: dict[str, Any] = {}

    @functools.wraps(function)
    def call(dtype: Any) -> Any:
        if dtype.name not in results:
            results[dtype.name] = function(dtype)
        return results[dtype.name]

    return call


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the number of elements and the shape in the form that Triton's tensors store."""
    return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(size) for size in shape])


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants(tuple(type.shape) if type.is_block() else ())


def _remembered(describe: Any) -> Any:
    """Return a constructor of block types that describes each pair of type and shape only once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(describe)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        found = known.get((element_ty.name, sizes))
        if found is None:
            describe(self, element_ty, list(sizes))
            known[element_ty.name, sizes] = dict(self.__dict__)
        else:
            self.__dict__.update(found, element_ty=element_ty)

    return init


def _unless_alike(check: Any) -> Any:
    """Return a check that passes two operands of equal type on without converting them."""

    @functools.wraps(check)
    def checked(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if (
            isinstance(lhs, tl.tensor)
            and isinstance(rhs, tl.tensor)
            and lhs.type.name == rhs.type.name
            and not (named.get("div_or_mod") or len(options) > 3 or lhs.dtype.is_ptr())
        ):
            return lhs, rhs
        return check(self, lhs, rhs, *options, **named)

    return checked
