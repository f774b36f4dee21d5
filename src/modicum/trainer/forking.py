"""What a fork leaves of the state that it starts from: what would mean something else to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.recipe import differences
from modicum.trainer.folder import RECIPE

if TYPE_CHECKING:
    from modicum.trainer.session import Session

_INPUTS, _OPTIMIZER = "inputs", "optimizer"
# Views of what optimizers keep: PyTorch's state, and the log of updates without gradients.
_KEPT = {_OPTIMIZER, "log"}
# Fields that say what a step makes of what is kept, which is the same whatever these are.
_OF_A_STEP = frozenset(
    (
        "adam_betas",
        "adam_decay",
        "adam_epsilon",
        "adam_rate",
        "betas",
        "epsilon",
        "factor_beta",
        "factor_rate",
        "gamma",
        "in_backward",
        "momentum",
        "nesterov",
        "outside_scale",
        "product_dtype",
        "scale",
        "shape_factor",
        "sign_beta",
        "sign_rate",
        "snapshot",
        "stream",
        "weight_decay",
    )
)


def left_by_fork(session: Session) -> set[str]:
    """The views of the state that a fork does not take up; all ranks call this.

    Its data may be other data. Where its optimizer is another, or differs in more than what a step
    makes of moments, these could be read as what they are not: they begin anew, and a warning says
    so.
    """
    before: Mapping[str, Any] | None = None
    if session.ranks.first:
        before = _optimizer_of(Path(session.record.content["forked_from"]))
    before = session.ranks.broadcast(before)
    changed = _changed(before or {}, session.plan.recipe.plain()[_OPTIMIZER])
    if not changed:
        return {_INPUTS}
    session.emit(
        "warning",
        message="what the optimizer kept in the run that this one starts from is not taken up, and "
        f"begins anew: {'; '.join(changed)}",
    )
    return {_INPUTS, *_KEPT}


def _optimizer_of(folder: Path) -> Mapping[str, Any] | None:
    """What the recipe of a run says of its optimizer, every field spelled out.

    None: it cannot be read. What else it says is not looked at: a file of methods that it names may
    be gone.
    """
    from modicum.recipe_yaml import parse, text_of

    try:
        values, _ = parse(text_of(folder / RECIPE), folder / RECIPE)
    except InputError:
        return None
    section = values.get(_OPTIMIZER)
    return section if isinstance(section, dict) else None


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences in what an optimizer keeps, as far as its fields tell.

    Fields that an older version did not know are what they were then: the default.
    """
    if before and before.get("method") != now["method"]:
        before = {"method": before.get("method")}
    kept, keeps = (
        {key: side[key] for key in side if key in before and key not in _OF_A_STEP}
        for side in (before, now)
    )
    return differences({_OPTIMIZER: kept}, {_OPTIMIZER: keeps})
