"""What `modicum plan` does: a plan, why a field is what it is, two plans, a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum import recipe_yaml
from modicum.cli.tables import TableRow, print_json, print_plan, table
from modicum.cli.train import Asked, placed
from modicum.core.errors import InputError
from modicum.core.ranks.environment import planned_on
from modicum.core.units import format_bytes, format_duration
from modicum.report.numbers import quantity

if TYPE_CHECKING:
    from modicum.planner import Plan
    from modicum.planner.profiles import Profile


@dataclass(frozen=True)
class PlanView:
    """What of a plan is to be shown.

    Args:
        asked: the recipe, its overrides and the ranks.
        why: a field to say the reason of.
        compare: another recipe, which comes first.
        machine: a profile's name, or its file.
        picture: where to draw a step's memory.
        hosts: that the ranks are on, as many on each.
    """

    asked: Asked
    why: str | None = None
    compare: str | None = None
    machine: str | None = None
    picture: Path | None = None
    hosts: int = 1


def show(shown: PlanView) -> None:
    """Plan, and print what is asked for.

    Raises:
        ModicumError: what is wrong, or does not fit.
    """
    asked = shown.asked
    here = placed(asked)
    if shown.why is not None and shown.compare is not None:
        raise InputError("give it or --compare, not both", field="--why", value=shown.why)
    if shown.picture is not None:
        from modicum.report.picture import check

        if shown.why is not None or shown.compare is not None:
            problem = "draws one plan; leave --why and --compare out"
            raise InputError(problem, field="--picture", value=str(shown.picture))
        check(shown.picture)
    machine = None if shown.machine is None else _profile(shown.machine)
    ranks = asked.ranks or here.size
    with planned_on(shown.hosts, ranks):
        if shown.compare is not None:
            found = _compared((shown.compare, asked.recipe), asked, ranks, machine)
        elif shown.why is not None:
            found = _why(shown.why, asked, ranks, machine)
        else:
            found = _plan(asked, ranks, machine).row()
    if not here.first:
        return
    if shown.picture is not None:
        _draw(found, shown)
    if asked.as_json:
        print_json(found)
    elif shown.compare is not None:
        print_compared(found, (shown.compare, asked.recipe))
    elif shown.why is not None:
        print_why(found)
    else:
        print_plan(found)
        print_treated(found)
        print_room(found)
        print_advice(found)


def _plan(asked: Asked, ranks: int, machine: Profile | None) -> Plan:
    from modicum.planner import plan

    recipe = recipe_yaml.load(asked.recipe, asked.overrides)
    with recipe_yaml.places(asked.recipe, asked.overrides):
        return plan(recipe, ranks=ranks, machine=machine, advise=True)


def _why(field: str, asked: Asked, ranks: int, machine: Profile | None) -> dict[str, Any]:
    from modicum.models.traced_cache import ending_traces
    from modicum.planner.planning import answered, asked_of
    from modicum.planner.why import why

    recipe = recipe_yaml.load(asked.recipe, asked.overrides)
    with ending_traces():
        with recipe_yaml.places(asked.recipe, asked.overrides):
            question = asked_of(recipe, ranks=ranks, machine=machine)
            made = answered(question)
        source = made.derived[field].field if field in made.derived else field
        written = recipe_yaml.written(asked.recipe, asked.overrides, source)
        return why(question, made, field, written)


def _compared(
    names: tuple[str, str], asked: Asked, ranks: int, machine: Profile | None
) -> dict[str, Any]:
    from modicum.models.traced_cache import ending_traces
    from modicum.planner.compared import compared
    from modicum.planner.planning import answered_anyway, asked_of

    questions, made = [], []
    with ending_traces():
        # Both before either is planned: a process that has planned holds more.
        for name in names:
            recipe = recipe_yaml.load(name, asked.overrides)
            with recipe_yaml.places(name, asked.overrides):
                questions.append(asked_of(recipe, ranks=ranks, machine=machine))
        for name, question in zip(names, questions, strict=True):
            with recipe_yaml.places(name, asked.overrides):
                made.append(answered_anyway(question))
    (one, fits_one), (two, fits_two) = made
    return compared(one, two, (fits_one, fits_two))


def _profile(name: str) -> Profile:
    """A profile by its name, or from a file: a path with a folder or an ending is one.

    Raises:
        InputError: there is none, or something is wrong with it.
    """
    from modicum.planner.profiles import profile, profile_of

    path = Path(name)
    if not path.is_file() and path.name == name and not path.suffix:
        return profile(name)
    values, _ = recipe_yaml.parse(recipe_yaml.text_of(path), path)
    return profile_of(values, path)


def _draw(row: Mapping[str, Any], shown: PlanView) -> None:
    """Draw, and say where the picture is."""
    from modicum.report.picture import draw

    assert shown.picture is not None
    draw(dict(row), shown.picture, Path(shown.asked.recipe).stem)
    print(f"picture: {shown.picture}", file=sys.stderr)


def print_treated(row: Mapping[str, Any]) -> None:
    """Print what the optimizer does with each class of parameters, where it treats them apart."""
    rows: list[TableRow] = [
        (each["class"], each["parameters"], each["rule"], format_bytes(each["bytes"]))
        for each in row.get("optimizer") or ()
    ]
    if rows:
        print()
        table(("Class", "Parameters", "Rule", "State"), rows)


def print_room(row: Mapping[str, Any]) -> None:
    """Print what the room that is left could be spent on."""
    rows: list[TableRow] = []
    for use in row.get("room") or ():
        trained = f"{use['trainable']:,}"
        rows.append((use["set"], format_bytes(use["needs_bytes"]), f"{use['work']:.2g} ×", trained))
    if rows:
        print()
        table(("There is room for", "Needs", "Work of an update", "Trained"), rows)


def print_advice(row: Mapping[str, Any]) -> None:
    """Print which other adapter the plan's figures speak for; nothing is changed."""
    for each in row.get("advice") or ():
        print(f"\n{each['because']}: try {each['try']}\n  {each['words']}; see {each['see']}")


