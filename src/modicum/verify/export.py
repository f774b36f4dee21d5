"""Whether what a run exported computes what was trained, step by step of the way out.

The trained model is restored from the run's checkpoint. All models compute in fp32, so that what
differs are their weights: what rounding, merging or a file has lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from modicum.core.errors import InputError
from modicum.core.machine.memory import release
from modicum.core.progress import StageProgress
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.models.decoders import Decoder
from modicum.serve import Conversation, load_run
from modicum.tasks.text import TextData
from modicum.trainer.restoring import FinishedRun
from modicum.verify.findings import Verification, Wanting
from modicum.verify.folders import loaded
from modicum.verify.outputs import Outputs, distance, other_text, outputs
from modicum.verify.tokenizers import end_findings, tokenizer_findings

# How far logits may be from the trained model's, by the dtype that the weights were rounded to.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Nor may more than this share of what the adapter changes in the logits be lost ...
LOST = 0.25
# ... where that is above what fp32 itself loses.
NOISE = 1e-5
_PROMPT = 32  # tokens of a prompt, at most


def verify_export(
    run: str | Path,
    *,
    against: str | Path | None = None,
    prompts: int = 4,
    tokens: int = 16,
    progress: StageProgress = lambda *_: None,
) -> Verification:
    """Hold logits and greedy text of what a run exported against its trained weights.

    Looked at are what the run wrote, read back; its adapter merged into the base as `modicum
    merge` does; its `compressed/` folder; and `against`. Nothing is written.

    Args:
        run: a finished run of the task `causal_lm`.
        against: a folder that was made of it: a model, an adapter, another run.
        prompts: how many, beginnings of rows of the validation data; of the training data where
            there is no other.
        tokens: written after each prompt, at the most.

    Raises:
        InputError: there is no finished run, its checkpoint or export is gone, or `against` is no
            model.
    """
    done = FinishedRun.of(run)
    if done.plan.task.name != "causal_lm":
        problem = "only models of text are verified so far"
        raise InputError(problem, field="task.method", value=done.plan.task.name)
    if changed := done.changed_base():
        expected, found = "the weights that the run began with", f"others in {', '.join(changed)}"
        finding = Wanting("base", str(done.base), expected, found)
        return Verification([{"check": "base", "changed": changed}], [finding])
    with done.data(progress) as data:
        assert isinstance(data, TextData)
        rows = data.validation or data.train
        ids = _prompts(rows, prompts)
        progress("restoring the trained model", 0, None)
        trial = _Trial(ids, tokens, data.tokenizer, *_trained(done, data, ids, tokens))
    side = "validation" if data.validation else "training"
    trial.checks.append({"check": "prompts", "of": side, "count": len(ids)})
    for name, where, make in _steps(done, against):
        progress(f"{name}: {where}", 0, None)
        trial.look(name, where, make)
        release()
    return Verification(trial.checks, trial.findings)


def _prompts(rows: TextRows, count: int) -> list[list[int]]:
    stride = max(1, len(rows) // count)
    found = []
    for row in range(0, min(len(rows), stride * count), stride):
        width = min(_PROMPT, max(1, rows.width(row) // 2))
        found.append(rows.batch([row]).input_ids[0, :width].tolist())
    return found


def _trained(
    done: FinishedRun, data: TextData, prompts: list[list[int]], tokens: int
) -> tuple[Outputs, float | None]:
    """The trained model's outputs, and how far they are from those without its adapter."""
    model, adapter = done.restored(data)
    found = outputs(model.float(), prompts, tokens, data.tokenizer.eos_id)
    if adapter is None:
        return found, None
    adapter.detach()
    before = outputs(model, prompts, 0, data.tokenizer.eos_id, found)
    return found, distance(found, before)


@dataclass
class _Trial:
    """The trained model's outputs, and what was found in comparing others with them."""

    prompts: list[list[int]]
    tokens: int
    tokenizer: Tokenizer
    trained: Outputs
    change: float | None
    checks: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Wanting] = field(default_factory=list)

    def look(self, name: str, where: str, make: Callable[[], Conversation]) -> None:
        """Compare one step's model; a merge that the method does not have is noted."""
        try:
            made = make()
        except _NotMergeable as refused:
            self.checks.append({"check": name, "where": where, "skipped": str(refused)})
            return
        exact = name == "exported" and made.adapter is not None
        dtype = torch.float32 if exact else coarsest(made.model)
        allowed = self._allowed(dtype)
        model = made.model.float()
        end = made.tokenizer.eos_id
        found = outputs(model, self.prompts, self.tokens, end, self.trained)
        error = distance(self.trained, found)
        self.checks.append({
            "check": name, "where": where, "dtype": str(dtype).removeprefix("torch."),
            "error": error, "allowed": allowed, "adapter_changes": self.change,
            "same_text": found.written == self.trained.written,
        })  # fmt: skip
        place = f"{name}: {where}"
        if error > allowed:
            said = f"{error:.2g}" + ("" if self.change is None else self._share(error))
            self.findings.append(
                Wanting("logits", place, f"a relative error of at most {allowed:.2g}", said)
            )
        elif (number := other_text(self.trained, found)) is not None:
            own, other = (each.written[number] for each in (self.trained, found))
            texts = [repr(self.tokenizer.decode(written)) for written in (own, other)]
            self.findings.append(Wanting("text", place, *texts))
        self.findings += tokenizer_findings(self.tokenizer, made.tokenizer, place)
        self.findings += end_findings(self.tokenizer, Path(where), place)

    def _allowed(self, dtype: torch.dtype) -> float:
        limit = TOLERANCES[dtype]
        return limit if self.change is None else min(limit, max(LOST * self.change, NOISE))

    def _share(self, error: float) -> str:
        assert self.change is not None
        return f", where the adapter changes the logits by {self.change:.2g}"


class _NotMergeable(Exception):
    """The run's adapter has no dense form."""


def _steps(
    done: FinishedRun, against: str | Path | None
) -> Iterator[tuple[str, str, Callable[[], Conversation]]]:
    """The models to look at: what the step is called, where it is, and how it is loaded."""
    path, device = done.folder.path, done.plan.device
    adapted = (path / "adapter").is_dir()
    made = path / ("adapter" if adapted else "model")
    yield "exported", str(made), lambda: load_run(path, device=device)
    if adapted:
        yield "merged", f"{made} into its base", lambda: _merged(path, device)
    small = path / "compressed"
    if small.is_dir():
        yield "compressed", str(small), lambda: load_run(small, device=device)
    if against is not None:
        folder = Path(against)
        yield "against", str(folder), lambda: loaded(folder, done, device)


def _merged(run: Path, device: str) -> Conversation:
    conversation = load_run(run, device=device)
    assert conversation.adapter is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounding, which is measured here
        try:
            conversation.adapter.merge(dense=next(conversation.model.parameters()).dtype)
        except InputError as error:
            raise _NotMergeable(error.problem) from None
    conversation.adapter.detach()
    return conversation


def coarsest(model: Decoder) -> torch.dtype:
    """The dtype of a model's parameters that rounds the most."""
    there = {parameter.dtype for parameter in model.parameters()}
    return max((each for each in TOLERANCES if each in there), key=TOLERANCES.__getitem__)
