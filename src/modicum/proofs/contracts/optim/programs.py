"""What must hold of the program that makes a run's updates, with a PyTorch optimizer or without.

A gradient transform that changes no gradients, but takes part by hooks alone, is looked at here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.method import Method
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.contracts.state import StateRegistry
from modicum.core.contracts.step import StepContext, StepOutcome, StepProgram, StepTask
from modicum.core.contracts.strategy import Strategy
from modicum.core.machine.memory import tensor_bytes
from modicum.data.batch import Batch
from modicum.data.sequences import SequenceBatch, delayed_recall
from modicum.models.recurrent import RecurrentConfig, create
from modicum.optim.sgd import SGD
from modicum.optim.transform import GradientTransform, TransformContext
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.base import NotApplicable, check
from modicum.proofs.contracts.optim.subjects import (
    RATE,
    OptimizerSubject,
    assert_equal,
    llama,
    small,
    tokens,
    without_a_class,
)
from modicum.tasks.causal_lm import CausalLM
from modicum.tasks.sequences import SequenceClasses, SequenceTask

ProgramSubject = type[Method] | Method
Entered = Callable[[Callable[[Any], None]], Any]


def programs_check(**about: Any) -> Entered:
    """Enter a check for methods of both slots: those that make updates, and that take part."""

    def enter(function: Callable[[Any], None]) -> Callable[[Any], None]:
        check("optim", slot="optimizer", **about)(function)
        others = ("transforms_gradients", *about.get("unless", ()))
        check("optim", slot="transform", **{**about, "unless": others})(function)
        return function

    return enter


class Lossless:
    """A task whose losses are no numbers."""

    def __init__(self, task: StepTask) -> None:
        self.outputs, self._loss_of = task.outputs, task.loss_of

    def loss_of(self, outputs: Any, batch: Any) -> Tensor:
        return self._loss_of(outputs, batch) * torch.nan


class Gradless(Lossless):
    """A task whose losses are numbers, and their gradients none."""

    def loss_of(self, outputs: Any, batch: Any) -> Tensor:
        loss: Tensor = _NoNumbers.apply(self._loss_of(outputs, batch))
        return loss


class _NoNumbers(torch.autograd.Function):
    """What it is given, with gradients that are no numbers."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


@dataclass(frozen=True)
class _World:
    """What programs are tried on: a small model, its task, and a batch by a seed."""

    task: StepTask
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]


def _text(seed: int) -> Batch:
    ids = tokens(seed=seed)
    return Batch(ids[:, :-1], ids[:, 1:].clone())


def _sequences(seed: int) -> SequenceBatch:
    made = delayed_recall(4, length=5, classes=3, noise=0.1, seed=seed, shortest=3)
    return made.batch(range(4))


def _world(subject: ProgramSubject) -> _World:
    """A decoder and text; a recurrent net and sequences for methods that need such a net."""
    if "needs_recurrence" in subject.info.traits:
        task, config = SequenceTask(SequenceClasses()), RecurrentConfig(3, 7, 3)
        return _World(task, lambda: create(config, seed=0), _sequences)
    return _World(CausalLM(), llama, _text)


