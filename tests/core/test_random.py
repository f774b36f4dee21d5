from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.random import bits, derive_seed, mixed, normal_, philox, sample, uniform_


def test_philox_gives_the_published_words():
    # Random123's kat_vectors, philox4x32 with 10 rounds, all zeros.
    published = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(torch.tensor([0]), (0, 0))[0].tolist() == published


def reference(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's own integers, as the paper's figure has it."""
    words, (first, second) = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], key
    for _ in range(10):
        one, two = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (two >> 32) ^ words[1] ^ first,
            two & 0xFFFFFFFF,
            (one >> 32) ^ words[3] ^ second,
            one & 0xFFFFFFFF,
        ]
        first, second = (first + 0x9E3779B9) & 0xFFFFFFFF, (second + 0xBB67AE85) & 0xFFFFFFFF
    return words


words32 = st.integers(0, 2**32 - 1)


@given(st.integers(0, 2**63 - 1), words32, words32)
def test_philox_equals_unbounded_integers(counter, first, second):
    got = philox(torch.tensor([counter]), (first, second))[0].tolist()
    assert got == reference(counter, (first, second))


def reference_words(seed: int, count: int) -> list[int]:
    """SplitMix64 in Python's own integers, as its authors' code has it."""
    found, all_bits = [], 2**64 - 1
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & all_bits
        word = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & all_bits
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & all_bits
        found.append(word ^ (word >> 31))
    return found


@given(words32, words32, st.integers(0, 5))
def test_mixed_words_equal_unbounded_integers(low, high, first):
    got = [word & (2**64 - 1) for word in mixed(first, 9, (low, high)).tolist()]
    assert got == reference_words(high << 32 | low, 9)[first:]


@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from([bits, "uniform", "normal"]))
@settings(max_examples=60)
def test_a_shard_draws_what_the_whole_draws(start, count, kind):
    def draw(size: int, offset: int) -> torch.Tensor:
        if kind is bits:
            return bits(size, seed=3, name="A", step=7, offset=offset)
        if kind == "uniform":
            return uniform_(torch.empty(size), -2, 5, seed=3, name="A", step=7, offset=offset)
        return normal_(torch.empty(size), seed=3, name="A", step=7, offset=offset)

    assert torch.equal(draw(count, start), draw(start + count, 0)[start:])


def test_long_draws_do_not_depend_on_the_pieces_they_are_made_in(monkeypatch):
    whole = normal_(torch.empty(1000), seed=1, name="w")
    monkeypatch.setattr("modicum.core.random._CHUNK", 16)
    assert torch.equal(normal_(torch.empty(1000), seed=1, name="w"), whole)


def test_streams_of_other_seeds_names_and_steps_differ():
    streams = [
        tuple(bits(4, **arguments).tolist())
        for arguments in (
            {"seed": 0},
            {"seed": 1},
            {"seed": 0, "name": "A"},
            {"seed": 0, "step": 1},
        )
    ]
    assert len(set(streams)) == 4
    assert 0 <= derive_seed(5, "sample") < 2**63


def test_moments_are_those_of_the_distributions():
    uniform = uniform_(torch.empty(100_000), -1.0, 3.0, seed=0, name="u")
    assert -1 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3
    assert abs(uniform.mean() - 1.0) < 0.02
    assert abs(uniform.var() - 16 / 12) < 0.02
    normal = normal_(torch.empty(100_000), mean=2.0, std=3.0, seed=0, name="n")
    assert abs(normal.mean() - 2.0) < 0.03
    assert abs(normal.std() - 3.0) < 0.03
    # A correlation of neighbours would show that the two words of a draw are not independent.
    centred = normal - normal.mean()
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.06


def test_every_dtype_and_layout_gets_the_same_draw():
    base = normal_(torch.empty(6, 4), seed=0, name="w")
    transposed = normal_(torch.empty(4, 6).T, seed=0, name="w")
    assert torch.equal(base, transposed)
    assert torch.equal(
        normal_(torch.empty(6, 4, dtype=torch.bfloat16), seed=0, name="w"), base.bfloat16()
    )


def test_draws_are_those_of_the_cpu_whatever_device_torch_has_by_default() -> None:
    drawn = [
        uniform_(torch.empty(6), -1.0, 2.0, seed=0, name="u"),
        normal_(torch.empty(6), seed=0, name="n"),
    ]
    with torch.device("meta"):
        again = [
            uniform_(torch.empty(6, device="cpu"), -1.0, 2.0, seed=0, name="u"),
            normal_(torch.empty(6, device="cpu"), seed=0, name="n"),
        ]
        chosen = sample(5000, 2600, seed=0), bits(7, seed=0)
    assert all(map(torch.equal, drawn, again))
    assert [(each.device.type, len(each)) for each in chosen] == [("meta", 2600), ("meta", 7)]


@pytest.mark.parametrize(("n", "k"), [(7, 0), (7, 1), (7, 3), (7, 6), (7, 7), (5000, 2400)])
def test_a_sample_has_different_numbers_in_their_order(n: int, k: int) -> None:
    chosen = sample(n, k, seed=1, name="places").tolist()
    assert len(chosen) == k
    assert chosen == sorted(set(chosen))
    assert not chosen or 0 <= chosen[0] <= chosen[-1] < n


def test_every_set_is_drawn_as_often() -> None:
    sets = Counter(tuple(sample(5, 2, seed=seed).tolist()) for seed in range(3000))
    assert len(sets) == 10
    assert 235 < min(sets.values()) <= max(sets.values()) < 365  # 300 and four deviations


def test_numbers_beyond_32_bits_are_drawn_and_too_many_refused() -> None:
    chosen = sample(10**15, 1000, seed=0)
    assert chosen.double().mean() == pytest.approx(5e14, rel=0.1)
    with pytest.raises(ValueError, match="4 different numbers below 3"):
        sample(3, 4, seed=0)
