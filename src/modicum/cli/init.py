"""`modicum init`: a recipe to start from, of what model, data and machine are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import DoesNotFit, InputError
from modicum.core.files import write_text
from modicum.core.units import format_bytes, format_count, format_duration
from modicum.recipe.json_schema import json_schema
from modicum.recipe_yaml import load, overridden

if TYPE_CHECKING:
    from modicum.planner.starting import OpenQuestion, Start

SCHEMA = "recipe.schema.json"
_HEAD = f"""\
# yaml-language-server: $schema={SCHEMA}
# A recipe of modicum. What is left out has its default; `modicum schema` lists everything.
"""


def write_recipe(
    out: Path,
    *,
    model: str | None,
    data: str | None,
    method: str | None,
    memory: str | None,
    overrides: Iterable[str] = (),
    asks: bool = False,
) -> Start:
    """Look at model and data, and write `out` with the schema next to it.

    Args:
        overrides: `FIELD=VALUE`, as `--set` has them.
        asks: whether open questions are asked on the terminal; else defaults are taken.

    Raises:
        InputError: `out` is there already, or what was asked for makes no valid recipe.
    """
    from modicum.planner.starting import start
    from modicum.planner.starting.draft import take_default
    from modicum.planner.starting.recipe_text import recipe_text

    if out.exists():
        raise InputError("this file is there already; give another --out", file=out)
    asked = overridden(overrides)
    ask = ask_here if asks else take_default
    made = start(model, data, memory=memory, method=method, asked=asked, ask=ask)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, _HEAD + recipe_text(made.draft.settings.values()))
    try:
        load(out)
    except InputError:
        out.unlink()
        raise
    write_text(out.with_name(SCHEMA), json.dumps(json_schema(), indent=2) + "\n")
    return made


def ask_here(question: OpenQuestion) -> Any:
    """The answer of whoever sits at the terminal; nothing is the default.

    What is not allowed is asked for again.
    """
    choices = f" ({', '.join(question.choices)})" if question.choices else ""
    default = "none" if question.default is None else question.default
    while True:
        print(f"{question.text}{choices} [{default}] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not answer:
            return question.default
        try:
            return question.check(answer)
        except InputError as error:
            print(error, file=sys.stderr)


def lines_of(made: Start, out: Path) -> list[str]:
    """What was found and written, for people."""
    from modicum.planner.starting.recipe_text import model_words

    lines = [f"wrote {out}", f"wrote {out.with_name(SCHEMA)}"]
    lines.append(f"model: {model_words(made.model)}")
    count, about = made.data["documents"], "" if made.data["exact"] else "about "
    lines.append(
        f"data:  {made.data['described']}; {about}{count:,} {made.data['unit']}"
        f"{'s' * (count != 1)} of up to {made.data['longest']:,} tokens"
    )
    if made.plan is not None:
        row = made.plan.row()
        prediction, budget = row["prediction"], row["prediction"]["budget_bytes"]
        needed = prediction["process_bytes"] or prediction["peak_bytes"]
        of = "" if budget is None else f" of {format_bytes(budget)}"
        lines.append(
            f"plan:  fits, with {format_bytes(needed)}{of}; {format_count(row['steps'], 'step')} "
            f"in about {format_duration(prediction['seconds'])}"
        )
        lines.append(f"next:  modicum data {out}; modicum train {out}")
    return lines


def as_json(made: Start, out: Path) -> dict[str, Any]:
    """What was found and written, as plain values."""
    return {
        "recipe": str(out),
        "schema": str(out.with_name(SCHEMA)),
        "model": dict(made.model),
        "data": dict(made.data),
        "settings": [vars(setting) for setting in made.draft.settings.values()],
        "questions": [vars(question) for question in made.draft.questions],
        "fits": made.plan is not None,
        "changes": [] if made.refused is None else made.refused.changes,
        "plan": None if made.plan is None else made.plan.row(),
    }


def refusal_of(made: Start, out: Path) -> DoesNotFit | None:
    """Why the recipe that was written does not fit; None where it does."""
    if made.refused is None:
        return None
    problem = str(made.refused).partition("\n")[0]
    return DoesNotFit(f"{out} was written, and {problem}", made.refused.changes)
