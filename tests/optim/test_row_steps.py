"""Updates by rows: how what is kept is laid out, and the sums that ranks add up at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, own_part, whole
from modicum.optim import MARS, AdamMini, Cautious, NAdamW, row_steps
from modicum.optim.kept import KeptTensor
from modicum.optim.row_steps import RowUpdate, by_rows, opened_bytes, row_bytes, step_rows
from modicum.optim.rules import Adam, RowRange, SummingRule
from modicum.proofs.contracts.optim.subjects import numbers

SHAPES = ((5, 4), (3,), (2, 3, 2), (7, 2))


@dataclass(frozen=True)
class Odd(SummingRule):
    """Keeps a number a row, one of the full tensor and a count, next to a moment in bf16."""

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        rows = {"row": KeptTensor((shape[0], 1), squared=True)} if len(shape) == 2 else {}
        return rows | {
            "moment": KeptTensor(shape, bits=16),
            "full": KeptTensor((1,)),
            "count": KeptTensor((), torch.int64),
        }

    def numbers(self, shape: tuple[int, ...]) -> int:
        return 2

    def sums(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int, rows: RowRange
    ) -> Tensor:
        assert len(gradient) == 0 or rows.before + len(gradient) <= rows.shape[0]
        moments["count"].add_(1)
        if "row" in moments:
            moments["row"].add_(gradient.square().mean(1, keepdim=True))
        return torch.stack([gradient.sum(), gradient.abs().sum()])

    def direction_by(
        self,
        gradient: Tensor,
        moments: Mapping[str, Tensor],
        age: int,
        rows: RowRange,
        sums: Tensor,
    ) -> tuple[Tensor, float]:
        moments["moment"].add_(gradient)
        moments["full"].add_(sums[0])
        assert moments["count"] == age
        return gradient / sums[1] + moments["full"], 2.0


def sharded(tensor: Tensor) -> nn.Parameter:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))


def stepped(ranks: Ranks) -> Any:
    """Two steps of the odd rule; weights, state in full, bytes here, calls and their bytes."""
    together = ranks.size > 1
    weights = [numbers(*shape, name=f"{shape}") for shape in SHAPES]
    parameters = [sharded(w) if together else nn.Parameter(w.clone()) for w in weights]
    states: list[dict[str, Any]] = [{} for _ in SHAPES]
    calls: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: Tensor, **fields: Any) -> Any:
        calls.append(tensor.nbytes)
        return reduce(tensor, **fields)

    def apply(one: RowUpdate, direction: Tensor, factor: float) -> None:
        with torch.no_grad():
            one.weight.sub_(direction, alpha=factor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", counted)
        for step in range(2):
            for parameter in parameters:
                gradient = numbers(*parameter.shape, name=f"{tuple(parameter.shape)} {step}")
                parameter.grad = sharded(gradient).detach() if together else gradient
            updates = [
                RowUpdate(p, Odd(), state, 32) for p, state in zip(parameters, states, strict=True)
            ]
            step_rows(updates, apply)
    held = [
        sum(own_part(t)[0].nbytes for key, t in state.items() if key != "step") for state in states
    ]
    full = [{key: whole(tensor) for key, tensor in state.items()} for state in states]
    laid = [{key for key, tensor in state.items() if is_sharded(tensor)} for state in states]
    return [whole(p.detach()) for p in parameters], full, held, calls, laid


@pytest.mark.ranks
@pytest.mark.parametrize("count", [2, 4])
def test_sums_of_all_parameters_go_in_one_call_and_rows_stay_where_they_are(
    pool: Pool, count: int
) -> None:
    weights, states, _, none, _ = stepped(Ranks())
    assert none == []
    for rank, (found, kept, held, calls, laid) in enumerate(pool.run(stepped, ranks=count)):
        for one, other in zip(found, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(kept, states, strict=True):
            assert one.keys() == other.keys()
            for key in one:
                torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-6)
        # Two numbers of each parameter, in fp32, in one call a step.
        assert calls == [2 * 4 * len(SHAPES)] * 2
        for shape, bytes_here, sharded_keys in zip(SHAPES, held, laid, strict=True):
            assert sharded_keys == {"moment"} | ({"row"} if len(shape) == 2 else set())
            rows = TrainedParameter("", shape, "matrix").rows(rank, count)
            assert row_bytes(Odd(), shape, rows, 32, 4) == bytes_here


def test_what_belongs_to_rows_is_known_by_its_shape() -> None:
    assert by_rows(KeptTensor((5, 4)), (5, 4))
    assert by_rows(KeptTensor((5, 1)), (5, 4))
    assert by_rows(KeptTensor((3,)), (3,))
    assert not by_rows(KeptTensor((5,)), (5, 4))
    assert not by_rows(KeptTensor((2, 4)), (5, 4))
    assert by_rows(KeptTensor(()), ())
    assert row_bytes(Odd(), (), 1, 32, 4) == 2 + 4 + 8
    # The moment is kept in bf16, so the rule gets an fp32 copy.
    assert opened_bytes(Odd(), (5, 4), 3, 32) == 4 * 3 * 4


@pytest.mark.parametrize("kind", [NAdamW, Cautious, MARS])
def test_numbers_on_the_wire_are_what_the_ledger_says(kind: Any) -> None:
    shapes = tuple(TrainedParameter(f"{shape}", shape, "matrix") for shape in SHAPES)
    alone, two = (kind.value().ledger(OptimizerQuery(shapes, shards=n)) for n in (1, 2))
    assert alone.wire == ()
    sent = [(wire.collective, wire.bytes, wire.count) for wire in two.wire]
    assert sent == ([] if kind is NAdamW else [("all_reduce", 4 * len(SHAPES), 1)])


@pytest.mark.parametrize("method", [AdamMini, Cautious, MARS, NAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_updated_a_few_at_a_time_come_out_as_all_at_once(
    method: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cached in (16, row_steps.CACHED):  # two rows of eight, or all
        monkeypatch.setattr(row_steps, "CACHED", cached)
        weight = nn.Parameter(numbers(7, 8, name="weight").to(dtype))
        optimizer = method([weight], lr=0.1, weight_decay=0.1)
        for step in range(3):
            weight.grad = numbers(7, 8, name=f"gradient {step}").to(dtype)
            optimizer.step()
        kept = {k: v for k, v in optimizer.state[weight].items() if isinstance(v, Tensor)}
        found.append({"weight": weight.detach(), **kept})
    few, whole_ones = found
    assert few.keys() == whole_ones.keys()
    exact = 1e-6 if dtype == torch.float32 else 1e-2  # sums are added up in another order
    for name, tensor in few.items():
        torch.testing.assert_close(tensor, whole_ones[name], rtol=exact, atol=exact)


def test_a_step_of_a_large_parameter_takes_the_memory_of_a_piece() -> None:
    shape = (4 * row_steps.CACHED // 64, 64)
    assert row_steps.rows_together(Adam((0.9, 0.99), 1e-8), shape, "cpu") == shape[0] // 4
    assert row_steps.rows_together(Adam((0.9, 0.99), 1e-8), shape, "cuda") == shape[0]
    assert row_steps.rows_together(Odd(), (4,), "cpu") == 4
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = NAdamW([weight])
    for _ in range(2):
        weight.grad = torch.ones(shape)
        with TensorMeter("cpu") as meter:
            optimizer.step()
    at = OptimizerQuery((TrainedParameter("weight", shape, "matrix"),))
    said = NAdamW.value().ledger(at).bytes("workspace")
    assert meter.peak is not None
    few_numbers = 64
    assert 4 * row_steps.CACHED <= meter.peak <= said + few_numbers < 4 * weight.numel()
