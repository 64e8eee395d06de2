"""The reference shows the options of a call as parameters, where the code has `**keywords: Unpack[...]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import Class, Extension, Function, Module, Object, Parameter, ParameterKind


class Options(Extension):
    """Replace the keywords of a function that `takes_options` by the options of its TypedDict."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        if pkg.name == "sdpa_xp":
            options: Any = pkg["_call.options"]
            for function in _functions(pkg):
                for decorator in function.decorators:
                    called: Any = decorator.value
                    if str(called).startswith("takes_options("):
                        kind, *defaults = called.arguments
                        _show(
                            function, options, str(kind), {default.name: default.value for default in defaults}
                        )


def _show(function: Function, options: Module, kind: str, defaults: dict[str, Any]) -> None:
    annotations = {name: attribute.annotation for name, attribute in _attributes(options, kind)}
    others = list(function.parameters)[:-1]
    shown = [
        Parameter(
            name,
            annotation=annotations[name],
            kind=ParameterKind.keyword_only,
            default=defaults.get(name, options["CallOptions"].attributes[name].value),
        )
        for name in options["CallOptions"].attributes
        if name in annotations
    ]
    function.parameters = type(function.parameters)(*others, *shown)


def _attributes(options: Module, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a TypedDict and of its bases."""
    typed = options.members.get(kind)
    if isinstance(typed, Class):
        yield from typed.attributes.items()
        for base in typed.bases:
            yield from _attributes(options, str(base))


def _functions(parent: Object) -> Iterator[Function]:
    for member in parent.members.values():
        if isinstance(member, Function):
            yield member
        elif isinstance(member, Object):
            yield from _functions(member)
