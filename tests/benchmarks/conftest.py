"""The benchmarks as modules: they import one another by their names, as scripts do."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "matrix",
    "matrix_host",
    "matrix_rows",
    "matrix_work",
    "matrix_results",
    "common",
    "demo",
)
EVERYTHING: dict[str, Any] = {
    "flags": frozenset({"sse4_1", "sse4_2", "avx2", "fma"})
    | {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "pythons": {minor: f"/usr/bin/python3.{minor}" for minor in (11, 12, 13, 14)},
    "allocator": "/usr/lib/libjemalloc.so.2",
}


class Modules:
    """The benchmark's modules by their last word."""

    def __init__(self) -> None:
        found = {name: importlib.import_module(name) for name in MODULES}
        self.main: ModuleType = found["matrix"]
        self.host: ModuleType = found["matrix_host"]
        self.rows: ModuleType = found["matrix_rows"]
        self.work: ModuleType = found["matrix_work"]
        self.results: ModuleType = found["matrix_results"]

    def machine(self, **changes: Any) -> Any:
        """A machine on which every row can run, but for these changes."""
        return self.host.Host(**(EVERYTHING | changes))

    def reasons(self, **changes: Any) -> dict[str, str]:
        """Why rows cannot run on a machine with these changes."""
        host = self.machine(**changes)
        every = self.rows.rows(host)
        return {row.name: reason for row in every if (reason := row.why_not(host))}


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Modules:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return Modules()