def print_why(row: Mapping[str, Any]) -> None:
    """Print where a value is from, and the candidates of a choice."""
    shown = json.dumps(row["value"]).strip('"')
    print(f"{row['field']}: {shown}, by {row['by']}: {row['why']}")
    if "note" in row:
        print(f"note: {row['note']}")
    candidates = row.get("candidates") or ()
    if not candidates:
        return
    of_process = candidates[0]["process_bytes"] is not None
    counted = "process_bytes" if of_process else "peak_bytes"
    rows = [
        (
            each["micro_batch_size"], each["recompute"], each["strategy"], each["asynchronous"],
            format_bytes(each[counted]), format_bytes(each["needs_bytes"]), each["fits"],
            f"{each['work']:.2f}", "this one" if each["chosen"] else "",
        )
        for each in candidates
    ]  # fmt: skip
    what = "Process" if of_process else "Tensors"
    headers = ("Micro-batch", "Recompute", "Strategy", "Copy", what, "Needs", "Fits", "Work", "")
    print()
    table(headers, rows)
    print(f"\n{what}: what `modicum plan` says of it. {_NEEDS[of_process]}\n{_WORK}")


_NEEDS = {
    True: "Needs: the budget\nthat keeps it, with a copy of the state and a part to spare.",
    False: "Needs: the\nbudget that keeps it.",
}
_WORK = "Work: of an update, over that of this one. Copy: of the state, while it is saved."


def print_compared(found: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Print two plans next to each other."""
    one, two = (Path(name).stem or name for name in names)
    one, two = (one, two) if one != two else names
    print(f"{one} -> {two}" if found["recipes"] else f"{one} and {two} say the same")
    for line in found["recipes"]:
        print(f"  {line}")
    rows: list[TableRow] = [
        (name, *pair) for name, pair in found["choices"].items() if pair[0] != pair[1]
    ]
    rows.append(("keeps its budget", *found["fits"]))
    rows += [
        (name.replace("_", " "), *(_figure(name, value) for value in pair))
        for name, pair in found["costs"].items()
        if pair != [None, None]
    ]
    print()
    table(("Cost", one, two), rows)
    print()
    table(
        ("Phase", one, two),
        [(phase, *map(format_bytes, pair)) for phase, pair in found["by_phase"].items()],
    )
    print()
    parts = [
        (each["kind"], each["phase"], each["what"], *map(format_bytes, each["bytes"]))
        for each in found["by_part"]
    ]
    table(("Kind", "Phase", "What", one, two), parts)


def _figure(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name == "seconds":
        return format_duration(value)
    return quantity(value, "tokens/s") if name == "tokens_per_second" else f"{value:,}"
