"""The state of a run as one registry of named views; snapshots and resume read this list alone.

A view is something that gives its state as tensors and plain values and takes it back. Nothing is
pickled: tensors go to safetensors, the rest to JSON, so a state dictionary is flattened to dotted
names and both kinds are distinguished here.

With several ranks a view is either shared or each rank's own. The ranks together hold the state of
a shared view, each all of it or, where tensors are DTensors, a part; a checkpoint holds it once and
any number of ranks can take it up. What is each rank's own is kept rank by rank.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.random import derive_seed
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, whole
from modicum.core.torch_private import is_persistent

Like = Callable[[str], Tensor | None]
Regroup = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


class Stateful(Protocol):
    """What a view stands on: any object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


@runtime_checkable
class WholeState(Protocol):
    """An optimizer that keeps full tensors for some parameters, be they sharded or not.

    Of a sharded parameter one of the ranks has them, its owner: it alone gives them to a checkpoint
    and takes them out of one. Optimizers without these methods lay all state out as parameters are.
    """

    def keeps_whole(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is of full tensors."""

    def holds(self, parameter: Tensor) -> bool:
        """Whether this rank keeps the state of a parameter."""


def _whole(key: str) -> None:
    """No live tensor represents any entry: each is loaded unsharded."""


@dataclass(frozen=True)
class View:
    """A named part of the run's state.

    Args:
        name: unique in a registry.
        read: gives tensors and JSON values by dotted name.
        write: takes them back. The mapping that it is given may read each tensor from the disk
            when it is asked for it, so it is best gone through once.
        like: the live tensor, perhaps a DTensor, that an entry is laid out as when it is loaded,
            if it has the entry's shape. For None the entry is loaded unsharded, on every rank.
        per_rank: whether each rank has a state of its own, as torch's generators have.
        regroup: makes this rank's state of those of all old ranks, in order, where a state of
            another number of ranks is taken up; where ranks are as many, each takes its own.
        suits: whether it can take its own up, of as many ranks: they may have shared the work
            another way. If left out, it can.
    """

    name: str
    read: Callable[[], Mapping[str, Any]]
    write: Callable[[Mapping[str, Any]], Any]
    like: Like = _whole
    per_rank: bool = False
    regroup: Regroup | None = None
    suits: Callable[[Mapping[str, Any]], bool] | None = None

    @property
    def follows_tensors(self) -> bool:
        """Whether entries are laid out as live tensors; `write` then reads each of them once."""
        return self.like is not _whole


@dataclass
class StateRegistry:
    """Every view of the run's state, by name.

    >>> registry = StateRegistry()
    >>> counter = {"count": 3}
    >>> registry.add("counter", lambda: dict(counter), counter.update)
    >>> saved = registry.read()
    >>> counter["count"] = 9
    >>> registry.write(saved)
    >>> counter
    {'count': 3}
    """

    views: dict[str, View] = field(default_factory=dict)

    def add(
        self,
        name: str,
        read: Callable[[], Mapping[str, Any]],
        write: Callable[[Mapping[str, Any]], Any],
        *,
        like: Like = _whole,
        per_rank: bool = False,
        regroup: Regroup | None = None,
    ) -> None:
        """Register a view; the arguments are those of `View`."""
        self.add_view(View(name, read, write, like, per_rank, regroup))

    def add_view(self, view: View) -> None:
        """Register a view.

        Raises:
            ValueError: its name is taken, or holds `/` or `#`, which separate names on disk.
        """
        if view.name in self.views:
            raise ValueError(f"the state {view.name!r} is registered already")
        if not view.name or set(view.name) & set("/#"):
            raise ValueError(f"a state's name has no '/' and no '#', and {view.name!r} has")
        self.views[view.name] = view

    def add_object(self, name: str, owner: Stateful) -> None:
        """Register an object with `state_dict` and `load_state_dict`."""
        self.add(name, owner.state_dict, owner.load_state_dict)

    def read(self) -> dict[str, Mapping[str, Any]]:
        """The full state: view name to its dictionary. Tensors are views, not copies."""
        return {name: view.read() for name, view in self.views.items()}

    def write(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put a full state back.

        Raises:
            InputError: a view has no state there, or there is state that nobody owns.
        """
        self.check(state.keys())
        for name, view in self.views.items():
            view.write(state[name])

    def check(self, names: Iterable[str], skip: Collection[str] = ()) -> None:
        """Make sure that a state with views of these names is one of this registry's.

        Args:
            names: of the views there.
            skip: views that need not be there, or may be there without an owner.

        Raises:
            InputError: a view has no state there, or there is state that nobody owns.
        """
        there, own = set(names) - set(skip), self.views.keys() - set(skip)
        missing, unknown = own - there, there - own
        if missing or unknown:
            problem = f"holds no state for {sorted(missing)}" if missing else ""
            problem += f"{' and ' if missing and unknown else ''}"
            problem += f"holds state that nobody asks for: {sorted(unknown)}" if unknown else ""
            raise InputError(f"the checkpoint does not match this run: it {problem}")


def _reshard(model: nn.Module) -> None:
    """Have FSDP put its sharded parameters back into the modules."""
    # Where nobody has imported FSDP, which takes a while, nothing is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict of the model would hold."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                yield f"{path}.{name}" if path else name, buffer


def trained_state(
    model: nn.Module, masters: Mapping[str, Tensor] | None = None
) -> tuple[Callable[[], dict[str, Tensor]], Callable[..., None]]:
    """Reader and writer of what training changes in a model: trained parameters and buffers.

    Frozen parameters are the base model's and stay where they came from. Parameters may be DTensors
    or unsharded, and so may be what is written into them.

    Args:
        masters: what is trained in place of the parameters of these names.
    """

    def tensors() -> dict[str, Tensor]:
        _reshard(model)
        parameters: dict[str, Tensor] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        parameters |= masters or {}
        return parameters | dict(_persistent_buffers(model))

    def read() -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in tensors().items()}

    def write(state: Mapping[str, Tensor]) -> None:
        own = tensors()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())[:3]
            raise InputError(f"the checkpoint holds other parameters than the model: {different}")
        with torch.no_grad():
            for name, tensor in own.items():
                value = state[name]
                if tensor.shape != value.shape or tensor.dtype != value.dtype:
                    raise InputError(
                        f"the checkpoint's {name} is {tuple(value.shape)} "
                        f"{value.dtype}, the model's {tuple(tensor.shape)} {tensor.dtype}"
                    )
                tensor.copy_(_laid_out(value, tensor))

    return read, write


