"""The check of search tables that all batteries have finds values that a method refuses."""

from __future__ import annotations

from typing import Any

import pytest

from modicum.core.contracts.method import Info, Method, PositiveInt
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.errors import InputError
from modicum.proofs.contracts.base import BATTERIES, checks
from modicum.proofs.contracts.search_tables import check_search_table, without_a_table

INFO = Info("even", "Even", "adapters", "", "", tiny={"needed": 3})


class Even(Method):
    info = INFO
    rank: PositiveInt = 8
    needed: int

    def model_post_init(self, context: Any) -> None:
        if self.rank % 2:
            raise InputError("must be even", field="rank", value=self.rank)


class WithAll(Even):
    search = SearchTable({"rank": IntegerRange(1, 64, 8, log=True)}, size="rank")


class WithEven(Even):
    search = SearchTable(
        {"rank": IntegerRange(2, 64, 8, log=True, step=2), "learning_rate": LogRange(1e-4, 1, 1e-3)}
    )


def test_a_value_that_the_method_refuses_is_found() -> None:
    with pytest.raises(AssertionError, match="has rank 1, and the method refuses it: rank: must"):
        check_search_table(WithAll)


def test_values_that_it_takes_pass_and_what_it_needs_is_given() -> None:
    check_search_table(WithEven)
    check_search_table(WithEven(needed=1))
    assert without_a_table(WithEven) is None


def test_nothing_is_said_of_a_method_without_a_table() -> None:
    reason = without_a_table(Even)
    assert reason is not None
    assert "no search table of its own" in reason


@pytest.mark.parametrize("room", BATTERIES)
def test_every_battery_has_the_check(room: str) -> None:
    slots = {
        "adapters": ("", "diagnosis"),
        "comm": ("", "watchdog"),
        "optim": ("optimizer", "transform"),
    }.get(room, ("",))
    for slot in slots:
        assert [each.name for each in checks(room, slot=slot)].count("search_table") == 1
