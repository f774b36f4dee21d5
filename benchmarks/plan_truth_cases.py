"""What `plan_truth` draws: recipes over everything that a recipe has a place for, of a useful size.

Methods come from the catalog, so a new one is drawn as soon as it is there. A case is a function of
the seed, its number and the catalog.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from plan_truth_models import DECODERS, ENCODERS, TOKENS, sized
from plan_truth_more import more, words_of

from modicum.core.contracts.catalog import MethodRecord
from modicum.core.errors import InputError
from modicum.data.named_templates import END
from modicum.planner.choose import choices
from modicum.recipe import SLOTS, Recipe, methods_for

STEPS = 5
TRIES = 20  # until settings go with the methods, or none do
IMAGES, TEXT_CLASSES, SEQUENCES = 0.1, 0.15, 0.05
# Where no method asks for trained weights, a case of text has a folder's model this often.
FROM_FOLDER = 0.4
TWO_RANKS, DIAGNOSED, WATCHED = 0.25, 0.1, 0.3
# The budget is the need of the plan without one, times a factor of this range.
LEAST_BUDGET, MOST_BUDGET = 0.7, 1.4
# What keeps a method small in tests is not wanted here, but for what only costs time.
_FIELDS: dict[str, dict[str, Any]] = {
    "diffora": {"search_steps": 6, "examples": 32},
    "fwsvd": {"examples": 16, "share": 0.5},
    "structured_pruning": {"examples": 16},
    # Two updates are metered: what begins later, or makes its state later, is not seen.
    "acp_sgd": {"start_after": 0},
    "mkor": {"every": 1},
    "powersgd": {"start_after": 0},
}


@dataclass(frozen=True)
class Case:
    """A recipe to plan and to run.

    Args:
        recipe: plain values; `{model}`, `{adapter}` and `{data}` represent the paths of what is
            made for it, and `{norm}` a last name of the model's norms.
        raw: the config.json of the folder `{model}`; None where there is none.
        data: of what kind the rows of `{data}` are, `examples` or `classes`; None: no such file.
        budget: the section's field that is set, `memory` or `tensors`.
        factor: of what the plan without a budget needs.
    """

    seed: int
    number: int
    recipe: dict[str, Any]
    ranks: int
    budget: str
    factor: float
    raw: dict[str, Any] | None = None
    data: str | None = None
    words: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """For people and folders."""
        return f"{self.seed}-{self.number}"


def draw(seed: int, number: int) -> Case:
    """The case of this number."""
    chance = random.Random(f"plan truth {seed}/{number}")
    ranks = 2 if chance.random() < TWO_RANKS else 1
    kind = chance.random()
    if kind < IMAGES:
        made: dict[str, Any] = {"recipe": _images(ranks, chance)}
    elif kind < IMAGES + TEXT_CLASSES:
        made = _text_classes(ranks, chance)
    elif kind < IMAGES + TEXT_CLASSES + SEQUENCES:
        made = {"recipe": _sequences(ranks, chance)}
    else:
        made = _text(ranks, chance)
    recipe = made.pop("recipe")
    if ranks > 1 and chance.random() < 0.4:
        recipe["comm"] = _method("comm", chance)
    for _ in range(TRIES):
        settings = _settings(recipe, ranks, chance)
        if _combine(recipe | settings, ranks):
            break
    recipe |= settings
    # By a chance of its own: what looks at evaluations changes nothing else that is drawn.
    other = random.Random(f"diagnosis {seed}/{number}")
    looks = {"diagnosis": _method("diagnosis", other)} if other.random() < DIAGNOSED else {}
    if "task" not in recipe and _combine(recipe | looks, ranks):
        recipe |= looks
    if ranks > 1 and other.random() < WATCHED:
        recipe["watchdog"] = _method("watchdog", other)
    if "task" not in recipe:
        third = random.Random(f"more {seed}/{number}")
        given = made.get("raw")
        recipe, raw = more(recipe, given, third, _method, lambda each: _combine(each, ranks))
        made |= {} if raw is None else {"raw": raw}
    return Case(
        seed,
        number,
        recipe,
        ranks,
        chance.choice(["memory", "tensors"]),
        round(chance.uniform(LEAST_BUDGET, MOST_BUDGET), 3),
        words=_words(recipe, made.get("raw"), ranks),
        **made,
    )


def _combine(recipe: dict[str, Any], ranks: int) -> bool:
    """Whether no rule forbids the recipe."""
    try:
        return any(choices(Recipe(**recipe), "cpu", ranks))
    except InputError:
        return False


def _method(
    slot: str, chance: random.Random, without: str = "", only: str | None = None
) -> dict[str, Any]:
    """Any method of a section, but for those with a trait, or of those with one."""
    known = [record for record in methods_for(slot).values() if without not in record.info.traits]
    known = [record for record in known if only is None or only in record.info.traits]
    record = chance.choice(sorted(known, key=lambda record: record.name))
    return {"method": record.name, **_fields(record, chance)}


def _fields(record: MethodRecord, chance: random.Random) -> dict[str, Any]:
    """A rank where an adapter has one, and a switch or two; the rest as people leave it."""
    fields = dict(_FIELDS.get(record.name, {}))
    if record.room == "adapters" and "rank" in record.fields:
        fields["rank"] = chance.choice([2, 4, 8] if record.name == "mos" else [8, 16, 64])
    for name, (kind, _) in record.fields.items():
        if kind is bool and chance.random() < 0.3:
            fields[name] = chance.choice([False, True])
    return fields


def _images(ranks: int, chance: random.Random) -> dict[str, Any]:
    width, rows = chance.choice([48, 64]), chance.choice([256, 384]) * ranks
    task = {
        "method": "images",
        "images": 1024,
        "held_out": 64,
        "widths": [width, width, 2 * width, 2 * width],
        "norm": chance.choice(["none", "group"]),
    }
    training = {"batch_size": rows, "micro_batch_size": rows // ranks}
    recipe: dict[str, Any] = {"task": task, "training": training}
    if chance.random() < 0.4:
        recipe["memory"] = _method("memory", chance)
    recipe["optimizer"] = _method("optimizer", chance, without="needs_recurrence")
    return recipe


def _sequences(ranks: int, chance: random.Random) -> dict[str, Any]:
    rows, length = chance.choice([1024, 2048]) * ranks, chance.choice([16, 32])
    task = {"method": "sequences", "sequences": 4096, "length": length, "width": 512}
    only = chance.choice([None, "needs_recurrence"])
    return {
        "task": task,
        "training": {"batch_size": rows, "micro_batch_size": rows // ranks},
        "optimizer": _method("optimizer", chance, only=only),
    }


def _text_classes(ranks: int, chance: random.Random) -> dict[str, Any]:
    name = chance.choice([*sorted(ENCODERS), "Llama", "Qwen 3"])
    length = chance.choice([128, 256])
    task = {"method": "text_classes", "pad_token": END}
    recipe: dict[str, Any] = {"task": task, "model": {"path": "{model}"}}
    recipe["data"] = {"path": "{data}", "sequence_length": length}
    recipe["training"] = {"batch_size": ranks * chance.choice([2048, 4096]) // length}
    if chance.random() < 0.4:
        # The one that a classifier's head is trained and kept next to.
        recipe["adapter"] = {"method": "lora", **_fields(methods_for("adapter")["lora"], chance)}
    else:
        recipe["optimizer"] = _method("optimizer", chance, without="needs_recurrence")
    raw = sized(name, chance.choice([384, 512]), chance.choice([4, 6]), 8192, 512)
    return {"recipe": recipe, "raw": raw, "data": "classes"}


def _text(ranks: int, chance: random.Random) -> dict[str, Any]:
    """A decoder: new, or of a folder, with what may stand on its weights."""
    recipe: dict[str, Any] = {}
    way = chance.choice(["full", "full", "adapter", "adapter", "adapter", "compress", "linear"])
    if way == "adapter":
        if chance.random() < 0.4:
            recipe["linear"] = _method("linear", chance, only="quantized_base")
        without = "writes_base" if "linear" in recipe else ""
        recipe["adapter"] = _method("adapter", chance, without=without)
    elif way != "full":
        recipe[way] = _method(way, chance, without="quantized_base")
    if chance.random() < 0.6:
        recipe["optimizer"] = _method("optimizer", chance, without="needs_recurrence")
    if way == "full" and chance.random() < 0.15:
        recipe["transform"] = _method("transform", chance)
    length = chance.choice([128, 256, 512])
    recipe["data"] = {"sequence_length": length, "boundaries": chance.random() < 0.8}
    made: dict[str, Any] = {"recipe": recipe}
    if chance.random() < 0.5:
        recipe["data"]["path"], made["data"] = "{data}", "examples"
    tokens = ranks * chance.choice([2048, 4096] if way == "adapter" else [1024, 2048])
    recipe["training"] = {"batch_size": tokens // length}
    width, layers = chance.choice([320, 384, 512, 640]), chance.choice([4, 6, 8])
    vocabulary = chance.choice([8192, 16384])
    if way in ("adapter", "compress") or chance.random() < FROM_FOLDER:
        # The built-in decoder and those of transformers in equal parts.
        name = chance.choice(["Llama", chance.choice(sorted(DECODERS))])
        recipe["model"] = {"path": "{model}"}
        made["raw"] = sized(name, width, layers, vocabulary, 512)
        return made
    heads = width // 64
    recipe["model"] = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": chance.choice([None, 1]),
        "vocabulary_size": TOKENS,
        "tied_embeddings": chance.random() < 0.7,
    }
    return made


def _settings(recipe: dict[str, Any], ranks: int, chance: random.Random) -> dict[str, Any]:
    """Everything else that a recipe says, half of it as people leave it."""
    training = dict(recipe["training"])
    rows = training["batch_size"] = max(training["batch_size"], 2 * ranks)
    training |= {"steps": STEPS, "learning_rate": 1e-4}
    training |= _of_updates(recipe.get("optimizer"))
    if training["learning_rate"] is None:
        del training["learning_rate"]
    training["precision"] = chance.choice(["fp32", "fp32", "bf16"])
    own = training.get("micro_batch_size", max(1, rows // ranks // 2))
    training["micro_batch_size"] = chance.choice(["auto", "auto", own]) if own < 64 else own
    training["recompute"] = chance.choice(["auto", "auto", "none", "blocks"])
    training["compile"] = "blocks" if chance.random() < 0.02 else "auto"
    checkpoint: dict[str, Any] = {"every": chance.choice([2, STEPS])}
    if chance.random() < 0.3:
        checkpoint["asynchronous"] = chance.choice([True, False])
    made = {
        "training": training,
        "parallel": {"strategy": chance.choice(["auto", "ddp", "fsdp", "zero"])},
        "checkpoint": checkpoint,
        "evaluation": {"every": STEPS, "rows": chance.choice([4, 16])},
        "samples": {"count": 0 if "task" in recipe else chance.choice([0, 1])},
    }
    return made | ({"data": recipe["data"] | {"limit": "1MB"}} if "data" in recipe else {})


def _of_updates(optimizer: dict[str, Any] | None) -> dict[str, Any]:
    """What of a recipe means nothing to its optimizer, as people would leave it out."""
    if optimizer is None:
        return {}
    fields = {name: value for name, value in optimizer.items() if name != "method"}
    traits = methods_for("optimizer")[optimizer["method"]].traits(fields)
    found: dict[str, Any] = {}
    if {"frees_gradient_in_backward", "needs_no_gradients"} & set(traits):
        found["clip_norm"] = None
    if "takes_no_rate" in traits:
        found |= {"learning_rate": None, "schedule": "constant"}
    return found


def _words(recipe: dict[str, Any], raw: dict[str, Any] | None, ranks: int) -> tuple[str, ...]:
    """What people want to know of a recipe at a glance."""
    training = recipe["training"]
    model = "built-in" if raw is None else str(raw["model_type"])
    found = [recipe.get("task", {}).get("method", "text"), model]
    found += [recipe[slot]["method"] for slot in SLOTS if slot in recipe and slot != "task"]
    found.append(training["precision"])
    if training["recompute"] == "blocks":
        found.append("recompute")
    if training["compile"] == "blocks":
        found.append("compile")
    return (*found, *words_of(recipe, raw), *([f"{ranks} ranks"] if ranks > 1 else []))
