"""ExportProbe of classifiers: logits of the classes, by their names, and the likeliest class."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modicum.adapters import AttachedAdapter, base_model_of
from modicum.adapters import load as load_adapter
from modicum.core.errors import InputError
from modicum.core.run_folders import is_adapter
from modicum.data.image_arrays import CARD
from modicum.data.pair_tokenizer import FILE, PairTokenizer
from modicum.models import convnet, recurrent
from modicum.models.huggingface import CONFIG, resolve
from modicum.models.transformers.classes import classes_of
from modicum.models.transformers.classifier_files import load_classifier
from modicum.serve import load_adapted
from modicum.serve.adapted import adapted_classifier
from modicum.tasks import Data
from modicum.tasks.images import ImageTask
from modicum.tasks.sequences import SequenceTask
from modicum.tasks.text_classes import TextClassInputs, TextClassTask
from modicum.trainer.restoring import FinishedRun
from modicum.verify.export_probe import ExportProbe, Incomplete, Loaded
from modicum.verify.findings import Wanting
from modicum.verify.outputs import Outputs, distance
from modicum.verify.tokenizers import same_tokens


@dataclass(frozen=True)
class LoadedClassifier:
    """A classifier, and the names of its classes in its own order; empty: its files name none."""

    model: Any
    adapter: AttachedAdapter | None
    names: tuple[str, ...]
    tokenizer: PairTokenizer | None = None


class ClassProbe(ExportProbe):
    """Logits of a batch of rows, less their mean."""

    default_count = 32
    what = "rows"
    names: tuple[str, ...]

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        super().__init__(done, data, count, tokens)
        self.batch = self.rows.batch(list(self.chosen)).to(done.plan.device)

    @torch.no_grad()
    def answers(self, model: Any, like: Outputs | None = None) -> Outputs:
        """Logits [rows, classes], and of each row the likeliest class."""
        logits = self.done.plan.task.outputs(model, self.batch).float().cpu()
        return _outputs(logits - logits.mean(-1, keepdim=True))

    def aligned(self, made: Loaded, found: Outputs) -> Outputs:
        """The classes in the order in which they were trained, by their names."""
        order = self._order(made)
        return found if order is None else _outputs(found.logits[0][:, order])

    def _order(self, made: Loaded) -> list[int] | None:
        """Where the trained classes are among a model's; None where these are not the same."""
        names = made.names if isinstance(made, LoadedClassifier) else ()
        if sorted(names) != sorted(self.names):
            return None
        return [names.index(name) for name in self.names]

    def same(self, trained: Outputs, found: Outputs) -> dict[str, Any]:
        """How many rows get another class."""
        return {"other_classes": len(_others(trained, found))}

    def lost(self, trained: Outputs, found: Outputs) -> str:
        """How many rows get another class, and the first of them."""
        if not (others := _others(trained, found)):
            return ", and every row gets its class"
        first = others[0]
        own, other = trained.written[0][first], found.written[0][first]
        names = dict(enumerate(self.names))
        return (
            f"; {len(others)} of {len(self.chosen)} rows get another class, the first "
            f"{names.get(other, other)!r} for {names[own]!r}"
        )

    def reason(self, made: Loaded, trained: Outputs, found: Outputs, allowed: float) -> str | None:
        """`labels`, where the logits are those of the trained model in its own order."""
        order = self._order(made)
        if order is None or order == sorted(order):
            return None
        as_they_are = _outputs(found.logits[0][:, torch.tensor(order).argsort()])
        return "labels" if distance(trained, as_they_are) <= allowed else None

    def findings(
        self, made: Loaded, trained: Outputs, found: Outputs, place: str, *, within: bool
    ) -> Iterator[Wanting]:
        """Other names of classes, another tokenizer, another token that fills rows."""
        assert isinstance(made, LoadedClassifier)
        if made.names and self._order(made) is None:
            yield Wanting("labels", place, _listed(self.names), _listed(made.names))

    @abstractmethod
    def load(self, run: Path) -> LoadedClassifier:
        """What the run exported, read back."""

    @abstractmethod
    def load_other(self, folder: Path) -> LoadedClassifier:
        """The classifier in a folder that was made of the run."""


