"""The segmentation toy: what is drawn, what Dice is, and that its sides have as many numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import SALT, LoRA
from modicum.proofs.adapters.salt import TOY_LORA_RANK, TOY_RANK
from modicum.proofs.adapters.segmentation_bench import CONVOLUTIONS, dice, drawn, network


@pytest.mark.parametrize(
    ("what", "least", "most"), [("ellipses", 0.03, 0.5), ("vessels", 0.02, 0.2)]
)
def test_images_are_noisy_masks_and_the_same_each_time(
    what: str, least: float, most: float
) -> None:
    images, masks = drawn(what, 4, "test")
    assert images.shape == masks.shape == (4, 1, 64, 64)
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    for mask in masks:
        assert least < mask.mean().item() < most
    assert torch.equal(drawn(what, 4, "test")[0], images)
    assert not torch.equal(drawn(what, 4, "training")[1], masks)


class Says(nn.Module):
    """Logits that say what they are given to say."""

    def __init__(self, found: Tensor) -> None:
        super().__init__()
        self.found = found

    def forward(self, images: Tensor) -> Tensor:
        return self.found - 0.5


def test_dice_is_the_mean_over_images() -> None:
    masks = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).view(2, 1, 2, 2)
    found = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]).view(2, 1, 2, 2)
    assert dice(Says(found), masks, masks) == pytest.approx((0.5 + 1.0) / 2)


def test_salt_and_lora_have_as_many_numbers_there() -> None:
    counts = []
    for value in (SALT(rank=TOY_RANK), LoRA(rank=TOY_LORA_RANK)):
        model = network()
        assert model(torch.zeros(1, 1, 64, 64)).shape == (1, 1, 64, 64)
        adapter = value.with_fields(targets=CONVOLUTIONS).attach(model)
        counts.append(sum(parameter.numel() for parameter in adapter.parameters()))
    assert counts[0] == counts[1]