class ProgramTraining:
    """A model, the method's program as a run would bind it, and what a checkpoint holds.

    Args:
        strategy: how ranks share the rows of each update; None: this process is alone.
    """

    def __init__(self, subject: ProgramSubject, strategy: Strategy | None = None) -> None:
        world = _world(subject)
        self.batch, self.model = world.batch, world.model()
        self.strategy = strategy or Strategy()
        blocks: Any = self.model.blocks
        self.strategy.cut(self.model, blocks, torch.device("cpu"))
        self.strategy.start(self.model)
        context = StepContext(
            self.model, 3, task=world.task, strategy=self.strategy, groups=self.groups
        )
        if subject.info.slot == "transform":
            self.program: StepProgram = SGD.value(momentum=0.9).bind_step(context)
            value = subject if isinstance(subject, GradientTransform) else _tiny(subject)
            trained = dict(self.strategy.trained(self.model))
            bound = value.bind(
                TransformContext(
                    self.model, 3, trained, self.strategy.ranks, self.program.optimizer, "sum"
                )
            )
            self.program.hooks.add("transform", value.run_hook(bound))
        else:
            other = without_a_class(subject) is not None
            value = _tiny(subject) if other else small(cast(OptimizerSubject, subject))
            self.program = value.bind_step(context)
        self.registry = StateRegistry()
        self.strategy.register(self.registry, self.model)
        self.program.register(self.registry)
        for name, hook in self.program.hooks.stateful().items():
            self.registry.add_object(name, hook)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The model's groups, as a run gives them."""
        return optimizer_groups(
            self.model,
            learning_rate=RATE,
            weight_decay=weight_decay,
            trained=dict(self.strategy.trained(self.model)),
        )

    def update(
        self, step: int, *, size: int = 4, seed: int | None = None, multiplier: float = 1.0
    ) -> StepOutcome:
        """Update number `step`, in micro-batches of `size` rows, at a part of the rate."""
        data = self.batch(step if seed is None else seed)
        self.program.set_rate(multiplier)
        ranks = self.strategy.ranks
        mine = data if ranks.alone else data.split(-(-data.rows // ranks.size))[ranks.rank]
        return self.program(step, mine.split(size), data.count, lambda: None)

    def read(self) -> Mapping[str, Any]:
        """A copy of all state, no update being deferred."""
        self.program.flush()
        return copy.deepcopy({name: dict(view) for name, view in self.registry.read().items()})


def _tiny(subject: ProgramSubject) -> Method:
    return subject if isinstance(subject, Method) else subject.tiny()


@programs_check()
def check_program_learns(subject: ProgramSubject) -> None:
    """Thirty updates on one batch: the loss is lower at the end, and no update is skipped."""
    training = ProgramTraining(subject)
    outcomes = [training.update(step, seed=0) for step in range(1, 31)]
    assert not any(each.skipped for each in outcomes), "an update is skipped"
    first, last = outcomes[0].loss, outcomes[-1].loss
    assert last < first, f"the loss goes from {first:.5f} to {last:.5f}"


@programs_check()
def check_program_is_deterministic(subject: ProgramSubject) -> None:
    """Two programs of one seed make the same updates, to the bit, whatever torch's generator."""
    trainings = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainings.append(ProgramTraining(subject))
        for step in (1, 2, 3):
            trainings[-1].update(step)
        trainings[-1].program.flush()
    assert_equal(trainings[0].model, trainings[1].model, "from one time to the next")


@programs_check(needs=("exact_resume",))
def check_program_resumes_to_the_bit(subject: ProgramSubject) -> None:
    """What a checkpoint holds after two updates makes the next two, in a new model and program."""
    straight, begun, resumed = (ProgramTraining(subject) for _ in range(3))
    for step in (1, 2, 3, 4):
        straight.update(step)
    for step in (1, 2):
        begun.update(step)
    resumed.registry.write(begun.read())
    for step in (3, 4):
        resumed.update(step)
    straight.program.flush()
    resumed.program.flush()
    assert_equal(straight.model, resumed.model, "after the interruption")


@programs_check()
def check_rehearsing_changes_nothing(subject: ProgramSubject) -> None:
    """A rehearsal leaves weights, and the updates after it are what they would have been."""
    plain, rehearsed = ProgramTraining(subject), ProgramTraining(subject)
    plain.update(1)
    rehearsed.update(1)
    rehearsed.program.rehearsing = True
    rehearsed.program.rehearse(rehearsed.batch(9), 36)
    rehearsed.program.rehearsing = False
    for parameter in rehearsed.model.parameters():
        parameter.grad = None
    plain.program.flush()
    rehearsed.program.flush()
    assert_equal(plain.model, rehearsed.model, "after a rehearsal")
    plain.update(2)
    rehearsed.update(2)
    plain.program.flush()
    rehearsed.program.flush()
    assert_equal(plain.model, rehearsed.model, "an update after a rehearsal")


@programs_check()
def check_what_is_no_number_is_skipped(subject: ProgramSubject) -> None:
    """A loss that is not finite makes no update: it is said, and weights stay as they were."""
    training = ProgramTraining(subject)
    training.update(1)
    before = training.read()
    training.program.task = Lossless(training.program.task)
    outcome = training.update(2)
    training.program.flush()
    assert outcome.skipped, "an update whose loss is no number is not skipped"
    for name, value in before["model"].items():
        now = training.registry.read()["model"][name]
        # What is moved and moved back may round.
        close = torch.allclose(now, value, rtol=1e-4, atol=1e-6)
        assert close, f"{name} changes in an update that is skipped"


@programs_check(unless=("frees_gradient_in_backward",))
def check_program_accumulates(subject: ProgramSubject) -> None:
    """An update in micro-batches has the loss of one in a piece, and nearly its weights."""
    one, several = ProgramTraining(subject), ProgramTraining(subject)
    losses = one.update(1).loss, several.update(1, size=1).loss
    assert abs(losses[0] - losses[1]) < 1e-4, f"the losses are {losses[0]} and {losses[1]}"
    one.program.flush()
    several.program.flush()
    others = dict(several.model.named_parameters())
    # A first step of Adam has one size whatever the gradient's, so single entries may turn.
    for name, value in one.model.named_parameters():
        off = (others[name] - value).abs().mean().item()
        assert off < 0.1 * RATE, f"{name} differs by {off:.2g} on average"


@programs_check(needs=("needs_no_gradients",))
def check_has_no_backward_pass(subject: ProgramSubject) -> None:
    """Neither an update nor a rehearsal saves anything for a backward pass, or leaves gradients."""
    training = ProgramTraining(subject)
    for passes in (
        lambda: training.update(1),
        lambda: training.program.rehearse(training.batch(9), 36),
    ):
        with saved_bytes() as saved:
            passes()
        assert not saved.total, f"{saved.total} bytes are saved for a backward pass"
    left = [name for name, value in training.model.named_parameters() if value.grad is not None]
    assert not left, f"{left[0]} has a gradient"


@check("optim", slot="optimizer", needs=("takes_no_rate",))
def check_takes_no_rate(subject: ProgramSubject) -> None:
    """No update depends on the learning rate, and none is said."""
    one, other = ProgramTraining(subject), ProgramTraining(subject)
    for training, multiplier in ((one, 1.0), (other, 0.25)):
        training.update(1)
        assert training.program.set_rate(multiplier) is None, "it says a learning rate"
        training.update(2, multiplier=multiplier)
        training.program.flush()
    assert_equal(one.model, other.model, "with another learning rate")


@check("optim", slot="optimizer")
def check_bytes_of_its_own_state(subject: ProgramSubject) -> None:
    """Of a program of its own, the ledger's bytes of state are those that are there, exactly."""
    if without_a_class(subject) is None:
        raise NotApplicable("it is a PyTorch optimizer, whose state other checks count")
    training = ProgramTraining(subject)
    training.update(1)
    value, shapes = _tiny(subject), trained_shapes(training.model)
    said = value.ledger(OptimizerQuery(shapes)).bytes("optimizer")
    found = tensor_bytes(list(training.program.state()))
    assert said == found, f"the ledger says {said} bytes of state, there are {found}"
