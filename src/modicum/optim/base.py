"""The base of optimizers that work on matrices: a projector, an inner rule and a rest rule.

A method says which projector it has and which rules. From here come: which parameters are matrices
and what the others get instead, moments in 8 bits, an owner for each matrix where parameters are
sharded, fp32 arithmetic for parameters in bf16, state that survives by name on any number of ranks,
and the ledger.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import ClassTreatment, Ledger, OptimizerQuery, TrainedParameter
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import class_by_shape
from modicum.core.contracts.step import InBackwardStep, StandardStep, StepContext, StepProgram
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part
from modicum.optim.agreement import Late, first_ones
from modicum.optim.copies import CopiedOptimizer
from modicum.optim.kept import StateShape
from modicum.optim.ledger import of_matrices, treatment_of
from modicum.optim.owners import Owners, Round
from modicum.optim.parts import TOGETHER, OptimizerParts
from modicum.optim.row_steps import RowUpdate, by_rows, step_rows, wide
from modicum.optim.rules import UpdateRule
from modicum.optim.saved_dtypes import load_as_saved
from modicum.optim.subspaces import SubspaceStep, drop_moments, is_active
from modicum.optim.with_gradients import with_gradients

_Given = ParamSpec("_Given")


def fields_given(declared: Callable[_Given, None]) -> Callable[_Given, None]:
    """An `__init__` that gives its keywords to `MatrixOptimizer` as fields; its own body is empty.

    So a method spells each of its fields once, with type and default, where editors, recipes and
    the catalog read them.

    Raises:
        TypeError: an argument is unknown, missing or given twice, as of any function.
    """
    signature = inspect.signature(declared)

    @functools.wraps(declared)
    def made(*given: _Given.args, **named: _Given.kwargs) -> None:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        optimizer, params, lr = bound.args
        MatrixOptimizer.__init__(optimizer, params, lr, **bound.kwargs)

    return made


class MatrixOptimizer(CopiedOptimizer):
    """The base class; a method gives its fields, and says which parts they mean (`parts_of`).

    Parameters that are no matrices (embeddings and output heads, vectors, those too small or
    excluded) follow the rest rule. Which are which stands in the groups: a group that holds both
    is split, and each has `matrix`. Groups of `optimizer_groups` know it from the layers; of
    `model.named_parameters()` the names are matched with `exclude`; of bare parameters all that
    fit are matrices. Weight decay is decoupled: it takes lr weight_decay W off W, before the update
    unless the parts say otherwise. The rest rule may have a rate and a decay of its own, as parts
    of the group's, so that a schedule of the group's rate is one of both.

    Sharded matrices (DTensors sharded along dimension 0) are updated by their owners; all ranks
    step the same parameters in the same order. Ranks with unsharded parameters all do the same; an
    SVD may differ between hosts of different kinds, so set `replicas` to their process group, and
    they take the first one's bases where theirs are others; a copy of the optimizer has none.

    Args:
        params, lr: as of any optimizer; groups may have their own `lr` and `weight_decay`.
        fields: the method's hyper-parameters, `weight_decay` among them.

    Raises:
        InputError: a hyper-parameter is of the wrong type or out of bounds.
    """

    def __init__(self, params: ParamsT, lr: float, **fields: Any) -> None:
        self.method = self.value(**fields)
        self.parts = self.parts_of(self.method)
        self.owners = Owners(self.parts.kept_bytes)
        self.rules: dict[Tensor, UpdateRule | None] = {}
        self._facts: dict[Tensor, tuple[TrainedParameter, bool]] = {}
        self.replicas: dist.ProcessGroup | None = None
        super().__init__(params, {"lr": lr, "weight_decay": fields["weight_decay"], "matrix": True})

    @classmethod
    @abstractmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """What the method is made of, by its value."""

    @classmethod
    def spends(cls, value: OptimizerMethod, at: OptimizerQuery) -> Ledger:
        """Gradients, state, and what a step takes in addition, of the rank that has most."""
        return of_matrices(cls.parts_of(value), at, in_backward=value.fields()["in_backward"])

    @classmethod
    def treatment(cls, value: OptimizerMethod, at: OptimizerQuery) -> tuple[ClassTreatment, ...]:
        """Which classes it takes, what is left to the rest rule, and the state of both.

        Nothing, where one rule is for all.
        """
        parts = cls.parts_of(value)
        return treatment_of(parts, at, cls.__name__) if parts.classes or parts.rule_of else ()

    @classmethod
    def projected(cls, value: OptimizerMethod, at: OptimizerQuery) -> dict[str, int]:
        """The matrices for the projector, with their smaller width, where there is a rank."""
        parts = cls.parts_of(value)
        return {
            p.name: min(p.shape)
            for p in at.parameters
            if "rank" in value.fields() and parts.meant(p.name, p.parameter_class)
        }

    @staticmethod
    def step_program(
        value: OptimizerMethod, context: StepContext, optimizer: MatrixOptimizer
    ) -> StepProgram:
        """The standard program; or each parameter's update in the backward pass."""
        sharing = context.strategy
        if sharing.layout.shards == 1 < sharing.ranks.size:
            # Unsharded gradients are alike everywhere; what unlike hosts make of them need not be.
            optimizer.replicas = dist.group.WORLD
        return (InBackwardStep if optimizer.in_backward else StandardStep)(context, optimizer)

    @property
    def in_backward(self) -> bool:
        """Whether each parameter is to be updated as soon as its gradient is known."""
        return bool(self.method.fields()["in_backward"])

    # Routing

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split in two where some of its parameters are matrices and some are not."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        flags = self._route(group)
        listed = [k for k in ("params", "names", "param_names", "classes", "heads") if k in group]
        for matrix in sorted(set(flags), reverse=True):
            chosen = [index for index, flag in enumerate(flags) if flag is matrix]
            lists: dict[str, list[Any]] = {
                key: [group[key][index] for index in chosen] for key in listed
            }
            self.param_groups.append({**group, **lists, "matrix": matrix})

    def _route(self, group: Mapping[str, Any]) -> list[bool]:
        """Note what the parameters of a group are; which of them are matrices."""
        parameters: list[nn.Parameter] = group["params"]
        names = group.get("names") or group.get("param_names") or [None] * len(parameters)
        found = group.get("classes") or [class_by_shape(p.shape) for p in parameters]
        heads = group.get("heads") or [0] * len(names)
        flags: list[bool] = []
        for parameter, name, kind, of_heads in zip(parameters, names, found, heads, strict=True):
            # A group that says it holds no matrices holds none, whatever their shapes.
            meant = group["matrix"] or kind != "matrix"
            flags.append(meant and self.parts.takes(name, parameter.shape, kind))
            shape, width = tuple(parameter.shape), parameter.element_size()
            facts = TrainedParameter(name or "", shape, kind, width, of_heads)
            self._facts[parameter] = facts, flags[-1]
            self.rules[parameter] = self.parts.row_rule(facts, flags[-1])
        if self.parts.taken_as == "full":
            self.owners.add([p for p, flag in zip(parameters, flags, strict=True) if flag])
        return flags

    def _route_all(self) -> None:
        """Route the parameters of all groups, which are split already, as if they were new."""
        self.owners = Owners(self.parts.kept_bytes)
        self.rules, self._facts = {}, {}
        for group in self.param_groups:
            self._route(group)

    def remake(self) -> None:
        """Make the parts of a copy, and route its parameters."""
        self.parts, self.replicas = self.parts_of(self.method), None
        self._route_all()

    def follow_exchange(self) -> None:
        """Route all parameters anew where some in the groups were replaced by others.

        So accelerate does with an optimizer that is there before FSDP2 shards its parameters.

        Raises:
            InputError: there is state of those that were replaced.
        """
        given = dict.fromkeys(p for group in self.param_groups for p in group["params"])
        if given.keys() <= self.rules.keys():
            return
        if any(kept for parameter, kept in self.state.items() if parameter not in given):
            raise InputError(
                "parameters in param_groups were replaced by others after a step, and what is kept "
                "is of those before; make the optimizer anew, of the new ones",
                field="param_groups",
            )
        self._route_all()

    # Stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            InputError: a gradient is sparse, or one to find a subspace of is not finite; a
                parameter is complex; a share of all matrices is none; parameters were replaced
                after a step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow_exchange()
        if self.parts.choice is not None:
            self.parts.choice.number(len(self.owners))
        groups: dict[nn.Parameter, dict[str, Any]] = {}
        rows: dict[nn.Parameter, dict[str, Any]] = {}
        for parameter, group in with_gradients(self.param_groups):
            (rows if self.rules[parameter] else groups)[parameter] = group
        self._step_rows(rows)
        self._step_matrices(groups)
        return loss

    def _step_matrices(self, groups: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        late: Late = {}
        for turns in self._together(list(groups)):
            updates: dict[nn.Parameter, Tensor] = {}
            for turn in turns:
                gradient, mine = turn.gather(), turn.mine
                if mine is not None and gradient is not None:
                    updates[mine] = self._update(mine, gradient.float(), late)
                    del gradient
            self._finish(updates)
            for turn in turns:
                self._scatter(turn, updates, groups)
        for same, tensors in late.items():
            first_ones(tensors, same)

    def _scatter(
        self,
        turn: Round,
        updates: dict[nn.Parameter, Tensor],
        groups: Mapping[nn.Parameter, dict[str, Any]],
    ) -> None:
        """Apply a round's updates to the rows that are here; they are freed at its end."""
        update = None if turn.mine is None else updates.pop(turn.mine)
        if update is not None and turn.mine is not None:
            update.mul_(groups[turn.mine]["lr"])
        for parameter, rows in turn.scatter(update):
            self._apply(own_part(parameter)[0], rows, groups[parameter])

    def _together(self, matrices: list[nn.Parameter]) -> Iterator[list[Round]]:
        """Rounds whose updates are finished together; on all ranks the same, in one order."""
        if self.parts.finish is None:
            yield from ([turn] for turn in self.owners.rounds(matrices))
            return
        turns: list[Round] = []
        elements = 0
        for turn in self.owners.rounds(sorted(matrices, key=lambda matrix: tuple(matrix.shape))):
            largest = max(matrix.numel() for matrix in turn.matrices.values())
            if turns and elements + largest > TOGETHER:
                yield turns
                turns, elements = [], 0
            turns.append(turn)
            elements += largest
        if turns:
            yield turns

    def _finish(self, updates: Mapping[nn.Parameter, Tensor]) -> None:
        """Map full updates in place, equal shapes at once, and scale them by their shape."""
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for update in updates.values():
            by_shape.setdefault(tuple(update.shape), []).append(update)
        for (rows, columns), alike in by_shape.items():
            if self.parts.finish is not None:
                self.parts.finish.apply_(alike)
            if (factor := self.parts.shape_factor(rows, columns)) != 1:
                for update in alike:
                    update.mul_(factor)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, late: Late) -> Tensor:
        """What a full matrix is to lose, without the learning rate: fp32, a tensor of its own."""
        state, place = self.state[parameter], self.owners[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
        if self.parts.choice is not None:
            self._make_room(int(state["step"]), place.number)
        same = place.cut.replicas or self.replicas
        step = SubspaceStep(self.parts, state, place.number, len(self.owners), same, late)
        return step.update(gradient)

    def _make_room(self, step: int, number: int) -> None:
        """Before an active matrix gets moments, free those of all whose turn is over by then."""
        parts, count = self.parts, len(self.owners)
        if not step or step % parts.update_gap or not is_active(parts, step, number, count):
            return
        for matrix, place in self.owners.all().items():
            state = self.state.get(matrix)
            over = state and int(state["step"]) == step
            if over and not is_active(parts, step, place.number, count):
                rows, columns = matrix.shape
                drop_moments(parts, self.state[matrix], (rows, columns))

    def _step_rows(self, groups: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Update this rank's rows of what no owner takes in full."""
        updates = []
        for parameter in groups:
            rule, state = self.rules[parameter], self.state[parameter]
            assert rule is not None
            updates.append(RowUpdate(parameter, rule, state, self.parts.rest_bits))

        def apply(one: RowUpdate, direction: Tensor, factor: float) -> None:
            group = groups[one.parameter]
            if group["matrix"]:
                rows, columns = one.parameter.shape
                factor *= self.parts.scale * self.parts.shape_factor(rows, columns)
            rate, _ = self.rates(group)
            self._apply(one.weight, direction, group, rate * factor)

        step_rows(updates, apply)

    def rates(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """The learning rate of a group's parameters now, and the part of W that a step takes off.

        Those of the rest rule are its own parts of what the group says.
        """
        rate, decay = group["lr"], group["weight_decay"]
        if not group["matrix"]:
            rate, decay = rate * self.parts.rest_rate, decay * self.parts.rest_decay
        return rate, rate * decay

    def _apply(
        self, weight: Tensor, update: Tensor, group: dict[str, Any], factor: float = 1.0
    ) -> None:
        """Take an update (fp32) off rows of a parameter that are here, and decay them; in fp32.

        Parameters in fp64 that are taken by rows are updated in fp64.
        """
        new, (_, lost) = wide(weight), self.rates(group)
        if lost and self.parts.decay == "before":
            new.mul_(1 - lost)
        new.sub_(update, alpha=factor)
        if lost and self.parts.decay == "after":
            new.mul_(1 - lost)
        if new is not weight:
            weight.copy_(new)

    # State

    def keeps_whole(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is of full tensors, not laid out as the parameter."""
        return parameter in self.owners

    def holds(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return parameter not in self.owners or self.owners[parameter].here

    def rowed(self, parameter: Tensor) -> list[str]:
        """What a rule keeps by rows of a parameter that is updated by rows."""
        if (rule := self.rules[parameter]) is None:
            return []
        shape = tuple(parameter.shape)
        return [name for name, kept in rule.state(shape).items() if by_rows(kept, shape)]

    def keeps_alike(self, parameter: Tensor, shape: Sequence[int]) -> bool:
        """Matrices may become too small for the projector, or what is kept for codes."""
        facts, taken = self._facts[parameter]
        new = replace(facts, shape=tuple(shape))
        takes = taken and self.parts.takes(facts.name or None, shape, facts.parameter_class)
        rules = self.rules[parameter], self.parts.row_rule(new, takes)
        if rules[0] is not None or rules[1] is not None:
            return rules[0] == rules[1]
        one, other = (
            {name: kept.coded(self.parts.bits) for name, kept in self.parts.inside(at).items()}
            for at in ((facts.shape[0], facts.shape[1]), (new.shape[0], new.shape[1]))
        )
        return one == other

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; tensors keep the dtypes in which they were saved.

        Raises:
            InputError: it is of another method, or of other fields; nothing is changed by then.
        """
        self.follow_exchange()
        load_as_saved(self, state_dict, self._kept, takes_turns=self.parts.choice is not None)

    def _kept(self, parameter: Tensor) -> dict[str, StateShape]:
        return self.parts.state_shapes(parameter.shape, self.rules[parameter])
