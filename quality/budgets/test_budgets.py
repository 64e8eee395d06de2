"""No room has more lines of code than its budget, and a budget falls with its room."""

from __future__ import annotations

import pytest

from quality.budgets.count import budgets, code_lines, counted

SLACK = 0.02
"""How much of a budget may be unused. Beyond it, lower the budget, so that the room stays small."""
COUNTED = counted()
WITH_NAMES = [(section, name) for section, values in COUNTED.items() for name in values]
SAMPLE = '''"""A docstring,
of two lines."""

# a comment
x = 1  # a comment behind code
"""An attribute's docstring."""


def f():
    "Short."
    return """a text
    of two lines"""
'''


@pytest.mark.parametrize(("section", "name"), WITH_NAMES)
def test_a_count_keeps_its_budget(section: str, name: str) -> None:
    number, allowed = COUNTED[section][name], budgets()[section].get(name)
    assert allowed is not None, f"{name} has no budget: give it one in quality/budgets/budgets.toml"
    assert number <= allowed, (
        f"{name} has {number}, and its budget is {allowed}: make room before you add to it"
    )
    least = allowed - max(10, SLACK * allowed)
    assert number >= least, f"{name} has {number}: lower its budget, {allowed}"


def test_no_budget_is_of_a_room_that_is_gone() -> None:
    for section, values in COUNTED.items():
        assert budgets()[section].keys() == values.keys()


def test_a_room_grows_only_if_another_shrinks() -> None:
    """The budgets of the rooms of a package are together no more than the budget of the package."""
    for package, most in budgets()["packages"].items():
        rooms = [size for room, size in budgets()["rooms"].items() if room.startswith(f"{package}/")]
        assert sum(rooms) <= most


def test_lines_of_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "sample.py"
    path.write_text(SAMPLE)
    assert code_lines(path) == 4
