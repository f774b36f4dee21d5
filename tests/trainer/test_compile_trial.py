from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from modicum.adapters import LoRA
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_compiler import graph_breaks
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama, create
from modicum.recipe import Recipe
from modicum.trainer import compile_trial, compiled_blocks
from modicum.trainer.compile_trial import decide
from modicum.trainer.compiled_blocks import CompilingFails, compile_blocks, eager_blocks
from modicum.trainer.stop import StopRequested

pytestmark = [
    # The tracer itself looks at gradients of what is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Python 3.13.0's, which a run does not show.
    pytest.mark.filterwarnings("error:Guards may run slower:RuntimeWarning"),
]

BLOCKS = Recipe(training={"compile": "blocks", "precision": "fp32"})
AUTO = Recipe(training={"compile": "auto", "precision": "fp32"})
HOUR = 3600.0


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """Traced and differentiated as for inductor, without the C++ compiler, which takes seconds."""
    torch.compiler.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **more: compile_(function, backend="aot_eager", **more)
    )
    compiled_blocks._function.cache_clear()
    yield
    compiled_blocks._function.cache_clear()
    torch.compiler.reset()


def model(adapter: LoRA | None = None, layers: int = 3, **options: object) -> Llama:
    config = ModelConfig(
        vocabulary_size=40, width=16, layers=layers, heads=2, context=12, **options
    )
    net = create(config, 0)
    if adapter is not None:
        for factor in adapter.attach(net).parameters():
            torch.nn.init.normal_(factor, std=0.1, generator=torch.Generator().manual_seed(1))
    return net.train()


def batch(rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (rows, 13), generator=generator)
    documents = torch.zeros(rows, 12, dtype=torch.int32)
    documents[:, 5:] = 1
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), documents)


