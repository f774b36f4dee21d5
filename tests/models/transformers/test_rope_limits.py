"""Rows in which positions depend on how long the longest document is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.transformers.test_states import LIMIT, LONG, long_rope

from modicum.models.transformers.kinds import described
from modicum.models.transformers.rope_limits import RopeLimits

_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.mark.parametrize(
    ("raw", "limits"),
    [
        (
            {
                "model_type": "phi3",  # as Phi-3 128k spells it
                "original_max_position_embeddings": 4096,
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", **_FACTORS},
            },
            RopeLimits(switch=4096),
        ),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            RopeLimits(growth=512),
        ),
        (
            {
                "model_type": "qwen2",
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeLimits(),
        ),
        ({"model_type": "gemma3_text"}, RopeLimits()),
        ({"model_type": "gpt2"}, RopeLimits()),
    ],
)
def test_limits_are_those_that_a_config_json_spells(
    raw: dict[str, Any], limits: RopeLimits
) -> None:
    assert RopeLimits.of(described(raw)) == limits


def test_limits_of_layers_that_differ_are_all_kept() -> None:
    layers = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "dynamic"},
    }
    known = SimpleNamespace(rope_parameters=layers, max_position_embeddings=512)
    limits = RopeLimits.of(known)
    assert limits == RopeLimits(switch=64, growth=512)
    assert [limits.alike(tokens) for tokens in (64, 65)] == [True, False]
    kept = [limits.keeps(*lengths) for lengths in ((63, 64), (64, 65), (65, 66), (512, 513))]
    assert kept == [True, False, True, False]


def test_a_limit_that_is_not_said_is_none_that_rows_keep() -> None:
    known = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
    assert not RopeLimits.of(known).alike(1)


@torch.no_grad()
def test_documents_of_rows_beyond_the_limit_are_computed_as_each_alone() -> None:
    model = long_rope("phi3", **LONG)
    config = model.decoder_config
    assert config.packing == "positions"
    assert (config.packing_of(LIMIT), config.packing_of(LIMIT + 1)) == ("positions", "none")
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    ids = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(2))
    for lengths in ([[LIMIT + 4, 12], [20, 20]], [[20, 4], [7, 17]]):
        width = sum(lengths[0])
        parts = [row.split(each) for row, each in zip(ids[:, :width], lengths, strict=True)]
        alone = [[model(part[None])[0] for part in row] for row in parts]
        expected = torch.stack([torch.cat(row) for row in alone])
        counts = [torch.arange(2).repeat_interleave(torch.tensor(each)) for each in lengths]
        runs.clear()
        found = model(ids[:, :width], torch.stack(counts).int())
        assert len(runs) == (4 if width > LIMIT else 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
