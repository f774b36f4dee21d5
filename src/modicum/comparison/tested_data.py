"""Whether a test can say anything: all sides have one, and what it holds is not trained on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from modicum.comparison.kept_data import way_to_prepare
from modicum.comparison.sides import RecipeSide
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan


def have_test(sides: Sequence[RecipeSide]) -> bool:
    """Whether the sides with a plan hold data out for a test: all of them, or none.

    Raises:
        InputError: some do and others do not, so that their tests could not be compared.
    """
    tested = {
        side.name: side.plan.task.has_test(side.recipe)
        for side in sides
        if side.plan is not None and side.recipe is not None
    }
    found = set(tested.values())
    if len(found) > 1:
        have, lack = (
            ", ".join(name for name, has in tested.items() if has is wanted)
            for wanted in (True, False)
        )
        raise InputError(
            f"some sides hold data out for a test ({have}) and others do not ({lack}), so their "
            "tests could not be compared; give all of them a test, or none"
        )
    return True in found


def refuse_trained_tests(plans: Sequence[Plan]) -> None:
    """Refuse a test of any of these plans that holds what is trained on there.

    Data that several of them prepare alike is looked at once.

    Raises:
        InputError: there is such a test; or something is wrong with the data.
    """
    for plan in {way_to_prepare(plan.recipe): plan for plan in plans}.values():
        refuse_trained_test(plan)


def refuse_trained_test(plan: Plan) -> None:
    """Refuse a test with data of its own, documents or rows of which are trained on as well.

    Both are prepared for it once, in a temporary folder. Of a stream nobody knows.

    Raises:
        InputError: so they are, with how many; or something is wrong with the data.
    """
    task, recipe = plan.task, plan.recipe
    section, asked = task.held_out(recipe)
    if asked.test_path is None or recipe.data.streaming:
        return
    with tempfile.TemporaryDirectory(prefix="modicum-test-") as folder:
        data = task.prepare(recipe, plan.inputs, Path(folder), lambda *_: None, Ranks())
        trained = set(task.digests(data.train))
        tested = [] if data.test is None else list(task.digests(data.test))
    twice = sum(digest in trained for digest in tested)
    if twice:
        raise InputError(
            f"{twice:,} of its {len(tested):,} {task.examples} are trained on too, so a test would "
            "say how well they are remembered; leave them out of the one or of the other",
            field=f"{section}.test_path",
            value=asked.test_path,
        )
