"""Write what type checkers read of the rooms' packages: `__init__.pyi`, by the catalog."""

from __future__ import annotations

import importlib
from pathlib import Path

import modicum
from modicum.core.exports import Exports

PACKAGE = Path(modicum.__file__).parent


def stubs() -> dict[Path, str]:
    """The stub of each package that finds its methods by the catalog."""
    found = {}
    for file in sorted(PACKAGE.glob("*/__init__.py")):
        if "Exports(" in file.read_text(encoding="utf-8"):
            exports = importlib.import_module(f"modicum.{file.parent.name}").EXPORTS
            assert isinstance(exports, Exports)
            found[file.with_suffix(".pyi")] = stub(exports)
    return found


def stub(exports: Exports) -> str:
    """Every public name, imported from where it is."""
    lines = [f"from {home} import {name} as {name}" for name, home in exports.homes.items()]
    lines.append("from modicum.core.exports import Exports")
    return "\n".join(["# Written by scripts/stubs.py.", *sorted(lines), "", "EXPORTS: Exports", ""])


if __name__ == "__main__":
    for file, text in stubs().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(PACKAGE.parent))
