from __future__ import annotations

import errno
import gc
import subprocess
import sys
import weakref

import pytest
import torch

from modicum.core.errors import DoesNotFit
from modicum.trainer.out_of_memory import causes, halved, is_out_of_memory, ran_out

# Processes that limit their own address space, some megabytes above what they have, and then work.
# They are forked from one: loading torch takes longest.
LIMITED = """
import os, resource, sys
import torch
import torch.nn.functional as F
from modicum.trainer.out_of_memory import is_out_of_memory

torch.set_num_threads(1)
x = torch.randn(64, 64, requires_grad=True)
F.linear(x, x).sum().backward()  # threads and kernels are there before the limit is
trained = torch.nn.Parameter(torch.randn(8))
trained.grad = torch.ones(8)
torch.optim.AdamW([trained], fused=True).step()
with torch.autocast("cpu", torch.bfloat16):
    F.linear(x, x)

def limit(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * resource.getpagesize() + int(megabytes * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if python:
            bytearray(100 * 2**20)
        return gradient * torch.ones(64 * 2**20)[:1]

def work(what, file):
    if what == "forward":
        limit(50)
        torch.randn(8192, 8192)
    elif what == "backward":
        a = torch.randn(2048, 2048, requires_grad=True)
        product = a @ a @ a
        limit(20)
        product.sum().backward()
    elif what in ("autograd function", "python in backward"):
        y = Greedy.apply(torch.ones(4, requires_grad=True)).sum()
        limit(20)
        y.backward()
    elif what == "optimizer":
        trained = torch.nn.Parameter(torch.randn(4096, 2048))
        trained.grad = torch.ones_like(trained)
        optimizer = torch.optim.AdamW([trained], fused=True)
        limit(20)
        optimizer.step()
    elif what == "attention":
        q = torch.randn(8, 8, 1024, 64, requires_grad=True)
        k = torch.randn(8, 2, 1024, 64, requires_grad=True)
        mask = torch.zeros(8, 1, 1024, 1024)
        limit(20)
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True).sum().backward()
    elif what == "autocast":
        w = torch.randn(4096, 4096, requires_grad=True)
        limit(20)
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x.detach().expand(64, 64).repeat(1, 64), w)
    elif what == "oneDNN":
        a = torch.randn(3000, 3000).bfloat16()
        out = torch.empty_like(a)
        limit(1)
        torch.mm(a, a, out=out)
    elif what == "sort":
        a = torch.randn(4 * 2**20)
        limit(20)
        a.topk(1000)
    elif what == "mapping":
        os.truncate(file, 200 * 2**20)
        limit(20)
        torch.from_file(file, size=50 * 2**20)
    elif what == "python":
        limit(20)
        bytearray(100 * 2**20)

file, *cases = sys.argv[1:]
open(file, "wb").close()
for what in cases:
    python = what == "python in backward"
    if os.fork():
        os.wait()
        continue
    said = "nothing was raised"
    try:
        work(what, file)
    except Exception as error:
        said = f"{is_out_of_memory(error)} {type(error).__name__} {error}".splitlines()[0]
    print(f"{what}: {said}", flush=True)
    os._exit(0)
"""
WHAT = [
    "forward", "backward", "autograd function", "python in backward", "optimizer", "attention",
    "autocast", "oneDNN", "sort", "mapping", "python",
]  # fmt: skip


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case's error was, after whether it was recognised."""
    file = tmp_path_factory.mktemp("limited") / "mapped"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(file), *WHAT],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.expensive
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
@pytest.mark.parametrize("what", WHAT)
def test_what_torch_raises_under_a_limit_is_recognised(what, said):
    if what == "oneDNN" and what not in said:
        pytest.skip("where next to nothing is left, the library ends the process")
    if what == "oneDNN" and said[what] == "nothing was raised":
        pytest.skip("on this processor the product is not oneDNN's, and takes nothing")
    assert said[what].startswith("True ")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("could not create a memory object"),
    ],
)
def test_errors_that_cannot_be_made_here_are_recognised_too(error):
    assert is_out_of_memory(error)


def raised_from(cause: BaseException) -> BaseException:
    try:
        raise ValueError("a wrapper") from cause
    except ValueError as error:
        return error


def test_a_wrapper_means_what_it_was_raised_from():
    assert is_out_of_memory(raised_from(MemoryError()))
    assert not is_out_of_memory(raised_from(KeyError("x")))
    wrapped = RuntimeError("backend failed")
    wrapped.inner_exception = MemoryError()
    assert is_out_of_memory(wrapped)


def test_causes_in_a_circle_end():
    one, two = ValueError(1), ValueError(2)
    one.__cause__, two.__cause__ = two, one
    assert list(causes(one)) == [one, two]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("DefaultCPUAllocator"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_the_memory_of_what_failed_comes_back():
    kept: list[weakref.ref[torch.Tensor]] = []

    def inner(graph: torch.Tensor) -> None:
        activations = graph * 2
        kept.append(weakref.ref(activations))
        try:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: first")
        except RuntimeError as error:
            raise RuntimeError("std::bad_alloc\nmore of it") from error

    def work() -> None:
        held = torch.ones(3, requires_grad=True)
        kept.append(weakref.ref(held))
        inner(held)

    gc.disable()
    try:
        assert ran_out(work) == "std::bad_alloc"
        assert len(kept) == 2
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_other_errors_pass_and_success_says_nothing():
    with pytest.raises(ZeroDivisionError):
        ran_out(lambda: 1 / 0)
    assert ran_out(lambda: 1) is None


def test_halving_ends_at_one_with_what_would_fit():
    sizes = [12]
    while sizes[-1] > 1:
        sizes.append(halved(sizes[-1]))
    assert sizes == [12, 6, 3, 1]
    with pytest.raises(DoesNotFit, match=r"training\.recompute"):
        halved(1)
    with pytest.raises(DoesNotFit, match="a smaller model") as caught:
        halved(1, ["a smaller model"])
    assert caught.value.exit_code == 3
