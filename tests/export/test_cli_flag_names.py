"""Messages of the command: keywords of Python become flags, and what a user wrote stays."""

from __future__ import annotations

import pytest

from sdpa_xp_export.cli.flag_names import with_flags

FLAGS = {"form": "--form", "runtime": "--runtime", "is_causal": "--is-causal", "overwrite": "--force"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("`form` cannot be that; got form='x'.", "`--form` cannot be that; got --form='x'."),
        ("`is_causal` must be a bool; got is_causal=1.", "`--is-causal` must be a bool; got --is-causal=1."),
        ("Pass overwrite=True to replace it.", "Pass --force to replace it."),
        ("`is_causal=True` is the causal mask", "`--is-causal` is the causal mask"),
        ("got is_causal=Truest", "got --is-causal=Truest"),
        ("got path='`form` form=1', form=2", "got path='`form` form=1', --form=2"),
        (r"got path='it\'s form=1', form=2", r"got path='it\'s form=1', --form=2"),
        ("the model's form=1 and `form`", "the model's --form=1 and `--form`"),
        ("`form.name`, x.form=1, --form=2, reform=3", "`form.name`, x.form=1, --form=2, reform=3"),
        ("the form of a runtime", "the form of a runtime"),
    ],
)
def test_keywords_become_flags(text: str, words: str) -> None:
    assert with_flags(text, FLAGS) == words


def test_without_flags_a_text_stays() -> None:
    assert with_flags("`form` must be auto", {}) == "`form` must be auto"
