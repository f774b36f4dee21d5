"""Write README's table of methods, by the catalog, and the tables of promises, by their results.

No method is named there by hand, and nothing is measured.
"""

from __future__ import annotations

from pathlib import Path

from modicum.cli.promises import RESULTS, read_rows, write_tables
from modicum.cli.promises_file import read_promises
from modicum.cli.readme import between
from modicum.core.contracts.catalog import catalog

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"
WITHOUT = ("tasks",)  # what methods work on


def methods() -> str:
    """The table: a line a method, by room."""
    lines = ["| room | name | method | claim | against |", "| --- | --- | --- | --- | --- |"]
    for record in catalog().values():
        if record.room not in WITHOUT:
            info = record.info
            cells = (
                record.room,
                f"`{record.name}`",
                info.title,
                info.claim_verdict,
                str(info.against),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def renewed(text: str) -> str:
    """The README with the table as it should be."""
    return between(text, BEGIN, END, methods())


if __name__ == "__main__":
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
    root = README.parent
    write_tables(read_rows(root / RESULTS), read_promises(root / "promises.yaml"), root)
    print(README)
