"""From a recipe to a plan: every `auto` filled, the cost predicted, or what would make it fit.

Budgets are constraints. Among plans that keep them the planner changes only what leaves the
arithmetic exact; `choose` says what, and in which order. What else would help it suggests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from modicum.core.arguments import check_type
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.machine import Machine, pick_device, this_machine
from modicum.core.machine.links import LOCAL, NODE, MeasuredLink, known_links, link_of
from modicum.core.machine.rate import shared_machine
from modicum.core.machine.record import MachineRecord, Reads, machine_record
from modicum.core.ranks.environment import ranks_on_a_host
from modicum.core.ranks.ranks import Ranks
from modicum.models.traced_cache import ending_traces
from modicum.planner.adapted_otherwise import rows_of_instead
from modicum.planner.advice import advice
from modicum.planner.auto_exchange import ways_shown, without_auto
from modicum.planner.choose import (
    COMPILE,
    DEVICE,
    Room,
    Share,
    choice_of,
    first_that_fits,
    layouts,
)
from modicum.planner.earlier_adapter import started
from modicum.planner.explained import explained
from modicum.planner.length import check_counted_in
from modicum.planner.plan import Plan
from modicum.planner.precision import export_rows, settled
from modicum.planner.predict import Predictor, needs_gradients
from modicum.planner.prediction import Prediction
from modicum.planner.profiles import Profile
from modicum.planner.question import Question, changed, map_as
from modicum.planner.refusal import does_not_fit
from modicum.planner.remedies import Remedy, remedies
from modicum.planner.uses import uses_of_room
from modicum.recipe import Recipe
from modicum.recipe.auto_exchange import is_auto
from modicum.tasks import task_of
from modicum.tasks.model_origins import pinned


@ending_traces()
def plan(
    recipe: Recipe,
    *,
    ranks: Ranks | int = 1,
    replay: Sequence[JsonObject] | None = None,
    keep: Sequence[JsonObject] = (),
    machine: Profile | None = None,
    advise: bool = False,
) -> Plan:
    """Look at the inputs, predict, and choose what the recipe leaves open.

    Args:
        recipe: what the user wants.
        ranks: this process among the ranks of a run, which all call this and get the same plan: for
            the rank with the least room, decided by rank 0. Or a number of ranks that are not
            there yet, all to run on this machine.
        replay: choices of an earlier plan, which are kept instead of made anew.
        keep: of an earlier plan, the choices that are kept when the others are made anew.
        machine: plan for this one, and not for the one that we are on.
        advise: also try what the room that is left could be spent on, and say which other adapters
            the prediction speaks for.

    Raises:
        InputError: something about the model or the data is wrong, or does not go with the ranks;
            this is no recipe.
        DoesNotFit: no choice keeps the budget; with the three cheapest changes that would.

    >>> import modicum
    >>> recipe = modicum.Recipe(data={"include": ["json/**"]}, model={"layers": 2, "width": 64})
    >>> modicum.plan(recipe).prediction.trainable
    368960
    >>> modicum.plan(recipe, ranks=4).row()["layout"]["name"]
    'ddp'
    """
    _check(recipe, ranks)
    live = Ranks() if isinstance(ranks, int) else ranks
    asked = asked_of(recipe, ranks=ranks, keep=keep if replay is None else replay, machine=machine)
    if replay is not None:
        choice = choice_of(asked.recipe, replay, asked.ranks)
        prediction = asked.predictor(asked.recipe, asked.inputs.config, choice)
        return planned(asked, prediction, tuple(replay))
    made = answered(asked, live, keep)
    if not advise:
        return made
    uses, given = uses_of_room(asked, made.prediction), advice(asked, made.prediction)
    ways = ways_shown(asked, made.prediction, recipe)
    return replace(made, uses=tuple(uses), advice=tuple(given), exchanges=tuple(ways))


def answered(asked: Question, live: Ranks | None = None, keep: Sequence[JsonObject] = ()) -> Plan:
    """The plan of the first choice that fits.

    Args:
        asked: the recipe's inputs and the machine, with the room that there was when they were
            looked at: a process that has planned holds more than one that has not.
        live, keep: as `plan`'s.

    Raises:
        DoesNotFit: no choice keeps the budget.
    """
    kept = {row["field"]: row for row in keep}
    open_ones = asked.choices(asked.recipe, kept=kept)
    found = first_that_fits(
        open_ones, asked.recipe, asked.inputs.config, asked.predictor, asked.room
    )
    if found is None:
        raise does_not_fit(asked)
    made = planned(asked, found)
    rows = _rows(asked, made, kept)
    return made.with_choices((live or Ranks()).broadcast([*asked.settled, *rows]))


@ending_traces()
def plan_anyway(
    recipe: Recipe, *, ranks: int = 1, machine: Profile | None = None
) -> tuple[Plan, bool]:
    """A plan, and whether it fits: where none does, the most frugal one.

    Raises:
        InputError: as `plan`.
    """
    return answered_anyway(asked_of(recipe, ranks=ranks, machine=machine))


def answered_anyway(asked: Question) -> tuple[Plan, bool]:
    """The same of a question."""
    map_as(asked.recipe, asked.device)  # another question may have been looked at since
    found = asked.fitting(asked.recipe)
    made = planned(asked, found or asked.frugal(asked.recipe))
    rows = _rows(asked, made, {})
    return replace(made, choices=(*asked.settled, *rows)), found is not None


def _rows(asked: Question, made: Plan, kept: Mapping[str, JsonObject]) -> list[JsonObject]:
    """A plan's choices as rows for people."""
    lasts = made.seconds, made.steps, made.epochs
    return explained(asked.recipe, made.prediction, asked.room, kept, *lasts)


