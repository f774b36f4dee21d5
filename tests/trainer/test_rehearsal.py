from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA
from modicum.core.errors import DoesNotFit, Restart
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.tasks import CausalLM
from modicum.trainer.rehearsal import first_that_fits, rehearse, untouched


class Counting(nn.Module):
    """Counts its calls in buffers: one written in place, one replaced, one not in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced + 1
        self.passing += 1
        return x


def model_and_batch():
    config = ModelConfig(vocabulary_size=40, width=16, layers=2, heads=2, context=12)
    net = create(config, 0)
    for factor in LoRA(rank=2, dropout=0.5).attach(net).parameters():
        nn.init.normal_(factor, std=0.1)
    net.counting = Counting()
    tokens = torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(1))
    return net, Batch(tokens[:, :-1], tokens[:, 1:].contiguous())


def everything(net: nn.Module) -> list[torch.Tensor]:
    tensors = [*net.parameters(), *net.buffers()]
    return [tensor.detach().clone() for tensor in tensors] + [torch.get_rng_state()]


def test_no_copy_is_kept_of_buffers_that_are_constant():
    net = Counting()
    net.constant_names = ("written",)
    with untouched(net):
        net(torch.ones(1))
    assert (net.written, net.replaced, net.passing) == (1, 0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rehearsal_leaves_no_trace(fails):
    net, batch = model_and_batch()
    net.eval()
    net.model.layers[0].train()
    modes = [module.training for module in net.modules()]
    task, seen, before, buffer = CausalLM(), [], everything(net), net.counting.replaced

    def step(batch: Batch) -> None:
        assert all(module.training for module in net.modules())
        net.counting(torch.ones(1))
        loss = task.loss_sum(net, batch)
        loss.backward()
        seen.append(float(loss.detach()))
        if fails:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def evaluation(batch: Batch) -> None:
        assert not any(module.training for module in net.modules())
        assert not torch.is_grad_enabled()
        seen.append(float(task.loss_sum(net, batch)))

    def run() -> None:
        rehearse(
            net, run_step=step, run_evaluation=evaluation, steps=[batch, batch], evaluation=batch
        )

    if fails:
        with pytest.raises(RuntimeError, match="can't allocate"):
            run()
    else:
        run()
        # Step, step, evaluation, step; dropout differs from pass to pass.
        assert len(seen) == len(set(seen)) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, everything(net), strict=True))
    assert net.counting.replaced is buffer
    assert all(p.grad is None for p in net.parameters())
    assert [module.training for module in net.modules()] == modes


def test_what_is_untouched_stays_so_without_any_module_state():
    net = nn.Linear(2, 2)
    with untouched(net):
        net(torch.ones(2)).sum().backward()
        torch.rand(3)
    assert net.weight.grad is None


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_are_there_when_a_pass_begins_as_in_an_update(accumulates: bool) -> None:
    net, batch = model_and_batch()
    task, found = CausalLM(), []

    def step(batch: Batch) -> None:
        found.append(any(p.grad is not None for p in net.parameters()))
        task.loss_sum(net, batch).backward()

    rehearse(net, run_step=step, steps=[batch], accumulates=accumulates)
    assert found == [False, accumulates]


def test_ballast_is_there_in_full_while_the_passes_run():
    net, batch = model_and_batch()
    size = 100 * 2**20 + 12345

    def held() -> int:
        """Bytes of tensors that hold ones: were they not written to, they would take no memory."""
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        found = [t for t in found if t.dtype is torch.uint8 and t.device.type == "cpu"]
        return sum(t.nbytes for t in found if bool((t == 1).all()))

    seen, before = [], held()
    rehearse(net, run_step=lambda _: seen.append(held()), steps=[batch])
    rehearse(net, run_step=lambda _: seen.append(held()), steps=[batch], ballast_bytes=size)
    assert [each - before for each in seen] == [0, 0, size, size]
    assert held() == before


def failing_above(limit: int):
    tried = []

    def attempt(size: int) -> None:
        tried.append(size)
        if size > limit:
            raise MemoryError(f"{size} rows")

    return tried, attempt


def test_sizes_are_halved_until_one_fits():
    tried, attempt = failing_above(3)
    written = []
    found = first_that_fits(attempt, 12, smaller=lambda *told: written.append(told))
    assert found == 3
    assert tried == [12, 6, 3]
    assert written == [(6, "12 rows"), (3, "6 rows")]


def test_nothing_is_written_where_the_first_size_fits():
    tried, attempt = failing_above(8)
    assert first_that_fits(attempt, 8, smaller=lambda *_: pytest.fail("written")) == 8
    assert tried == [8]


def test_it_ends_with_what_would_fit():
    written = []
    _, attempt = failing_above(0)
    with pytest.raises(DoesNotFit, match=r"--set model\.width=8"):
        first_that_fits(
            attempt, 2, smaller=lambda *told: written.append(told), changes=["--set model.width=8"]
        )
    assert written == [(1, "2 rows")]


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(ZeroDivisionError):
        first_that_fits(lambda _: 1 / 0, 8, smaller=lambda *_: None)


class Second(Ranks):
    """Rank 1 of two, with a peer that waits in an exchange of its own."""

    def __init__(self) -> None:
        super().__init__(1, 2, 1, 2)
        self.agreed = []

    def min(self, *values):
        self.agreed.append(values)
        return list(values)


def test_among_ranks_all_begin_anew_and_success_is_agreed():
    ranks, written = Second(), []
    tried, attempt = failing_above(4)
    with pytest.raises(Restart, match="rank 1"):
        first_that_fits(attempt, 8, smaller=lambda *told: written.append(told), ranks=ranks)
    assert (tried, written, ranks.agreed) == ([8], [(4, "8 rows")], [])
    assert first_that_fits(attempt, 4, smaller=lambda *_: None, ranks=ranks) == 4
    assert ranks.agreed == [(4,)]


# A process that may take so much address space and no more, beyond what it holds with its model.
LIMITED = """
import json, resource, sys
import torch
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.tasks import CausalLM
from modicum.trainer.rehearsal import first_that_fits, rehearse

