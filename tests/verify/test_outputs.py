"""What is compared of models that write text."""

from __future__ import annotations

import math

from modicum.models import ModelConfig, create
from modicum.verify.outputs import distance, outputs

CONFIG = ModelConfig(
    vocabulary_size=23, width=16, layers=1, heads=2, context=16, initializer_range=0.5
)


def test_a_model_without_finite_logits_is_another_one_however_far() -> None:
    prompts = [[3, 7, 1], [5]]
    trained = outputs(create(CONFIG, 0), prompts, 4, eos_id=0)
    broken = create(CONFIG, 0)
    broken.get_parameter("model.norm.weight").data.fill_(math.nan)
    found = outputs(broken, prompts, 4, 0, trained)
    assert found.written == [[], []]
    assert distance(trained, found) == math.inf
