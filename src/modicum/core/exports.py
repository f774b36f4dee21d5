"""The public names of a room's package: those that it lists, and the classes of its methods.

The methods are found by the catalog, so no package names them. Type checkers read the same names
from `__init__.pyi`, which `scripts/stubs.py` writes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property


class Exports:
    """The names of a package, each imported when it is first asked for.

    Args:
        package: the package's name.
        listed: names that are no methods, and the modules in which they are.

    >>> Exports("modicum.optim", {"step_in_backward": "backward"}).homes["SGD"]
    'modicum.optim.sgd'
    """

    def __init__(self, package: str, listed: Mapping[str, str]) -> None:
        self.package = package
        self.listed = {
            name: home if home.startswith("modicum.") else f"{package}.{home}"
            for name, home in listed.items()
        }

    @cached_property
    def homes(self) -> dict[str, str]:
        """Every public name and its module."""
        from modicum.core.contracts.catalog import of_package

        return self.listed | {
            record.class_name: record.module
            for record in of_package(self.package)
            if record.module is not None
        }

    def names(self) -> list[str]:
        """All public names, sorted: the package's `__all__` and `dir()`."""
        return sorted(self.homes)

    def load(self, name: str) -> object:
        """The package's `__getattr__`.

        Raises:
            AttributeError: it has no such name.
        """
        if name == "__all__":
            return self.names()
        home = self.listed.get(name)
        if home is None and not name.startswith("_"):
            home = self.homes.get(name)
        if home is None:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)
