from __future__ import annotations

import pytest
import torch

from modicum.core.errors import InputError
from modicum.models import ModelConfig, create
from modicum.models.generate import NotFinite, generate, sample

CONFIG = ModelConfig(
    vocabulary_size=23, width=16, layers=2, heads=4, kv_heads=2, context=16, initializer_range=0.5
)


def test_greedy_tokens_are_the_likeliest_of_full_passes() -> None:
    model = create(CONFIG, 0)
    prompt = torch.tensor([[3, 7, 1]])
    found = list(generate(model, prompt, max_tokens=8))
    ids = prompt
    for _ in range(8):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    assert found == ids[0, 3:].tolist()


def test_it_stops_where_the_context_is_full() -> None:
    model = create(CONFIG, 0)
    assert len(list(generate(model, torch.ones(1, 13, dtype=torch.long), max_tokens=99))) == 3
    with pytest.raises(InputError, match="16 tokens fill the model's context of 16"):
        next(generate(model, torch.ones(1, 16, dtype=torch.long), max_tokens=1))
    with pytest.raises(InputError, match="empty"):
        next(generate(model, torch.ones(1, 0, dtype=torch.long), max_tokens=1))


@pytest.mark.parametrize("several", [False, True])
def test_it_stops_before_an_end_token(several: bool) -> None:
    model = create(CONFIG, 0)
    prompt = torch.tensor([[3, 7, 1]])
    free = list(generate(model, prompt, max_tokens=8))
    end = free[4]
    stopped = generate(model, prompt, max_tokens=8, eos_id=(end, 99) if several else end)
    assert list(stopped) == free[: free.index(end)]


def test_draws_repeat_with_their_generator() -> None:
    model = create(CONFIG, 0)
    prompt = torch.tensor([[3, 7, 1]])

    def draw(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        tokens = generate(model, prompt, max_tokens=12, temperature=1.5, generator=generator)
        return list(tokens)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.1, 0.3]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {sample(logits, 1.0, top_p, generator) for _ in range(200)}

    assert drawn(0.0) == drawn(0.4) == {1}
    assert drawn(0.6) == {1, 3}
    assert drawn(1.0) == {0, 1, 2, 3}


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.4, 0.6]).log()
    generator = torch.Generator().manual_seed(0)
    share = sum(sample(logits, 0.5, 1.0, generator) for _ in range(4000)) / 4000
    assert share == pytest.approx(0.36 / 0.52, abs=0.03)


def test_a_draw_from_what_is_no_number_is_told() -> None:
    damaged = torch.tensor([1.0, float("nan")])
    with pytest.raises(InputError, match="damaged or diverged"):
        sample(damaged, 1.0, 1.0, torch.Generator())


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_the_likeliest_of_what_is_no_number_is_told(logit: float) -> None:
    with pytest.raises(NotFinite, match="damaged or diverged"):
        sample(torch.tensor([1.0, logit]), 0.0, 1.0, None)
    masked = torch.tensor([1.0, -float("inf"), 2.0])
    assert sample(masked, 0.0, 1.0, None) == 2
    model = create(CONFIG, 0)
    model.get_parameter("model.norm.weight").data.fill_(logit)
    with pytest.raises(NotFinite, match="damaged or diverged"):
        next(generate(model, torch.tensor([[3, 7, 1]]), max_tokens=8))
