"""Errors with fields: the parts of a message, in this process and in another, and under other names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import sdpa_xp
from sdpa_xp.errors import ArgumentTypeError, ArgumentValueError, Message, message_of, renamed, summary

NAMES = {"form": "--form", "is_causal": "--is-causal", "overwrite": "--force", "scale": "--scale"}


def refusal() -> ArgumentValueError:
    with pytest.raises(ArgumentValueError) as caught:
        sdpa_xp.attention_weights(np.zeros((4, 2)), np.zeros((4, 2)), bias=np.zeros(3))
    return caught.value


def test_the_fields_are_the_parts_of_the_text() -> None:
    error = refusal()
    assert isinstance(error, ValueError)
    assert (error.function, error.argument) == ("attention_weights", "bias")
    assert error.got["bias.shape"] == "(3,)"
    assert str(error).startswith(f"attention_weights: {error.rule}; got bias.shape=(3,), ")
    assert str(error).endswith(error.hint)


@pytest.mark.parametrize("change", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", [ArgumentTypeError, ArgumentValueError])
def test_errors_keep_their_fields_elsewhere(kind: Any, change: Any) -> None:
    error = kind("f", "`scale` must be a number", {"scale": "x"}, "Pass 1.")
    other = change(error)
    assert type(other) is kind
    assert (str(other), other.message.parts, other.argument) == (str(error), error.message.parts, "scale")
    message = change(Message("f", "`a` must be", {"a": 1}))
    assert (message, message.got) == ("f: `a` must be; got a=1.", {"a": "1"})


def test_an_error_may_be_raised_anew_with_its_text() -> None:
    """As Keras does, to say in which layer it was, and torch's DataLoader, to raise it in another process."""
    error = refusal()
    other = pickle.loads(pickle.dumps(type(error)(f"in a layer: {error}")))
    assert (type(other), str(other)) == (ArgumentValueError, f"in a layer: {error}")
    assert (other.rule, other.function, other.got) == (str(other), "", {})
    assert message_of(other) is None


@pytest.mark.parametrize(
    ("rule", "argument"),
    [
        ("`bias.slopes` must be", "bias.slopes"),
        ("`is_causal=True` needs no mask", "is_causal"),
        ("the function of `mask` must return", "mask"),
        ("arrays must be of one library", ""),
    ],
)
def test_the_argument_is_what_the_rule_names_first(rule: str, argument: str) -> None:
    assert Message("f", rule, {}).argument == argument


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("`form` cannot be that", "`--form` cannot be that"),
        ("Pass `overwrite=True` to replace it.", "Pass `--force` to replace it."),
        ("`scale.dtype` and `scale[0]`", "`--scale.dtype` and `--scale[0]`"),
        ("the form of a runtime, `reform` and `x.form`", "the form of a runtime, `reform` and `x.form`"),
        ("`layout='...HLE'`", "`layout='...HLE'`"),
    ],
)
def test_names_in_backticks_get_other_names(text: str, words: str) -> None:
    assert renamed(text, NAMES) == words


def test_what_a_user_wrote_stays() -> None:
    message = Message(
        "f", "`form` must be auto", {"form": "'`form` form=1'", "scale.dtype": "int64"}, "See `form`."
    )
    assert message.renamed("export", NAMES) == (
        "export: `--form` must be auto; got --form='`form` form=1', --scale.dtype=int64. See `--form`."
    )


def test_errors_of_others_have_one_line() -> None:
    error = refusal()
    assert summary(error, "attention_weights") == error.message.statement
    assert summary(error).startswith("attention_weights: `bias` must")
    long = ArgumentValueError("f", "`a` must be", {"a": 1}, "Pass 2.")
    assert (summary(long), summary(long, "f")) == ("f: `a` must be; got a=1", "`a` must be; got a=1")
    assert summary(KeyError("no\nsuch")) == r"'no\nsuch'"
    assert summary(ValueError("First. Second.\nThird.")) == "First"
    assert summary(RuntimeError()) == "RuntimeError"
    assert message_of(ValueError("f: text")) is None
    assert (
        message_of(FileExistsError(Message("save", "`path` must not exist", {"path": "a"}))).argument == "path"
    )
