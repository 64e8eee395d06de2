"""A name that a package imports from its submodule of the same name is that function, as it is in Python."""

from __future__ import annotations

from typing import Any

from griffe import Alias, Extension, GriffeLoader, Module


class PublicNames(Extension):
    """`sdpa_xp.biases.alibi` is the function, not the module `sdpa_xp/biases/alibi.py`."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        loader.resolve_aliases(implicit=True, external=False)  # by the modules, while their names are theirs
        for package in (pkg, *pkg.modules.values()):
            for name in package.exports or ():
                member = package.members[str(name)]
                if isinstance(member, Module) and str(name) in member.members:
                    package.members[str(name)] = Alias(str(name), member[str(name)], parent=package)
