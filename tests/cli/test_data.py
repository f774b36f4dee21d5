"""`modicum data`, on conversations with the recipe's own template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modicum.data import Tokenizer

RECIPE = """\
model: {{layers: 1, width: 16, heads: 2, vocabulary_size: 300}}
data: {{path: {data}, chat_template: {template}, sequence_length: 64, validation_fraction: 0.2}}
training: {{epochs: 2, batch_size: 2}}
samples: {{count: 0}}
"""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def unwrapped(text: str) -> str:
    """Text without blanks, since a terminal's width decides where long paths are broken."""
    return "".join(text.split())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    talks = [
        [
            {"role": "user", "content": f"What is {n % 9} + 1?"},
            {"role": "assistant", "content": f"It is {n % 9 + 1}\x1b[31m!"},
        ]
        for n in range(40)
    ]
    data, template = folder / "chat.jsonl", folder / "template.jinja"
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    template.write_text(TEMPLATE)
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(data=data, template=template))
    return file


def test_each_row_is_a_line_with_what_is_trained(modicum: Any, recipe: Path) -> None:
    ended = modicum("data", recipe, "--json")
    assert ended.code == 0
    rows = [json.loads(line) for line in ended.out.splitlines()]
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert all(len(row["tokens"]) == len(row["trained"]) for row in rows)
    assert all(set(row["trained"]) == {0, 1} for row in rows)
    assert all("[user]What is" in row["text"] for row in rows)
    planned = json.loads(modicum("plan", recipe, "--json").out)
    trained = sum(sum(row["trained"]) for row in rows)
    # The plan's tokenizer is a guess, here by the same text.
    assert planned["counts"]["trained"] == pytest.approx(trained, rel=0.1)
    assert planned["epochs"] == pytest.approx(2, rel=0.1)
    assert len(modicum("data", recipe, "--json", "--rows", "2").out.splitlines()) == 2


def test_answers_are_marked_and_oddities_are_counted(modicum: Any, recipe: Path) -> None:
    ended = modicum("data", recipe, "--rows", "1")
    assert ended.code == 0
    assert "[assistant]⟦It is" in ended.out
    assert "\x1b" not in ended.out
    legend = "What is learned in a row is between ⟦ and ⟧."
    assert ended.out.splitlines()[-1] == legend
    assert legend not in modicum("data", recipe, "--rows", "0").out
    assert "the recipe's; the model has none" in ended.out
    assert "format 'messages'" in " ".join(ended.out.split())  # a long path wraps the line

    def fact(name: str) -> int:
        found = re.search(rf"^{name} +([\d,]+)", ended.out, re.MULTILINE)
        assert found is not None
        return int(found[1])

    assert fact("duplicates") >= 20
    assert fact("overlap") > 0
    # The template ends no turn with an end of text.
    row = r"^documents +([\d,]+) +([\d,]+) train and ([\d,]+) are held"
    parts = re.search(row, ended.out, re.MULTILINE)
    assert parts is not None
    count, trained, held = (int(part.replace(",", "")) for part in parts.groups())
    assert fact("without an end") == trained
    assert count == trained + held > trained


@pytest.mark.parametrize("nothing_to_learn", [0, 3])
def test_it_counts_the_documents_that_init_counts(
    modicum: Any, runs: Any, tmp_path: Path, nothing_to_learn: int
) -> None:
    rows = [{"prompt": f"add {n}", "answer": f"{n} and one"} for n in range(40)]
    rows += [{"prompt": f"say nothing {n}", "answer": ""} for n in range(nothing_to_learn)]
    file, recipe = tmp_path / "rows.jsonl", tmp_path / "my.yaml"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = ("--set", "data.column=answer", "--set", "data.prompt_column=prompt")
    made = modicum("init", "--model", runs.new, "--data", file, *columns, "--json", "--out", recipe)
    assert made.code == 0, made.err
    shown = modicum("data", recipe, "--rows", "0").out
    found = re.search(r"^documents +(\d+) +(\d+) train and (\d+) are held out", shown, re.MULTILINE)
    assert found is not None
    total, trained, held = map(int, found.groups())
    assert total == trained + held == json.loads(made.out)["data"]["documents"]
    assert held > 0


