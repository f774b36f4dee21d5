from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.data.parts import Draw
from modicum.planner.starting import rules
from modicum.planner.starting.lengths import LEAST, STEP, Lengths, row_length, text_length


@pytest.mark.parametrize(
    ("parameters", "new", "adapter", "rate"),
    [
        (7e9, False, "lora", 2e-4),
        (70e9, False, "lora", 1e-4),
        (7e9, False, None, 2e-5),
        (13e9, False, None, 1e-5),
        (1e8, False, "lora", 1e-3),
        (4e6, True, None, 1e-3),
        (125e6, True, None, 6e-4),
    ],
)
def test_the_learning_rate_is_that_of_the_sources(
    parameters: float, new: bool, adapter: str | None, rate: float
) -> None:
    assert rules.learning_rate(int(parameters), new=new, adapter=adapter)[0] == rate


@given(st.integers(1, 10**7))
def test_an_epoch_has_some_updates(rows: int) -> None:
    size, _ = rules.batch_size(rows)
    assert 1 <= size <= rules.MOST_SEQUENCES
    assert rows // size >= 8 or size == 1
    updates, _ = rules.steps(rows, size)
    assert 1 <= updates * size / rows <= 5 or rows < 8
    warm, _ = rules.warmup_steps(updates, new=False)
    assert warm < updates
    assert 1 <= rules.evaluate_every(updates)[0] <= max(1, updates)


@pytest.mark.parametrize(
    ("documents", "examples", "part"),
    [(3, True, 0.0), (3, False, 0.0), (8, False, 0.05), (100, True, 0.05), (100_000, True, 0.005)],
)
def test_enough_is_held_out_and_not_more(documents: int, examples: bool, part: float) -> None:
    assert rules.held_out(documents, examples)[0] == part


@pytest.mark.parametrize(("documents", "seed"), [(917, 0), (917, 1), (33, 4), (120_000, 2)])
def test_as_many_are_said_to_be_held_out_as_a_run_holds_out(documents: int, seed: int) -> None:
    part, why = rules.held_out(documents, True, seed)
    assert why == f"{sum(Draw(part, seed=seed).flags(documents)):,} of the documents, never trained"
    assert rules.held_out(documents, True)[1].startswith("about ")


def test_how_often_and_how_long() -> None:
    assert rules.epochs(52_000)[0] == 3
    assert rules.epochs(100_000)[0] == 1
    assert "such as 20" in rules.epochs(900, new=True)[1]
    assert rules.steps(16_000, 16)[0] == 1000
    assert rules.steps(160, 16)[0] == 40  # four times
    assert [rules.checkpoint_every(s)[0] for s in (9, 7200, 1e6, None)] == ["1m", "5m", "15m", "5m"]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.integers(128, 4096))
def test_rows_hold_nearly_all_examples_or_as_much_as_the_model_reads(
    tokens: list[int], context: int
) -> None:
    lengths = Lengths(tuple(sorted(tokens)), len(tokens), True)
    length, why = row_length(lengths, context)
    assert length <= context
    if length < context:
        assert length % STEP == 0
        assert length >= LEAST
        assert lengths.longer(length) <= 0.01
    elif lengths.longer(context) > 0.01:
        assert "context" in why


def test_rows_of_text_are_shorter_where_there_is_little() -> None:
    assert text_length(10**6, 4096, 1024)[0] == 1024
    assert text_length(10**6, 512, 1024)[0] == 512
    assert text_length(10**4, 4096, 1024)[0] == 128
    assert text_length(10, 4096, 1024)[0] == 64
