"""Each output in each dtype, layout and rank is what the function of the library by its name gives."""

from __future__ import annotations

from typing import Any

import graphs
import ml_dtypes
import numpy as np
import pytest
from graphs import BATCH, EVERY_CALL, RULES, Rules, check, check_forms, library, moved, operands, qkv, run, spec
from internals import open_session, reference, run_session
from short_runs import assert_right

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec, export_attention, verify

pytestmark = pytest.mark.usefixtures("small_blocks")

F = np.float32
EVERY = ("output", "lse", "weights", "scores")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("outputs", [(name,) for name in EVERY] + [EVERY, ("scores", "output")], ids="-".join)
def test_outputs(rng: np.random.Generator, outputs: tuple[str, ...], rules: Rules, dtype: str) -> None:
    """In the order that they are asked for."""
    arguments = operands(rules, rng, 5, 9, dtype)
    names = {BATCH: "B", 5: "L", 9: "S"}
    check(qkv(rng, dtype=dtype), rules, arguments, names=names, outputs=outputs, form="primitive")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("outputs", [("output",), ("lse", "output")], ids="-".join)
def test_layouts(rng: np.random.Generator, outputs: tuple[str, ...], name: str, dtype: str) -> None:
    """Each layout beside each rule, each dtype, and each choice of outputs."""
    rules, dtypes = RULES[name], ["float16", "float32", "float64"]
    layout = ["...HLE", "...LHE"][([*RULES].index(name) + dtypes.index(dtype) + len(outputs)) % 2]
    arguments = operands(rules, rng, 5, 9, dtype)
    arrays = moved(qkv(rng, dtype=dtype), layout)
    check_forms(arrays, rules, arguments, names={BATCH: "B", 5: "L", 9: "S"}, outputs=outputs, layout=layout)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 16), (9, 16), (9, 12)),
        ((4, 5, 16), (2, 9, 16), (2, 9, 12)),
        ((4, 5, 16), (1, 9, 16), (1, 9, 12)),
        ((5, 16), (1, 9, 16), (9, 12)),
        ((1, 5, 16), (9, 16), (1, 1, 9, 12)),
        ((3, 4, 5, 16), (2, 9, 16), (2, 9, 12)),
        ((3, 4, 5, 16), (1, 4, 9, 16), (3, 4, 9, 12)),
        ((1, 4, 5, 16), (3, 2, 9, 16), (1, 2, 9, 12)),
        ((6, 3, 4, 5, 16), (3, 2, 9, 16), (1, 2, 9, 12)),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", [True, False])
def test_ranks_and_batches(rng: np.random.Generator, shapes: Any, layout: str, fixed: bool) -> None:
    arrays = {
        name: rng.standard_normal(shape).astype(F)
        for name, shape in zip(("query", "key", "value"), shapes, strict=True)
    }
    arrays = moved(arrays, layout)
    names = {} if fixed else {6: "A", 3: "B", 5: "L", 9: "S"}

    def rules(bias: Any) -> dict[str, Any]:
        return {"attn_mask": masks.causal(1), "bias": bias}

    arguments = {"bias": rng.standard_normal((5, 9)).astype(F)}
    check_forms(arrays, rules, arguments, names=names, layout=layout)
    check_forms(arrays, rules, arguments, names=names, layout=layout, outputs=("output", "lse"))


@pytest.mark.parametrize("outputs", [("weights",), ("scores",)])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_weights_and_scores_of_each_rank(rng: np.random.Generator, rank: int, outputs: tuple[str, ...]) -> None:
    batch = (6, BATCH)[4 - rank :] if rank > 3 else ()
    arrays = qkv(rng, batch=batch)
    arrays = {name: x[0] for name, x in arrays.items()} if rank == 2 else arrays
    rules: Rules = lambda: {"attn_mask": masks.sliding_window(1, 1), "softcap": 3.0}  # noqa: E731
    check(arrays, rules, {}, names={6: "A", BATCH: "B", 5: "L", 9: "S"}, form="primitive", outputs=outputs)


