"""Whether a test can say anything: what it holds must not be trained on."""

from __future__ import annotations

import tempfile
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan


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
