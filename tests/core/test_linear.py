"""Linear attention and the causal convolution: the recurrence in float64, ONNX's cases, derivatives."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from internals import dtype_name, judge, override
from libraries import Library
from linear_cases import RULES, Arrays, assert_as_onnx, draw, onnx_cases, recurrence

from sdpa_xp import causal_conv_with_state, jvp, linear_attention, linear_attention_vjp


def run(library: Library, arrays: Arrays, **rules: Any) -> tuple[np.ndarray, np.ndarray]:
    result = library.call(linear_attention, **arrays, **rules)
    return library.get(result.output), library.get(result.state)


def assert_agrees(results: Any, arrays: Arrays, dtype: str, **scale: Any) -> None:
    """The output and the state, by the rounding errors of the recurrence in the dtype of the state."""
    state_dtype = np.float64 if dtype == "float64" else np.float32
    expected, textbook = recurrence(arrays, **scale), recurrence(arrays, state_dtype, **scale)
    for part, name in enumerate((dtype, state_dtype.__name__)):
        assert dtype_name(results[part].dtype) == name
        verdict = judge(results[part], expected[part], textbook[part].astype(name), name)
        assert verdict.agrees, verdict


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.leaves_out("jax-debug")
def test_each_rule_is_the_recurrence(library: Library, rule: str, dtype: str) -> None:
    """For one token, for whole chunks, and for a chunk that is not full; query heads share a state."""
    library.needs(dtype)
    if library.lazy:
        pytest.skip("refused")
    for length in (1, 19):
        arrays = draw(rule, length, dtype)
        assert_agrees(run(library, arrays, chunk_size=8), arrays, dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [2, 63, 64, 65, 1000])
def test_chunks_change_rounding_alone(rule: str, length: int) -> None:
    arrays = draw(rule, length, "float32")
    for size in (1, 3, 64, 2**20):
        if (size > 1 or length < 100) and (size < 100 or "beta" not in arrays):
            assert_agrees(
                linear_attention(**arrays, chunk_size=size, scale=-2.0), arrays, "float32", scale=-2.0
            )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [0.01, 20.0])
def test_ten_thousand_tokens(rule: str, decay: float) -> None:
    arrays = draw(rule, 10_000, "float32", heads=2)
    if "decay" in arrays:
        arrays["decay"] = np.full_like(arrays["decay"], -decay)
    assert_agrees(linear_attention(**arrays), arrays, "float32")


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_a_call_with_the_state(rule: str) -> None:
    """So is a part of any length; without a state, it is zeros."""
    arrays = draw(rule, 21)
    tokens = {name: array for name, array in arrays.items() if name != "state"}
    whole, state, outputs = linear_attention(**tokens), None, []
    for start, stop in itertools.pairwise((0, 1, 2, 9, 21)):
        part = {name: array[..., start:stop, :] for name, array in tokens.items()}
        output, state = linear_attention(**part, state=state)
        outputs.append(output)
    np.testing.assert_allclose(np.concatenate(outputs, axis=-2), whole.output, atol=1e-13)
    np.testing.assert_allclose(state, whole.state, atol=1e-13)
    fade = np.exp(tokens["decay"][..., 9:, :].sum(-2))[..., None] if "decay" in tokens else 1.0
    first, second = (
        linear_attention(**{name: x[..., cut, :] for name, x in tokens.items()}).state
        for cut in (slice(9), slice(9, None))
    )
    if not rule.startswith("gated_delta"):  # where little is left of the first
        assert np.allclose(fade * first + second, whole.state, atol=1e-13) == ("beta" not in tokens)


@pytest.mark.parametrize("rule", RULES)
def test_a_nan_shows_from_its_token_on_and_never_before(rule: str) -> None:
    arrays, token = draw(rule, 16), 9
    clean = linear_attention(**arrays, chunk_size=16)
    for name in arrays.keys() - {"state"}:
        spoilt = arrays | {name: arrays[name].copy()}
        spoilt[name][..., token, 0] = np.nan
        output, state = linear_attention(**spoilt, chunk_size=16)
        np.testing.assert_array_equal(output[..., :token, :], clean.output[..., :token, :])
        after = np.isnan(output).any(-1)
        assert after[..., token].all(), name
        assert after[..., token + 1 :].all() == np.isnan(state).any() == (name != "query"), name


def test_layouts_leading_axes_and_one_head(library: Library) -> None:
    if library.lazy:
        pytest.skip("refused")
    arrays = draw("gated_delta", 6, "float32")
    arrays["decay"], arrays["beta"] = arrays["decay"][:1, :, :1], arrays["beta"][0, :1]
    arrays["key"] = arrays["key"][0]
    whole = {name: np.broadcast_to(x, (2, 2, 6, x.shape[-1])) for name, x in arrays.items() if name[0] in "kdb"}
    expected = recurrence(arrays | whole)
    swapped = {name: x if name == "state" else np.swapaxes(x, -2, -3) for name, x in arrays.items()}
    output, state = run(library, swapped, layout="...LHE")
    for result in (run(library, arrays), (np.swapaxes(output, 1, 2), state)):
        for part in (0, 1):
            np.testing.assert_allclose(result[part], expected[part], atol=2e-6)
    one = {name: np.asarray(x[0, 0], order="C") for name, x in (arrays | whole).items()}
    output, state = run(library, one)
    assert (output.shape, state.shape) == ((6, 5), (8, 5))
    np.testing.assert_allclose(output, expected[0][0, 0], atol=2e-6)


def test_empty_axes() -> None:
    arrays = draw("gated_delta", 3)
    none = {name: x if name == "state" else x[..., :0, :] for name, x in arrays.items()}
    (output, state), pullback = linear_attention_vjp(**none)
    np.testing.assert_array_equal(state, arrays["state"])
    assert output.shape == (2, 4, 0, 5)
    assert not np.shares_memory(state, arrays["state"])
    np.testing.assert_array_equal(pullback(output, state)["state"], state)
    narrow = arrays | {"value": arrays["value"][..., :0], "state": arrays["state"][..., :0]}
    assert [x.shape for x in linear_attention(**narrow)] == [(2, 4, 3, 0), (2, 2, 8, 0)]


@pytest.mark.parametrize("rule", RULES)
def test_memory_is_linear_in_the_tokens(rule: str) -> None:
    def peak(length: int) -> int:
        arrays = draw(rule, length, "float32")
        tracemalloc.start()
        linear_attention(**arrays)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    short, long = peak(8192), peak(16384)
    inputs = sum(array.nbytes for array in draw(rule, 16384, "float32").values())
    assert long < 2.2 * short
    assert long < 6 * inputs


# Derivatives


def cotangents(output: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal(output.shape), rng.standard_normal(state.shape)


def slopes(
    arrays: Arrays, weights: tuple[np.ndarray, np.ndarray], tangents: Arrays, step: float = 1e-6
) -> float:
    """The derivative of <weights, result> along tangents, by differences in float64; -inf does not move."""
    ends = []
    for sign in (1, -1):
        with np.errstate(invalid="ignore"):
            moved = {name: x + sign * step * tangents[name] for name, x in arrays.items()}
        ends.append(sum(float(np.sum(c * x)) for c, x in zip(weights, recurrence(moved), strict=True)))
    return (ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_recurrence(
    library: Library, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each input by itself, by differences; and of tangents through our own arrays with derivatives.

    Each chunk is computed by itself, as in a long call.
    """
    override(monkeypatch, "LINEAR_ELEMENTS", 1)
    if library.lazy:
        pytest.skip("refused")
    library.needs("float64")
    arrays = draw(rule, 11)
    weights = cotangents(np.empty((2, 4, 11, 5)), arrays["state"])

    def gradients_of(*weights: Any, **arrays: Any) -> Any:
        return linear_attention_vjp(**arrays, chunk_size=4)[1](*weights)

    gradients = library.call(gradients_of, *weights, **arrays)
    gradients = {name: library.get(x) for name, x in gradients.items()}
    assert gradients.keys() == arrays.keys()
    rng, total, directions = np.random.default_rng(2), 0.0, {}
    for name, array in arrays.items():
        assert gradients[name].shape == array.shape
        directions[name] = rng.standard_normal(array.shape)
        still = {other: np.zeros_like(x) for other, x in arrays.items()} | {name: directions[name]}
        slope = float(np.sum(gradients[name] * directions[name]))
        assert slope == pytest.approx(slopes(arrays, weights, still), rel=1e-6, abs=1e-6), name
        total += slope
    if library.name == "numpy":
        _, tangent = jvp(
            lambda *x: linear_attention(**dict(zip(arrays, x, strict=True)), chunk_size=4),
            tuple(arrays.values()),
            tuple(directions.values()),
        )
        moved = sum(float(np.sum(c * x)) for c, x in zip(weights, tangent, strict=True))
        assert moved == pytest.approx(total, rel=1e-10)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rule", RULES)
