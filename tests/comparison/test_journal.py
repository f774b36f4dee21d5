from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from formula_trials import Bowl, sides

from modicum.comparison import Study

optuna = pytest.importorskip("optuna")


def run(folder: Path, **arguments: Any) -> None:
    Study(folder, sides("a", "b"), Bowl(), sampler="grid", **arguments).run()


def journal(folder: Path) -> dict[str, list[tuple[Any, Any]]]:
    storages = optuna.storages.journal
    storage = storages.JournalStorage(storages.JournalFileBackend(str(folder / "journal.log")))
    return {
        name: [
            (trial.params["rate"], trial.value)
            for trial in optuna.load_study(study_name=name, storage=storage).trials
        ]
        for name in optuna.get_all_study_names(storage)
    }


def test_the_journal_is_what_optuna_reads(tmp_path: Path) -> None:
    run(tmp_path)
    found = journal(tmp_path)
    assert {name: len(trials) for name, trials in found.items()} == {"a": 8, "b": 8}
    assert found["a"][0][0] == 1e-3
    assert found["a"][0][1] == pytest.approx(2.036, abs=0.05)


@pytest.mark.parametrize("damage", ["missing", "no JSON", "truncated", "of others", "locked"])
def test_a_damaged_journal_is_made_anew(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    expected, file = journal(tmp_path), tmp_path / "journal.log"
    if damage == "missing":
        file.unlink()
    elif damage == "no JSON":
        file.write_bytes(b"\x00\xff{]\n" * 5)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "of others":
        run(tmp_path / "other", seed=5)
        file.write_bytes((tmp_path / "other" / "journal.log").read_bytes())
    else:
        Path(f"{file}.lock").symlink_to(file)
        file.unlink()
    run(tmp_path)
    assert journal(tmp_path) == expected


def test_trials_are_added_to_what_is_there(tmp_path: Path) -> None:
    run(tmp_path)
    lines = (tmp_path / "journal.log").read_bytes()
    run(tmp_path, trials=15)
    assert (tmp_path / "journal.log").read_bytes().startswith(lines)
    assert len(journal(tmp_path)["a"]) == 11
