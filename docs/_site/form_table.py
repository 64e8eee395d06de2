"""The forms and their operators, and which one `form="auto"` takes for a feature or a length, by runtime."""

from __future__ import annotations

from typing import Any, NamedTuple

from evidence import Notes, table
from internals import ExportCall, Runtime, checked_call

from sdpa_xp import masks
from sdpa_xp_export import TensorSpec
from sdpa_xp_export.forms.choice import FORMS, check_tensors, choose

RUNTIMES = (
    ">=1.23;cpu",
    ">=1.28;cpu",
    ">=1.31;cpu",
    ">=1.28;cuda",
    ">=1.28;webgpu",
    "openvino>=2026.4;cpu",
    "onnx",
)
"""Without `onnxruntime` at the front."""
HEADS, KEY_HEADS, WIDTH = 8, 2, 64
LENGTHS = (128, 1024, 4096, 8192, "L")
CALLS_BY_LENGTH: dict[str, dict[str, Any]] = {
    "all pairs": {},
    "causal": {"is_causal": True},
    "a window of 256": {"attn_mask": masks.sliding_window(255, 0)},
}


class Size(NamedTuple):
    """The lengths of a call, and what the page calls them."""

    words: str
    batch: int | str
    length: int | str
    past: int | str


SIZES = (
    Size("128 tokens", 1, 128, 128),
    Size("8,192 tokens", 1, 8192, 8192),
    Size("open lengths", "B", "L", "P"),
)


def features(size: Size) -> dict[str, ExportCall]:
    """The rows: calls with one feature each, at these lengths."""
    cache = {name: _tokens(size, size.past, KEY_HEADS) for name in ("past_key", "past_value")}
    lengths = TensorSpec("int64", (size.batch,))
    per_head = TensorSpec("float32", (HEADS,))
    rules: dict[str, dict[str, Any]] = {
        "all pairs": {},
        "`is_causal`": {"is_causal": True},
        "a window: `sliding_window(63, 0)`": {"attn_mask": masks.sliding_window(63, 0)},
        "`padding`": {"attn_mask": masks.padding(lengths)},
        "an array as `attn_mask`": {"attn_mask": TensorSpec("bool", (size.length, size.length))},
        "`softcap`": {"softcap": 30.0, "is_causal": True},
        "`sinks`": {"sinks": per_head, "is_causal": True},
        "a cache: `past_key`": {"is_causal": True} | cache,
        "a cache with free space: `past_lengths`": {"is_causal": True, "past_lengths": lengths} | cache,
        "`lse` as an output": {"is_causal": True, "outputs": ("output", "lse")},
        "`weights` as an output": {"is_causal": True, "outputs": ("weights",)},
    }
    calls = {name: _call(size, "float32", **rule) for name, rule in rules.items()}
    equal_heads = {"all pairs, as many key heads": _call(size, "float32", key_heads=HEADS)}
    dtypes = {
        f"{dtype}, `is_causal`": _call(size, dtype, is_causal=True)
        for dtype in ("float16", "bfloat16", "float64")
    }
    return calls | equal_heads | dtypes


def page() -> str:
    """The table in Markdown, with the messages of what is refused below it."""
    notes = Notes("form-note")
    header = ["", *(f"`{runtime}`" for runtime in RUNTIMES)]
    calls = [features(size) for size in SIZES]
    names: dict[tuple[str, ...], list[str]] = {}  # by the cells of a row
    for name in calls[0]:
        cells = (cell(notes, [by_name[name] for by_name in calls], runtime) for runtime in RUNTIMES)
        names.setdefault(tuple(cells), []).append(name)
    rows = [["; ".join(features), *cells] for cells, features in names.items()]
    on_cpu, on_wasm = (
        [cell(Notes(""), [by_name[name] for by_name in calls], f">=1.28;{provider}") for name in calls[0]]
        for provider in ("cpu", "wasm")
    )
    if any(cpu != wasm and "refused" not in wasm for cpu, wasm in zip(on_cpu, on_wasm, strict=True)):
        raise AssertionError("the page says that `wasm` has the forms of `cpu`")
    return f"{table(header, rows)}\n\n{notes.html()}"


def forms() -> str:
    """The table of the forms in Markdown: operators, first releases and opsets."""
    header = ["form", "operators", "fixed lengths, from", "open lengths, from", "opsets", "default opset"]
    rows = []
    for name, form in FORMS.items():
        batch = ", with a fixed batch" if name == "grouped_query" else ""
        when_open = _release(max(form.since, form.empty_since)) + batch
        opsets = f"{form.opsets[0]} to {form.opsets[-1]}"
        rows.append([f"`{name}`", form.nodes, _release(form.since), when_open, opsets, str(form.default_opset)])
    return table(header, rows)


def cell(notes: Notes, calls: list[ExportCall], runtime: str) -> str:
    """The forms of the calls in order; the last one is that of all calls from there on."""
    forms = [_chosen(notes, call, runtime) for call in calls]
    while forms[1:] and forms[-1] == forms[-2]:
        forms.pop()
    return ", ".join(forms)


def _chosen(notes: Notes, call: ExportCall, runtime: str) -> str:
    target = Runtime.parse("form_table", written(runtime))
    try:
        check_tensors("export_attention", call, target)
        form, _ = choose("export_attention", call, "auto", None, target)
    except TypeError as error:
        return f"refused{notes.mark(str(error))}"
    return f"`{form}`"


def written(runtime: str) -> str:
    """Return a runtime as it is passed."""
    return f"onnxruntime{runtime}" if runtime.startswith(">") else runtime


def _release(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _call(size: Size, dtype: str, *, key_heads: int = KEY_HEADS, **rules: Any) -> ExportCall:
    query, key = (_tokens(size, size.length, heads, dtype) for heads in (HEADS, key_heads))
    return checked_call("form_table", query, key, key, **rules)


def _tokens(size: Size, length: int | str, heads: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, (size.batch, heads, length, WIDTH))
