"""Why a plan's choices are what they are, as sentences for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from modicum.adapters.widths import listed
from modicum.comm.base import MatrixMethod
from modicum.core.files import JsonObject
from modicum.core.ranks.one_rank import NOTHING_TRAVELS
from modicum.planner.choose import (
    ASYNCHRONOUS,
    COMPILE,
    COMPILE_PAYS_AFTER,
    DEVICE,
    MICRO,
    RECOMPUTE,
    STRATEGY,
    USEFUL_TOKENS,
    Room,
    choices,
    strategy_of,
)
from modicum.planner.left_out import rows_of_left_out
from modicum.planner.prediction import Choice, Prediction
from modicum.planner.save_interval import first_choice
from modicum.recipe import Recipe

PRODUCT = "adapter.product"

_IN_WORDS = {
    (True, True): "built",
    (False, False): "factored",
    (True, False): "built forward alone",
    (False, True): "built backward alone",
}


def explained(
    recipe: Recipe,
    prediction: Prediction,
    room: Room,
    kept: Mapping[str, JsonObject],
    seconds: float,
    steps: int,
    epochs: float | None = None,
) -> list[JsonObject]:
    """The choices as rows for people.

    Args:
        seconds: that the run's `steps` are estimated to take.
        epochs: that they are; None: it is not known.
    """
    choice, training = prediction.choice, recipe.training
    rows: list[JsonObject] = _narrow(recipe, prediction) + _sent_dense(recipe, prediction)
    rows += _narrow_matrices(recipe, prediction) + _thin_matrices(recipe, prediction)
    rows += _never(recipe, steps) + _before_an_epoch(recipe, epochs)
    rows += _larger_forms(recipe, prediction) + rows_of_left_out(recipe, prediction.left_out)
    rows += [dict(kept[PRODUCT])] if PRODUCT in kept else product_rows(prediction)
    if MICRO in kept:
        rows.append({**kept[MICRO], "value": choice.micro_batch_size})
    elif training.micro_batch_size == "auto":
        rows.append(_row(MICRO, choice.micro_batch_size, _why_micro(recipe, prediction, room)))
    if training.recompute == "auto":
        why = "keeping activations is faster, and fits"
        if choice.recompute:
            why = f"activations of all blocks do not fit into {room.name}"
        rows.append(_row(RECOMPUTE, "blocks" if choice.recompute else "none", why))
    if choice.layout.ranks > 1 and recipe.parallel.strategy == "auto":
        rows.append(_strategy(recipe, choice, room))
    if recipe.checkpoint.asynchronous == "auto":
        why = "training continues while a copy of the state is written, and the copy fits"
        if not choice.asynchronous:
            where = room.name if room.device == "cpu" else "the host's free memory"
            why = f"a copy of the state does not fit into {where}"
        rows.append(_row(ASYNCHRONOUS, choice.asynchronous, why))
    if recipe.checkpoint.every == "auto":
        rows.append(first_choice(recipe))
    if COMPILE in kept:
        rows.append(dict(kept[COMPILE]))
    elif training.compile == "auto" and seconds < COMPILE_PAYS_AFTER:
        why = "the run is too short to win back the time that compiling takes"
        rows.append(_row(COMPILE, "none", why))
    if training.device == "auto":
        why = "CUDA is there" if room.device == "cuda" else "no accelerator is there"
        rows.append(_row(DEVICE, room.device, why))
    return rows


def _row(field: str, value: Any, why: str) -> JsonObject:
    return {"field": field, "value": value, "why": why}


def _narrow(recipe: Recipe, prediction: Prediction) -> list[JsonObject]:
    """A row that names the layers for which the adapter's rank is too high, where there are any."""
    if not (found := prediction.narrow):
        return []
    enough = min(found.values())
    rank = getattr(recipe.method("adapter"), "rank", None)
    why = f"above the smaller width of {listed(found)}, where rank {enough} is enough"
    return [_row("adapter.rank", rank, why)]


def product_rows(prediction: Prediction) -> list[JsonObject]:
    """A row that says where an adapter builds its change, if it chooses that; `positions` stay."""
    if not (found := prediction.built):
        return []
    named = [_IN_WORDS[built] for built in found.values()]
    counts = Counter(named).most_common()
    value = counts[0][0] if len(counts) == 1 else "by layer"
    each = ", ".join(f"{word} in {count} layer{'s'[: count > 1]}" for word, count in counts)
    why = f"less work for the {prediction.positions:,} positions of a micro-batch: {each}"
    return [{**_row(PRODUCT, value, why), "positions": prediction.positions}]


def planned_positions(rows: Iterable[JsonObject]) -> int | None:
    """By how many positions the adapter's layers choose how to compute, if choices say so."""
    found = (row["positions"] for row in rows if row["field"] == PRODUCT)
    return next(found, None)


def _narrow_matrices(recipe: Recipe, prediction: Prediction) -> list[JsonObject]:
    """A row that names the matrices for which the optimizer's rank is too high, if there are."""
    if not (found := prediction.narrow_matrices):
        return []
    rank = getattr(recipe.method("optimizer"), "rank", None)
    why = (
        f"above the smaller width of {listed(found)}, which are trained as what is no matrix is; "
        f"rank {min(found.values())} fits all"
    )
    return [_row("optimizer.rank", rank, why)]


