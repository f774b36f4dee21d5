"""Ranks that layers have no room for: refused where most are too narrow, named in a plan else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from modicum.adapters import BlockLoRA, DoRA, LoRA, QBaRA, load
from modicum.adapters.base import Adapter
from modicum.adapters.widths import narrow_layers
from modicum.core.errors import InputError


def model(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(widths)))


@pytest.mark.parametrize(
    ("adapter", "largest"),
    [
        (LoRA(rank=17), 12),
        (DoRA(rank=17), 12),
        (QBaRA(rank=5), 3),  # of pooled matrices: 2 r of the 6 that 12 outputs pool to
        (BlockLoRA(rank=34, blocks=2), 24),  # the sum of two arms has half the rank
        (BlockLoRA(rank=9, blocks=2, structure="fold"), 8),  # 16 inputs fold to 8
    ],
)
def test_a_rank_above_the_width_of_most_layers_is_refused(adapter: Adapter, largest: int) -> None:
    made = model(16, 16, 12)
    with pytest.raises(InputError) as refused:
        adapter.attach(made)
    assert refused.value.field == "rank"
    said = str(refused.value)
    assert "0 (16 x 16), 1 (16 x 12); " in said or "0 (16 x 16); " in said
    assert f"the largest rank that fits is {largest} (found: {adapter.rank})" in said  # type: ignore[attr-defined]
    assert [type(layer) for layer in made] == [nn.Linear] * 2
    adapter.with_fields(rank=largest).attach(made)


def test_of_many_layers_the_first_are_named() -> None:
    with pytest.raises(InputError, match=r"0 \(4 x 4\), 1 .*, 2 \(4 x 4\) and 4 more; .* is 4 "):
        LoRA(rank=5).attach(model(*[4] * 8))


def test_a_narrow_head_among_others_is_adapted_as_in_peft() -> None:
    made = LoRA(rank=4).attach(model(16, 32, 1))
    assert {layer.A.shape[0] for _, layer in made.layers()} == {4}
    assert narrow_layers(made.method, list(made.sites.values())) == {"1 (32 x 1)": 1}


def test_a_file_of_any_rank_loads(tmp_path: Path) -> None:
    LoRA(rank=9, targets=("0",)).attach(model(16, 16)).save(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    narrow = {
        key: (tensor[:, :4] if "lora_A" in key else tensor[:4]).clone()
        for key, tensor in load_file(file).items()
    }
    save_file(narrow, file)
    loaded = load(model(4, 4), tmp_path / "adapter")
    assert loaded.method.rank == 9  # type: ignore[attr-defined]
