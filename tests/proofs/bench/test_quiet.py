"""What else runs on the machine is looked at before a series, and waited for, or said."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.bench import quiet


class Machine:
    """A clock, and the load at each look."""

    def __init__(self, loads: Iterator[float]) -> None:
        self.now, self.loads, self.looks = 0.0, loads, 0

    def look(self) -> float:
        self.now += quiet.LOOKS
        self.looks += 1
        return next(self.loads)


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *loads: float) -> Machine:
    def given() -> Iterator[float]:
        yield from loads
        while True:
            yield loads[-1]

    made = Machine(given())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(quiet, "busy_processors", made.look)
    monkeypatch.setattr(quiet.time, "monotonic", lambda: made.now)
    return made


def test_a_load_that_falls_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = machine(monkeypatch, tmp_path, 1.9, 1.2, 0.3)
    with quiet.alone():
        assert quiet.quiet() == 0.3
        assert ours.looks == 3
        assert quiet.quiet() == 0.3
    assert ours.looks == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "waiting for other programs, which have 1.9 processors\n"


def test_a_load_that_does_not_fall_is_refused_or_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = machine(monkeypatch, tmp_path, 1.5)
    with quiet.alone():
        with pytest.raises(quiet.BusyMachine, match=r"other programs run here: they have 1\.5"):
            quiet.quiet()
        assert quiet.PATIENCE < ours.now < quiet.PATIENCE + 3 * quiet.LOOKS
        looks = ours.looks
        assert quiet.quiet(refuses=False) == 1.5
    assert ours.looks == looks + 1


def test_who_has_not_got_the_lock_times_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, 0.0)
    with pytest.raises(RuntimeError, match="within `alone`"):
        quiet.quiet()
    with quiet.alone():
        with quiet.alone():  # it is ours
            assert quiet.quiet() == 0.0
        assert quiet.quiet() == 0.0
    with pytest.raises(RuntimeError):
        quiet.quiet()


def test_full_proofs_have_the_machine_to_themselves_and_record_its_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = machine(monkeypatch, tmp_path, 0.2, 0.4, 0.1)
    for full in (False, True):
        run = ProofRun(find("lora"), null=False, full=full)
        run.contender(1, null=2, null_is="two")
        run.at_most("it", 1, 1)
        assert [run.quiet() for _ in range(3)] == ([0.2, 0.4, 0.1] if full else [0.0] * 3)
        assert bool(quiet._held) == full
        run.close()
        assert not quiet._held
        recorded = run.conclude().as_json()["machine"].get("load_before_series")
        assert recorded == (0.4 if full else None)
    assert ours.looks == 3


def test_processors_that_programs_have_are_counted() -> None:
    assert 0 <= quiet.busy_processors(0.05) <= (quiet.psutil.cpu_count() or 1)