def test_torch_differentiates_it(rule: str) -> None:
    import torch

    arrays = draw(rule, 11)
    (output, state), pullback = linear_attention_vjp(**arrays, chunk_size=4)
    weights = cotangents(output, state)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    result = linear_attention(**leaves, chunk_size=4)
    torch.autograd.backward([*result], [torch.tensor(x) for x in weights])
    for name, gradient in pullback(*weights).items():
        assert leaves[name].grad is not None
        np.testing.assert_allclose(leaves[name].grad.numpy(), gradient, atol=1e-12)


@pytest.mark.needs("jax")
def test_jax_compiles_its_chunks_whole() -> None:
    """Not each operation of each chunk for itself, which took 20 s on an AMD EPYC with AVX2."""
    import jax

    programs: list[str] = []

    def count(name: str, _seconds: float, **_more: object) -> None:
        programs.extend([name] * name.endswith("backend_compile_duration"))

    arrays = {name: jax.numpy.asarray(x) for name, x in draw("gated_delta", 77, "float32").items()}
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        result, pullback = linear_attention_vjp(**arrays, chunk_size=4)
        pullback(result.output)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert 0 < len(programs) < 60


@pytest.mark.needs("jax")
def test_jax_differentiates_it_in_a_jit() -> None:
    import jax
    from libraries import jax_x64

    arrays = draw("gated_delta", 11)
    (output, state), pullback = linear_attention_vjp(**arrays, chunk_size=4)
    weights = cotangents(output, state)

    def loss(arrays: Any) -> Any:
        return sum(
            (c * x).sum() for c, x in zip(weights, linear_attention(**arrays, chunk_size=4), strict=True)
        )

    with jax_x64(True):
        gradients = jax.jit(jax.grad(loss))({name: jax.numpy.asarray(x) for name, x in arrays.items()})
    for name, gradient in pullback(*weights).items():
        np.testing.assert_allclose(gradients[name], gradient, atol=1e-12)