@ending_traces()
def made_to_fit(
    recipe: Recipe, *, ranks: int = 1, machine: Profile | None = None
) -> tuple[Recipe, Remedy | None]:
    """The recipe where a plan of it fits, else with the cheapest change that makes it fit.

    For whoever writes recipes: `modicum.plan` changes nothing by itself.

    Returns:
        recipe: as it was, or changed.
        remedy: the change; None where there was no need for one.

    Raises:
        InputError: as `plan`.
        DoesNotFit: no change is enough.

    >>> import modicum
    >>> recipe = modicum.Recipe(data={"include": ["json/**"]}, model={"layers": 2, "width": 64})
    >>> made_to_fit(recipe)[1] is None
    True
    """
    asked = asked_of(recipe, ranks=ranks, machine=machine)
    if asked.fitting(asked.recipe) is not None:
        return recipe, None
    remedy = next(remedies(asked), None)
    fitting = None if remedy is None else changed(recipe, remedy.change)
    if fitting is None:
        raise does_not_fit(asked)
    return fitting, remedy


def asked_of(
    recipe: Recipe,
    *,
    ranks: Ranks | int = 1,
    keep: Sequence[JsonObject] = (),
    machine: Profile | None = None,
) -> Question:
    """Look at a recipe's inputs and at the machine, with nothing chosen yet.

    Args:
        recipe, ranks, keep, machine: as `plan`.

    Raises:
        InputError: as `plan`.
    """
    live = Ranks() if isinstance(ranks, int) else ranks
    count = ranks if isinstance(ranks, int) else ranks.size
    recipe = recipe.anchored()
    section = recipe.comm
    if is_auto("comm", section):
        recipe = recipe.changed(comm=None)
    layouts(recipe, count)  # what does not go with the ranks is reported before all else
    task = task_of(recipe)
    check_counted_in(recipe, task)
    recipe, commit = pinned(recipe, live)
    inputs = task.look(recipe)
    asked, (recipe, rows) = recipe, settled(recipe, inputs.dtypes)
    if recipe.linear != asked.linear:
        inputs = task.look(recipe)
    rows += export_rows(recipe, inputs.dtypes, rounds=task.rounds)
    recipe, start = started(recipe, task, inputs, keep)
    start += rows_of_instead(recipe, task, inputs.config)
    if recipe.adapter is not None:
        # A small model is run for it, which leaves something in the process: before it is measured.
        getattr(inputs.config, "unreached", None)
    device = _device(recipe, keep).type if machine is None else machine.device_for(recipe)
    map_as(recipe, device)
    if machine is None:
        compiled = recipe.training.compile
        compiled = {row["field"]: row["value"] for row in keep}.get(COMPILE, compiled)
        found, record, room = _agreed(
            recipe, torch.device(device), live, count, inputs.reads, compiled=compiled == "blocks"
        )
    else:
        machine = machine.of_run(inputs.reads)
        record = machine.record
        found = machine.machine(recipe.training.precision)
        # That share the memory and the processor; each has its accelerator.
        here = ranks_on_a_host(count)
        share = Share(here, live=False)
        if device == "cpu":
            found = replace(found, flops=found.flops / here)
        room = Room.of(recipe, found, device, record, share, machine.base)
        room = replace(room, name=room.name.replace("this machine", machine.name))
    predictor = Predictor(device, dense=partial(task.uncompressed, inputs=inputs))
    # After the room is measured: what this leaves in memory is used again when the run tokenizes.
    # Every rank looks, so that what is wrong with the data is reported by all.
    counts = live.broadcast(task.survey(recipe, inputs))
    question = Question(
        recipe, task, inputs, device, found, record, room, predictor, counts, count, machine,
        (*commit, *rows, *start), _link(live, count, machine, device), asked,
        _held_by_compiled(recipe, record) if machine is None and device == "cpu" else 0,
    )  # fmt: skip
    if section is not None and is_auto("comm", section):
        question = without_auto(question, section, live)
    return question


