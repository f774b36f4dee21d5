"""Bytes that optimizers keep and forms export, of a tiny decoder."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def savings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("savings")


def test_state_is_two_moments_of_each_number_and_less_in_subspaces(savings: ModuleType) -> None:
    methods = savings.optimizers(savings.TINY.width)
    numbers = savings.TINY.parameter_count()
    full = savings.state(methods["adamw"], savings.TINY)
    assert 8 * numbers <= full < 8 * numbers + 200
    assert savings.state(methods["frugal"], savings.TINY) < 0.5 * full


def test_a_folder_of_half_of_the_numbers_is_smaller(savings: ModuleType, tmp_path: Path) -> None:
    found = savings.exported(savings.FORMS["monarch"], savings.TINY, tmp_path)
    assert found["over_dense"] == found["form"] / found["dense"] < 0.6


@pytest.mark.parametrize(("form", "least", "most"), [("sst", 1.0, 1.001), ("maestro", 0.1, 0.7)])
def test_a_form_larger_than_dense_weights_is_exported_dense(
    savings: ModuleType, tmp_path: Path, form: str, least: float, most: float
) -> None:
    found = savings.exported(savings.FORMS[form], savings.TINY, tmp_path)
    assert found["trained_over_dense"] > 1.2
    assert least <= found["over_dense"] <= most
    assert bool(found["layers_in_form"]) == (form == "maestro")
