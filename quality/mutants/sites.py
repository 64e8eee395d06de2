"""Where a source file can be mutated: each site is one small change of its text.

Docstrings, annotations, decorators, `__all__`, messages, formatted strings and `strict=True` are no sites.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
REDUCTIONS = (("any", "all"), ("min", "max"), ("minimum", "maximum"), ("ceil", "floor"))
NEIGHBOURS = (
    ("queries", "keys"),
    ("query", "key"),
    ("key", "value"),
    ("rows", "columns"),
    ("left", "right"),
    ("start", "stop"),
    ("first", "last"),
    ("L", "S"),
)


def _both_ways(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Each name with what stands for it in a mutant; of two partners, the later pair's."""
    return {a: b for x, y in pairs for a, b in ((x, y), (y, x))}


SAME_KIND, MIXED_UP = _both_ways(REDUCTIONS), _both_ways(NEIGHBOURS)


@dataclass(frozen=True)
class Mutant:
    """One change: what stands there before and after, in a function and on a line that has this `text`."""

    file: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    stop: int
    text: str
    scope: tuple[int, int]
    """The lines of the function; of the module, all."""
    at_import: bool
    """Whether it runs when the module is imported, as defaults do."""

    @property
    def name(self) -> tuple[str, ...]:
        """What stays the same when lines move."""
        return self.file, self.function, self.text, self.before, self.after

    def applied(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.stop :]).decode()


def mutants(root: Path, path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its text."""
    source = path.read_text()
    finder = _Finder(source, path.relative_to(root).as_posix())
    finder.visit(ast.parse(source))
    return finder.mutants


def differs(source: str, mutant: Mutant) -> bool:
    """Whether the mutant is another program, and one that parses."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str, file: str) -> None:
        self.file, self.source = file, source
        self.mutants: list[Mutant] = []
        self.path: list[str] = []
        self.scopes = [(1, len(source.splitlines()))]
        self.at_import = True
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts

    def add(self, node: ast.stmt | ast.expr, operator: str, after: ast.AST | str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        stop = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = self.source.encode()[start:stop].decode()
        text = after if isinstance(after, str) else ast.unparse(after)
        if isinstance(node, ast.expr) and not isinstance(
            node, ast.Constant | ast.Name | ast.Attribute | ast.Call
        ):
            text = f"({text})"
        where = ".".join(self.path) or "<module>"
        line = self.source.splitlines()[node.lineno - 1].strip()
        place = (start, stop, line, self.scopes[-1], self.at_import)
        self.mutants.append(Mutant(self.file, where, node.lineno, operator, before, text, *place))

    # What is not looked into.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
        self.path.append(node.name)
        self.scopes.append((node.lineno, node.end_lineno or node.lineno))
        outside = self.at_import
        for part in [*defaults, *node.body]:
            self.at_import = outside and part in defaults
            self.visit(part)
        self.at_import = outside
        self.path.pop()
        self.scopes.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.path.append(node.name)
        for part in node.body:
            self.visit(part)
        self.path.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if "__all__" in names:
            return
        if any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self.add(node, "statement dropped", "pass")
        self.generic_visit(node)

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            self.add(node, "statement dropped", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "statement dropped", "pass")
        other = ARITHMETIC.get(type(node.op))
        if other:
            self.add(node, "arithmetic", ast.AugAssign(node.target, other(), node.value))
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "raise dropped", "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "statement dropped", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "statement dropped", "pass")

    def visit_If(self, node: ast.If) -> None:
        self.negate(node.test)
        for part in node.body:
            if isinstance(part, ast.Return):
                self.add(part, "early return dropped", "pass")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    # Expressions.

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp | ast.Compare):
            return  # has a mutant of its own that says the same
        if "TYPE_CHECKING" not in ast.unparse(test):
            self.add(test, "condition negated", f"(not ({ast.unparse(test)}))")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = COMPARISONS[type(op)]()
            self.add(node, "comparison", ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add(node, "and, or", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other and not any(_is_text(x) for x in (node.left, node.right)):
            self.add(node, "arithmetic", ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        inner = node.operand
        if isinstance(node.op, ast.USub) and isinstance(inner, ast.Constant) and inner.value in (1, 2):
            self.add(node, "axis", "-2" if inner.value == 1 else "-1")
            return
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, "sign or not dropped", inner)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", repr(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", repr(node.value + 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", repr(node.value * 2 + 1))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if node.id in MIXED_UP:
                self.add(node, "names mixed up", MIXED_UP[node.id])
            if node.id in SAME_KIND:
                self.add(node, "any, min", SAME_KIND[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            for operator, names in (("names mixed up", MIXED_UP), ("any, min", SAME_KIND)):
                if node.attr in names:
                    self.add(node, operator, ast.Attribute(node.value, names[node.attr], node.ctx))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        first = node.args[:2]
        is_symmetric = ast.unparse(node.func) in ("min", "max")
        if len(first) == 2 and not is_symmetric and not any(isinstance(x, ast.Starred) for x in first):
            swapped = ast.Call(node.func, [*reversed(first), *node.args[2:]], node.keywords)
            self.add(node, "arguments swapped", swapped)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        # zip(..., strict=True) asserts that lengths agree: no call can tell a right program without it.
        if node.arg != "strict" or not (isinstance(node.value, ast.Constant) and node.value.value is True):
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self.add(bound, "slice", "None")
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def all_mutants(root: Path) -> Iterator[tuple[Path, list[Mutant]]]:
    """Each file of both packages with its mutants."""
    for folder in ("sdpa_xp", "export/sdpa_xp_export"):
        for path in sorted((root / folder).rglob("*.py")):
            yield path, mutants(root, path)
