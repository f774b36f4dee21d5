"""What the planner may choose, in the order in which it is given up, and what there is room for.

Everything here leaves the arithmetic as it is. Cheapest to lose is the copy of the state in memory
(a stall now and then), then the size of micro-batches (products become thin), then activations
(a third more work), and last unsharded weights on every rank (all cross the wire each time).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine import Machine
from modicum.core.machine.memory import resident_bytes
from modicum.core.machine.record import MachineRecord
from modicum.core.ranks.layout import Layout
from modicum.core.units import format_bytes
from modicum.planner.predict import Predictor
from modicum.planner.prediction import Choice, Prediction
from modicum.recipe import Recipe

# A larger micro-batch than this many tokens makes no machine faster that was measured.
USEFUL_TOKENS = {"cpu": 4096, "cuda": 32768}
# Trying to compile and compiling take about a minute on a CPU; a shorter run does not win it back.
COMPILE_PAYS_AFTER = 600.0  # seconds
# A budget is kept with so much to spare of what the run adds to the process: what is left of the
# text that was read and tokenized depends on the data, and no allocator's waste is the same twice.
# The first is a part, and holds for large runs; the second are bytes, and hold for small ones.
HEADROOM, LEAST_HEADROOM = 0.1, 56_000_000
MICRO, RECOMPUTE, DEVICE = "training.micro_batch_size", "training.recompute", "training.device"
STRATEGY, ASYNCHRONOUS = "parallel.strategy", "checkpoint.asynchronous"
COMPILE = "training.compile"
MEMORY = "memory"  # what its policy was seen to leave of saved activations


@dataclass(frozen=True)
class Room:
    """The bytes that a rank may take on its device, and what to call them.

    Args:
        base: what the process holds before the first tensor: Python, torch, and all that a run
            loads.
        loaded_last: what of it is loaded after all that is done before the first update.
        record: what was measured of the machine: what the allocator keeps, above all.
        limit: what the process may hold in all.
        most: what a larger budget could be on this machine.
        host: what there is next to an accelerator for copies of the state.
    """

    device: str
    base: int
    record: MachineRecord
    limit: int
    name: str
    most: int
    host: int
    loaded_last: int = 0

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        machine: Machine,
        device: str,
        record: MachineRecord,
        share: Share,
        now: int | None = None,
        *,
        elsewhere: bool = False,
    ) -> Room:
        """The room for one of the ranks that share this machine.

        A budget is no more than there is. On this processor that is all the memory that a process
        here may use, since what of it is free changes until the run begins.

        Args:
            now: what a process holds on the machine that a profile describes; None: the machine is
                this one, and the process too.
            elsewhere: whether the run may be on another machine, so that a budget is what it says.
        """
        here = now is None
        now = resident_bytes() if now is None else now
        base = now + record.still_loaded()
        # What is free has pages of files, which are given back at need, and `now` has them again.
        host = min(share.of(machine.available_bytes, now), machine.memory_bytes)
        if device == "cpu":
            most, owner = host, "this machine's free memory"
            if share.count > 1:
                owner = f"a rank's part of {owner}"
        else:
            most, owner = int(0.95 * (machine.accelerator_bytes or 0)), "the accelerator's memory"
        limit, name = most, f"{owner} ({format_bytes(most)})"
        bound, bounded = limit, name
        if device == "cpu" and here:
            bound = max(most, machine.memory_bytes // share.count)
            bounded = f"{owner.replace('free', 'usable')} ({format_bytes(bound)})"
        if (budget := recipe.budget.memory) is not None:
            limit, name = budget, f"budget.memory ({format_bytes(budget)})"
        if (tensors := recipe.budget.tensors) is not None:
            own = tensors + (base if device == "cpu" else 0)
            if recipe.budget.memory is None or own < limit:
                limit, name = own, f"budget.tensors ({format_bytes(tensors)})"
        if limit > bound and not elsewhere:
            limit, name = bound, bounded
        last = record.loaded_last() if here else 0
        return cls(device, base, record, limit, name, most, host, last)

    @property
    def host_room(self) -> int:
        """Bytes for copies of the state next to an accelerator."""
        return self.host - self.base

    def needed(self, prediction: Prediction) -> int:
        """The bytes of a prediction that count here."""
        return max(self.by_phase(prediction))

    def by_phase(self, prediction: Prediction) -> tuple[int, ...]:
        """The same in each phase of a step, and before the first."""
        if self.device != "cpu":
            return (*prediction.ledger.by_phase().values(), prediction.peak_before)
        expected = sum(self.record.kept_where(recompute=prediction.choice.recompute)) / 2
        before = sum(self.record.kept) / 2
        sizes = (
            *prediction.process_by_phase(self.base, expected),
            prediction.process_before(self.base - self.loaded_last, before),
        )
        return tuple(with_headroom(size, self.base) for size in sizes)

    def host_holds(self, prediction: Prediction) -> bool:
        """Whether there is enough next to an accelerator."""
        return self.device == "cpu" or prediction.host_bytes <= self.host_room

    def holds(self, prediction: Prediction) -> bool:
        """Whether there is enough, on the device and next to it."""
        return self.host_holds(prediction) and self.needed(prediction) <= self.limit


def with_headroom(size: int, base: int) -> int:
    """The budget that a process of this size needs, of which `base` is there before the run.

    >>> with_headroom(1_400_000_000, 400_000_000)
    1500000000
    """
    return size + max(round(HEADROOM * (size - base)), LEAST_HEADROOM)


@dataclass(frozen=True)
class Share:
    """How many ranks share this machine, and whether they are there already."""

    count: int = 1
    live: bool = True

    def of(self, available: int, base: int) -> int:
        """What each may hold, when `available` is free and each holds `base`."""
        if self.live:
            # What processes hold already is not among what is available.
            return available // self.count + base
        return (available + base) // self.count


def layouts(recipe: Recipe, ranks: int) -> list[Layout]:
    """The layouts that a recipe allows on so many ranks, the fastest first.

    Raises:
        InputError: the batch has fewer sequences than there are ranks, or the ranks cannot be split
            into groups of `parallel.shard`.
    """
    section, batch = recipe.parallel, recipe.training.batch_size
    if batch < ranks:
        raise InputError(
            f"an update has fewer sequences than there are ranks ({ranks}); use fewer ranks, or",
            field="training.batch_size",
            value=batch,
            allowed=f"at least {ranks}",
        )
    if section.shard is not None and ranks % section.shard:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        raise InputError(
            f"does not divide the number of ranks ({ranks})",
            field="parallel.shard",
            value=section.shard,
            allowed=f"{', '.join(divisors)}, or null for all",
        )
    if ranks == 1:
        return _combining(recipe, [Layout()])
    cut = Layout.of(ranks, section.shard or ranks)
    if section.strategy == "zero":
        allowed = [Layout.of(ranks, ranks, copies=True)]
    elif section.strategy == "fsdp" or section.shard is not None:
        allowed = [cut]
    elif section.strategy == "ddp":
        allowed = [Layout.of(ranks)]
    else:
        allowed = [Layout.of(ranks), cut]
        if recipe.comm is not None:
            # Methods that go with neither of them have full copies of sharded weights.
            allowed.append(Layout.of(ranks, ranks, copies=True))
    return _combining(recipe, allowed)


def _combining(recipe: Recipe, candidates: list[Layout]) -> list[Layout]:
    """The layouts that go with the recipe's methods.

    Raises:
        InputError: none does; with the reason of the last.
    """
    kept: list[Layout] = []
    for layout in candidates:
        try:
            recipe.refuse_clashes(_traits(recipe, layout))
        except InputError:
            if layout is candidates[-1] and not kept:
                raise
        else:
            kept.append(layout)
    return kept


def _traits(recipe: Recipe, layout: Layout) -> set[str]:
    """What a layout makes of a run, in words of the table of traits."""
    if layout.ranks == 1:
        return set()
    if layout.shards == 1:
        return {"run_whole_weights"}
    if layout.copies:
        return {"run_cuts_weights", "run_masters"}
    also = {
        "run_gathers_frozen": recipe.adapter is not None or _freezes(recipe),
        "run_hybrid": layout.replicas > 1,
        "run_gathers_again": recipe.parallel.reshard_after_forward,
    }
    return {"run_cuts_weights", "run_on_fsdp", *(trait for trait, is_so in also.items() if is_so)}


def _freezes(recipe: Recipe) -> bool:
    """Whether its compressor leaves some of the model untrained."""
    compressor = recipe.method("compress")
    return compressor is not None and "freezes_the_rest" in compressor.traits


def choices(
    recipe: Recipe,
    device: str,
    ranks: int,
    kept: Mapping[str, JsonObject] | None = None,
    check: Callable[[Layout], None] = lambda layout: None,
) -> Iterator[Choice]:
    """Every choice that the recipe leaves open, the fastest first.

    Args:
        kept: choices of an earlier plan by field; a micro-batch is not larger than its `most`.
        check: refuses a layout that the model does not run in.

    Raises:
        InputError: nothing is left, with the last reason.
    """
    training, asynchronous = recipe.training, recipe.checkpoint.asynchronous
    share = -(-training.batch_size // ranks)
    micro: Any = training.micro_batch_size
    most = (kept or {}).get(MICRO, {}).get("most", share)
    if micro == "auto":
        useful = max(1, USEFUL_TOKENS[device] // recipe.data.sequence_length)
        counts = {-(-share // size) for size in range(1, min(share, useful, most) + 1)}
        sizes = sorted({-(-share // count) for count in counts}, reverse=True)
        if refused(recipe, ["run_accumulates"]) is not None:
            sizes = [share]
    else:
        sizes = [min(micro, most)]
    recomputes = {"auto": (False, True), "none": (False,), "blocks": (True,)}
    copies = (True, False) if asynchronous == "auto" else (asynchronous,)
    found, refusal = False, functools.cache(lambda words: refused(recipe, words))
    unfit: InputError | None = None
    for layout in layouts(recipe, ranks):
        try:
            check(layout)
        except InputError as error:
            unfit = error
            continue
        for recompute in recomputes[training.recompute]:
            for size in sizes:
                first = Choice.of(training.batch_size, size, recompute, layout, copies[0])
                if refusal(traits_of(recipe, first)) is not None:
                    continue
                found = True
                for copied in copies:
                    yield replace(first, asynchronous=copied)
    if not found and (why := unfit or refusal(traits_of(recipe, first))) is not None:
        raise why


def traits_of(recipe: Recipe, choice: Choice) -> frozenset[str]:
    """What a choice makes of a run, in words of the table of traits."""
    also = {
        "run_accumulates": choice.micro_batches > 1,
        "run_recomputes": choice.recompute,
    }
    words = _traits(recipe, choice.layout)
    return frozenset({*words, *(trait for trait, is_so in also.items() if is_so)})


def refused(recipe: Recipe, words: Iterable[str]) -> InputError | None:
    """Why a recipe does not go with what was chosen for it; None where it does."""
    try:
        recipe.refuse_clashes(words)
    except InputError as error:
        return error
    return None


def first_that_fits(
    candidates: Iterable[Choice],
    recipe: Recipe,
    config: Any,
    predictor: Predictor,
    room: Room,
) -> Prediction | None:
    """The prediction of the first choice that there is room for."""
    for choice in candidates:
        prediction = predictor(recipe, config, choice)
        if room.holds(prediction):
            return prediction
    return None


def strategy_of(layout: Layout) -> str:
    """What a recipe calls it."""
    if layout.copies:
        return "zero"
    return "ddp" if layout.shards == 1 else "fsdp"


def choice_of(recipe: Recipe, rows: Iterable[Mapping[str, Any]], ranks: int) -> Choice:
    """The choice that an earlier plan's rows tell of.

    Raises:
        InputError: as `layouts`.
    """
    values = {row["field"]: row["value"] for row in rows}
    training = recipe.training
    size = values.get(MICRO, training.micro_batch_size)
    recompute = values.get(RECOMPUTE, training.recompute) == "blocks"
    copied = values.get(ASYNCHRONOUS, recipe.checkpoint.asynchronous) is True
    allowed = layouts(recipe, ranks)
    named = {strategy_of(layout): layout for layout in reversed(allowed)}
    layout = named.get(values.get(STRATEGY, ""), allowed[0])
    choice = Choice.of(training.batch_size, int(size), recompute, layout, copied)
    seen = values.get(MEMORY)
    return choice if seen is None else replace(choice, shares=Shares(**seen))
