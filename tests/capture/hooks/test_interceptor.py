"""Every SDPA call is intercepted with its arguments, and PyTorch is restored afterwards."""

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture.hooks.interceptor import TORCH_SDPA, Arguments, intercept, observe

Q, K, V = torch.randn(3, 1, 4, 6, 8)


class Seen:
    """Handler that records the arguments and makes the call."""

    def __init__(self) -> None:
        self.calls: list[Arguments] = []
        self.functions: list[Callable[..., Tensor]] = []

    def __call__(self, arguments, proceed, sdpa):
        self.calls.append(arguments)
        self.functions.append(sdpa)
        return proceed()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check after every test of this file that PyTorch is restored."""
    before = (torch.backends.mha.get_fastpath_enabled(), torch._dynamo.eval_frame._stance.stance)
    yield
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert torch._C._nn.scaled_dot_product_attention is TORCH_SDPA
    after = (torch.backends.mha.get_fastpath_enabled(), torch._dynamo.eval_frame._stance.stance)
    assert after == before


@pytest.mark.parametrize(
    "how",
    [
        lambda: F.scaled_dot_product_attention(Q, K, V),
        lambda: F.scaled_dot_product_attention(Q, K, value=V),
        lambda: F.scaled_dot_product_attention(Q, value=V, key=K),
        lambda: F.scaled_dot_product_attention(value=V, query=Q, key=K),
        lambda: torch.nn.functional.scaled_dot_product_attention(query=Q, key=K, value=V),
        lambda: torch._C._nn.scaled_dot_product_attention(Q, K, V),
    ],
)
def test_tensors_are_seen_however_passed(seen: Seen, how: Callable[[], Tensor]) -> None:
    expected = how()
    with intercept(seen):
        output = how()
    assert torch.equal(output, expected)
    assert seen.calls == [Arguments(Q, K, V, None, 0.0, False, None, False)]


def test_every_option_is_seen_positional_and_by_keyword(seen: Seen) -> None:
    mask = torch.zeros(6, 6)
    with intercept(seen):
        F.scaled_dot_product_attention(Q, K, V, None, 0.0, True)
        F.scaled_dot_product_attention(Q, K, V, mask, 0.25)
        F.scaled_dot_product_attention(Q, K, V, is_causal=True, scale=0.5)
        F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True, attn_mask=mask)
        F.scaled_dot_product_attention(Q, K, V, dropout_p=0.5)
    options = [call[3:8] for call in seen.calls]
    assert options == [
        (None, 0.0, True, None, False),
        (mask, 0.25, False, None, False),
        (None, 0.0, True, 0.5, False),
        (mask, 0.0, False, None, True),
        (None, 0.5, False, None, False),
    ]


@pytest.mark.parametrize("scale", [numpy.float32(0.5), torch.tensor(0.5), numpy.int64(2), 2])
def test_scale_of_any_number_type_is_a_plain_float(seen: Seen, scale: Any) -> None:
    expected = F.scaled_dot_product_attention(Q, K, V, scale=scale)
    with intercept(seen):
        output = F.scaled_dot_product_attention(Q, K, V, scale=scale)
    assert torch.equal(output, expected)
    assert type(seen.calls[0].scale) is float
    assert seen.calls[0].scale == float(scale)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((Q, K), {}),
        ((Q, K, None), {}),
        ((1, 2, 3), {}),
        ((Q, K, V, None, 0.0, False, 0.5), {}),  # scale is keyword-only
        ((Q, K, V), {"softmax_scale": 1.0}),
        ((Q, K, V), {"scale": "big"}),
        ((Q, K, V), {"is_causal": 1}),
        ((Q, K[..., :4], V), {}),
        ((Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), {}),
        ((Q, K, V, torch.zeros(6, 6, dtype=torch.int64)), {}),
        ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    ],
)
def test_wrong_call_fails_as_without_a_recording(
    tmp_path: Any, layers: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Arguments that SDPA rejects raise SDPA's own error, not one from the recorder."""
    from capture import record
    from capture.errors import RecordingWarning

    with pytest.raises(Exception) as plain:  # noqa: PT011
        F.scaled_dot_product_attention(*args, **kwargs)
    answers: list[Exception] = []

    def call() -> None:
        try:
            F.scaled_dot_product_attention(*args, **kwargs)
        except Exception as error:
            answers.append(error)

    no_call = "no attention call was seen"
    with pytest.warns(RecordingWarning, match=no_call), record(layers, out=tmp_path):
        call()
    assert [(type(error), str(error)) for error in answers] == [(plain.type, str(plain.value))]


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))
    return module


@pytest.fixture
def imported_by_name() -> Iterator[types.ModuleType]:
    """Module that was loaded earlier and imported the function under two names."""
    yield _module(
        "took_it_by_name",
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "from torch.nn.functional import scaled_dot_product_attention as sdpa\n"
        "attend = lambda *tensors: scaled_dot_product_attention(*tensors)\n",
    )
    del sys.modules["took_it_by_name"]


def test_module_that_imported_the_function_by_name_is_seen(
    seen: Seen, imported_by_name: types.ModuleType
) -> None:
    with intercept(seen):
        imported_by_name.attend(Q, K, V)
        imported_by_name.sdpa(Q, K, V)
    assert len(seen.calls) == 2
    assert imported_by_name.scaled_dot_product_attention is TORCH_SDPA
    assert imported_by_name.sdpa is TORCH_SDPA


def test_module_imported_meanwhile_is_seen_and_gets_the_original_back(seen: Seen) -> None:
    try:
        with intercept(seen):
            late = _module(
                "imported_late", "from torch.nn.functional import scaled_dot_product_attention"
            )
            late.scaled_dot_product_attention(Q, K, V)
        assert len(seen.calls) == 1
        assert late.scaled_dot_product_attention is TORCH_SDPA
    finally:
        del sys.modules["imported_late"]


