from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from modicum.core.draws import NUMBERS_IN_A_WORD, add_, fill_, normals, words

KINDS = list(NUMBERS_IN_A_WORD)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def splitmix(place: int, start: int, gamma: int) -> int:
    """One word in Python's own integers, by the paper's figure 16 with mix64variant13."""
    z = (start + place * gamma) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_words_are_those_of_splitmix64(monkeypatch):
    # The published sequence of seed 1234567 begins with the words of places 1 to 3.
    golden = 0x9E3779B97F4A7C15 - 2**64
    monkeypatch.setattr("modicum.core.draws._stream", lambda *_: (1234567, golden))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = words(1, 400, seed=0, name="w")
    assert [word % 2**64 for word in drawn[:3].tolist()] == published
    assert [word % 2**64 for word in drawn.tolist()] == [
        splitmix(place, 1234567, golden) for place in range(1, 400)
    ]


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from(KINDS))
@settings(max_examples=60)
def test_a_slice_draws_what_the_whole_draws(start, count, kind):
    whole = fill_(torch.empty(start + count), seed=3, name="A", step=7, kind=kind)
    part = fill_(torch.empty(count), seed=3, name="A", step=7, kind=kind, offset=start)
    assert torch.equal(whole[start:], part)


@pytest.mark.parametrize("kind", KINDS)
def test_long_draws_do_not_depend_on_the_pieces_they_are_made_in(kind, monkeypatch):
    whole = fill_(torch.empty(3000), seed=1, name="w", kind=kind)
    monkeypatch.setattr("modicum.core.draws._CHUNK", 128)
    assert torch.equal(fill_(torch.empty(3000), seed=1, name="w", kind=kind), whole)
    part = fill_(torch.empty(2500), seed=1, name="w", kind=kind, offset=499)
    assert torch.equal(part, whole[499:2999])


def test_bits_are_pinned():
    assert digest(normals()) == "1697cce4787159ce"
    normal = fill_(torch.empty(100_003), seed=11, name="blocks.3.weight", step=5)
    signs = fill_(torch.empty(100_003), seed=11, name="blocks.3.weight", step=5, kind="rademacher")
    assert (digest(normal), digest(signs)) == ("d1ca379e8f757200", "10a0fe23f3a3db63")
    assert digest(add_(normal, 1e-3, seed=2, name="x")) == "c3aad248b3c72c6d"


def test_no_entry_of_the_table_is_near_where_its_rounding_changes():
    quantile = NormalDist().inv_cdf
    exact = [quantile(0.5 + (2 * i + 1) / 2**17) * 1.00001014110284 * 2**20 for i in range(2**15)]
    margin = min(abs(value - math.floor(value) - 0.5) for value in exact) * 2.0**-20
    assert margin > 1e-11
    # And the rounded ones are quantiles by another library.
    other = stats.norm.ppf((torch.arange(2**16).double() + 0.5) / 2**16)
    assert (normals().double() - torch.from_numpy(other)).abs().max() < 1e-4


def test_normals_have_the_moments_of_the_distribution():
    table = normals().double()
    assert torch.equal(table, -table.flip(0))
    assert table.square().mean().item() == pytest.approx(1, abs=1e-7)
    assert table.pow(4).mean().item() == pytest.approx(3, abs=1e-3)
    assert table.max().item() == pytest.approx(4.3250, abs=1e-4)
    n = 1_000_000
    z = fill_(torch.empty(n), seed=0, name="n").double()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs(z.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(z.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    for lag in (1, 2, 3, 4, 64):  # numbers of one word, and of neighbouring ones
        assert abs((z[lag:] * z[:-lag]).mean()) < 4 / math.sqrt(n)
        assert abs(((z[lag:] ** 2 - 1) * (z[:-lag] ** 2 - 1)).mean()) < 8 / math.sqrt(n)


@pytest.mark.parametrize("seed", range(3))
def test_kolmogorov_and_smirnov_see_a_normal_distribution(seed):
    z = fill_(torch.empty(200_000), seed=seed, name="ks", step=seed)
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01


def test_signs_are_even_and_independent():
    n = 1_000_000
    z = fill_(torch.empty(n), seed=0, name="r", kind="rademacher").double()
    assert z.abs().eq(1).all()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    for lag in (1, 7, 8, 63, 64, 65):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4 / math.sqrt(n)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_other_seeds_names_and_steps_are_independent(kind):
    n = 200_000
    streams = torch.stack(
        [
            fill_(torch.empty(n), kind=kind, **arguments).double()
            for arguments in (
                {"seed": 0, "name": "A"},
                {"seed": 1, "name": "A"},
                {"seed": 0, "name": "B"},
                {"seed": 0, "name": "A", "step": 1},
                {"seed": 0, "name": "A", "step": 2},
            )
        ]
    )
    correlations = streams @ streams.T / n
    assert (correlations - torch.eye(5).double()).abs().max() < 4 * math.sqrt(2 / n)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_rounded_twice_in_every_dtype_and_layout(kind):
    z = fill_(torch.empty(6, 4), seed=0, name="w", kind=kind)
    start = torch.linspace(-3, 3, 24).view(6, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = (start.to(dtype).float() + z * 1e-3).to(dtype)
        assert torch.equal(add_(start.to(dtype), 1e-3, seed=0, name="w", kind=kind), expected)
    double = add_(start.double(), 1e-3, seed=0, name="w", kind=kind)
    assert torch.equal(double, start.double() + z.double() * 1e-3)
    columns = start.T.contiguous().T
    assert not columns.is_contiguous()
    assert torch.equal(add_(columns, 1e-3, seed=0, name="w", kind=kind), start + z * 1e-3)


def test_other_kinds_are_refused():
    with pytest.raises(ValueError, match="no draw is called 'uniform'; there are normal, rademach"):
        add_(torch.zeros(2), 1.0, seed=0, name="w", kind="uniform")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_draws_the_same_bits(kind):
    here = add_(torch.ones(100_003), 1e-3, seed=1, name="w", kind=kind)
    there = add_(torch.ones(100_003, device="cuda"), 1e-3, seed=1, name="w", kind=kind)
    assert torch.equal(there.cpu(), here)
