"""The matrix's rows: which run on which machine, and what each changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


@pytest.mark.parametrize("minor", [11, 13])
def test_at_most_twenty_rows_and_each_changes_one_thing(matrix: Any, minor: int) -> None:
    host = matrix.machine(minor=minor)
    default, *others = every = matrix.rows.rows(host)
    assert len(every) <= 20
    assert len({row.name for row in every}) == len(every)
    assert {row.minor for row in others if row.minor} == {11, 12, 13, 14} - {minor}
    for row in others:
        fields = [field.name for field in dataclasses.fields(row)]
        changed = [name for name in fields if getattr(row, name) != getattr(default, name)]
        assert len(set(changed) - {"name", "claim"}) == 1, row.name


def test_where_there_is_everything_every_row_runs(matrix: Any) -> None:
    assert matrix.reasons() == {}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"flags": frozenset({"avx2", "fma", "sse4_1", "sse4_2"})}, {"avx512"}),
        ({"flags": frozenset(), "architecture": "aarch64"}, {"avx512", "avx2", "baseline"}),
        ({"pythons": {11: "/usr/bin/python3.11"}}, {"python-3.12", "python-3.13", "python-3.14"}),
        ({"uid": 1000}, {"not-root"}),
        ({"others_read": False, "lends_reading": False}, {"not-root"}),
        ({"others_read": False}, set()),
        ({"programs": frozenset({"git", "setpriv"})}, {"one-core", "four-threads"}),
        ({"programs": frozenset({"git", "taskset"})}, {"not-root"}),
        ({"cores": (3,)}, {"one-core", "four-threads"}),
        ({"allocator": None}, {"allocator"}),
    ],
)
def test_what_a_machine_lacks_is_why_rows_are_not_run(
    matrix: Any, changes: dict[str, Any], rows: set[str]
) -> None:
    assert set(matrix.reasons(**changes)) == rows


def test_changes_reach_the_commands(matrix: Any) -> None:
    host = matrix.machine(cores=(2, 5, 6), others_read=False)
    by_name = {row.name: row for row in matrix.rows.rows(host)}
    assert by_name["default"].set_variables(host) == {}
    assert by_name["default"].wrapper(host) == []
    assert by_name["avx2"].set_variables(host) == {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    assert by_name["four-threads"].wrapper(host) == ["taskset", "--cpu-list", "2,5"]
    four = {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"}
    assert by_name["four-threads"].set_variables(host) == four
    assert by_name["allocator"].set_variables(host) == {"LD_PRELOAD": host.allocator}
    assert "--reuid=65534" in by_name["not-root"].wrapper(host)
    assert "--bounding-set=-all,+dac_read_search" in by_name["not-root"].wrapper(host)
    assert by_name["baseline"].expected(host)["capability"] == "DEFAULT"