@pytest.mark.parametrize("form", EVERY_CALL)
def test_softmax_in_float64_of_float32(rng: np.random.Generator, form: str) -> None:
    """Scores of some hundreds, of which a softmax in float32 loses three digits."""
    arrays = qkv(rng) | {"query": rng.standard_normal((BATCH, 4, 5, 16)).astype(F) * 100}
    specs = [spec(arrays[name], {BATCH: "B", 5: "L", 9: "S"}) for name in ("query", "key", "value")]
    model = export_attention(*specs, softmax_dtype="float64", outputs=("output", "lse"), form=form)
    outputs = run(model, arrays)
    wanted = library(arrays, ("output", "lse"), softmax_dtype=np.float64)
    assert outputs["lse"].dtype == wanted["lse"].dtype == np.float64
    np.testing.assert_allclose(outputs["lse"], wanted["lse"], rtol=1e-14)
    np.testing.assert_allclose(outputs["output"], wanted["output"], rtol=0, atol=1e-6)
    assert_right(model)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def of_bfloat16(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(BFLOAT16) if x.dtype.kind == "f" else x for name, x in arrays.items()}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("layout", ["...HLE", "...LHE"])
def test_bfloat16(rng: np.random.Generator, rules: Rules, layout: str) -> None:
    """The output is the reference of the inputs, rounded once, where that is finite."""
    arrays = of_bfloat16(qkv(rng))
    arguments = of_bfloat16(operands(rules, rng, 5, 9))
    names = {BATCH: "B", 5: "L", 9: "S"}
    argument_specs = rules(**{name: spec(x, names) for name, x in arguments.items()})
    specs = [spec(x, names) for x in moved(arrays, layout).values()]
    wide = {name: x.astype(F) if x.dtype == BFLOAT16 else x for name, x in arguments.items()}
    exact = library({name: x.astype(F) for name, x in arrays.items()}, ("output",), **rules(**wide))["output"]
    for model in graphs.in_each_form(*specs, **argument_specs, layout=layout, forms=["attention", *EVERY_CALL]):
        output = run_session(open_session(model, "CPUExecutionProvider"), moved(arrays, layout) | arguments)[
            "output"
        ]
        assert output.dtype == BFLOAT16
        output = moved({"output": output}, layout)["output"]
        np.testing.assert_allclose(output.astype(F), exact, rtol=2**-8, atol=2**-20)
        assert_right(model)


def test_bfloat16_outputs_and_cache(rng: np.random.Generator) -> None:
    """lse stays float32; a bfloat16 in a cache is passed on bit by bit, NaN too."""
    arrays = of_bfloat16(qkv(rng, 2, 2, batch=(1,)))
    past = of_bfloat16({f"past_{name}": x for name, x in qkv(rng, 2, 5, batch=(1,)).items() if name != "query"})
    past["past_value"][0, 0, 0] = np.nan
    names = {5: "P", 2: "L"}
    specs = {
        name: TensorSpec("bfloat16", (1, x.shape[1], names[x.shape[2]], x.shape[3]))
        for name, x in arrays.items()
    }
    pasts = {name: TensorSpec("bfloat16", (1, 2, "P", x.shape[3])) for name, x in past.items()}
    model = export_attention(**specs, **pasts, is_causal=True, outputs=("output", "lse"))
    outputs = run_session(open_session(model, "CPUExecutionProvider"), arrays | past)
    whole = np.concatenate([past["past_value"], arrays["value"]], axis=-2)
    np.testing.assert_array_equal(outputs["present_value"].view(np.uint16), whole.view(np.uint16))
    keys = np.concatenate([past["past_key"], arrays["key"]], axis=-2).astype(np.float64)
    _, lse, _ = reference.attention(arrays["query"], keys, keys, np.tri(2, 7, 5, dtype=bool))
    np.testing.assert_allclose(outputs["lse"], lse, rtol=0, atol=2e-6)
    assert outputs["lse"].dtype == F
    assert_right(model)


@pytest.mark.usefixtures("short_verify")
def test_bfloat16_that_is_wrong_is_caught() -> None:
    qkv = TensorSpec("bfloat16", ("B", 2, "L", 8))
    model = export_attention(qkv, qkv, qkv, form="primitive")
    (scaled,) = (node for node in model.graph.node if node.op_type == "Mul")
    scaled.op_type = "Div"
    assert not verify(model).agrees


def test_weights_of_a_batch_that_the_values_have(rng: np.random.Generator) -> None:
    """Those of the library know no values; the graph has one set of weights for each output."""
    arrays = qkv(rng, batch=(1,)) | {"value": rng.standard_normal((BATCH, 2, 9, 12)).astype(F)}
    specs = [spec(arrays[name], {BATCH: "B"}) for name in ("query", "key", "value")]
    model = export_attention(*specs, outputs=("output", "weights", "lse"))
    assert_right(model)
    outputs, expected = run(model, arrays), library(arrays, ("output", "weights", "lse"))
    expected["weights"] = np.broadcast_to(expected["weights"], (BATCH, 4, 5, 9))
    graphs.assert_close(outputs, expected)
