"""A run made anew is the same to the bit, or what differs is named; changed inputs are refused."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.verify.conftest import changed_checkpoint, run, talks, values

from modicum.core.errors import InputError
from modicum.verify import Verification, reproduce, verify_resume


def checks(done: Verification) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in done.checks}


@pytest.fixture
def spoilt(base: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(base, tmp_path / "run"))


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_run_says_what_it_was_made_of_and_where(base: Path, adapted: Path, clean: Path) -> None:
    record = json.loads((base / "run.json").read_text())
    assert set(record["inputs"]["data"]) == {
        str(clean / "train.jsonl"), str(clean / "held.jsonl")
    }  # fmt: skip
    assert all(digest.startswith("sha256:") for digest in record["inputs"]["data"].values())
    [where] = record["environments"]
    assert where["after_step"] == 0
    assert where["ranks"] == 1
    assert {"processor", "instructions", "threads", "torch", "modicum", "code"} <= where.keys()
    adapter = json.loads((adapted / "run.json").read_text())
    assert set(adapter["inputs"]["model"]) == {"model.safetensors"}


def test_a_run_made_anew_is_the_same_to_the_bit(base: Path, here: None, tmp_path: Path) -> None:
    said: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*")}
    done = reproduce(base, tmp_path / "again", say=said.append)
    assert done.passed, done.findings
    assert said[-1].startswith("8 steps, about ")
    assert said[-1].endswith("to the bit")
    told = checks(done)
    assert told["environment"]["differs"] == []
    assert (told["metrics"]["rows"], told["metrics"]["equal"]) == (8, 8)
    assert told["evaluations"]["equal"] == told["evaluations"]["rows"] > 1
    assert told["weights"]["step"] == 8
    assert told["weights"]["equal"] == told["weights"]["entries"] > 20
    record = json.loads((tmp_path / "again" / "run.json").read_text())
    assert record["status"] == "finished"
    weights = "model/model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (base / weights).read_bytes()
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*")} == before


def test_a_run_that_writes_the_date_is_made_anew_with_its_own(
    clean: Path, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = SimpleNamespace(
        now=lambda: datetime(2024, 7, 5, 10), fromisoformat=datetime.fromisoformat
    )
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made = values(clean)
    made["data"] |= {"chat_template": str(tmp_path / "dated.jinja")}
    with monkeypatch.context() as patched:
        patched.setattr("modicum.data.tokenizer_files.datetime", then)
        folder = run(made, tmp_path / "run")
    done = reproduce(folder, tmp_path / "again", steps=4)
    assert done.passed, done.findings
    date = tmp_path / "again" / "tokenizer" / "moment.txt"
    assert date.read_text() == "2024-07-05T10:00:00\n"


def test_the_first_steps_alone_are_compared(adapted: Path, here: None, tmp_path: Path) -> None:
    done = reproduce(adapted, tmp_path / "again", steps=4)
    assert done.passed, done.findings
    assert checks(done)["metrics"]["rows"] == 4
    assert checks(done)["weights"]["step"] == 4
    assert json.loads((tmp_path / "again" / "run.json").read_text())["status"] == "interrupted"
    fewer = reproduce(adapted, tmp_path / "fewer", steps=3)
    assert fewer.passed
    assert checks(fewer)["weights"] == {"check": "weights", "step": None, "kept": "4, 8"}


def test_the_first_difference_is_named(spoilt: Path, here: None, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (spoilt / "metrics.jsonl").read_text().splitlines()]
    rows[2]["loss"] *= 1.001
    (spoilt / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changed_checkpoint(
        spoilt / "checkpoints" / "step-00000004",
        lambda tensors: tensors["model/model.norm.weight"].mul_(1.5),
    )
    done = reproduce(spoilt, tmp_path / "again", steps=4)
    where = {finding.what: finding.where for finding in done.findings}
    assert where == {"loss": "step 3 of metrics.jsonl", "model": "model.norm.weight after step 4"}
    assert done.findings[0].found.endswith("(0.001 of it apart)")
    assert checks(done)["metrics"]["first"] == 3


def test_where_versions_differ_a_tolerance_holds(spoilt: Path, here: None, tmp_path: Path) -> None:
    record = json.loads((spoilt / "run.json").read_text())
    [where] = record["environments"]
    edit(spoilt / "run.json", environments=[where | {"torch": "2.0.0", "ranks": 1}])
    rows = [json.loads(line) for line in (spoilt / "metrics.jsonl").read_text().splitlines()]
    rows[2]["loss"] *= 1.001
    (spoilt / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said: list[str] = []
    done = reproduce(spoilt, tmp_path / "again", steps=4, say=said.append)
    assert done.passed
    assert said[0].startswith("not as it was: torch was 2.0.0, here it is ")
    assert said[1].endswith("within 0.01")
    assert checks(done)["metrics"]["first"] == 3
    assert checks(done)["metrics"]["largest"] == pytest.approx(0.001, rel=0.01)
    strict = reproduce(spoilt, tmp_path / "strict", steps=4, tolerance=1e-4)
    assert [finding.what for finding in strict.findings] == ["loss"]


def test_changed_inputs_are_refused_by_their_names(
    clean: Path, base: Path, here: None, tmp_path: Path
) -> None:
    for name in ("train.jsonl", "held.jsonl"):
        (tmp_path / name).write_bytes((clean / name).read_bytes())
    folder = run(values(tmp_path), tmp_path / "run")
    (tmp_path / "train.jsonl").write_text(talks(39) + talks(1, first=900))
    with pytest.raises(InputError, match=r"train\.jsonl: is not what it was when the run began"):
        reproduce(folder)
    assert not (tmp_path / "run-again").exists()


def test_what_cannot_be_made_anew_is_refused(spoilt: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        reproduce(tmp_path)
    with pytest.raises(InputError, match=r"--out: is there already"):
        reproduce(spoilt, base)
    edit(spoilt / "run.json", forked_from="/another")
    with pytest.raises(InputError, match="began with another run's state"):
        reproduce(spoilt)
    edit(spoilt / "run.json", forked_from=None)
    (spoilt / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="has done no step"):
        reproduce(spoilt)


@pytest.mark.expensive
def test_streams_resume_and_are_made_anew_without_digests_of_their_files(
    clean: Path, base: Path, here: None, tmp_path: Path
) -> None:
    stream = {"streaming": True, "tokenizer": str(base / "tokenizer"), "shuffle_buffer": 16}
    made = values(clean)
    folder = run(made | {"data": made["data"] | stream}, tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["inputs"]["data"] == {}
    assert verify_resume(folder, steps=3).passed
    said: list[str] = []
    assert reproduce(folder, steps=4, say=said.append).passed
    assert "its data is streamed" in said[0]
