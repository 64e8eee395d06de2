"""`python -m quality.faults.false_alarms`: verify right models, and print each that is called wrong.

The models are every form of each call in quality/runtime/jobs.py, and of random calls, for `verify`; and the
layers of right_layers.py, each with many seeds, for `verify_layer`: 5,005 in onnxruntime 1.31. `make
false-alarms` runs them in each release, with the forms that the exporter writes for it, and `make test-cpus` as
on older CPUs. All of it takes hours: `--part 3/40` runs one model of 40, and `--seconds` ends a run in time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from feature_calls import DTYPES
from hypothesis import HealthCheck, Phase, given
from internals import (
    PROVIDERS,
    ExportCall,
    FormName,
    Input,
    Runtime,
    checked_call,
    runtime_text,
    version,
    with_operands,
)
from random_calls import CALLS, Part, taken_in_order
from short_runs import run_each_model_once

from quality.faults.right_layers import LAYERS
from quality.runtime.jobs import jobs
from sdpa_xp.biases import Bias
from sdpa_xp.masks import Mask
from sdpa_xp_export import TensorSpec, to_onnx, verify, verify_layer
from sdpa_xp_export.export import export_call
from sdpa_xp_export.forms.choice import FORMS, unsupported_reason

Right = tuple[str, ExportCall, FormName]
"""A model that is right: its name, its call and its form."""


def listed_calls() -> Iterator[tuple[str, ExportCall]]:
    """The calls that every release has to get right, ONNX's own among them."""
    for job in jobs():
        yield job.name, job.call


def random_calls(count: int, seed: int) -> Iterator[tuple[str, ExportCall]]:
    """As many random calls; those that the exporter refuses are left out."""
    chosen: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=HealthCheck,
    )
    @given(
        parts=CALLS,
        dtype=st.sampled_from(DTYPES),
        heads=st.sampled_from([4, 2, 1]),
        layout=st.sampled_from(["...HLE", "...LHE"]),
        outputs=st.sampled_from([("output",), ("output", "lse"), ("weights",)]),
        cached=st.booleans(),
    )
    def draw(**options: Any) -> None:
        chosen.append(options)

    draw()
    for number, options in enumerate(chosen):
        try:
            yield f"random call {number} of seed {seed}", random_call(**options)
        except (TypeError, ValueError):
            continue


def random_call(
    parts: dict[str, Part], dtype: str, heads: int, layout: str, outputs: tuple[str, ...], cached: bool
) -> ExportCall:
    """A call of open lengths, of the masks, biases and rules in `parts`."""
    keys = "P+L" if cached else "S"
    floats = "float32" if dtype in ("float16", "bfloat16") else dtype
    operands: dict[str, TensorSpec] = {
        "offset": TensorSpec("int64", ("B",)),
        "key_lengths": TensorSpec("int64", ("B",)),
        "query_lengths": TensorSpec("int32", ("B",)),
        "length": TensorSpec("int64", ("B",)),
        "query_ids": TensorSpec("int64", ("B", "L")),
        "key_ids": TensorSpec("int64", ("B", keys)),
        "attn_mask": TensorSpec("bool", ("B", 4, "L", keys)),
        "slopes": TensorSpec("float32", (4,)),
        "table": TensorSpec(dtype, (12, 4)),
        "sinks": TensorSpec(floats, (4,)),
        "scale": TensorSpec(floats, (4, 1, 1)),
        "bias": TensorSpec(dtype, ("B", 4, "L", keys)),
    }
    rules = taken_in_order(parts, lambda name: operands[name.rstrip("_0123456789")])
    length = "L" if cached else "S"
    past = {f"past_{name}": tokens(dtype, heads, "P", layout) for name in ("key", "value")} if cached else {}
    key = tokens(dtype, heads, length, layout)
    query = tokens(dtype, 4, "L", layout)
    return checked_call("false_alarms", query, key, key, **rules, **past, layout=layout, outputs=outputs)


def tokens(dtype: str, heads: int, length: str, layout: str) -> TensorSpec:
    return TensorSpec(dtype, ("B", heads, length, 16) if layout == "...HLE" else ("B", length, heads, 16))


def right_models(calls: Iterator[tuple[str, ExportCall]], runtime: Runtime) -> Iterator[Right]:
    """Each form of each call that computes it on the runtime."""
    for name, call in calls:
        for form in FORMS:
            if not unsupported_reason(form, call, runtime):
                yield name, call, form


def alarm(right: Right, runtime: str, **options: Any) -> str | None:
    """What `verify` says against a model, or None if it agrees."""
    name, call, form = right
    model = export_call(call, form=form, runtime=runtime)
    try:
        report = verify(model, **functions_of(call), **options)
    except ValueError as error:
        return f"{name}, {form}: {error}"
    return None if report.agrees else f"{name}, {form}: {report}"


def alarm_of_layer(name: str, seed: int) -> str | None:
    """What `verify_layer` says against a layer of that name, or None if it agrees."""
    layer, spec = LAYERS[name]
    report = verify_layer(to_onnx(layer, spec), layer, seed=seed)
    return None if report.agrees else f"{name}, seed {seed}: {report}"


def functions_of(call: ExportCall) -> dict[str, Any]:
    """The mask and the bias that hold a function, with specs; the metadata cannot hold them."""
    options = {name: getattr(call, name) for name in ("attn_mask", "bias")}
    return {name: with_specs(None, x) for name, x in options.items() if "from_function" in str(x)}


def with_specs(_: object, operand: Any) -> Any:
    """A mask or a bias with specs in place of the inputs of a graph."""
    if isinstance(operand, Mask | Bias):
        return with_operands(operand, with_specs)
    return TensorSpec(operand.dtype, operand.shape) if isinstance(operand, Input) else operand


def main(arguments: list[str]) -> int:
    """Print the false alarms and the count of models; 1 if there are alarms."""
    parser = argparse.ArgumentParser(prog="quality.faults.false_alarms", description=__doc__)
    parser.add_argument("--part", default="1/1", help="3/40 is the third, 43rd, 83rd model and so on")
    parser.add_argument("--random", type=int, default=400, help="the number of random calls")
    parser.add_argument("--layers", type=int, default=115, help="the number of seeds for each layer")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls, and of the inputs")
    parser.add_argument(
        "--here", action="store_true", help="run models in this process: an emulator does not emulate others"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after that")
    chosen = parser.parse_args(arguments)
    first, _, step = chosen.part.partition("/")
    text = runtime_text(PROVIDERS["cpu"], version())
    runtime, end = Runtime.parse("false_alarms", text), time.monotonic() + chosen.seconds

    def calls() -> Iterator[tuple[str, ExportCall]]:
        yield from listed_calls()
        if chosen.random:
            yield from random_calls(chosen.random, chosen.seed)

    models = [partial(alarm, right, text, seed=chosen.seed) for right in right_models(calls(), runtime)]
    seeds = range(chosen.seed, chosen.seed + chosen.layers)
    models += [partial(alarm_of_layer, name, seed) for seed in seeds for name in LAYERS]
    models = models[int(first) - 1 :: int(step)]
    if chosen.here:
        run_each_model_once(pytest.MonkeyPatch())
    ran = alarms = 0
    for say in models:
        if time.monotonic() > end:
            break
        said = say()
        ran += 1
        if said:
            alarms += 1
            print(f"FALSE ALARM: {said}", flush=True)
    print(f"onnxruntime {version()}: {alarms} false alarms in {ran} of {len(models)} models")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
