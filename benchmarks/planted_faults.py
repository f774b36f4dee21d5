"""Faults that are planted in data, checkpoints and exports: which of them `modicum verify` finds.

Each is put to the command that should find it, and counts as found where the command ends with 5
and names it. Where nothing is planted the same commands must pass. All of it runs in this process,
also what `verify resume` does in processes of its own; `tests/verify/test_resume.py` starts those.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, say, write_result
from safetensors.torch import load_file, save_file

from modicum.data.named_templates import NAMED
from modicum.recipe import Recipe
from modicum.recipe_yaml import dump

sys.path.insert(0, str(HERE.parent / "tests"))
sys.path.insert(0, str(HERE.parent))
from classifiers import base_folder, rows, write_rows  # type: ignore[import-not-found]
from tests.cli.conftest import modicum
from tests.verify.conftest import (
    as_new_process,
    changed_checkpoint,
    run,
    stretches_here,
    talks,
    values,
)
from tests.verify.test_class_export import changed as with_other_tensors
from tests.verify.test_class_export import merged as merged_classifier
from tests.verify.test_class_export import values as classes
from tests.verify.test_data import NO_END, SILENT
from tests.verify.test_export import edit, merged

FORGETFUL = HERE.parent / "tests" / "contracts" / "plugins" / "forgetful.py"
OTHER_TEMPLATE = "{{ messages[0].content }}"
STEPS = ("--steps", "3")
Words = list[str]


@dataclass(frozen=True)
class Fault:
    """A fault: what it is, what plants it and gives the command's words, and the finding's name.

    Args:
        finding: None: nothing is planted, and the command must pass.
    """

    name: str
    plant: Callable[[Path], Words]
    finding: str | None


class World:
    """Clean data, a new model's run and an adapter's run on it, which faults are copied from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write_data(folder)
        self.base = run(values(folder), folder / "base")
        self.adapter = {"method": "lora", "rank": 2}
        model = {"path": str(self.base)}
        self.adapted = run(values(folder, model=model, adapter=self.adapter), folder / "adapted")
        write_rows(folder / "data.jsonl", rows())
        self.encoder = base_folder(folder / "bert", "bert")
        self.classifier = run(classes(folder, "bert"), folder / "classifier")
        adapter = self.adapter | {"rank": 4}
        self.adapted_classifier = run(classes(folder, "bert", adapter=adapter), folder / "classes")

    @staticmethod
    def write_data(folder: Path, train: str = "", held: str = "") -> None:
        """Conversations, with something after them."""
        (folder / "train.jsonl").write_text(talks(40) + train)
        (folder / "held.jsonl").write_text(talks(8, first=100) + held)

    # Data

    def data(self, place: Path, **spoilt: Any) -> Words:
        """A recipe on data of its own."""
        self.write_data(place, spoilt.pop("train", ""), spoilt.pop("held", ""))
        recipe = place / "recipe.yaml"
        recipe.write_text(dump(Recipe(**values(place, **spoilt))))
        return ["data", str(recipe)]

    def template(self, place: Path, text: str, model: str | None = None) -> Words:
        """A recipe with a chat template, perhaps on a trained model."""
        (place / "own.jinja").write_text(text)
        based = {} if model is None else {"model": {"path": model}}
        return self.data(place, data={"chat_template": str(place / "own.jinja")}, **based)

    # Resume

    def forgets(self, place: Path, what: str) -> Words:
        """A run with a method of its own that keeps something out of the checkpoint."""
        made = values(self.folder, transform={"method": "forgetful", "forgets": what})
        with as_new_process():
            run(made | {"plugins": [str(FORGETFUL)]}, place / "run")
        return ["resume", str(place / "run"), *STEPS]

    def checkpoint(self, place: Path, change: Callable[[Path], None]) -> Words:
        """The run with another checkpoint."""
        folder = Path(shutil.copytree(self.base, place / "run"))
        change(folder / "checkpoints" / "step-00000004")
        return ["resume", str(folder), *STEPS]

    # Export

    def against(self, place: Path, change: Callable[[Path], None], **how: Any) -> Words:
        """The adapter merged, and something changed in the folder."""
        folder = merged(self.adapted, place / "merged", **how)
        change(folder)
        return ["export", str(self.adapted), "--against", str(folder)]

    def other_base(self, place: Path) -> Words:
        """An adapter whose base has changed since."""
        own = Path(shutil.copytree(self.base, place / "base"))
        made = values(self.folder, model={"path": str(own)}, adapter=self.adapter)
        folder = run(made, place / "run")
        file = own / "model" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] *= 1.5
        save_file(tensors, file, metadata={"format": "pt"})
        return ["export", str(folder)]

    def scaled(self, place: Path, scale: float) -> Words:
        """The adapter of a classifier merged with another scale; its trained head is there."""
        done = self.adapted_classifier
        folder = merged_classifier(done, place / "merged", scale=scale)
        return ["export", str(done), "--against", str(folder)]

    def other_classifier(self, place: Path, change: Callable[[Path], Any]) -> Words:
        """A classifier's exported folder with something changed."""
        folder = Path(shutil.copytree(self.classifier / "model", place / "model"))
        change(folder)
        return ["export", str(self.classifier), "--against", str(folder)]

    def faults(self) -> Iterator[Fault]:
        """All of them, and before them what is clean."""
        for words in (
            ["resume", str(self.base), *STEPS],
            ["resume", str(self.adapted), *STEPS],
            ["export", str(self.base)],
            ["export", str(self.adapted)],
            ["export", str(self.classifier)],
            ["export", str(self.adapted_classifier)],
        ):
            yield Fault(f"clean: {words[0]}", partial(_given, words), None)
        yield Fault("clean: data", self.data, None)
        yield from self._of_data()
        for what, finding in (("moment", "gradient_norm"), ("generator", "gradient_norm"),
                              ("schedule", "gradient_norm"), ("position", "rows")):  # fmt: skip
            name = f"a method that does not save its {what}"
            yield Fault(name, partial(self.forgets, what=what), finding)
        yield Fault("stale moment", partial(self.checkpoint, change=stale_moment), "record")
        yield Fault("damaged file", partial(self.checkpoint, change=damaged), "checkpoint")
        yield from self._of_exports()

    def _of_data(self) -> Iterator[Fault]:
        silent = json.dumps(SILENT) + "\n"
        yield Fault("duplicates", partial(self.data, train=talks(10)), "duplicates")
        yield Fault("validation is trained on", partial(self.data, held=talks(1)), "overlap")
        yield Fault("empty answers", partial(self.data, train=silent), "silent")
        yield Fault("missing end of text", partial(self.template, text=NO_END), "unended")
        text = NAMED["chatml"].source.replace("<|im_start|>", "<|im_start|> ")
        other = partial(self.template, text=text, model=str(self.base))
        yield Fault("other template", other, "chat_template")

    def _of_exports(self) -> Iterator[Fault]:
        nothing = partial(self.against, change=lambda folder: None)
        yield Fault("wrong merge scale", partial(nothing, scale=0.5), "logits")
        words = ["export", str(self.adapted), "--against", str(self.base / "model")]
        yield Fault("adapter not applied", partial(_given, words), "logits")
        yield Fault("changed base", self.other_base, "base")
        yield Fault("missing EOS in the export", partial(self.against, change=endless), "eos")
        other = partial(self.against, change=other_template)
        yield Fault("other template in the export", other, "chat_template")
        yield from self._of_classifiers()

    def _of_classifiers(self) -> Iterator[Fault]:
        for name, scale in (("wrong merge scale", 0.5), ("adapter not applied", 0.0)):
            yield Fault(f"classifier: {name}", partial(self.scaled, scale=scale), "logits")
        for name, change, finding in (
            ("changed head", other_head, "logits"),
            ("other label order", other_labels, "labels"),
        ):
            planted = partial(self.other_classifier, change=change)
            yield Fault(f"classifier: {name}", planted, finding)
        words = ["export", str(self.classifier), "--against", str(self.encoder)]
        yield Fault("classifier: no head", partial(_given, words), "head")


