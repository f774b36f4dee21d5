"""Planted faults in what a checkpoint holds are found, with their place; clean runs resume."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.cli.conftest import command as command
from tests.verify.conftest import as_new_process, changed_checkpoint, run, values
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.trainer.folder import RunFolder
from modicum.verify import Verification, verify_resume
from modicum.verify.copies import begun_run
from modicum.verify.stretch import Stretch, run_stretch

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "forgetful.py"
Plant = Callable[[dict[str, Tensor]], object]


def found(done: Verification) -> dict[str, str]:
    """By what was found, where."""
    assert not done.passed
    return {finding.what: finding.where for finding in done.findings}


def checks(done: Verification) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in done.checks}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plant], None]:
    """Has the checkpoint at the stop changed before it is restored."""

    def plant(change: Plant) -> None:
        def start(stretch: Stretch) -> None:
            stops = stretch.folder.name == "stopped" and stretch.traces is None
            run_stretch(stretch, Ranks())
            if stops:
                folder = stretch.folder / "checkpoints" / f"step-{stretch.until:08d}"
                changed_checkpoint(folder, change)

        monkeypatch.setattr("modicum.verify.resume.launched", start)

    return plant


def named(tensors: dict[str, Tensor], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(end))


def test_a_clean_run_passes_and_its_folder_is_left_as_it_is(
    adapted: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in adapted.rglob("*")}
    said: list[str] = []
    parts: list[str] = []
    done = verify_resume(
        adapted, steps=3, say=said.append, progress=lambda name, *_: parts.append(name)
    )
    assert done.passed, done.findings
    assert {path: path.stat().st_mtime_ns for path in adapted.rglob("*")} == before
    cost = r"from a checkpoint of step 4: 8 steps and 3 starts of \d+ s, about \d+ s in all by its"
    assert re.match(cost, said[0]), said
    assert [each.partition(": ")[0] for each in parts] == [
        "1 of 3",
        "2 of 3",
        "3 of 3",
        "comparing",
    ]
    assert all(re.search(r", about \d+ s$", each) for each in parts[:3])
    told = checks(done)
    assert told["steps"] == {"check": "steps", "begin": 4, "stop": 5, "end": 8}
    assert told["compared"]["exact"]
    assert told["compared"]["entries"] > 20
    assert told["record"]["steps"] == 4
    assert told["record"]["largest"] == 0.0


def stale(tensors: dict[str, Tensor]) -> None:
    tensors[named(tensors, "/exp_avg")].mul_(0.5)


def test_a_stale_moment_is_found_with_its_name_and_amount(
    base: Path, planted: Callable[[Plant], None]
) -> None:
    planted(stale)
    done = verify_resume(base, steps=3)
    assert set(found(done)) == {"optimizer", "gradient_norm"} or set(found(done)) == {"optimizer"}
    assert found(done)["optimizer"].endswith("/exp_avg after step 5")
    assert done.findings[0].found.startswith("0.5 of its norm apart; 1 of ")


def test_other_weights_are_found(base: Path, planted: Callable[[Plant], None]) -> None:
    planted(lambda tensors: tensors[named(tensors, "down_proj.weight")].mul_(1.01))
    done = verify_resume(base, steps=3)
    assert found(done)["model"].endswith("down_proj.weight after step 5")
    assert done.findings[0].found.startswith("0.01 of its norm apart")


def test_a_wrong_count_of_steps_is_found(base: Path, planted: Callable[[Plant], None]) -> None:
    planted(lambda tensors: tensors[named(tensors, "/step")].fill_(1.0))
    assert found(verify_resume(base, steps=3))["optimizer"].endswith("/step after step 5")


def test_another_generator_is_found(adapted: Path, planted: Callable[[Plant], None]) -> None:
    state = torch.Generator().manual_seed(7).get_state()
    planted(lambda tensors: tensors.update({"random#0/cpu": state}))
    done = verify_resume(adapted, steps=3)
    assert found(done)["random"] == "cpu after step 5"
    assert "elements are others" in done.findings[0].found


def forgetting(clean: Path, what: str, folder: Path) -> Path:
    made = values(clean, transform={"method": "forgetful", "forgets": what})
    with as_new_process():
        return run(made | {"plugins": [str(PLUGIN)]}, folder)


@pytest.mark.parametrize(
    ("forgets", "what", "where"),
    [
        ("moment", "gradient_norm", "step 6"),
        ("generator", "gradient_norm", "step 6"),
        ("schedule", "gradient_norm", "step 6"),
        ("position", "rows", "step 6"),
    ],
)
@pytest.mark.expensive
def test_what_a_plugin_forgets_is_found(
    clean: Path, here: None, tmp_path: Path, forgets: str, what: str, where: str
) -> None:
    folder = forgetting(clean, forgets, tmp_path / "run")
    assert found(verify_resume(folder, steps=3))[what] == where


def test_a_plugin_that_forgets_nothing_passes(clean: Path, here: None, tmp_path: Path) -> None:
    assert verify_resume(forgetting(clean, "nothing", tmp_path / "run"), steps=3).passed


@pytest.fixture
def spoilt(base: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(base, tmp_path / "run"))


def test_a_checkpoint_of_another_moment_than_the_record_is_found(spoilt: Path, here: None) -> None:
    changed_checkpoint(
        spoilt / "checkpoints" / "step-00000004",
        lambda tensors: [each.zero_() for name, each in tensors.items() if "/exp_avg" in name],
    )
    done = verify_resume(spoilt, steps=3)
    assert found(done) == {"record": "loss of step 6, from the checkpoint of 4"}
    assert checks(done)["record"]["exact"]


def test_elsewhere_the_record_is_compared_within_a_tolerance(spoilt: Path, here: None) -> None:
    rows = [json.loads(line) for line in (spoilt / "metrics.jsonl").read_text().splitlines()]
    rows[5]["loss"] *= 1 + 1e-5
    (spoilt / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert list(found(verify_resume(spoilt, steps=3))) == ["record"]
    record = json.loads((spoilt / "run.json").read_text())
    record["environments"][0]["processor"] = "another"
    (spoilt / "run.json").write_text(json.dumps(record))
    done = verify_resume(spoilt, steps=3)
    assert done.passed
    assert checks(done)["record"]["largest"] == pytest.approx(1e-5, rel=0.01)


def test_a_damaged_checkpoint_is_found(spoilt: Path, here: None) -> None:
    [file] = (spoilt / "checkpoints" / "step-00000004").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    [finding] = verify_resume(spoilt, steps=3).findings
    assert finding.what == "checkpoint"
    assert "checksum" in finding.found


def test_arithmetic_that_is_by_chance_is_no_fault_of_the_checkpoint(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = iter(range(100))

    def start(stretch: Stretch) -> None:
        from modicum.trainer.session import Session

        plain = Session.agree

        def agree(self: Session, **asked: bool) -> Any:
            with torch.no_grad():
                next(iter(self.model.parameters())).add_(1e-6 * next(chance))
            return plain(self, **asked)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Session, "agree", agree)
            run_stretch(stretch, Ranks())

    monkeypatch.setattr("modicum.verify.resume.launched", start)
    done = verify_resume(base, steps=3)
    assert done.findings[0].what == "determinism"
    assert done.findings[0].expected == "the same in two uninterrupted continuations"


def test_steps_are_begun_anew_where_no_checkpoint_leaves_enough(base: Path, here: None) -> None:
    done = verify_resume(base, steps=5)
    assert done.passed, done.findings
    assert checks(done)["steps"] == {"check": "steps", "begin": 0, "stop": 2, "end": 7}
    assert checks(done)["record"]["steps"] == 7


def test_what_cannot_be_verified_is_refused(spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        verify_resume(tmp_path)
    record = json.loads((spoilt / "run.json").read_text())
    (spoilt / "run.json").write_text(json.dumps(record | {"forked_from": "/gone"}))
    with pytest.raises(InputError, match=r"began as a fork.*fewer --steps"):
        verify_resume(spoilt, steps=6)
    (spoilt / "run.json").write_text(json.dumps(record | {"steps_planned": 1}))
    with pytest.raises(InputError, match="a single step"):
        verify_resume(spoilt)


def on_ranks(ranks: Ranks, stretch: Stretch) -> None:
    run_stretch(stretch, ranks)


def trained(ranks: Ranks, recipe: dict[str, Any], folder: Path) -> None:
    import modicum
    from modicum.trainer.loop import train

    train(modicum.plan(modicum.Recipe(**recipe), ranks=ranks), folder, ranks=ranks)


@pytest.mark.ranks
@pytest.mark.expensive
def test_runs_on_several_ranks_are_verified_on_as_many_and_on_fewer(
    clean: Path, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(trained, values(clean, parallel={"strategy": "fsdp"}), tmp_path / "run", ranks=2)

    def start(stretch: Stretch) -> None:
        pool.run(on_ranks, stretch, ranks=stretch.ranks)

    monkeypatch.setattr("modicum.verify.resume.launched", start)
    done = verify_resume(tmp_path / "run", steps=3)
    assert done.passed, done.findings
    assert checks(done)["ranks"] == {"check": "ranks", "run": 2, "restored": 2}
    fewer = verify_resume(tmp_path / "run", steps=3, ranks=1)
    assert fewer.passed, fewer.findings
    assert not checks(fewer)["compared"]["exact"]


# Processes


def test_a_stretch_is_read_as_it_was_written(tmp_path: Path) -> None:
    stretch = Stretch(tmp_path / "run", 7, tmp_path / "traces", (5, 7), 2, True)
    stretch.save(tmp_path / "file")
    assert Stretch.load(tmp_path / "file") == stretch
    (tmp_path / "file").write_text("{}")
    with pytest.raises(InputError, match="is no stretch of a run"):
        Stretch.load(tmp_path / "file")


@pytest.mark.expensive
def test_processes_of_their_own_pass_and_say_once_what_is_wrong(spoilt: Path, modicum: Any) -> None:
    ended = modicum("verify", "resume", spoilt, "--steps", "3", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["passed"]
    recipe = spoilt / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("sequence_length: 64", "sequence_length: 48"))
    ended = modicum("verify", "resume", spoilt, "--steps", "3")
    assert ended.code == 2
    assert ended.out == ""
    [cost, message] = ended.err.splitlines()
    assert cost.startswith("from a checkpoint of step 4")
    assert "the data has changed since this run began" in message
    assert not list(spoilt.glob(".stretch*"))


def test_a_run_on_a_disk_that_keeps_no_locks_is_looked_at(
    spoilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (spoilt / "lock").touch()
    monkeypatch.setattr("fcntl.flock", refuses)
    assert begun_run(spoilt).path == spoilt


def test_a_run_in_use_is_refused(spoilt: Path) -> None:
    with RunFolder(spoilt).locked(), pytest.raises(InputError, match="is in use"):
        verify_resume(spoilt)