def test_gradients_of_what_is_broadcast_are_summed() -> None:
    arrays = draw("gated_delta", 6)
    small = arrays | {"decay": arrays["decay"][0, :, :1], "beta": arrays["beta"][:1], "key": arrays["key"][:1]}
    whole = small | {
        name: np.broadcast_to(small[name], arrays[name].shape) for name in ("decay", "beta", "key")
    }
    gradients, full = (linear_attention_vjp(**x)[1](np.ones((2, 4, 6, 5))) for x in (small, whole))
    np.testing.assert_allclose(gradients["decay"], full["decay"].sum((0, 2))[:, None], atol=1e-12)
    for name in ("beta", "key"):
        np.testing.assert_allclose(gradients[name], full[name].sum(0, keepdims=True), atol=1e-12)


# Refusals

X = draw("gated_delta", 3)


@pytest.mark.needs("jax")
def test_a_length_that_is_a_symbol_is_refused() -> None:
    import jax
    from jax import export

    (length,) = export.symbolic_shape("L")
    query = jax.ShapeDtypeStruct((2, length, 8), np.float32)
    with pytest.raises(ValueError, match=r"`query` \(L\) must be a number, because its chunks are counted"):
        export.export(jax.jit(linear_attention))(query, query, query)


@pytest.mark.needs("dask")
def test_lazy_chunks_are_refused() -> None:
    import dask.array

    with pytest.raises(TypeError, match="`query` must not be in lazy chunks"):
        linear_attention(**{name: dask.array.asarray(x) for name, x in X.items()})


# The convolution


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, state: np.ndarray) -> np.ndarray:
    padded = np.concatenate([state, x], axis=-1)
    rows = [
        np.convolve(row, weight[n % 3, 0, ::-1], "valid")
        for n, row in enumerate(padded.reshape(-1, padded.shape[-1]))
    ]
    total = np.reshape(rows, x.shape) + bias[:, None]
    return total / (1 + np.exp(-total))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_the_convolution_passes_its_state_on(library: Library, length: int) -> None:
    rng = np.random.default_rng(0)
    if library.lazy:
        pytest.skip("its chunks of 3 inputs would be cut anew")
    x, weight, bias, state = (rng.standard_normal(s).astype("f") for s in ((2, 3, 9), (3, 1, 4), 3, (2, 3, 3)))
    expected, parts = convolved(x, weight, bias, state), []
    for start in range(0, 9, length):
        result = library.call(
            causal_conv_with_state, x[..., start : start + length], weight, bias, state, activation="silu"
        )
        state = library.get(result.state)
        parts.append(library.get(result.output))
    np.testing.assert_allclose(np.concatenate(parts, axis=-1), expected, atol=2e-6)
    np.testing.assert_array_equal(state, x[..., -3:])


# ONNX's own cases

OPERATORS: dict[str, Any] = {
    "LinearAttention": (linear_attention, 14),
    "CausalConvWithState": (causal_conv_with_state, 13),
}


@pytest.mark.needs("onnx")
@pytest.mark.parametrize("operator", OPERATORS)
def test_all_cases_of_the_operators(library: Library, operator: str) -> None:
    if library.lazy:
        pytest.skip("refused, or cut into other chunks")
    function, count = OPERATORS[operator]
    cases = [*onnx_cases(operator)]
    assert len(cases) == count
    for name, arrays, rules, outputs in cases:
        if library.holds(outputs[0].dtype.name):
            results = library.call(function, **arrays, **rules)
            assert_as_onnx(map(library.get, results), outputs, name)
