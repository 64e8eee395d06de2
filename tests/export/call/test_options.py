"""The table of options: the signature, the metadata, files and flags all have what it has."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
from command import refused, run
from internals import OF_TRACED_CALLS, OPTIONS, checked_call, from_json, to_json

from sdpa_xp import biases, masks
from sdpa_xp_export import TensorSpec, export_attention
from sdpa_xp_export.cli.export import KEYS
from sdpa_xp_export.forms.choice import FORMS

LENGTHS: Any = TensorSpec("int64", ("B",))
SINKS = np.arange(8, dtype="float32")
EVERY: dict[str, Any] = {
    "query": TensorSpec("float32", ("B", "L", 8, 32)),
    "key": TensorSpec("float32", ("B", "L", 2, 32)),
    "value": TensorSpec("float32", ("B", "L", 2, 32)),
    "attn_mask": masks.padding(LENGTHS) & masks.chunked(4),
    "bias": biases.alibi(8),
    "is_causal": True,
    "scale": TensorSpec("float64", (8, 1, 1)),
    "softcap": 5.0,
    "sinks": SINKS,
    "softmax_dtype": "float64",
    "layout": "...LHE",
    "past_key": TensorSpec("float32", ("B", "P", 2, 32)),
    "past_value": TensorSpec("float32", ("B", "P", 2, 32)),
    "past_lengths": LENGTHS,
    "outputs": ("lse", "output"),
}
"""A call with a value of its own for each option that a file can hold."""
WRITTEN = [name for name, option in OPTIONS.items() if option.kind]


def test_the_signature_has_each_option_with_its_default() -> None:
    parameters = dict(inspect.signature(export_attention).parameters)
    for name in ("form", "opset", "runtime"):  # of the graph
        del parameters[name]
    defaults = {name: option.default for name, option in OPTIONS.items() if name not in OF_TRACED_CALLS}
    assert [*parameters] == [*defaults]
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    assert required == ["query", "key", "value"]
    assert [parameters[name].default for name in defaults][3:] == [*defaults.values()][3:]


def test_metadata_hold_each_option() -> None:
    call = checked_call("test", **EVERY)
    text = to_json(call)
    assert [*json.loads(text)] == WRITTEN == [*EVERY]
    assert to_json(from_json(text, call.initializers)) == text


def test_an_option_as_by_default_is_not_written() -> None:
    qkv = TensorSpec("float32", ("B", 8, "L", 64))
    assert json.loads(to_json(checked_call("test", qkv, qkv, qkv))).keys() == {
        *("query", "key", "value"),
        *("is_causal", "scale"),  # for readers who do not know the defaults
    }


def test_each_option_is_a_flag_and_a_key_of_files() -> None:
    words = run("export", "--help")[1].split()
    flags = {f"--{name.replace('_', '-')}" for name in WRITTEN}
    assert flags <= {*words}
    assert [*KEYS][: len(WRITTEN)] == WRITTEN
    for name in OPTIONS.keys() - {*WRITTEN}:
        assert "No such option" in refused("export", f"--{name.replace('_', '-')}", "0")


def test_each_form_says_whether_it_takes_an_option() -> None:
    """By its code for these, and else by `takes` of its record; an option without a noun would be left out."""
    tokens = {"query", "key", "value", "past_key", "past_value", "past_lengths"}
    scores = {"attn_mask", "bias", "is_causal", "scale", "dropout_p", "softmax_dtype"}
    by_their_code = tokens | scores | {"layout", "outputs", *OF_TRACED_CALLS}
    assert {name for name, option in OPTIONS.items() if not option.noun} == by_their_code
    assert all({*form.takes} <= OPTIONS.keys() - by_their_code for form in FORMS.values())