def _held_by_compiled(recipe: Recipe, record: MachineRecord) -> int:
    """What the process holds for compiled blocks alone, where the recipe asks for them."""
    return (record.compiled_bytes or 0) if recipe.training.compile == "blocks" else 0


def _link(live: Ranks, count: int, machine: Profile | None, device: str) -> MeasuredLink | None:
    """The link that the ranks' calls are held by: between hosts where there are several.

    What `modicum bench link` measures is gloo's, between processors.
    """
    if count == 1:
        return None
    if machine is not None:
        return None if machine.link is None else MeasuredLink(0.0, machine.link, ranks=count)
    if device != "cpu":
        return None
    known = known_links() if live.first else {}
    said = live.broadcast({axis: asdict(link) for axis, link in known.items()})
    links = {axis: link_of(raw) for axis, raw in said.items()}
    here = ranks_on_a_host(count) if live.alone else live.local_size
    if here == count:
        return links.get(LOCAL)
    return replace(links[NODE], within=links.get(LOCAL)) if NODE in links else None


def planned(asked: Question, prediction: Prediction, rows: tuple[JsonObject, ...] = ()) -> Plan:
    """The plan that answers a question with this prediction and these choices."""
    return Plan(
        asked.recipe, asked.task, asked.inputs, asked.machine, asked.device, prediction, rows,
        asked.room.base, asked.record, counts=asked.counts, profile=asked.profile, link=asked.link,
        loaded_last=asked.room.loaded_last,
    )  # fmt: skip


def _check(recipe: Recipe, ranks: Ranks | int) -> None:
    """Refuse what is no recipe, and what is no number of ranks."""
    file = "modicum.recipe_yaml.load(path), which gives the recipe of a file"
    instead = {
        str: file,
        Path: file,
        dict: "modicum.Recipe(**fields)",
        Plan: "modicum.train(plan): it is planned already",
    }
    check_type(recipe, Recipe, "plan(recipe)", "a modicum.Recipe", instead)
    check_type(ranks, (Ranks, int), "plan(ranks)", "a number of ranks, from 1")
    if isinstance(ranks, int) and (isinstance(ranks, bool) or ranks < 1):
        raise InputError(
            "is no number of ranks", field="plan(ranks)", value=ranks, allowed="1 and more"
        )


def _device(recipe: Recipe, kept: Sequence[JsonObject]) -> torch.device:
    """The device that the recipe asks for; one chosen earlier is kept where it is still there.

    Raises:
        InputError: the recipe asks for CUDA, and there is none.
    """
    wanted = recipe.training.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here", field="training.device", value=wanted, allowed="cpu"
        )
    told_before = {row["field"]: row["value"] for row in kept}.get(DEVICE, wanted)
    return pick_device(told_before if torch.cuda.is_available() else "cpu")


def _agreed(
    recipe: Recipe, device: torch.device, live: Ranks, count: int, reads: Reads, *, compiled: bool
) -> tuple[Machine, MachineRecord, Room]:
    """The machine and the room of the slowest rank and the one with the least.

    A rank's rate is what it measures with its own threads. Ranks that are not there yet will share
    this process's.
    """
    machine = shared_machine(device) if live.alone else this_machine(device)
    known = machine_record(device.type)
    if recipe.training.compile != "blocks" and not recipe.budget.limits:
        compiled = compiled and known.compiled_bytes is not None  # it is not measured for this
    record = known.of_run(
        reads,
        gradients=needs_gradients(recipe),
        compiled=compiled and device.type == "cpu",
    )
    planned = live.alone and count > 1
    here = ranks_on_a_host(count)
    share = Share(here, live=False) if planned else Share(live.local_size)
    room = Room.of(recipe, machine, device.type, record, share)
    on_cpu = device.type == "cpu"
    machine = replace(machine, flops=machine.flops / here) if planned and on_cpu else machine
    if live.alone:
        return machine, record, room
    seen = [record.kept_where(recompute=again) for again in (False, True)]
    free, host, last, flops, efficiency, half_efficiency, least, least_again = live.min(
        room.limit - room.base, room.host - room.base, room.loaded_last, machine.flops,
        record.efficiency, record.efficiency_in(half=True), *(each[0] for each in seen),
    )  # fmt: skip
    base, most, most_again = live.max(room.base, *(each[1] for each in seen))
    record = replace(
        record, kept=(least, most), kept_again=(least_again, most_again), efficiency=efficiency,
        half_efficiency=half_efficiency,
    )  # fmt: skip
    room = replace(
        room, record=record, base=int(base), limit=int(base + free), host=int(base + host),
        loaded_last=int(last),
    )  # fmt: skip
    return replace(machine, flops=flops), record, room
