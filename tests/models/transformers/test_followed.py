from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from modicum.models.transformers.followed import Following, Pieces

GATE, UP, GATE_UP = "experts.*.gate", "experts.*.up", "experts.gate_up"


def assembled(parts: list[Tensor], pieces: Pieces, shape: tuple[int, ...]) -> Tensor:
    made = torch.full(shape, -1.0)
    for piece in pieces:
        view = piece.view
        box = [slice(at, at + n) for at, n in zip(piece.place, view.shape, strict=True)]
        part = parts[piece.part]
        made[tuple(box)] = part.as_strided(view.shape, view.stride(), view.storage_offset())
    return made


def followed(
    parts: list[Tensor], run: Callable[[list[Tensor]], dict[str, Tensor]]
) -> dict[str, tuple[Pieces | None, Tensor]]:
    """For each tensor of what a rule makes, its pieces and what it is."""
    empty = [torch.empty(part.shape, device="meta") for part in parts]
    with Following(empty) as following:
        found = run(empty)
    made = run(parts)
    return {name: (following.pieces(tensor), made[name]) for name, tensor in found.items()}


def rule(sources: list[str], targets: list[str], operations: list[Any], each: int = 1) -> Any:
    """What runs a rule of transformers over `each` tensors for a source."""
    own = WeightConverter(sources, targets, operations)

    def run(values: list[Tensor]) -> dict[str, Tensor]:
        fresh = copy.deepcopy(own)
        for number, value in enumerate(values):
            fresh.add_tensor(targets[0], str(number), sources[number // each], value)
        found = fresh.convert(targets[0], model=None, config=None)
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    return run


def parts(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


MERGE = MergeModulelist(dim=0)
FOLLOWED = {
    "experts": (rule([GATE], [GATE_UP], [MERGE], 3), parts(3, 4, 5)),
    "gates": (rule([GATE, UP], [GATE_UP], [MERGE, Concatenate(dim=1)], 3), parts(6, 4, 5)),
    "transposed": (
        rule([GATE, UP], [GATE_UP], [MERGE, Concatenate(dim=1), Transpose(1, 2)], 3),
        parts(6, 4, 5),
    ),
    "last": (rule([GATE, UP], [GATE_UP], [MERGE, Concatenate(dim=-1)], 2), parts(4, 4, 5)),
    "fused": (rule(["q", "k", "v"], ["qkv"], [Concatenate(dim=0)]), parts(3, 4, 5)),
    "thirds": (rule(["qkv"], ["q", "k", "v"], [Chunk(dim=0)]), parts(1, 9, 2)),
    "columns": (rule(["both"], ["one", "two"], [Chunk(dim=1)]), parts(1, 3, 8)),
    "turned": (rule(["both"], ["one", "two"], [Transpose(0, 1), Chunk(dim=0)]), parts(1, 3, 8)),
    "apart": (rule(["experts.gate"], [GATE], [SplitModulelist(dim=0)]), parts(1, 3, 1, 5)),
    "inner": (rule(["experts.gate"], [GATE], [SplitModulelist(dim=1)]), parts(1, 3, 2, 5)),
    "halves": (
        rule([GATE, UP], ["text", "vision"], [ErnieFuseAndSplitTextVisionExperts()], 4),
        parts(8, 4, 5),
    ),
    "split": (lambda v: dict(zip("ab", v[0].split([1, 2], dim=1), strict=True)), parts(1, 2, 3)),
    "unbound": (lambda v: dict(zip("ab", v[0].unbind(1), strict=True)), parts(1, 3, 2)),
    "squeezed": (lambda v: {"a": v[0].squeeze(1), "b": v[0].squeeze(0)}, parts(1, 3, 1, 2)),
    "named": (
        lambda v: {"a": torch.transpose(torch.stack(v, dim=-1), dim0=-1, dim1=0)},
        parts(3, 4, 5),
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_rule_makes_is_known_by_its_pieces(name: str) -> None:
    run, given = FOLLOWED[name]
    for pieces, made in followed(given, run).values():
        assert pieces is not None
        assert torch.equal(assembled(given, pieces, tuple(made.shape)), made)


def changed(values: list[Tensor]) -> dict[str, Tensor]:
    values[0][:1].mul_(2.0)
    return {"a": torch.stack(values)}


def filled(values: list[Tensor]) -> dict[str, Tensor]:
    made = values[0].new_empty(2, 4, 5)
    for number, value in enumerate(values):
        made[number] = value
    return {"a": made}


UNKNOWN = {
    "interleaved": (rule(["w"], ["a", "b"], [Interleave(dim=1), Chunk(dim=1)]), parts(1, 2, 8)),
    "changed": (changed, parts(2, 4, 5)),
    "filled": (filled, parts(2, 4, 5)),
    "scaled": (lambda v: {"a": torch.stack(v) * 2}, parts(2, 4, 5)),
    "cast": (lambda v: {"a": torch.stack([each.half() for each in v])}, parts(2, 4, 5)),
    "all ones": (lambda v: {"a": v[0].squeeze()}, parts(1, 3, 1, 2)),
    "by a list": (lambda v: {"a": v[0].squeeze((1, 2))}, parts(1, 3, 1, 1)),
    "a constant": (lambda v: {"a": torch.cat([v[0], v[0].new_zeros(4, 5)])}, parts(1, 4, 5)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_after_anything_else_nothing_is_known(name: str) -> None:
    run, given = UNKNOWN[name]
    assert all(pieces is None for pieces, _ in followed(given, run).values())


def test_shapes_and_dtypes_may_be_asked_for() -> None:
    def run(values: list[Tensor]) -> dict[str, Tensor]:
        first = values[0]
        with torch.no_grad():
            known = first.shape == (4, 5) and first.dtype == torch.float32 and first.dim() == 2
        return {"a": torch.stack(values).contiguous() if known and len(first) == 4 else first}

    given = parts(2, 4, 5)
    [(pieces, made)] = followed(given, run).values()
    assert pieces is not None
    assert torch.equal(assembled(given, pieces, (2, 4, 5)), made)
