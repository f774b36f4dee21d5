"""What must hold of every method of the section `diagnosis`: it looks, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.adapters.diagnosis import DiagnosisRuntime, ModelDiagnosis
from modicum.adapters.lora import LoRA
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import llama, stir, tokens
from modicum.proofs.contracts.base import check
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers

DiagnosisSubject = type[ModelDiagnosis] | ModelDiagnosis

diagnoses_check = partial(check, "adapters", slot="diagnosis")
OTHERS = tokens() // 2


def _bound(subject: DiagnosisSubject, model: nn.Module) -> DiagnosisRuntime:
    value = subject if isinstance(subject, ModelDiagnosis) else subject.tiny()
    return value.bind(Context(model))


def _seen(runtime: DiagnosisRuntime, *batches: Tensor) -> list[dict[str, Any]]:
    """The rows after these forward passes of a model."""
    with torch.no_grad(), runtime.looking():
        for batch in batches:
            runtime.model(batch)
    return runtime.findings()


def _adapted() -> Llama:
    model = llama()
    stir(LoRA(rank=2).attach(model))
    return model


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float) -> None:
    assert len(one) == len(other), f"{len(one)} rows and {len(other)}"
    for first, second in zip(one, other, strict=True):
        for key, value in first.items():
            found = second[key]
            if isinstance(value, float) and isinstance(found, float):
                close = math.isclose(value, found, rel_tol=tolerance, abs_tol=tolerance)
                assert close, f"{key} is {value} and {found}"
            else:
                assert value == found, f"{key} is {value!r} and {found!r}"


@diagnoses_check()
def check_is_no_adapter(subject: DiagnosisSubject) -> None:
    """Bound, it adds no tensor to the model and to no file, and trains and freezes nothing."""
    kind: type[object] = subject if isinstance(subject, type) else type(subject)
    assert not issubclass(kind, Adapter), "a diagnosis is no adapter"
    assert "adapts_base" not in subject.info.traits, "it says that it adapts the base"
    model = _adapted()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    names = list(model.state_dict())
    runtime = _bound(subject, model)
    _seen(runtime, tokens())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == names, "the model's state has other tensors"
    assert not runtime.state_dict(), "it has a state"


@diagnoses_check(proves="alone")
def check_changes_nothing(subject: DiagnosisSubject) -> None:
    """Logits and gradients of a model are the same to the bit, whether it is looked at or not."""
    found = []
    for looks in (False, True):
        model = _adapted()
        runtime = _bound(subject, model)
        with runtime.forward_context("evaluate" if looks else "train"):
            logits = model(tokens())
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    same = all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert same, "looking at a model changes what it computes"


@diagnoses_check()
def check_rows_are_plain_and_alike(subject: DiagnosisSubject) -> None:
    """Rows are there, are plain values in JSON, and have the same keys."""
    rows = _seen(_bound(subject, _adapted()), tokens())
    assert rows, "there is no row"
    assert all(row.keys() == rows[0].keys() for row in rows), "rows differ in their keys"
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows, "rows are no plain values"


@diagnoses_check()
def check_same_rows_again(subject: DiagnosisSubject) -> None:
    """The same passes give the same rows, and other ones other rows."""
    runtimes = [_bound(subject, _adapted()) for _ in range(3)]
    batches = (tokens(), tokens(), OTHERS)
    first, again, other = (
        _seen(runtime, batch) for runtime, batch in zip(runtimes, batches, strict=True)
    )
    assert first == again, "rows of the same passes differ"
    assert first != other, "rows do not depend on the data"


@diagnoses_check()
def check_batches_go_together(subject: DiagnosisSubject) -> None:
    """A batch in two parts, the second first, has the rows of the batch, to 1e-4."""
    one, parts = (_bound(subject, _adapted()) for _ in range(2))
    batch = tokens(8)
    _same(_seen(one, batch), _seen(parts, *reversed(batch.split(4))), 1e-4)


@diagnoses_check()
def check_each_evaluation_begins_anew(subject: DiagnosisSubject) -> None:
    """What was seen before an evaluation, or in training, is not in its rows."""
    plain, noisy = (_bound(subject, _adapted()) for _ in range(2))
    _seen(noisy, OTHERS)
    with torch.no_grad():
        with noisy.evaluation(), noisy.forward_context("evaluate"):
            noisy.model(tokens())
        with noisy.forward_context("train"):
            noisy.model(OTHERS)
    assert noisy.findings() == _seen(plain, tokens()), "other passes are among what was seen"


@diagnoses_check()
def check_nothing_to_see_is_refused(subject: DiagnosisSubject) -> None:
    """Before a forward pass, and after `forget`, there is one clear message, and no row."""
    runtime = _bound(subject, _adapted())
    for _ in range(2):
        try:
            runtime.findings()
        except InputError:
            pass
        else:
            raise AssertionError("rows of nothing")
        _seen(runtime, tokens())
        runtime.forget()


@diagnoses_check()
def check_leaves_no_hook(subject: DiagnosisSubject) -> None:
    """After looking, also where a forward pass fails, no hook is left on any module."""
    model = _adapted()
    model(tokens())  # adapters have a hook of their own until the first pass
    kept = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    runtime = _bound(subject, model)
    _seen(runtime, tokens())
    with contextlib.suppress(IndexError):
        _seen(runtime, torch.full((1, 4), 1000))
    runtime.close()
    after = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert after == kept, "a module has hooks still"


@diagnoses_check()
def check_low_precision(subject: DiagnosisSubject) -> None:
    """A bf16 model has rows whose numbers are finite."""
    rows = _seen(_bound(subject, llama().bfloat16()), tokens())
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert rows
    assert all(map(math.isfinite, numbers)), "a number is not finite"


@diagnoses_check()
def check_works_without_adapters(subject: DiagnosisSubject) -> None:
    """A model without adapters has rows too, and one row of tokens is enough."""
    assert _seen(_bound(subject, llama()), tokens(1)), "there is no row"


@diagnoses_check(proves="export")
def check_files_are_the_same(subject: DiagnosisSubject) -> None:
    """An adapter's file is the same to the bit whether the model was looked at or not."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for looks in (False, True):
            model = llama()
            adapter = stir(LoRA(rank=2).attach(model))
            if looks:
                _seen(_bound(subject, model), tokens())
            path = Path(folder) / str(looks)
            adapter.save(path, form="modicum")
            found.append({file.name: file.read_bytes() for file in sorted(path.iterdir())})
    assert found[0] == found[1], "the adapter's files differ"


@diagnoses_check(expensive=True, proves="transformers")
def check_looks_under_transformers(subject: DiagnosisSubject) -> None:
    """A callback of `transformers.Trainer` looks at its evaluations, and trains the same bits."""
    found = []
    for looks in (False, True):
        model = hugging_face_llama()
        runtime = _bound(subject, model)
        train_under_transformers(
            model,
            tokens(8),
            callback=runtime.callback() if looks else None,
            max_steps=2,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=1,
        )
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert runtime.findings(), "no evaluation was looked at"
    same = all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert same, "the callback changes what is trained"
