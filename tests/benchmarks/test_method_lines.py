from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

CODE = '''"""A docstring
of two lines."""

import os  # counts

# does not


def f(
    x: int,
) -> int:
    """Not counted."""
    return (
        x
        + 1
    )
'''


@pytest.fixture
def method_lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("method_lines")


def test_lines_of_code_are_counted_without_docstrings_and_comments(method_lines: Any) -> None:
    # import, def, x, the type of what is returned, and a sum on two lines in a return.
    assert method_lines.code_lines(ast.parse(CODE)) == 7


def test_every_method_with_a_proof_has_its_parts(method_lines: Any) -> None:
    found = method_lines.lines_of_methods(method_lines.ROOT)
    assert set(found) >= {"lora", "galore", "dear", "comet", "fwsvd"}
    for parts in found.values():
        assert set(parts) == set(method_lines.PARTS)
        assert min(parts["method"], parts["proof"]) >= 20