def test_reference_kept_in_a_closure_is_harmless_afterwards(seen: Seen) -> None:
    with intercept(seen):
        kept = F.scaled_dot_product_attention
    assert kept is not TORCH_SDPA
    assert torch.equal(kept(Q, K, V), TORCH_SDPA(Q, K, V))
    assert not seen.calls


def test_replacement_looks_like_the_original(seen: Seen) -> None:
    with intercept(seen):
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
        assert F.scaled_dot_product_attention.__doc__ == TORCH_SDPA.__doc__
        pickled = pickle.dumps(F.scaled_dot_product_attention)
    assert pickle.loads(pickled) is TORCH_SDPA


def test_module_that_forbids_setattr_is_seen_too(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frozen(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"{name} is read-only")

    frozen = Frozen("frozen")
    vars(frozen)["sdpa"] = TORCH_SDPA
    monkeypatch.setitem(sys.modules, "frozen", frozen)
    with intercept(seen):
        vars(frozen)["sdpa"](Q, K, V)
    assert len(seen.calls) == 1
    assert vars(frozen)["sdpa"] is TORCH_SDPA


def test_transformer_encoder_leaves_its_fast_path_and_returns_to_it(seen: Seen) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    states = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        # With padding, PyTorch's fast path would use nested tensors and never call SDPA.
        expected = encoder(states, src_key_padding_mask=padding)
        with intercept(seen):
            output = encoder(states, src_key_padding_mask=padding)
    assert len(seen.calls) == 3
    kept = ~padding
    torch.testing.assert_close(output[kept], expected[kept])
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("how", [intercept, observe])
def test_exception_passes_and_the_next_call_is_seen(how: Callable[..., Any]) -> None:
    calls = []

    def failing(*arguments: Any) -> Tensor:
        calls.append(arguments)
        raise TypeError("its own")

    with how(failing):
        for _ in range(2):
            with pytest.raises(TypeError, match="its own"):
                F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 2
    with pytest.raises(TypeError, match="its own"), how(failing):
        F.scaled_dot_product_attention(Q, K, V)


def test_handlers_output_is_the_models() -> None:
    answer = torch.ones_like(Q)
    with intercept(lambda arguments, proceed, sdpa: answer):
        assert F.scaled_dot_product_attention(Q, K, V) is answer


def test_another_program_s_replacement_is_called_through_and_put_back(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        reached.append(True)
        return TORCH_SDPA(*args, **kwargs) + 1

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", theirs)
        with intercept(seen):
            output = F.scaled_dot_product_attention(Q, K, V)
        assert F.scaled_dot_product_attention is theirs
    assert len(reached) == 1
    assert seen.functions == [theirs]
    assert torch.equal(output, TORCH_SDPA(Q, K, V) + 1)


def test_their_inner_call_is_part_of_the_outer_one(
    seen: Seen, imported_by_name: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *a: imported_by_name.sdpa(*a) + 1)
        with intercept(seen):
            output = F.scaled_dot_product_attention(Q, K, V)
    assert len(seen.calls) == 1
    assert torch.equal(output, TORCH_SDPA(Q, K, V) + 1)


def test_replacement_made_inside_stays(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        with intercept(seen):
            before = F.scaled_dot_product_attention

            def theirs(*args: Any, **kwargs: Any) -> Tensor:
                return before(*args, **kwargs) + 1

            patch.setattr(F, "scaled_dot_product_attention", theirs)
            F.scaled_dot_product_attention(Q, K, V)
            assert len(seen.calls) == 1
        assert F.scaled_dot_product_attention is theirs
        # The other patch still holds our function, which must no longer record.
        assert torch.equal(theirs(Q, K, V), TORCH_SDPA(Q, K, V) + 1)
        assert len(seen.calls) == 1
    # The other patch restored our function, which is harmless; set the builtin again.
    F.scaled_dot_product_attention = TORCH_SDPA


def test_stance_that_was_set_is_restored(seen: Seen) -> None:
    def stance() -> str:
        return torch._dynamo.eval_frame._stance.stance

    with torch.compiler.set_stance("eager_on_recompile"):
        with intercept(seen):
            assert stance() == "force_eager"
        assert stance() == "eager_on_recompile"


class Told:
    """Observer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, output, sdpa, query, *rest, scale=1):
        self.calls.append((output, sdpa, query, *rest, scale))


def test_observer_is_called_after_a_call_returns() -> None:
    told = Told()
    with observe(told):
        kept = F.scaled_dot_product_attention
        output = kept(Q, K, V, None, scale=0.5)
        with pytest.raises(TypeError, match="scaled_dot_product_attention"):
            kept(Q, K)
    kept(Q, K, V)
    assert len(told.calls) == 1
    for found, expected in zip(
        told.calls[0], (output, TORCH_SDPA, Q, K, V, None, 0.5), strict=True
    ):
        assert found is expected


def test_observer_is_called_once_for_nested_calls(
    imported_by_name: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with arguments that SDPA does not accept are not reported."""
    told = Told()

    def theirs(*tensors: Tensor, window: int = 0) -> Tensor:
        return imported_by_name.attend(*tensors) + window

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", theirs)
        with observe(told):
            assert torch.equal(F.scaled_dot_product_attention(Q, K, V), TORCH_SDPA(Q, K, V))
            output = F.scaled_dot_product_attention(Q, K, V, window=1)
    assert torch.equal(output, TORCH_SDPA(Q, K, V) + 1)
    assert [call[1] for call in told.calls] == [theirs]
