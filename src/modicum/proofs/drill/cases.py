"""What the drill draws: recipes with one method from each of up to four rooms, and a kill."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from modicum.core.contracts.catalog import MethodRecord
from modicum.core.errors import InputError
from modicum.planner.choose import layouts
from modicum.planner.combinations import NEEDS
from modicum.recipe import SLOTS, Recipe, methods_for
from modicum.recipe.slots import slot_of

RANKS, STEPS, MOST_ROOMS = 2, 8, 4
# How often a switch or a choice of words is drawn instead of left at its default.
DRAWN = 0.3
# So often a recipe has what its methods ask for: a trained model, an adapter on a quantized base,
# settings that go with them. In so many tries such settings are found, or there are none.
SENSIBLE, TRIES = 0.95, 20
IMAGES_SHARE = 0.25
# What an adapter may train copies of in addition: norms, the head, a full layer.
ALSO = (("*norm",), ("lm_head",), ("model.norm", "layers.1.mlp.down_proj"))
_OF_IMAGES = ("comm", "memory", "optim")
TEXT: dict[str, Any] = {"include": ["json/**", "email/**"], "sequence_length": 64}
# With fewer images on a rank, what a CPU's bf16 convolutions need at any size is most of the peak.
IMAGES_BATCH = 32
IMAGES: dict[str, Any] = {"method": "images", "images": 256, "held_out": 32, "widths": [8, 8, 16]}
# What goes with nothing but a recurrent net is drawn alone, on one.
SEQUENCES: dict[str, Any] = {"method": "sequences", "sequences": 256, "held_out": 32, "length": 6}
NEW: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "vocabulary_size": 600}


@dataclass(frozen=True)
class Case:
    """A drawn recipe, and when which of its processes is killed.

    Args:
        rooms: those that a method was drawn from.
        recipe: plain values; `{base}` represents the folder of a trained model.
        kill_after: the step after which a process is killed.
        victim: the rank that is killed; the number of ranks represents the one that watches them.
    """

    seed: int
    number: int
    rooms: tuple[str, ...]
    recipe: dict[str, Any]
    kill_after: int
    victim: int

    @property
    def name(self) -> str:
        """For people and folders."""
        return f"{self.seed}-{self.number}"

    def with_base(self, base: str) -> dict[str, Any]:
        """The recipe with the folder of the trained model in its place."""
        model = self.recipe.get("model", {})
        if model.get("path") != "{base}":
            return self.recipe
        return {**self.recipe, "model": {**model, "path": base}}


@cache
def rooms() -> dict[str, list[MethodRecord]]:
    """The methods that a recipe has a place for, by room; tasks are what they work on."""
    found: dict[str, list[MethodRecord]] = {}
    for slot in SLOTS:
        for record in methods_for(slot).values():
            if record.room != "tasks":
                found.setdefault(record.room, []).append(record)
    return found


def draw(seed: int, number: int) -> Case:
    """The case of this number: a function of both numbers and of the catalog.

    First comes the task, then up to four of the rooms that have to do with it, and of each a
    method, whatever the others are. What these ask of the rest of the recipe is mostly there.
    """
    chance = random.Random(f"{seed}/{number}")
    known = rooms()
    images = chance.random() < IMAGES_SHARE
    there = [name for name in sorted(known) if (name in _OF_IMAGES) or not images]
    if not images:
        there.remove("memory")
    chosen = chance.sample(there, chance.randint(1, min(MOST_ROOMS, len(there))))
    if "linears" in chosen and "adapters" not in chosen and chance.random() < SENSIBLE:
        chosen[chosen.index("linears")] = "adapters"
    recipe: dict[str, Any] = {}
    training: dict[str, Any] = {}
    alone: str | None = None
    for room in chosen:
        record = chance.choice(sorted(known[room], key=lambda record: record.name))
        slot = slot_of(record)
        assert slot is not None
        alone = slot if "needs_recurrence" in record.info.traits else alone
        for trait in {"needs_no_gradients", "takes_no_rate"} & set(record.info.traits):
            training |= NEEDS[trait]["training"]
        recipe[slot] = {"method": record.name, **_fields(record, chance)}
        if slot == "adapter" and chance.random() < DRAWN:
            recipe[slot]["also"] = list(chance.choice(ALSO))
    recipe |= {"task": dict(IMAGES)} if images else _text(chosen, chance)
    if alone is not None:
        chosen = ["optim"]
        recipe = {alone: recipe[alone], "task": dict(SEQUENCES)}
    recipe |= _settings(recipe, training, chance)
    return Case(
        seed,
        number,
        tuple(sorted(chosen)),
        recipe,
        kill_after=chance.randint(1, STEPS - 2),
        victim=chance.randint(0, RANKS),
    )


def _fields(record: MethodRecord, chance: random.Random) -> dict[str, Any]:
    """Hyper-parameters: those of the tiny form, and some of the words and switches."""
    drawn = dict(record.info.tiny)
    for name, (kind, _) in record.fields.items():
        words = _words(kind)
        if words and chance.random() < DRAWN:
            drawn[name] = chance.choice(words)
    return drawn


def _words(kind: Any) -> list[Any]:
    if kind is bool:
        return [False, True]
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _text(chosen: list[str], chance: random.Random) -> dict[str, Any]:
    """Model and data: a trained model where a method asks for one."""
    asks = {"adapters", "compress", "linears"} & set(chosen)
    trained = chance.random() < (SENSIBLE if asks else 1 - SENSIBLE)
    model = {"path": "{base}"} if trained else dict(NEW)
    return {"model": model, "data": dict(TEXT)}


def _settings(
    methods: dict[str, Any], needed: dict[str, Any], chance: random.Random
) -> dict[str, Any]:
    """Everything else that a recipe says: mostly what goes with the methods, sometimes blindly.

    Args:
        needed: of the section training, by methods without gradients or a rate.
    """
    for _ in range(TRIES if chance.random() < SENSIBLE else 1):
        drawn = _some_settings(8 if "task" not in methods else IMAGES_BATCH, chance)
        drawn["training"] |= needed
        if _combine(methods | drawn):
            break
    return drawn


def _combine(recipe: dict[str, Any]) -> bool:
    """Whether no rule forbids the recipe on the drill's ranks."""
    try:
        layouts(Recipe(**recipe), RANKS)
    except InputError:
        return False
    return True


def _some_settings(batch: int, chance: random.Random) -> dict[str, Any]:
    """Settings, half of them as people leave them."""
    training: dict[str, Any] = {"steps": STEPS, "batch_size": batch}
    training["precision"] = chance.choice(["fp32", "fp32", "bf16"])
    training["micro_batch_size"] = chance.choice(["auto", "auto", batch // 4])
    training["recompute"] = chance.choice(["auto", "none", "blocks"])
    training["clip_norm"] = chance.choice([1.0, None])
    strategies = ["auto", "auto", "auto", "ddp", "fsdp", "zero"]
    return {
        "training": training,
        "parallel": {
            "strategy": chance.choice(strategies),
            "reshard_after_forward": chance.choice([True, False]),
        },
        "checkpoint": {"every": 2},
        "evaluation": {"every": 4, "rows": 8},
        "samples": {"count": 0},
    }
