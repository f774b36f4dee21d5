"""ExportProbe of models that write text: logits over the trained model's text, and greedy text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from modicum.data.tokenizer import Tokenizer
from modicum.serve import Conversation, load_run
from modicum.tasks import Data
from modicum.tasks.text import TextData
from modicum.trainer.restoring import FinishedRun
from modicum.verify.export_probe import ExportProbe, Loaded
from modicum.verify.findings import Wanting
from modicum.verify.folders import loaded
from modicum.verify.outputs import Outputs, other_text, outputs
from modicum.verify.tokenizers import end_findings, tokenizer_findings

_PROMPT = 32  # tokens of a prompt, at most


class TextProbe(ExportProbe):
    """Prompts are beginnings of rows."""

    default_count = 4
    what = "prompts"

    def __init__(self, done: FinishedRun, data: Data[Any], count: int | None, tokens: int) -> None:
        super().__init__(done, data, count, tokens)
        assert isinstance(data, TextData)
        self.tokenizer: Tokenizer = data.tokenizer
        self.prompts: list[list[int]] = []
        for row in self.chosen:
            width = min(_PROMPT, max(1, self.rows.width(row) // 2))
            self.prompts.append(self.rows.batch([row]).input_ids[0, :width].tolist())

    def answers(self, model: Any, like: Outputs | None = None) -> Outputs:
        """Greedy text, and logits over that of the trained model."""
        return outputs(model, self.prompts, self.tokens, self.tokenizer.eos_id, like)

    def changed(self, model: Any, trained: Outputs) -> Outputs:
        """The same, but nothing is written."""
        return outputs(model, self.prompts, 0, self.tokenizer.eos_id, trained)

    def load(self, run: Path) -> Loaded:
        """As `modicum chat` loads it."""
        return load_run(run, device=self.done.plan.device)

    def load_other(self, folder: Path) -> Loaded:
        """As a model, an adapter on its base, or a run."""
        return loaded(folder, self.done, self.done.plan.device)

    def same(self, trained: Outputs, found: Outputs) -> dict[str, Any]:
        """Whether the same text is written."""
        return {"same_text": found.written == trained.written}

    def findings(
        self, made: Loaded, trained: Outputs, found: Outputs, place: str, *, within: bool
    ) -> Iterator[Wanting]:
        """Another text for no reason that the logits give; another tokenizer, end or template."""
        if within and (number := other_text(trained, found)) is not None:
            own, other = (each.written[number] for each in (trained, found))
            texts = [repr(self.tokenizer.decode(written)) for written in (own, other)]
            yield Wanting("text", place, *texts)
        where = place.partition(": ")[2]
        yield from tokenizer_findings(self.tokenizer, cast(Conversation, made).tokenizer, place)
        yield from end_findings(self.tokenizer, Path(where), place)
