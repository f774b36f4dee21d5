"""Which adapter suits what need: answers, and those that a plan's own figures ask for.

A plan never changes the method by itself. The page "Which adapter should I use?" shows the measured
figure of each answer, and a test holds that it still carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from modicum.adapters.base import Adapter
from modicum.core.contracts.ledger import EntryKind
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.planner.prediction import Prediction
from modicum.planner.question import Question
from modicum.recipe import Recipe

PAGE = "docs/how-to/which-adapter.md"
_LARGE = 0.5  # of the peak
_ROUNDED = ("nf4", "int8")  # forms of weights that take no change exactly

Reason = Callable[[Recipe, Adapter, Prediction], str | None]


@dataclass(frozen=True)
class AdapterAnswer:
    """An answer to "which adapter should I use?".

    Args:
        name: by which its figure is known.
        need: what the user has to cope with.
        methods: adapters to try.
        take: the same, as a recipe has it.
        words: why, and at what price.
        reason: what of a plan speaks for it; None where only the user can know.
        form: of linear layers, where one is advised next to the recipe's own adapter.
    """

    name: str
    need: str
    methods: tuple[str, ...]
    take: str
    words: str
    reason: Reason | None = None
    form: str | None = None


def _share(made: Prediction, kind: EntryKind) -> float:
    by_phase = made.ledger.by_phase()
    peak = max(by_phase, key=lambda phase: by_phase[phase])
    return made.ledger.bytes(kind, peak) / max(by_phase[peak], 1)


def _activations(recipe: Recipe, adapter: Adapter, made: Prediction) -> str | None:
    share = _share(made, "activation")
    if share < _LARGE or not adapter.needs_input:
        return None
    return f"activations are {share:.0%} of the peak, and this adapter keeps its layers' inputs"


def _base(recipe: Recipe, adapter: Adapter, made: Prediction) -> str | None:
    share = _share(made, "weight")
    return f"weights are {share:.0%} of the peak" if not recipe.linear and share >= _LARGE else None


def _few_bits(recipe: Recipe, adapter: Adapter, made: Prediction) -> str | None:
    form = (recipe.linear or {}).get("method")
    if form not in _ROUNDED or "mergeable" not in adapter.traits:
        return None
    return f"a change that is merged into {form} weights is rounded with them"


ANSWERS = (
    AdapterAnswer(
        "activations",
        "Activations do not fit",
        ("lora_fa",),
        "adapter: {method: lora_fa}",
        "LoRA-FA keeps A x, and not x, for the backward pass; A is not trained, so it needs a "
        "larger rank",
        _activations,
    ),
    AdapterAnswer(
        "base",
        "The base does not fit",
        ("loram",),
        "linear: {method: nf4}, or adapter: {method: loram}",
        "nf4 holds weights in about 4 bits; LoRAM trains on a pruned base, and the change is for "
        "the full one",
        _base,
        "nf4",
    ),
    AdapterAnswer(
        "few_bits",
        "The model is used in 2 to 4 bits",
        ("qa_hira",),
        "linear: {method: tiles} and adapter: {method: qa_hira}",
        "the change goes into zero points of tiles, so merging rounds nothing",
        _few_bits,
    ),
    AdapterAnswer(
        "many_users",
        "There are thousands of users",
        ("lora_xs", "svfit"),
        "adapter: {method: lora_xs}, or adapter: {method: svfit}",
        "both train a few numbers between directions of the weight, which every user's file shares",
    ),
    AdapterAnswer(
        "switching",
        "Adapters change all the time",
        ("s2ft", "shira"),
        "adapter: {method: s2ft}, or adapter: {method: shira}",
        "both change few entries of a weight, which are overwritten and put back to the bit",
    ),
    AdapterAnswer(
        "high_rank",
        "The change is not of low rank",
        ("soka",),
        "adapter: {method: soka}",
        "a term has about as many numbers as a LoRA of rank 1, and full rank; where the change has "
        "a low rank LoRA is better",
    ),
    AdapterAnswer(
        "small_shift",
        "The task is near what the model knows",
        ("svfit",),
        "adapter: {method: svfit}",
        "the weight's own directions are there already, so their sizes alone are trained; for a "
        "task further away take LoRA",
    ),
)


def advice(asked: Question, made: Prediction) -> Iterator[JsonObject]:
    """What a plan's own figures speak for: rows for `modicum plan --json`.

    Nothing where training starts from an adapter of a file, which is the one that it is.
    """
    recipe, adapter = asked.recipe, asked.recipe.method("adapter")
    if not isinstance(adapter, Adapter) or recipe.model.adapter is not None:
        return
    for answer in ANSWERS:
        reason = answer.reason and answer.reason(recipe, adapter, made)
        if reason and adapter.info.name not in answer.methods and _allowed(asked, answer):
            yield {"because": reason, "try": answer.take, "words": answer.words, "see": PAGE}


def _allowed(asked: Question, answer: AdapterAnswer) -> bool:
    """Whether the task takes all adapters of an answer, and its form goes with the recipe's own."""
    changes: list[dict[str, Any]] = [{"adapter": {"method": name}} for name in answer.methods]
    if answer.form is not None:
        changes.append({"linear": {"method": answer.form}})
    try:
        for change in changes:
            asked.config(asked.recipe.changed(**change))
    except InputError:
        return False
    return True