def _given(words: Words, place: Path) -> Words:
    """Words that need nothing in a place."""
    return words


def stale_moment(folder: Path) -> None:
    """Moments of a checkpoint are none."""
    changed_checkpoint(
        folder, lambda tensors: [t.zero_() for name, t in tensors.items() if "/exp_avg" in name]
    )


def damaged(folder: Path) -> None:
    """A bit is another."""
    [file] = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def endless(folder: Path) -> None:
    """No token ends a text."""
    edit(folder / "generation_config.json", eos_token_id=None)


def other_template(folder: Path) -> None:
    """Conversations are written in another way."""
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)


def other_head(folder: Path) -> None:
    """A classifier's head is scaled."""
    scaled = "classifier.weight"
    with_other_tensors(folder, lambda name, tensor: tensor * (1.1 if name == scaled else 1))


def other_labels(folder: Path) -> None:
    """Classes are named in another order than the head's rows have."""
    names = json.loads((folder / "config.json").read_text())["id2label"]
    edit(folder / "config.json", id2label=dict(zip(names, reversed(names.values()), strict=True)))


def put(fault: Fault, place: Path) -> dict[str, Any]:
    """What the command makes of a fault."""
    place.mkdir()
    words = fault.plant(place)
    with stretches_here():
        done = modicum("verify", *words, "--json")
    whats = [each["what"] for each in json.loads(done.out)["findings"]] if done.out else []
    expected = 0 if fault.finding is None else 5
    named = fault.finding in whats if fault.finding else not whats
    row = {"fault": fault.name, "command": f"modicum verify {words[0]}", "expected": fault.finding,
           "findings": whats, "found": done.code == expected and named}  # fmt: skip
    if not row["found"]:
        row["said"] = f"{done.code}: {done.err.strip()[-500:]}"
    say(f"{'as it should be' if row['found'] else 'NOT FOUND':16} {fault.name}: {', '.join(whats)}")
    return row


def main() -> None:
    """Plant them, one after the other, and write what was found."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        rows = [
            put(fault, Path(folder) / f"fault-{number}")
            for number, fault in enumerate(world.faults())
        ]
    planted = [row for row in rows if row["expected"] is not None]
    clean = [row for row in rows if row["expected"] is None]
    content = {
        "planted": len(planted),
        "found": sum(row["found"] for row in planted),
        "missed": sum(not row["found"] for row in planted),
        "clean": len(clean),
        "clean_but_found": sum(not row["found"] for row in clean),
        "rows": rows,
    }
    write_result("planted_faults", content, {})


if __name__ == "__main__":
    main()