def optimizer_state(
    optimizer: torch.optim.Optimizer,
) -> tuple[Callable[[], dict[str, Any]], Callable[..., None]]:
    """Reader and writer of an optimizer's state by parameter *name* (`names` of its groups).

    Names survive a change in the order or the grouping of parameters; indices do not. What another
    rank keeps (see `WholeState`) is passed over without being read.
    """

    def named() -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for group in optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def read() -> dict[str, Any]:
        return {
            f"{name}/{key}": value
            for name, parameter in named().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def write(state: Mapping[str, Any]) -> None:
        own = named()
        # PyTorch's own rule: the count of updates stays on the host but for these.
        on_device = {
            name
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for name in group["names"]
        }
        optimizer.state.clear()
        for full in state:
            name, key = full.rsplit("/", 1)
            if name not in own:
                raise InputError(f"the checkpoint has optimizer state for {name!r}, unknown here")
            keeper = _keeper(optimizer, own[name])
            if keeper is not None and not keeper.holds(own[name]):
                continue
            value = state[full]
            if isinstance(value, Tensor) and (key != "step" or name in on_device):
                value = value.to(own[name].device)
                if keeper is None and value.shape == own[name].shape:
                    value = _laid_out(value, own[name])
            optimizer.state[own[name]][key] = value.clone() if isinstance(value, Tensor) else value

    return read, write


def _keeper(optimizer: Any, parameter: Tensor) -> WholeState | None:
    """The optimizer, if it keeps full tensors for this parameter."""
    known = isinstance(optimizer, WholeState)
    return optimizer if known and optimizer.keeps_whole(parameter) else None


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """`value`, full or sharded as `like` is; the full one is gathered from all ranks."""
    if not is_sharded(like):
        return whole(value)
    if is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the full value, so nothing needs to be sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def random_state() -> tuple[Callable[[], dict[str, Any]], Callable[..., None]]:
    """Reader and writer of torch's own generators: the CPU's and every accelerator's.

    This process's own accelerator is there once more by a name without a number: where others are
    visible than before, it may have another one.
    """

    def read() -> dict[str, Any]:
        state: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            for index, value in enumerate(torch.cuda.get_rng_state_all()):
                state[f"cuda{index}"] = value
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def write(state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                if f"cuda{index}" in state:
                    torch.cuda.set_rng_state(state[f"cuda{index}"], index)
            if "cuda" in state:  # older checkpoints have none
                torch.cuda.set_rng_state(state["cuda"])

    return read, write


def model_view(
    model: nn.Module, name: str = "model", masters: Mapping[str, Tensor] | None = None
) -> View:
    """What training changes in a model, as a view: see `trained_state`."""

    def like(key: str) -> Tensor | None:
        if masters is not None and key in masters:
            return masters[key]
        owner, _, last = key.rpartition(".")
        try:
            tensor = getattr(model.get_submodule(owner), last)
        except AttributeError:
            return None
        return tensor if isinstance(tensor, Tensor) else None

    return View(name, *trained_state(model, masters), like=like)


def optimizer_view(optimizer: torch.optim.Optimizer, name: str = "optimizer") -> View:
    """An optimizer's state as a view: see `optimizer_state`.

    It is laid out as its parameters, but for what `WholeState` is about.
    """
    known: dict[str, Tensor] = {}

    def like(key: str) -> Tensor | None:
        parameter = key.rsplit("/", 1)[0]
        if parameter not in known:
            for group in optimizer.param_groups:
                known.update(zip(group["names"], group["params"], strict=True))
        found = known.get(parameter)
        return None if found is None or _keeper(optimizer, found) is not None else found

    return View(name, *optimizer_state(optimizer), like=like)


def random_view(seed: int, ranks: Ranks, name: str = "random") -> View:
    """Torch's own generators as a view, for each rank its own.

    Another number of ranks than the saved one begins with fresh generators, which are a function
    of the seed, of all saved generators, of how many ranks there are and of which one this is.
    """
    read, write = random_state()

    def regroup(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        digest = hashlib.sha256()
        for state in states:
            digest.update(bytes(state["cpu"].tolist()))
        fresh = derive_seed(seed, f"{name} {digest.hexdigest()} {ranks.rank} of {ranks.size}")
        own = {"cpu": torch.Generator().manual_seed(fresh).get_state()}
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                generator = torch.Generator(f"cuda:{index}").manual_seed(fresh)
                own[f"cuda{index}"] = generator.get_state()
            own["cuda"] = own[f"cuda{torch.cuda.current_device()}"]
        return own

    return View(name, read, write, per_rank=True, regroup=regroup)