torch.set_num_threads(1)
config = ModelConfig(vocabulary_size=4000, width=64, layers=2, heads=2, context=128)
net = create(config, 0).train()
task = CausalLM()

def step(batch):
    task.loss_sum(net, batch).backward()

def evaluation(batch):
    task.evaluate(net, batch)

def attempt(size):
    ids = torch.zeros(size, 128, dtype=torch.int64)
    batch = Batch(ids, ids, (torch.arange(128) > 50).int().expand(size, 128))
    rehearse(net, run_step=step, run_evaluation=evaluation, steps=[batch], evaluation=batch,
             ballast_bytes=int(ballast * 2**20))

ballast = 0
attempt(1)
pages = int(open("/proc/self/statm").read().split()[0])
size = pages * resource.getpagesize() + int(float(sys.argv[1]) * 2**20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
ballast = float(sys.argv[2])
written = []
before = [p.detach().clone() for p in net.parameters()], torch.get_rng_state()
found = first_that_fits(attempt, 8, smaller=lambda size, said: written.append([size, said]))
same = all(torch.equal(a, b) for a, b in zip(before[0], net.parameters()))
same = same and torch.equal(before[1], torch.get_rng_state())
print(json.dumps([found, written, same]))
"""


@pytest.mark.expensive
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_under_a_limit_the_largest_batch_that_fits_is_found_and_ballast_counts():
    # The logits of a row are 2 MB; a row's pass takes some four times that.
    def run(megabytes: float, ballast: float):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(megabytes), str(ballast)],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    found, written, same = run(50, 0)
    assert found in (2, 4)
    assert [size for size, _ in written] == [size for size in (4, 2) if size >= found]
    assert all("can't allocate memory" in said or "MemoryError" in said for _, said in written)
    assert same
    assert run(150, 0)[0] == 8
    assert run(150, 110)[0] < 8
