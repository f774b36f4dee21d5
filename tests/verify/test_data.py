"""Planted faults in data are found, each by its limit; clean data passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from classifiers import base_folder, rows, write_rows  # type: ignore[import-not-found]
from tests.verify.conftest import talks, values

import modicum
from modicum.core.errors import InputError
from modicum.data.named_templates import NAMED
from modicum.verify import DataLimits, Verification, verify_data

NO_END = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SILENT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": ""}]}


def verified(folder: Path, **sections: dict[str, Any]) -> Verification:
    return verify_data(modicum.Recipe(**values(folder, **sections)))


def found(done: Verification) -> dict[str, str]:
    """By what was found, where."""
    assert not done.passed
    return {finding.what: finding.where for finding in done.findings}


@pytest.fixture
def folder(tmp_path: Path, clean: Path) -> Path:
    """Clean data that a test may spoil."""
    for name in ("train.jsonl", "held.jsonl"):
        (tmp_path / name).write_bytes((clean / name).read_bytes())
    return tmp_path


def test_clean_data_passes_and_every_limit_has_a_row(clean: Path) -> None:
    done = verified(clean)
    assert done.passed
    # Labelled texts have one, and data with a test the other.
    limits = {*DataLimits.names()} - {"contradicting", "test_overlap"}
    assert {check["check"] for check in done.checks} == limits | {"chat_template"}
    assert {check["count"] for check in done.checks if "count" in check} == {0}
    by_name = {check["check"]: check for check in done.checks}
    assert by_name["overlap"]["of"] == 8
    assert by_name["unended"]["of"] == by_name["duplicates"]["of"] == 40


def test_duplicates_are_found_with_their_share(folder: Path) -> None:
    (folder / "train.jsonl").write_text(talks(30) + talks(10))
    done = verified(folder)
    assert found(done) == {"duplicates": "data.path"}
    [finding] = done.findings
    assert finding.expected == "at most 5.000% of the documents"
    assert finding.found == "25.000% (10 of 40)"


def test_validation_that_is_trained_on_is_found(folder: Path) -> None:
    (folder / "held.jsonl").write_text(talks(7, first=100) + talks(1))
    assert found(verified(folder)) == {"overlap": "data.validation_path"}


def test_empty_answers_are_found(folder: Path) -> None:
    with open(folder / "train.jsonl", "a") as file:
        file.write(f"{json.dumps(SILENT)}\n")
    done = verified(folder)
    assert found(done) == {"silent": "data.path"}
    assert done.findings[0].found == "2.439% (1 of 41)"


def test_rows_with_nothing_to_learn_are_found(tmp_path: Path) -> None:
    for name, count in (("train", 40), ("held", 5)):
        rows = [
            {"question": f"{name} {n}?", "answer": f"{n}" if n > 2 else ""} for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = verified(tmp_path, data={"column": "answer", "prompt_column": "question"})
    assert found(done) == {"empty": "data.path"}


def test_a_missing_end_of_text_is_found(folder: Path) -> None:
    (folder / "template.jinja").write_text(NO_END)
    done = verified(folder, data={"chat_template": str(folder / "template.jinja")})
    assert found(done) == {"unended": "data.path"}
    assert done.findings[0].found.startswith("100.000%")


def test_another_template_than_the_models_is_found(clean: Path, base: Path, tmp_path: Path) -> None:
    own = {"model": {"path": str(base)}}
    assert verified(clean, **own).passed
    file = tmp_path / "other.jinja"
    file.write_text(NAMED["chatml"].source.replace("<|im_start|>", "<|im_start|> "))
    done = verified(clean, **own, data={"chat_template": str(file)})
    assert found(done)["chat_template"] == "data.chat_template"


def test_prompts_that_lose_their_front_are_found(clean: Path) -> None:
    done = verified(clean, data={"sequence_length": 12})
    assert found(done) == {"truncated": "data.sequence_length"}


def test_examples_that_are_left_out_are_found(folder: Path) -> None:
    long = talks(1, first=500).replace("What", "what " * 99)
    (folder / "train.jsonl").write_text(talks(40) + long)
    done = verified(folder, data={"too_long": "drop"})
    assert found(done) == {"dropped": "data.sequence_length"}


def test_a_limit_may_be_wider_and_must_be_a_share(folder: Path) -> None:
    (folder / "train.jsonl").write_text(talks(30) + talks(10))
    recipe = modicum.Recipe(**values(folder))
    assert verify_data(recipe, DataLimits(duplicates=0.25)).passed
    assert not verify_data(recipe, DataLimits(duplicates=0.24)).passed
    with pytest.raises(InputError, match=r"overlap: is no share.*found: 5.*allowed: 0 to 1"):
        DataLimits(overlap=5)


def test_images_are_refused() -> None:
    with pytest.raises(InputError, match=r"task\.method: only texts"):
        verify_data(modicum.Recipe(task={"method": "images", "data": "textures"}))


def labelled(folder: Path, **data: Any) -> modicum.Recipe:
    """A recipe on a folder's labelled texts."""
    model = folder / "base"
    if not model.exists():
        base_folder(model, "bert")
    made = {"path": str(folder / "texts.jsonl"), "sequence_length": 16, **data}
    return modicum.Recipe(
        task={"method": "text_classes"}, model={"path": str(model)}, data=made,
        training={"steps": 2, "batch_size": 4},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["train.jsonl", "held.jsonl"])
