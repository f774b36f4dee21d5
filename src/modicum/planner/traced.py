"""The planner's other ledger of a model: traced, where no arithmetic is known or a recipe asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.errors import InputError
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine.turn import tell
from modicum.models.traced_cache import StoredLedgers, TraceFailed
from modicum.models.traced_ledger import TracedLedgers
from modicum.recipe import Recipe
from modicum.tasks.traced import passes_of, trace_device, trace_request

_WHAT = "Tracing one block of each kind in the model, which takes some seconds."
_STANDING_IN = (
    "Tracing one block of each kind in the model, which takes some seconds: a processor's "
    "operations, as there is no CUDA here, which take a little more."
)


@cache
def _say_once(*, standing_in: bool = False) -> None:
    """A plan that tries changes traces several models."""
    tell(_STANDING_IN if standing_in else _WHAT)


@dataclass(frozen=True)
class Traces:
    """What traces tell of a model: one, or where data decides the one with the most rows too.

    It answers what the planner asks of a task: `ledger` and `slack`, adapters included.

    Args:
        each: those traces.
        passes: of each row in a batch; a trace's sequences are rows, a query's all that run.
    """

    each: Sequence[TracedLedgers]
    passes: int = 1

    def ledger(self, shape: ModelQuery, *, recompute: bool = False) -> Ledger:
        """What model and adapters spend; where data decides, the most."""
        return max((ledger for _, ledger in self._asked(shape, recompute)), key=Ledger.peak)

    def slack(self, shape: ModelQuery, *, recompute: bool = False) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        worst, _ = max(self._asked(shape, recompute), key=lambda pair: pair[1].peak())
        return worst.slack(self._rows(shape), recompute=recompute)

    def kept_by_block(self, shape: ModelQuery, *, recompute: bool = False) -> list[int]:
        """Bytes that each block keeps until its backward pass is over, in the order they run."""
        worst, _ = max(self._asked(shape, recompute), key=lambda pair: pair[1].peak())
        return worst.kept_by_block(self._rows(shape), recompute=recompute)

    def _asked(self, shape: ModelQuery, recompute: bool) -> list[tuple[TracedLedgers, Ledger]]:
        rows, updates = self._rows(shape), shape.micro_batches
        return [
            (one, one.ledger(rows, micro_batches=updates, recompute=recompute)) for one in self.each
        ]

    def _rows(self, shape: ModelQuery) -> int:
        return shape.sequences // self.passes


def traces(
    recipe: Recipe,
    config: Any,
    shape: ModelQuery,
    device: str,
    experts: tuple[int, int] | None,
    shares: Shares | None = None,
    prepared: Mapping[str, Mapping[str, Any]] | None = None,
) -> Traces:
    """The traces of a recipe's model, from the user's cache or made now by another process.

    Args:
        config: of the task's model.
        shape: of a micro-batch; how many sequences and micro-batches there are does not matter.
        experts: over how many of them a layer chooses, and how many it chooses.
        shares: what the recipe's policy on saved activations is taken to leave of them.
        prepared: by layer, what the adapter found out from data.

    Raises:
        InputError: the model cannot be traced, or not all that the recipe does to it.
    """
    numbers: tuple[int | None, ...] = experts or (None,)
    return Traces(
        [_stored(recipe, config, shape, device, number, shares, prepared) for number in numbers],
        passes_of(recipe),
    )


_known: dict[Path, StoredLedgers] = {}


def _stored(
    recipe: Recipe,
    config: Any,
    shape: ModelQuery,
    device: str,
    experts: int | None,
    shares: Shares | None,
    prepared: Mapping[str, Mapping[str, Any]] | None,
) -> StoredLedgers:
    """The traces of one request; those that this process has read it does not read again."""
    asked = recipe.budget.ledger
    try:
        request = trace_request(recipe, config, shape, device, experts, shares, prepared)
        file = request.file
        if file not in _known:
            other = trace_device(device) != device
            _known[file] = StoredLedgers(request, say=partial(_say_once, standing_in=other))
        return _known[file]
    except TraceFailed as error:
        problem = f"the model cannot be traced: {error}"
    except InputError as error:
        problem = f"the model cannot be traced: {error.problem}"
    if asked == "traced":
        raise InputError(
            problem, field="budget.ledger", value=asked, allowed="auto, where the task has its own"
        )
    raise InputError(
        f"{problem}; its task has no ledger of its own, so no plan can be made",
        field="task.method",
        value=(recipe.task or {}).get("method"),
    )