def _thin_matrices(recipe: Recipe, prediction: Prediction) -> list[JsonObject]:
    """A row that names the matrices of which the density rounds to nothing, if there are."""
    if not (found := prediction.thin_matrices):
        return []
    density = getattr(recipe.method("optimizer"), "density", None)
    why = f"less than half of one of {min(found.values())} in {listed(found)}; one is taken"
    return [_row("optimizer.density", density, why)]


def _larger_forms(recipe: Recipe, prediction: Prediction) -> list[JsonObject]:
    """A row that says which layers are larger in their form than dense, and how they come out."""
    linear = recipe.methods().get("linear")
    if linear is None or not (found := prediction.larger_forms):
        return []
    first = "at first " if "changes_shapes" in linear.traits(recipe.fields("linear")) else ""
    why = (
        f"{first}up to {max(found.values()):.3g} times the bytes of dense weights, in "
        f"{listed(found)}; layers that are larger at the run's end are exported dense alone"
    )
    return [_row("linear.method", linear.name, why)]


def _never(recipe: Recipe, steps: int) -> list[JsonObject]:
    """A row for each thing that a method does after more updates than the run has."""
    rows = []
    for (slot, field), what in _LATER.items():
        method = recipe.method(slot)
        after = getattr(method, field, None)
        if isinstance(after, int) and after >= steps and (said := what(method)):
            why = f"the run has {steps} updates, so {said}"
            rows.append(_row(f"{slot}.{field}", after, why))
    return rows


def _before_an_epoch(recipe: Recipe, epochs: float | None) -> list[JsonObject]:
    """A row where a method does something at each epoch's end, and the run ends before."""
    linear: Any = recipe.method("linear")
    if epochs is None or epochs >= 1 or not _prunes(linear) or linear.every is not None:
        return []
    why = f"the run ends after {epochs:.2g} of an epoch, so {_NONE_PRUNED}"
    return [_row("linear.every", "epoch", why)]


def _prunes(linear: Any) -> bool:
    """Whether it is a form that loses components while it trains."""
    return hasattr(linear, "every") and getattr(linear, "threshold", 0) > 0


def _part_stays(method: Any) -> str:
    if hasattr(method, "rank"):
        return "the first subspaces are kept throughout"
    kept = 0 < getattr(method, "density", 0) < 1
    return "the same part has moments throughout" if kept else ""


def _first_stay(method: Any) -> str:
    return "what the first update finds is kept throughout"


def _never_ends(method: Any) -> str:
    return "the method never ends" if getattr(method, "hybrid", False) else ""


def _none_swapped(method: Any) -> str:
    return "the vectors that are trained are the same throughout"


_NONE_PRUNED = "no component is pruned before its end"


def _none_pruned(method: Any) -> str:
    return _NONE_PRUNED if _prunes(method) else ""


# By slot and field, of how many updates, what never happens where the run has no more.
_LATER: dict[tuple[str, str], Callable[[Any], str]] = {
    ("optimizer", "update_gap"): _part_stays,
    ("optimizer", "frequency"): _first_stay,
    ("transform", "every"): _first_stay,
    ("transform", "hybrid_after"): _never_ends,
    ("linear", "interval"): _none_swapped,
    ("linear", "every"): _none_pruned,
}


def _sent_dense(recipe: Recipe, prediction: Prediction) -> list[JsonObject]:
    """A row on what an exchange leaves as it is: tensors that travel in full, gathers of weights.

    On one rank it says that nothing is sent.
    """
    if recipe.comm is None:
        return []
    if prediction.choice.layout.ranks == 1:
        return [_row("comm.method", recipe.comm["method"], NOTHING_TRAVELS)]
    reasons = []
    if found := prediction.sent_dense:
        share = sum(found.values()) / max(1, prediction.trainable)
        reasons.append(
            f"{listed(found)} would not be smaller, and travel as they are: {share:.1%} of the "
            "numbers"
        )
    gathered = sum(w.bytes for w in prediction.ledger.wire if w.collective == "all_gather")
    if isinstance(recipe.method("comm"), MatrixMethod) and gathered:
        part = gathered / prediction.wire_bytes
        reasons.append(f"weights are gathered as before, which are {part:.0%} of the bytes")
    return [_row("comm.method", recipe.comm["method"], "; ".join(reasons))] if reasons else []


def _strategy(recipe: Recipe, choice: Choice, room: Room) -> JsonObject:
    """Whether weights are sharded, and why."""
    if (shard := recipe.parallel.shard) is not None:
        return _row(STRATEGY, "fsdp", f"parallel.shard is {shard}")
    if recipe.comm is not None:
        goes = strategy_of(choice.layout)
        return _row(STRATEGY, goes, f"comm.method {recipe.comm['method']} goes with it")
    if choice.layout.shards == 1:
        return _row(STRATEGY, "ddp", "all weights fit on every rank, and need not cross the wire")
    why = f"with all weights on every rank it does not fit into {room.name}"
    return _row(STRATEGY, "fsdp", why)


def _why_micro(recipe: Recipe, prediction: Prediction, room: Room) -> str:
    choice = prediction.choice
    if choice.micro_batches == 1:
        whole = "the full batch fits" if choice.layout.ranks == 1 else "a rank's sequences fit"
        return f"{whole} at once"
    largest = next(choices(recipe, room.device, choice.layout.ranks)).micro_batch_size
    if choice.micro_batch_size == largest:
        return f"{USEFUL_TOKENS[room.device]} tokens at a time are as fast as more"
    return f"the largest that keeps {room.name}"
