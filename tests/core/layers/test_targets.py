"""Names choose layers."""

from __future__ import annotations

import pytest
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.targets import ALL_LINEAR, choose, output_head

LAYERS = ["emb", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "lm_head"]
LINEAR = LAYERS[1:]


class Named(nn.Module):
    """A model whose head has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head, self.out = nn.Linear(2, 2), nn.Linear(2, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def model() -> nn.Module:
    return nn.ModuleDict({"lm_head": nn.Linear(2, 3)})


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        ([ALL_LINEAR], [], LAYERS[1:5]),
        ([ALL_LINEAR, "lm_head"], [], LINEAR),
        (["down", "blocks.0.up"], [], ["blocks.0.up", "blocks.0.down", "blocks.1.down"]),
        (["blocks.1.*", "emb"], ["1.up"], ["emb", "blocks.1.down"]),
        (["emb", "up"], [ALL_LINEAR], ["emb"]),
    ],
)
def test_names_choose(targets: list[str], exclude: list[str], expected: list[str]) -> None:
    assert choose(model(), LAYERS, targets, exclude, linear=LINEAR) == expected


def test_a_part_of_a_name_that_is_not_whole_chooses_nothing() -> None:
    with pytest.raises(InputError, match="no kernel of the model has this name"):
        choose(model(), LAYERS, ["own"], linear=LINEAR, kind="kernel")
    with pytest.raises(InputError, match="excluded again"):
        choose(model(), LAYERS, ["up"], ["*.up"], linear=LINEAR)


def test_what_the_model_says_is_its_head_goes_before_names() -> None:
    named = output_head(Named())
    assert named is not None
    assert named[0] == "out"
    assert output_head(nn.Linear(2, 2)) is None
