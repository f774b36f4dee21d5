"""How many lines of code a method needs: its own file, what serves it alone, proof and tests.

Counted are lines that hold code: no blank ones, comments and docstrings. A file serves a method
alone if of all methods and their proofs only this one stands on it, by imports.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from pathlib import Path

from common import HERE, say, write_result

from modicum.core.contracts.catalog import MethodRecord, catalog

ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from tests.reach import Checkout  # noqa: E402

PARTS = ("method", "helpers", "proof", "tests")


def main() -> None:
    """Count for every method with a proof, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = lines_of_methods(ROOT)
    totals = {name: sum(parts.values()) for name, parts in found.items()}
    for name, parts in sorted(found.items()):
        each = ", ".join(f"{part} {count}" for part, count in parts.items())
        say(f"{name:10} {totals[name]:5}  ({each})")
    medians = {part: statistics.median(each[part] for each in found.values()) for part in PARTS}
    middle = statistics.median(totals.values())
    say(f"{'median':10} {middle:5.0f}")
    figures = {"methods": found, "totals": totals, "median_parts": medians, "median": middle}
    write_result("method-lines", figures, {})


def lines_of_methods(root: Path) -> dict[str, dict[str, int]]:
    """Of each method that has a proof: the lines of its parts, by name."""
    checkout = Checkout(root)
    records = [record for record in catalog().values() if _proof(record) in checkout.trees]
    owners = {
        module: record.name for record in records for module in (_home(record), _proof(record))
    }
    alone: dict[str, list[str]] = {record.name: [] for record in records}
    for module in checkout.trees:
        if module.startswith("modicum.") and module not in owners:
            users = {owners[one] for one in checkout.dependents(module) & owners.keys()}
            if len(users) == 1:
                alone[users.pop()].append(module)
    return {
        record.name: {
            "method": code_lines(checkout.trees[_home(record)]),
            "helpers": sum(code_lines(checkout.trees[one]) for one in alone[record.name]),
            "proof": code_lines(checkout.trees[_proof(record)]),
            "tests": sum(code_lines(checkout.trees[one]) for one in _tests(record, checkout)),
        }
        for record in records
    }


def code_lines(tree: ast.Module) -> int:
    """Lines on which code stands, docstrings apart."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and id(node.value) in docstrings:
            continue
        if isinstance(node, ast.stmt | ast.arg | ast.alias):
            lines.add(node.lineno)
        elif isinstance(node, ast.expr) and id(node) not in docstrings:
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _home(record: MethodRecord) -> str:
    return str(record.module)


def _proof(record: MethodRecord) -> str:
    return f"modicum.proofs.{record.room}.{record.name}"


def _tests(record: MethodRecord, checkout: Checkout) -> list[str]:
    """Test files of the method's name, its proof's among them."""
    last = f"test_{record.name}"
    return [
        module
        for module in checkout.trees
        if module.startswith("tests.")
        and (module.rpartition(".")[2] == last or module.rpartition(".")[2].startswith(f"{last}_"))
    ]


if __name__ == "__main__":
    main()
