"""A checkout with as many methods as modicum is to have: those that are there, repeated.

Each copy has a name and a file of its own, with its proof and its own tests, so that all that grows
with the number of methods can be measured before they are written.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from modicum.core.contracts.catalog import MethodRecord, catalog


def checkout_with(count: int, source: Path, target: Path) -> list[str]:
    """Copy the files that git tracks to `target`, with copies of methods up to `count` of them.

    Returns:
        The names of all methods.
    """
    command = ["git", "-C", str(source), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    there = [record for record in catalog().values() if _is_copied(record)]
    names = list(catalog())
    number = 1
    while len(names) < count:
        number += 1
        for record in there[: count - len(names)]:
            copy = f"{record.name}_{number}"
            _repeat(record, copy, target)
            names.append(copy)
    return names


def _is_copied(record: MethodRecord) -> bool:
    """Tasks and optimizers that others build on are there once."""
    return record.room in ("adapters", "compress", "memory", "comm", "optim")


def _repeat(record: MethodRecord, copy: str, target: Path) -> None:
    pairs = [
        (f"src/modicum/{record.room}/{record.name}.py", f"src/modicum/{record.room}/{copy}.py"),
        (
            f"src/modicum/proofs/{record.room}/{record.name}.py",
            f"src/modicum/proofs/{record.room}/{copy}.py",
        ),
    ]
    for folder in (f"tests/{record.room}", f"tests/proofs/{record.room}"):
        for path in sorted((target / folder).glob(f"test_{record.name}*.py")):
            rest = path.stem.removeprefix(f"test_{record.name}")
            if rest == "" or (rest.startswith("_") and not rest[1:].split("_")[0].isdigit()):
                pairs.append((f"{folder}/{path.name}", f"{folder}/test_{copy}{rest}.py"))
    for one, other in pairs:
        path = target / one
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        text = re.sub(rf'(\bInfo\(\s*)"{record.name}"', rf'\1"{copy}"', text)
        text = re.sub(rf'(\bInfo\(\s*name=)"{record.name}"', rf'\1"{copy}"', text)
        text = re.sub(
            rf"\bmodicum\.((?:proofs\.)?{record.room})\.{record.name}\b",
            rf"modicum.\1.{copy}",
            text,
        )
        (target / other).write_text(text, encoding="utf-8")
