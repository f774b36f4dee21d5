"""What methods of the section `diagnosis` share: they look at a model, and change nothing.

Such a method is no adapter: it has no factors, no file and nothing to merge. What it is bound to is
a run hook that looks at evaluations and gives rows for the report. There is no state, as each
evaluation is looked at afresh.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from modicum.core.contracts.method import Context, Method
from modicum.core.contracts.run_hooks import PassKind, RunHook
from modicum.core.ranks.ranks import Ranks


@dataclass(frozen=True)
class DiagnosisContext(Context):
    """What a diagnosis is bound to: the model, and the ranks that share its batches."""

    ranks: Ranks = field(default_factory=Ranks)


class DiagnosisRuntime(RunHook, ABC):
    """A diagnosis at work on a model: `looking()` around forward passes, then `findings()`.

    Under `transformers.Trainer`, as `callback()`, evaluations are looked at.
    """

    def __init__(self, context: Context) -> None:
        self.model = context.model
        self.ranks = context.ranks if isinstance(context, DiagnosisContext) else Ranks()

    @abstractmethod
    def looking(self) -> AbstractContextManager[object]:
        """Look at the forward passes in this block, in addition to what was seen."""

    @abstractmethod
    def forget(self) -> None:
        """Begin anew."""

    @abstractmethod
    def findings(self) -> list[dict[str, Any]]:
        """A row for each thing that was looked at, over all ranks, which all call this.

        Raises:
            InputError: there was nothing to see.
        """

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """Look at evaluations alone."""
        return self.looking() if kind == "evaluate" else nullcontext()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """An evaluation begins: what was seen before is not of it."""
        self.forget()
        yield

    def state_dict(self) -> Mapping[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing was kept."""


class ModelDiagnosis(Method):
    """The value of a diagnosis. A subclass writes `bind`, which gives a `DiagnosisRuntime`."""

    @abstractmethod
    def bind(self, context: Context) -> DiagnosisRuntime:
        """What looks at the context's model."""
