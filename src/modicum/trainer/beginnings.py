"""What a run was begun with, in its record: digests of its inputs, and where each part of it ran.

`modicum reproduce` reads it, to say before it begins what is not as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum import __version__
from modicum.core.machine.identity import depends_on
from modicum.core.weight_digests import changed_weights, remembered_digest
from modicum.recipe import Recipe
from modicum.tasks.base import Task
from modicum.trainer.rank_agreement import code
from modicum.trainer.session import Session

# Of more files than these one digest is kept, of all of them.
MOST_FILES = 200
# Of what a machine's record depends on, what decides no result.
_APART = ("format", "GLIBC_TUNABLES", "LD_PRELOAD")
_PREFIXES = ("MALLOC_", "TCMALLOC_")


def note_beginning(session: Session) -> None:
    """Take into the record where the steps from here on are made, and at the start from what."""
    if not session.ranks.first:
        return
    content, plan = session.record.content, session.plan
    if not content["inputs"]:
        # A run that compresses has another base by now than it began with.
        model = session.registry.views["inputs"].read()["model"]
        content["inputs"] = {
            **files_of(plan.recipe, plan.task, plan.inputs),
            "model": dict(model),
            "order": order_of(session.data.identity, plan.recipe.training.seed),
        }
    now = environment(plan.device, session.ranks.size)
    kept = [each for each in content["environments"] if each["after_step"] < session.step]
    last = {key: value for key, value in kept[-1].items() if key != "after_step"} if kept else None
    if last != now:
        kept.append({"after_step": session.step, **now})
    content["environments"] = kept


def order_of(identity: Mapping[str, Any], seed: int) -> str:
    """A digest of prepared data and of the seed that orders its rows.

    Two runs with the same one take the same rows in the same order, for as long as both last.

    >>> order_of({"made_from": "a"}, 0) == order_of({"made_from": "a"}, 1)
    False
    """
    key = json.dumps([identity, seed], sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def environment(device: str, ranks: int) -> dict[str, Any]:
    """What a run's arithmetic may depend on here: versions, processor, kernels, threads, ranks.

    >>> environment("cpu", 2)["ranks"]
    2
    """
    here = depends_on(device)
    kept = {
        name: value
        for name, value in here.items()
        if name not in _APART and not name.startswith(_PREFIXES)
    }
    return {"ranks": ranks, "device": device, "modicum": __version__, "code": code(), **kept}


def files_of(recipe: Recipe, task: Task[Any, Any, Any], inputs: Any) -> dict[str, dict[str, str]]:
    """Digests of the files that a run reads next to its model: of `data`, and its `settings`.

    Of very many files there is one digest, of all.
    """
    data = [Path(file) for file in task.data_files(recipe, inputs)]
    named = (*recipe.plugins, recipe.data.tokenizer, recipe.data.chat_template)
    paths = [Path(name) for name in named if name]
    settings = [path / "tokenizer.json" if path.is_dir() else path for path in paths]
    return {"data": _digests(data), "settings": _digests([f for f in settings if f.is_file()])}


def changed_inputs(
    recipe: Recipe, task: Task[Any, Any, Any], inputs: Any, before: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Which of a run's inputs are not what they were when it began, by their paths.

    Args:
        before: `inputs` of the run's record.
    """
    now = files_of(recipe, task, inputs)
    changed = [
        name
        for kind in now
        if kind in before
        for name in sorted({*before[kind], *now[kind]})
        if before[kind].get(name) != now[kind].get(name)
    ]
    folder = inputs.model_folder
    weights = changed_weights(folder, before["model"]) if "model" in before else []
    return changed + [str(folder / name) for name in weights]


def _digests(files: list[Path]) -> dict[str, str]:
    if len(files) <= MOST_FILES:
        return {str(file): remembered_digest(file) for file in files}
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0{remembered_digest(file)}\n".encode())
    return {f"{files[0].parent} ({len(files):,} files)": f"sha256:{found.hexdigest()}"}
