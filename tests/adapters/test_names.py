"""Files of adapters have the names of the plain model, whenever it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA, MoS, load
from modicum.adapters.base import Adapter
from modicum.adapters.saving import Form
from modicum.proofs.contracts.adapters.subjects import stir

MOS = MoS(rank=3, equivalent_rank=2, private_rank=1, shards=2)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def whole(model: nn.Sequential) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def blocks(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    return model


Compile = Callable[[nn.Sequential], nn.Module]
COMPILED: list[Compile] = [whole, blocks]
INPUTS = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.mark.parametrize(("method", "form"), [(LoRA(rank=2), "peft"), (MOS, "modicum")])
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("first", ["compiled", "attached"])
def test_an_adapter_of_a_compiled_model_loads_into_the_plain_one_and_back(
    first: str,
    compiled: Callable[[nn.Sequential], nn.Module],
    method: Adapter,
    form: Form,
    tmp_path: Path,
) -> None:
    model = plain()
    if first == "compiled":
        adapter = method.attach(compiled(model))
    else:
        adapter = method.attach(model)
        compiled(model)
    stir(adapter).save(tmp_path, form=form)
    for file in tmp_path.iterdir():
        assert b"_orig_mod" not in file.read_bytes()
    other, again = plain(), plain()
    load(other, tmp_path)
    load(compiled(again), tmp_path)
    assert not torch.equal(other(INPUTS), plain()(INPUTS))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(other(INPUTS), model(INPUTS))
        assert torch.equal(again(INPUTS), model(INPUTS))