def test_a_document_of_the_test_that_is_trained_or_evaluated_on_is_found(
    folder: Path, name: str
) -> None:
    more = {"test_path": str(folder / "test.jsonl")}
    section = values(folder)["data"] | more
    (folder / "test.jsonl").write_text(talks(5, first=200))
    assert verified(folder, data=section).passed
    [line, *_] = (folder / name).read_text().splitlines(keepends=True)
    (folder / "test.jsonl").write_text(talks(5, first=200) + line)
    done = verified(folder, data=section)
    assert found(done) == {"test_overlap": "data.test_path"}
    assert done.findings[0].found == "16.667% (1 of 6)"


def test_labelled_texts_are_held_against_limits_of_their_own(tmp_path: Path) -> None:
    distinct = list({row["text"]: row for row in rows(60)}.values())
    write_rows(tmp_path / "texts.jsonl", distinct)
    done = verify_data(labelled(tmp_path, validation_fraction=0.2))
    assert done.findings == []
    assert [check["check"] for check in done.checks] == [
        "truncated", "dropped", "duplicates", "empty", "contradicting", "overlap",
    ]  # fmt: skip
    first = distinct[0]
    other = "plants" if first["label"] == "animals" else "animals"
    spoilt = [first] * 9 + [first | {"label": other}, {"text": " ", "label": other}]
    write_rows(tmp_path / "texts.jsonl", distinct + spoilt)
    write_rows(tmp_path / "held.jsonl", distinct[:3])
    held = {"validation_path": str(tmp_path / "held.jsonl"), "validation_fraction": 0.0}
    done = verify_data(labelled(tmp_path, **held))
    assert found(done) == {
        "duplicates": "data.path", "empty": "data.path", "contradicting": "data.path",
        "overlap": "data.validation_path",
    }  # fmt: skip
    by_name = {check["check"]: check for check in done.checks}
    trained = len(distinct) + len(spoilt)
    assert (by_name["duplicates"]["count"], by_name["duplicates"]["of"]) == (9, trained)
    assert (by_name["empty"]["count"], by_name["contradicting"]["count"]) == (1, 1)
    assert (by_name["overlap"]["count"], by_name["overlap"]["of"]) == (3, 3)
    tested = labelled(tmp_path, test_path=held["validation_path"], validation_fraction=0.0)
    assert found(verify_data(tested))["test_overlap"] == "data.test_path"
    short = verify_data(labelled(tmp_path, sequence_length=4), DataLimits(duplicates=1, empty=1))
    assert found(short)["truncated"] == "data.sequence_length"
