"""What the exports of a run are asked, whatever its task: the base of all kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

from modicum.adapters import AttachedAdapter
from modicum.tasks import Data
from modicum.trainer.restoring import FinishedRun
from modicum.verify.findings import Wanting
from modicum.verify.outputs import Outputs


class Loaded(Protocol):
    """A model in evaluation mode, and its adapter if it has one."""

    @property
    def model(self) -> Any:
        """The model."""

    @property
    def adapter(self) -> AttachedAdapter | None:
        """Its adapter."""


class ExportProbe(ABC):
    """How the models of one task are loaded, asked and compared.

    Args:
        done: the run.
        data: its data; asked are rows of the validation data, else of the training data.
        count: how many; None: `default_count`.
        tokens: of text, how many are written after a prompt at the most.
    """

    default_count: ClassVar[int]
    what: ClassVar[str]  # that is asked: prompts, rows

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        self.done, self.tokens = done, tokens
        self.side = "validation" if data.validation else "training"
        self.rows: Any = data.validation or data.train
        wanted = count or self.default_count
        stride = max(1, len(self.rows) // wanted)
        self.chosen = range(0, min(len(self.rows), stride * wanted), stride)

    def check(self) -> dict[str, Any]:
        """The first row of the verification: what was asked."""
        return {"check": self.what, "of": self.side, "count": len(self.chosen)}

    @abstractmethod
    def answers(self, model: Any, like: Outputs | None = None) -> Outputs:
        """What a model makes of the rows.

        Args:
            like: the trained model's; None: this is it.
        """

    def changed(self, model: Any, trained: Outputs) -> Outputs:
        """The same of the trained model without its adapter, of which logits alone are compared."""
        return self.answers(model, trained)

    def aligned(self, made: Loaded, found: Outputs) -> Outputs:
        """Outputs in the order that the trained model's have."""
        return found

    @abstractmethod
    def load(self, run: Path) -> Loaded:
        """What the run exported, read back.

        Raises:
            InputError: it is not there, or damaged.
        """

    @abstractmethod
    def load_other(self, folder: Path) -> Loaded:
        """The model in a folder that was made of the run.

        Raises:
            InputError: it holds no model.
            Incomplete: the model lacks what was trained.
        """

    @abstractmethod
    def same(self, trained: Outputs, found: Outputs) -> dict[str, Any]:
        """What people are shown of a step next to its error."""

    def reason(self, made: Loaded, trained: Outputs, found: Outputs, allowed: float) -> str | None:
        """Why logits differ more than is allowed, as a finding's name; None: it is not known."""
        return None

    def lost(self, trained: Outputs, found: Outputs) -> str:
        """What else of the outputs differs, for a finding that the logits do."""
        return ""

    @abstractmethod
    def findings(
        self, made: Loaded, trained: Outputs, found: Outputs, place: str, *, within: bool
    ) -> Iterator[Wanting]:
        """What else is wanting.

        Args:
            place: the step and its folder, for people.
            within: whether the logits differ by no more than is allowed.
        """


class Incomplete(Exception):
    """A folder's model lacks what was trained, such as a classifier's head."""

    def __init__(self, finding: Wanting) -> None:
        super().__init__(str(finding))
        self.finding = finding