def gradients(net: Llama, batch: Batch) -> list[torch.Tensor]:
    torch.manual_seed(3)
    logits = net(batch.input_ids, batch.documents)
    F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    for parameter in net.parameters():
        parameter.grad = None
    return found


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.expensive
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        pytest.param(None, 4, id="full"),
        # The first block's input has no gradient where the embedding is frozen.
        pytest.param(LoRA(rank=2), 8, id="lora"),
        pytest.param(LoRA(rank=2, dropout=0.3), 8, id="dropout"),
    ],
)
def test_one_graph_a_shape_serves_all_blocks_and_computes_the_same(adapter, expected, recompute):
    net = model(adapter)
    net.recompute = recompute
    shapes = [
        replace(part, documents=documents)
        for part in (batch(), batch().split(3)[0])
        for documents in (part.documents, None)
    ]
    eager = [gradients(net, shape) for shape in shapes]
    names = [name for name, _ in net.named_parameters()]
    compile_blocks(net)
    before = graphs()
    for _ in range(2):
        for shape, wanted in zip(shapes, eager, strict=True):
            for one, other in zip(gradients(net, shape), wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert graphs() - before == expected
    assert graph_breaks() == 0
    assert [name for name, _ in net.named_parameters()] == names


@pytest.mark.expensive
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_with_several_streams_compute_the_same(recompute):
    plan = FormPlan().with_block("model.layers.0", mlp_skips=[1])
    for layer in (1, 2, 3):
        plan = plan.with_block(f"model.layers.{layer}", mixer_skips=[1], mlp_skips=[1])
    net = model(layers=4, forms=plan)
    net.recompute = recompute
    decision = decide(net, BLOCKS, batch(), passes=100_000, seconds=HOUR)
    assert not decision.failed, decision.why
    eager = gradients(net, batch())
    compile_blocks(net)
    before = graphs()
    for one, other in zip(gradients(net, batch()), eager, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert graphs() - before == 3 - 1  # those between are alike; the trial compiled the first
    assert graph_breaks() == 0


@pytest.mark.expensive
def test_many_shapes_are_all_compiled():
    # By default the ninth would be eager without a word.
    net = model(layers=1)
    compile_blocks(net)
    before = graphs()
    for rows in range(1, 13):
        gradients(net, batch(rows))
    assert graphs() - before == 12


def test_evaluation_and_text_stay_eager():
    net = model()
    compile_blocks(net)
    before = graphs()
    with torch.no_grad():
        net(batch().input_ids)
    net.eval()
    net(batch().input_ids).sum().backward()
    assert graphs() == before
    net.train()
    eager_blocks(net)
    gradients(net, batch())
    assert graphs() == before


def state(net: Llama) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()] + [torch.get_rng_state()]


@pytest.mark.expensive
@pytest.mark.parametrize("adapter", [None, LoRA(rank=2, dropout=0.3)])
def test_a_trial_leaves_the_model_as_it_was(adapter):
    net = model(adapter).eval()
    before = state(net)
    decision = decide(net, BLOCKS, batch(), passes=100, seconds=HOUR)
    assert not decision.failed
    assert decision.seconds > 0
    assert "ms compiled" in decision.why
    assert decision.compile == (decision.gain > 0)
    assert all(torch.equal(a, b) for a, b in zip(before, state(net), strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert not net.training
    assert all("forward" not in block.__dict__ for block in net.model.layers)


def test_biases_of_keys_whose_gradient_is_rounding_alone_do_not_look_wrong():
    net = model(attention_bias=True)
    assert not decide(net, BLOCKS, batch(), passes=1, seconds=HOUR).failed


@pytest.mark.parametrize(
    ("gain", "cost", "passes", "mode", "expected"),
    [
        (0.01, 10.0, 1001, "auto", True),
        (0.01, 10.0, 999, "auto", False),
        (0.01, 10.0, 999, "blocks", True),
        (-0.01, 0.0, 1001, "blocks", False),
    ],
)
def test_it_pays_when_the_passes_left_win_the_time_back(
    monkeypatch, gain, cost, passes, mode, expected
):
    clock = [0.0]
    monkeypatch.setattr(compile_trial.time, "perf_counter", lambda: clock[0])
    trial = compile_trial.CompileTrial
    monkeypatch.setattr(compile_trial, "compiled_forward", compiled_blocks.eager_forward)
    run, first = trial.run, []

    def timed(self, forward):
        if forward is self.compiled and not first:
            first.append(1)
            clock[0] += cost
        else:
            clock[0] += 0.05 if forward is self.eager else 0.05 - gain
        return run(self, forward)

    monkeypatch.setattr(trial, "run", timed)
    recipe = Recipe(training={"compile": mode, "precision": "fp32"})
    decision = decide(model(), recipe, batch(), passes=passes, seconds=HOUR)
    assert decision.compile is expected
    assert decision.value == ("blocks" if expected else "none")
    assert decision.gain == pytest.approx(gain)
    assert not decision.failed


def test_short_runs_are_not_tried_and_the_recipe_has_the_last_word(monkeypatch):
    monkeypatch.setattr(compile_trial, "_attempt", lambda *_: pytest.fail("tried"))
    short = decide(model(), AUTO, batch(), passes=10**9, seconds=599)
    assert not short.compile
    assert "9 min 59 s is too short" in short.why
    off = Recipe(training={"compile": "none"})
    assert not decide(model(), off, batch(), passes=10**9, seconds=HOUR).compile


def test_a_method_that_does_not_claim_to_compile_keeps_blocks_eager(monkeypatch):
    recipe = Recipe(model={"path": "."}, adapter={"method": "lora"}, training={"compile": "blocks"})
    assert compile_trial.without_trait(recipe) is None
    record = recipe.methods()["adapter"]
    changed = replace(record, info=replace(record.info, traits=("adapts_base",)))
    monkeypatch.setattr(Recipe, "methods", lambda self: {"adapter": changed})
    decision = decide(model(), recipe, batch(), passes=1, seconds=HOUR)
    assert not decision.compile
    assert decision.failed
    assert decision.why == "adapter.method lora does not claim to work compiled"


def broken(error: BaseException):
    def compile_(function, **_):
        def run(*arguments):
            raise error

        return run

    return compile_


def backend_failed(inner: BaseException) -> BaseException:
    return torch._dynamo.exc.BackendCompilerFailed(lambda: None, inner, None)


def test_what_fails_in_the_trial_is_a_reason_to_stay_eager(monkeypatch):
    error = backend_failed(RuntimeError("no working C++ compiler\nlooked for g++"))
    monkeypatch.setattr(torch, "compile", broken(error))
    decision = decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR)
    assert decision.failed
    assert not decision.compile
    assert decision.why == ("compiling does not work here: RuntimeError: no working C++ compiler")


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_other_numbers_are_a_reason_to_stay_eager(monkeypatch, wrong):
    def compile_(function, **_):
        return lambda *arguments: (function(*arguments)[0] * wrong, None)

    monkeypatch.setattr(torch, "compile", compile_)
    decision = decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR)
    assert decision.failed
    assert "computes something else" in decision.why


def test_a_wrong_gradient_is_noticed_behind_a_right_output(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.001

    def compile_(function, **_):
        return lambda block, x, *more: function(block, Wrong.apply(x), *more)

    monkeypatch.setattr(torch, "compile", compile_)
    decision = decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR)
    assert "computes something else: it differs by 0.001" in decision.why


def test_a_stop_that_the_compiler_wraps_or_swallows_is_still_a_stop(monkeypatch):
    error = backend_failed(StopRequested("SIGTERM"))
    monkeypatch.setattr(torch, "compile", broken(error))
    with pytest.raises(StopRequested):
        decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR)
    net = model()
    compile_blocks(net)
    with pytest.raises(StopRequested):
        gradients(net, batch())

    def check() -> None:
        raise StopRequested("SIGTERM")

    compiled_blocks._function.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(StopRequested):
        decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR, check=check)