class TextClassProbe(ClassProbe):
    """Classifiers of transformers, with or without an adapter."""

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        super().__init__(done, data, count, tokens)
        assert isinstance(done.plan.inputs, TextClassInputs)
        self.names = done.plan.inputs.texts.names
        self.tokenizer = PairTokenizer(done.folder.path / "tokenizer")
        self.padding = int(done.plan.inputs.config.raw["pad_token_id"])

    def load(self, run: Path) -> LoadedClassifier:
        """The run's adapter on its base, with the trained head, or its model."""
        if not (run / "adapter").is_dir():
            return self._model(run / "model")
        model, adapter = load_adapted(run)
        return self._on_device(model, adapter, run / "tokenizer")

    def load_other(self, folder: Path) -> LoadedClassifier:
        """A run, an adapter on the base that it names or else the run's, or a model."""
        if not folder.is_dir():
            raise InputError("no such folder", file=folder, field="--against")
        if (folder / "adapter").is_dir():
            return self.load(folder)
        return self._adapter(folder) if is_adapter(folder) else self._model(resolve(folder))

    def _adapter(self, folder: Path) -> LoadedClassifier:
        named = base_model_of(folder)
        base = Path(named) if named and Path(named).is_dir() else self.done.base
        if base is None:
            raise InputError("the adapter's base model is not there", file=folder, value=named)
        plan, own = self.done.plan, self.done.folder.path / "tokenizer"
        assert isinstance(plan.task, TextClassTask)
        model, adapter = adapted_classifier(
            folder, base, plan.recipe, plan.task.asked, PairTokenizer(own), self.names
        )
        return self._on_device(model, adapter, folder)

    def _model(self, folder: Path) -> LoadedClassifier:
        model, lacking = load_classifier(folder)
        if lacking:
            found = f"none: the weights lack {', '.join(lacking)}"
            raise Incomplete(Wanting("head", str(folder), "the head that was trained", found))
        return self._on_device(model, None, folder)

    def _on_device(
        self, model: Any, adapter: AttachedAdapter | None, tokens: Path
    ) -> LoadedClassifier:
        there = (tokens / FILE).is_file()
        tokenizer = PairTokenizer(tokens) if there else None
        names = classes_of(model.decoder_config.raw) or ()
        model = model.to(self.done.plan.device).eval()
        return LoadedClassifier(model, adapter, names, tokenizer)

    def findings(
        self, made: Loaded, trained: Outputs, found: Outputs, place: str, *, within: bool
    ) -> Iterator[Wanting]:
        """Other names of classes, another tokenizer, another token that fills rows."""
        yield from super().findings(made, trained, found, place, within=within)
        assert isinstance(made, LoadedClassifier)
        other = made.tokenizer
        if other is not None and not same_tokens(other.inner, self.tokenizer.inner):
            yield Wanting("tokenizer", place, "the tokens of the training", "others")
        padding = made.model.decoder_config.raw.get("pad_token_id")
        if padding != self.padding:
            yield Wanting("padding", place, f"pad_token_id {self.padding}", f"{padding}")


class OwnClassProbe(ClassProbe):
    """Classifiers that are modicum's own, with or without an adapter."""

    @staticmethod
    @abstractmethod
    def read(folder: Path, device: str) -> Any:
        """The model of a folder."""

    def load(self, run: Path) -> LoadedClassifier:
        """The run's adapter on its base, or its model."""
        if not (run / "adapter").is_dir():
            return self.load_other(run / "model")
        assert self.done.base is not None
        model = self.read(self.done.base, self.done.plan.device)
        adapter = load_adapter(model, run / "adapter", plugins=self.done.plan.recipe.plugins)
        return LoadedClassifier(model.eval(), adapter, ())

    def load_other(self, folder: Path) -> LoadedClassifier:
        """A folder of such a model, or a run's; of one's own images it names the classes."""
        if not folder.is_dir():
            raise InputError("no such folder", file=folder, field="--against")
        inner = folder if (folder / CONFIG).is_file() else folder / "model"
        model = self.read(inner, self.done.plan.device).eval()
        card = inner / CARD
        names = json.loads(card.read_text(encoding="utf-8"))["classes"] if card.is_file() else ()
        return LoadedClassifier(model, None, tuple(names))


class ImageProbe(OwnClassProbe):
    """Convolutional classifiers."""

    read = staticmethod(convnet.load)

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        super().__init__(done, data, count, tokens)
        assert isinstance(done.plan.task, ImageTask)
        self.names = done.plan.task.names


class SequenceProbe(OwnClassProbe):
    """Recurrent nets."""

    read = staticmethod(recurrent.load)

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        super().__init__(done, data, count, tokens)
        assert isinstance(done.plan.task, SequenceTask)
        self.names = tuple(map(str, range(done.plan.task.classes)))


def _outputs(logits: torch.Tensor) -> Outputs:
    return Outputs([], [logits], [logits.argmax(-1).tolist()])


def _others(trained: Outputs, found: Outputs) -> list[int]:
    """The rows that get another class."""
    pairs = zip(trained.written[0], found.written[0], strict=True)
    return [row for row, (own, other) in enumerate(pairs) if own != other]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
