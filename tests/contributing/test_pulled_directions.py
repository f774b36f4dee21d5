"""The second example of the guide: its own tests, its lines, its proof and its length."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest

from modicum.core.contracts.catalog import MethodRecord, read_file
from modicum.proofs import prove

EXAMPLE = Path(__file__).parents[2] / "docs" / "contributing" / "examples" / "pulled_directions.py"
OWN = (
    pytest.param("test_it_passes_the_battery_of_its_room", marks=pytest.mark.expensive),
    "test_a_block_has_as_many_directions_as_its_data_need",
    "test_the_pull_is_the_mean_of_what_is_added",
)


@pytest.fixture(scope="module")
def record() -> MethodRecord:
    [found] = read_file(EXAMPLE)
    return found


@pytest.mark.parametrize("name", OWN)
def test_its_own_test_passes(record: MethodRecord, name: str) -> None:
    getattr(sys.modules[record.load().__module__], name)()


def test_it_is_one_file_of_less_than_300_lines_whose_lines_run(record: MethodRecord) -> None:
    module = sys.modules[record.load().__module__]
    named = {name for name in vars(module) if name.startswith("test_")}
    assert named == {getattr(one, "values", (one,))[0] for one in OWN}
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 300
    found = doctest.testmod(module)
    assert (found.attempted > 5, found.failed) == (True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("null", [False, True])
def test_its_proof_says_what_its_info_does(record: MethodRecord, null: bool) -> None:
    proof = prove("pulled_directions", null=null, plugins=[EXAMPLE])
    if null:
        assert proof.claim_verdict == "does not hold"
        assert not proof.defects
    else:
        assert proof.claim_verdict == record.info.claim_verdict
        assert proof.against == record.info.against
