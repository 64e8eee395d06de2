"""The support matrix: which features a library or form does not compute, and the largest errors."""

from __future__ import annotations

from typing import Any

from evidence import DTYPES, FEATURES, NAMES, RESULTS, ROWS, about, code, column, columns, table


def page() -> str:
    libraries, forms = columns(exported=False), columns(exported=True)
    absent = [NAMES.get(name, name) for name in RESULTS["absent"]]
    return "\n\n".join(
        [
            about(),
            "## On the array libraries",
            f"{', '.join(libraries)} compute each of these {len(FEATURES)} features, but for the exceptions in "
            f"the table: {'; '.join(map(named, FEATURES))}.",
            exceptions(libraries),
            f"Not run here, because it was not installed or had no device: {', '.join(absent)}."
            if absent
            else "",
            "## In exported graphs",
            f"Forms of an ONNX graph for onnxruntime {RESULTS['libraries']['onnxruntime']}, run in it on the "
            "CPU, compute the same features, but for these exceptions. If a form refuses most features, "
            "the table says which it computes.",
            exceptions(forms),
            "## Largest errors",
            "The largest error of any feature against the float64 reference, and its share of its bound.",
            errors([*libraries, *forms]),
        ]
    )


def exceptions(names: list[str]) -> str:
    """Return a table of what each library or form does not compute, and why."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for why, what in by_reason(name).items():
            names_of.setdefault((what, code(why)), []).append(name)
    rows = [[", ".join(who), *cells] for cells, who in names_of.items()]
    return table(["", "not computed", "why"], rows)


def by_reason(name: str) -> dict[str, str]:
    """Return what a library or form does not compute by the reason; first the dtypes that it does not have."""
    dtypes = [dtype for dtype in DTYPES if computes(dtype, name)]
    missing: dict[str, list[str]] = {}
    for dtype in DTYPES:
        if dtype not in dtypes:
            missing.setdefault(reason(dtype, name), []).append(f"`{dtype}`")
    computed = [feature for feature in FEATURES if any(agrees(dtype, name, feature) for dtype in dtypes)]
    if len(computed) < len(FEATURES) / 2:
        return {why: "; ".join(what) for why, what in missing.items()} | {
            "an operator of com.microsoft takes only such calls": f"all but {'; '.join(map(named, computed))}"
        }
    for feature in FEATURES:
        outcomes = {dtype: result(dtype, name, feature) for dtype in dtypes}
        everywhere = all(outcome["refused"] for outcome in outcomes.values())
        for dtype, outcome in outcomes.items():
            if outcome["refused"]:
                where = named(feature) if everywhere else f"{named(feature)} in {dtype}"
                missing.setdefault(outcome["refused"], []).append(where)
            elif not outcome["agrees"]:
                missing.setdefault("**wrong**", []).append(f"{named(feature)} in {dtype}")
    return {why: "; ".join(dict.fromkeys(what)) for why, what in missing.items()}


def errors(names: list[str]) -> str:
    """Return a table of the largest errors, a row a library or form and a column a dtype."""
    return table(["", *DTYPES], [[name, *(worst(dtype, name) for dtype in DTYPES)] for name in names])


def worst(dtype: str, name: str) -> str:
    """Return the error of the feature that came nearest to its bound, and its share of the bound."""
    agreements = [
        outcome["agreement"]
        for row in rows_of(dtype, name)
        for outcome in row["features"]
        if outcome["agreement"]
    ]
    if not agreements:
        return "-"
    nearest = max(agreements, key=share_of_bound)
    return f"{nearest['absolute']:.1e}, {share_of_bound(nearest):.0%}"


def share_of_bound(agreement: dict[str, float]) -> float:
    return agreement["absolute"] / agreement["bound"] if agreement["bound"] else 0.0


def computes(dtype: str, name: str) -> bool:
    return any(row["jobs"] for row in rows_of(dtype, name))


def agrees(dtype: str, name: str, feature: str) -> bool:
    outcome = result(dtype, name, feature)
    return bool(outcome["agrees"]) and not outcome["refused"]


def reason(dtype: str, name: str) -> str:
    """Return why a column computes nothing in a dtype: it has no such arrays, or each graph is refused."""
    rows = rows_of(dtype, name)
    if not rows:
        return "only with `jax_enable_x64`" if name == "JAX" else "the standard does not have it"
    refused: list[str] = [outcome["refused"] for outcome in rows[0]["features"]]
    return max(dict.fromkeys(refused), key=refused.count)


def result(dtype: str, name: str, feature: str) -> dict[str, Any]:
    (row,) = rows_of(dtype, name)
    return next(outcome for outcome in row["features"] if outcome["feature"] == feature)


def rows_of(dtype: str, name: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["dtype"] == dtype and column(row) == name]


def named(feature: str) -> str:
    """Return a feature as the page writes it: in code if it is a name."""
    return feature if " " in feature or feature == "plain" else f"`{feature}`"
