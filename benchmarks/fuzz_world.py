"""The small valid world that every input of the fuzzer is a change of, and what changed in it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from modicum.adapters.base import Adapter
from modicum.adapters.saving import Form
from modicum.adapters.travel import travel_of
from modicum.models import huggingface
from modicum.proofs.contracts.adapters.subjects import attached, stir
from modicum.recipe import methods_for

NEW = """\
model: {layers: 1, width: 16, heads: 2, vocabulary_size: 280}
data: {path: texts, sequence_length: 16, validation_fraction: 0.25}
training: {steps: 2, batch_size: 2, learning_rate: 1e-2, compile: none}
evaluation: {rows: 2}
samples: {count: 1, tokens: 4}
checkpoint: {every: 1}
"""
ADAPTED = """\
model: {path: new}
data: {path: data.jsonl, sequence_length: 16, validation_fraction: 0.25}
adapter: {method: lora, rank: 2}
training: {steps: 2, batch_size: 2, learning_rate: 1e-1, compile: none}
samples: {count: 0}
checkpoint: {every: 1}
"""
PROMISES = """\
- id: one
  sentence: "a promise"
  command: "true"
  figure: {file: figures.json, key: a.b}
  bar: "< 1"
"""
PLUGIN = '''\
from __future__ import annotations

from typing import ClassVar

from modicum.core.contracts.method import Info, Method, PositiveInt


class Mine(Method):
    """A method of one's own."""

    info: ClassVar[Info] = Info(
        name="mine", title="Mine", room="adapters", paper="none", claim="none"
    )
    rank: PositiveInt = 2
'''
# As the first step of a model that has seen little has few directions.
_FIELDS: dict[str, dict[str, Any]] = {"lora_sb": {"rank": 2}}
# Further forms of methods: what is kept in full next to factors, the order that PEFT's files have.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora-also": ("lora", {"also": ("*norm",)}),
    "randlora-rank": ("randlora", {"pairing": "rank"}),
}
Stamps = dict[str, tuple[int, ...]]


def make(folder: Path, environment: Mapping[str, str]) -> None:
    """Fill an empty folder with recipes, data, and a run of each kind.

    Raises:
        SystemExit: a run of the unspoilt recipes failed.
    """
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(8):
        text = f"def add_{number}(one, other):\n    return one + other  # naïve\n" * 4
        (texts / f"{number}.py").write_text(text, encoding="utf-8")
    rows = [{"text": f"row {n} says something", "id": n} for n in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("One line, and another.\n" * 100)
    (folder / "table.csv").write_text("id,text\n1,one\n")
    (folder / "figures.json").write_text('{"a": {"b": 0.5}, "when": "2026-01-01"}')
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    for name, content in (
        ("new.yaml", NEW),
        ("adapted.yaml", ADAPTED),
        ("promises.yaml", PROMISES),
        ("mine.py", PLUGIN),
    ):
        (folder / name).write_text(content, encoding="utf-8")
    for name in ("new", "adapted"):
        command = [sys.executable, "-m", "modicum", "train", f"{name}.yaml", "--out", name, "-q"]
        done = subprocess.run(command, cwd=folder, env=dict(environment), check=False)
        if done.returncode:
            raise SystemExit(f"{name}.yaml is no valid recipe any more: exit {done.returncode}")
    base = folder / "new" / "model"
    save_adapters(lambda: huggingface.load(base), folder / "adapters", base_model=str(base))


@dataclass(frozen=True)
class Folder:
    """An adapter's folder: of which method, in which format."""

    name: str
    path: Path
    form: Form


def save_adapters(
    model: Callable[[], nn.Module], folder: Path, base_model: str | None = None
) -> list[Folder]:
    """A folder of every method, as tiny as it is on tiny models, in each format that holds it."""
    records = dict(sorted(methods_for("adapter").items()))
    subjects: dict[str, tuple[Any, dict[str, Any]]]
    subjects = {name: (record.load(), _FIELDS.get(name, {})) for name, record in records.items()}
    subjects |= {name: (records[of].load(), fields) for name, (of, fields) in _VARIANTS.items()}
    found = []
    for name, (kind, fields) in subjects.items():
        assert issubclass(kind, Adapter)
        adapter = stir(attached(kind, model(), seed=5, **fields))
        forms: list[Form] = ["modicum"]
        forms += ["peft"] if travel_of(adapter).form in ("lora", "peft") else []
        for form in forms:
            path = folder / f"{name}-{form}"
            adapter.save(path, form=form, base_model=base_model)
            found.append(Folder(name, path, form))
    return found


def restore(world: Path, template: Path) -> None:
    """Make the world anew."""
    if world.exists():
        for path in world.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(world)
    shutil.copytree(template, world, symlinks=True, copy_function=_copy, dirs_exist_ok=True)


def _copy(source: str, target: str) -> str:
    if stat.S_ISFIFO(os.lstat(source).st_mode):
        os.mkfifo(target)
        return target
    return shutil.copy2(source, target, follow_symlinks=False)


def stamps(folder: Path) -> Stamps:
    """What tells of each file and folder below whether somebody changed it."""
    found: Stamps = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        inside = stat.S_ISDIR(about.st_mode)  # whose own size and date change with its entries
        known = (about.st_mode, about.st_ino)
        found[path.relative_to(folder).as_posix()] = (
            known if inside else (*known, about.st_size, about.st_mtime_ns)
        )
    return found


def changed(before: Stamps, after: Stamps) -> list[str]:
    """The names that are new, gone or changed."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