def test_the_file_to_evaluate_on_is_named_and_counted(
    modicum: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    talks = (recipe.parent / "chat.jsonl").read_text().splitlines(True)
    Path("chat.jsonl").write_text("".join(talks))
    Path("held.jsonl").write_text("".join(talks[:7]))
    changes = ["data.path=chat.jsonl", "data.validation_path=held.jsonl"]
    both = [word for change in changes for word in ("--set", change)]
    ended = modicum("data", recipe, "--rows", "0", *both, "--set", "data.validation_fraction=0")
    said = unwrapped(ended.out)
    for file in ("/chat.jsonl", f"; validation: {tmp_path}/held.jsonl"):
        assert unwrapped(f"{file}, format 'messages': 1 file, ") in said
    assert re.search(r"^validation rows +\d+ +7 documents, ", ended.out, re.MULTILINE)
    test = ("--set", "data.test_path=held.jsonl")
    tested = modicum("data", recipe, "--rows", "0", *both, *test).out
    assert re.search(r"^test rows +\d+ +7 documents, ", tested, re.MULTILINE)
    assert re.search(r"^overlap of the test +7 ", tested, re.MULTILINE)
    assert unwrapped(f"; test: {tmp_path}/held.jsonl") in unwrapped(tested)
    alone = ("--set", "data.validation_fraction=0")
    assert "validation" not in modicum("data", recipe, "--rows", "0", *alone).out


def test_a_new_model_has_a_template_and_a_tokenizer_without_one_is_refused(
    modicum: Any, recipe: Path, tmp_path: Path
) -> None:
    ended = modicum("data", recipe, "--rows", "1", "--set", "data.chat_template=null")
    assert ended.code == 0
    assert "<|im_start|>assistant\n⟦It is" in ended.out
    assert "chatml, as the model is new" in ended.out
    assert re.search(r"^without an end +0 ", ended.out, re.MULTILINE)
    Tokenizer.train(iter(["to be"] * 9), 270).save(tmp_path)
    changes = ("--set", "data.chat_template=null", "--set", f"data.tokenizer={tmp_path}")
    ended = modicum("data", recipe, *changes)
    assert ended.code == 2
    assert "data.chat_template: the rows are conversations (format 'messages')" in ended.err
    assert "allowed: chatml, llama-3, zephyr, alpaca, or a file" in ended.err


def test_of_a_stream_the_first_documents_are_shown(
    modicum: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokenizer.train(iter(["to be"] * 9), 270).save(tmp_path)
    changes = ["data.streaming=true", f"data.tokenizer={tmp_path}", "data.validation_fraction=0"]
    changes += ["training.epochs=null", "training.steps=3"]
    sets = [word for change in changes for word in ("--set", change)]
    monkeypatch.setattr("modicum.tasks.text_stream.SHOWN", 7)
    ended = modicum("data", recipe, "--rows", "1", *sets)
    assert ended.code == 0, ended.err
    assert re.search(r"^documents +7 ", ended.out, re.MULTILINE)
    assert "streamed: the first 7 documents" in " ".join(ended.out.split())
    ended = modicum("plan", recipe, *sets)
    assert re.search(r"^streamed +read, tokenized and packed as training", ended.out, re.MULTILINE)


def test_only_text_has_rows_to_look_at(modicum: Any, tmp_path: Path) -> None:
    file = tmp_path / "images.yaml"
    file.write_text("task: {method: images, data: textures}\n")
    assert "only text, and images of your own" in modicum("data", file).err


def test_images_are_counted_by_class(modicum: Any, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for label, count in (("cats", 8), ("dogs", 4)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for n in range(count):
            pillow.new("L", (4, 4), n).save(tmp_path / "images" / label / f"{n}.png")
    file = tmp_path / "images.yaml"
    task = f"{{method: images, data_path: {tmp_path / 'images'}, validation_fraction: 0.25}}"
    file.write_text(f"task: {task}\n")
    ended = modicum("data", file)
    assert ended.code == 0, ended.err
    shown = [line.split() for line in ended.out.splitlines()]
    assert ["cats", "6", "2"] in shown
    assert ["dogs", "3", "1"] in shown
    assert ["all", "9", "3"] in shown
    rows = [json.loads(line) for line in modicum("data", file, "--json").out.splitlines()]
    assert [row["row"] for row in rows] == list(range(12))
    assert {(row["side"], row["label"]) for row in rows[9:]} == {
        ("validation", "cats"), ("validation", "dogs"),
    }  # fmt: skip
    assert "images: 12 images of 2 classes, as 32x32, 3 of them for" in " ".join(ended.out.split())
    tested = modicum("data", file, "--set", "task.test_fraction=0.25").out
    shown = [line.split() for line in tested.splitlines()]
    assert ["Class", "Training", "Validation", "Test"] in shown
    assert ["cats", "4", "2", "2"] in shown
    assert ["all", "6", "3", "3"] in shown
    own = ("--set", f"task.validation_path={tmp_path / 'images'}", "--set")
    said = unwrapped(modicum("data", file, *own, "task.validation_fraction=0").out)
    assert said.startswith(unwrapped(f"{tmp_path}/images: 12 images of 2 classes, as 32x32;"))
    assert unwrapped(f"; validation: {tmp_path}/images: 12 images") in said
    assert unwrapped("overlap of the validation 12 images that train too") in said
    planned = json.loads(modicum("plan", file, "--json").out)
    assert planned["counts"]["classes"] == {"cats": 6, "dogs": 3}
    assert "cats 6, dogs 3" in modicum("plan", file).out


def test_classes_of_texts_are_shown_and_counted(modicum: Any, tmp_path: Path) -> None:
    from classifiers import base_folder, write_rows

    made = [{"text": f"cat {'fox ' * n}dog", "label": "animals"} for n in range(6)]
    made += [{"text": "big oak", "label": "plants"}] * 3 + [{"text": "big oak", "label": "animals"}]
    held = [{"text": "cat dog", "label": "animals"}, {"text": "moss", "label": "plants"}]
    write_rows(tmp_path / "train.jsonl", made)
    write_rows(tmp_path / "val.jsonl", held)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "task: {method: text_classes}\n"
        f"model: {{path: {base_folder(tmp_path / 'base', 'bert')}}}\n"
        f"data: {{path: {tmp_path / 'train.jsonl'}, validation_path: {tmp_path / 'val.jsonl'},"
        " sequence_length: 8}\n"
    )
    lines = modicum("data", file, "--json").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["side"] for row in rows] == ["train"] * 10 + ["validation"] * 2
    assert rows[0]["text"] == "[CLS] cat dog [SEP]"
    assert ("plants", 3) in [(row["label"], len(row["tokens"])) for row in rows[-2:]]
    said = modicum("data", file, "--rows", "1").out
    sides = r"train\.jsonl,.+,10textsof2classes;validation:.+/val\.jsonl,.+,2textsClass"
    assert re.search(sides, unwrapped(said))
    one = ("--set", "data.validation_path=null", "--set", "data.validation_fraction=0.2")
    held_out = unwrapped(modicum("data", file, "--rows", "0", *one).out)
    assert unwrapped(", 10 texts of 2 classes, 2 of them for validation") in held_out
    assert "row 0: 4 tokens, animals\n[CLS] cat dog [SEP]" in said
    three = ("--set", f"data.test_path={tmp_path / 'val.jsonl'}")
    tested = modicum("data", file, "--rows", "0", *three).out
    assert ["animals", "7", "1", "1"] in [line.split() for line in tested.splitlines()]
    assert re.search(r"^overlap of the test +2 ", tested, re.MULTILINE)
    counted = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert counted["animals"] == ["7", "1"]
    assert counted["plants"] == ["3", "1"]
    for name, count in {
        "truncated": "1", "duplicates": "2", "contradicting": "1", "overlap": "1", "dropped": "0",
    }.items():  # fmt: skip
        assert counted[name][0] == count
