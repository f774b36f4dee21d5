"""Values derived from optimizers' signatures: by the catalog unseen, and by import."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.contracts.catalog import catalog, find, of_value, read_file
from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.method import Info, Method
from modicum.core.contracts.optimizers import OptimizerMethod, value_class
from modicum.core.errors import InputError
from modicum.optim import AdamW, GaLore

PLUGIN = '''
"""A stranger's optimizer, and one that takes over its signature."""
from __future__ import annotations
from typing import Literal
import torch
from torch.optim.optimizer import ParamsT
from modicum.core.contracts.method import Info, PositiveFloat, PositiveInt

class Signs(torch.optim.Optimizer):
    """Steps by signs."""
    info = Info(name="signs", title="Signs", room="optim", paper="none", claim="none",
                slot="optimizer", traits_if=(("kind", "late", "defers_update"),))
    noise: int = 3
    def __init__(self, params: ParamsT, lr: PositiveFloat = 1e-3, *, needed: PositiveInt,
                 kind: Literal["soon", "late"] = "soon") -> None:
        super().__init__(params, {"lr": lr})
        self.needed, self.kind = needed, kind
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * self.needed)

class Twice(Signs):
    """Steps by signs, under another name."""
    info = Info(name="twice", title="Twice", room="optim", paper="none", claim="none")
'''


def plugin(folder: Path) -> Path:
    path = folder / "signs.py"
    path.write_text(textwrap.dedent(PLUGIN))
    return path


def test_the_keywords_of_the_signature_are_the_fields(tmp_path: Path) -> None:
    for record in read_file(plugin(tmp_path)):
        defaults = {name: default for name, (_, default) in record.fields.items()}
        assert defaults == {"needed": ..., "kind": "soon"}, "lr and noise are none of them"
        with pytest.raises(InputError, match=r"optimizer\.needed: too small"):
            record.validate({"needed": 0}, prefix="optimizer.")
        kind = record.load()
        assert issubclass(kind, OptimizerMethod)
        assert list(kind.model_fields) == list(record.fields)
        with pytest.raises(InputError, match="needed: too small"):
            kind(needed=0)
        value = kind(needed=2, kind="late")
        assert of_value(value) == record
        assert value == kind(needed=2, kind="late") != kind(needed=2)


def test_a_value_makes_the_optimizer(tmp_path: Path) -> None:
    record = catalog([plugin(tmp_path)])["signs"]
    value = record.load()(needed=2)
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -4.0])
    optimizer = value.bind([{"params": [weight], "lr": 0.25}])
    assert type(optimizer) is value.optimizer_class
    optimizer.step()
    assert weight.tolist() == [-0.5, 0.5]
    with pytest.raises(TypeError, match="Signs defines no spends"):
        value.ledger(OptimizerQuery(()))


def test_traits_may_follow_from_fields(tmp_path: Path) -> None:
    record = catalog([plugin(tmp_path)])["signs"]
    assert record.traits({"needed": 1}) == frozenset()
    assert record.traits({"needed": 1, "kind": "late"}) == {"defers_update"}
    assert record.load()(needed=1, kind="late").traits == {"defers_update"}
    assert record.as_json()["traits_if"] == [["kind", "late", "defers_update"]]
    with pytest.raises(InputError, match="unknown trait"):
        Info("a", "a", "optim", "", "", traits_if=(("kind", "late", "deferz_update"),))


def test_optimizers_are_listed_without_torch_and_loaded_once() -> None:
    record = find("galore", room="optim")
    assert record.fields["rank"][1] == 128
    assert record.load() is record.load() is value_class(GaLore)
    assert issubclass(record.load(), Method)
    assert AdamW.value(weight_decay=0.5) == find("adamw").load()(weight_decay=0.5)


def test_other_classes_have_no_values() -> None:
    with pytest.raises(InputError, match=r"found: 'SGD'"):
        value_class(torch.optim.SGD)

    class Odd(torch.optim.SGD):
        info = find("sgd").info

    with pytest.raises(InputError, match="an optimizer that is a method"):
        value_class(Odd)

    class Shadow(torch.optim.SGD):
        info = find("sgd").info

        def __init__(self, params: Any, lr: float = 0.1, *, fields: int = 1) -> None:
            super().__init__(params, lr)

    with pytest.raises(InputError, match="fields: every value has something of this name"):
        value_class(Shadow)