def test_a_compiled_run_does_not_fall_back_by_itself(monkeypatch):
    error = backend_failed(RuntimeError("the compiler is gone"))
    monkeypatch.setattr(torch, "compile", broken(error))
    net = model()
    compile_blocks(net)
    with pytest.raises(CompilingFails, match="RuntimeError: the compiler is gone") as caught:
        gradients(net, batch())
    assert isinstance(caught.value, InputError)
    assert "--fork" in str(caught.value)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("not the compiler's")]
)
def test_other_errors_in_a_compiled_block_pass_as_they_are(monkeypatch, error):
    monkeypatch.setattr(torch, "compile", broken(error))
    net = model()
    compile_blocks(net)
    with pytest.raises(type(error)):
        gradients(net, batch())


class Two(Ranks):
    """Rank 0 of two; the other's answers are given."""

    def __init__(self, other: object) -> None:
        super().__init__(0, 2, 0, 2)
        self.other = other

    def broadcast(self, value):
        return value

    def first_alone(self, work, check=lambda: None):
        return work()

    def min(self, *values):
        return [0.0 if self.other else value for value in values]

    def gather(self, value):
        return [value, self.other]


def test_a_failure_on_any_rank_keeps_all_eager(monkeypatch):
    good = compile_trial.Decision(True, "it pays", 1.0, 0.1)
    monkeypatch.setattr(compile_trial, "_attempt", lambda *_: good)
    assert decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR, ranks=Two(None)).compile
    decision = decide(model(), BLOCKS, batch(), passes=1, seconds=HOUR, ranks=Two("no compiler"))
    assert not decision.compile
    assert decision.failed
    assert decision.why == "on rank 1, no compiler"


# With the real compiler, in processes that can be killed

CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.recipe import Recipe
from modicum.trainer.compiled_blocks import compile_blocks
from modicum.trainer.compile_trial import decide
from modicum.trainer.stop import StopRequested, StopSignals

net = create(ModelConfig(vocabulary_size=40, width=16, layers=2, heads=2, context=12), 0).train()
ids = torch.arange(24).view(2, 12)
recipe = Recipe(training={"compile": "blocks", "precision": "fp32"})
with StopSignals() as signals:
    print("compiling", flush=True)
    try:
        with signals.at_once():
            decision = decide(
                net, recipe, Batch(ids, ids), passes=1, seconds=1.0, check=signals.check
            )
    except StopRequested:
        print("stopped", flush=True)
        sys.exit(4)
assert not decision.failed, decision
compile_blocks(net)
net(ids).square().sum().backward()
print(decision.seconds, float(sum(p.grad.double().norm() for p in net.parameters())))
"""


def start(cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=environment
    )


def children(pid: int) -> dict[int, str]:
    """The processes below one, by their command's name; any of them may end meanwhile."""
    found = {}
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    found[child] = Path(f"/proc/{child}/comm").read_text().strip()
                    found |= children(child)
    return found


def wait_for_compiler(process: subprocess.Popen[str]) -> dict[int, str]:
    """The processes below, as soon as a C++ compiler is among them."""
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    while process.poll() is None:
        found = children(process.pid)
        if any(name == "cc1plus" for name in found.values()):
            return found
        time.sleep(0.01)
    raise AssertionError("it ended before it compiled")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_compilation_leaves_no_process_and_no_broken_cache(tmp_path):
    results = []
    for signal_number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 4)):
        process = start(tmp_path / "cache")
        below = wait_for_compiler(process)
        assert not [name for name in below.values() if "python" in name]
        process.send_signal(signal_number)
        process.communicate(timeout=180)
        assert process.returncode == code
        deadline = time.monotonic() + 180
        while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    for _ in range(2):  # compiled anew, then from the cache
        process = start(tmp_path / "cache")
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        results.append(said.split()[-1])
    assert results[0] == results[1]
