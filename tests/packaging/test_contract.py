"""Each rule of the contract has a test that names it, and the marked tests name rules that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np

from sdpa_xp import attention_state

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/contract.md").read_text()
RULES = re.findall(r'^\| <a id="r(\d+)"></a>R(\d+) \|', PAGE, re.MULTILINE)
NAMED = ("README.md", "docs/reference/errors.md", "docs/how-to/port.md")
"""Pages that name rules."""


def marked(path: Path) -> dict[str, set[str]]:
    """Return the rules that each test of a file is marked with."""
    rules_of: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
            of_rules = [mark for mark in calls if ast.unparse(mark.func) == "pytest.mark.rule"]
            rules_of[node.name] = {ast.literal_eval(argument) for mark in of_rules for argument in mark.args}
    return rules_of


def test_rules_are_numbered_in_their_order() -> None:
    assert [(int(anchor), int(name)) for anchor, name in RULES] == [(n, n) for n in range(1, len(RULES) + 1)]


def test_each_rule_has_a_test_and_each_mark_a_rule() -> None:
    tests = [rules for path in (ROOT / "tests").rglob("test_*.py") for rules in marked(path).values()]
    assert set().union(*tests) == {f"R{name}" for _, name in RULES}


def test_each_test_of_the_semantics_holds_a_rule() -> None:
    without = [name for name, rules in marked(ROOT / "tests/core/test_semantics.py").items() if not rules]
    assert without == []


def test_pages_name_rules_that_are_there() -> None:
    for page in NAMED:
        named = set(re.findall(r"\bR(\d+)\b", (ROOT / page).read_text()))
        assert named
        assert named <= {name for _, name in RULES}


def test_the_formula_of_the_page_is_what_is_computed(rng: np.random.Generator) -> None:
    """With a NaN that no query attends to, a row without keys, biases that mask, and a sink."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.partition("## The formula in code")[2], re.DOTALL)[:1]
    names: dict[str, Any] = {}
    exec(code, names)
    query, key, value, added = (rng.standard_normal(shape) for shape in ((6, 4), (9, 4), (9, 3), (6, 9)))
    allowed = rng.random((6, 9)) < 0.5
    allowed[2], allowed[:, 0], added[3, :4], value[0] = False, False, -np.inf, np.nan
    rules: dict[str, Any] = {"softcap": 2.0, "bias": added, "sinks": np.array([0.3])}
    output, lse = names["attention"](query, key, value, allowed, added, 2.0, 0.3)
    state = attention_state(query, key, value, allowed, **rules)
    np.testing.assert_allclose(state.output, output, rtol=0, atol=1e-15)
    np.testing.assert_allclose(state.lse, lse, rtol=0, atol=1e-15)
    output, lse = names["attention"](query, key, value, allowed, added)
    np.testing.assert_array_equal(output[2], 0)
    assert lse[2] == -np.inf
