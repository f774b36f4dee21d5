"""Which modules use which trained parameters, and in which order a forward pass comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakMethod

from torch import nn

from modicum.core.contracts.parameters import trainable

Parameters = list[nn.Parameter]


class Uses:
    """Tells of trained parameters just before the modules that hold them run.

    A parameter is expected to be used by modules that hold it. One that is not (the output
    projection inside `nn.MultiheadAttention`, a factor that the layer around it reads) is found in
    the first update: it has a gradient, and no module that holds it ran. It is then reported
    before the nearest module around it that did run. Of one without a gradient it is not known
    who will read it (a branch, a layer that was left out): it is reported before each module
    around it that has not run either.

    Args:
        before: called with the parameters of each module before its forward pass, and in
            recomputation.
    """

    def __init__(self, model: nn.Module, before: Callable[[Parameters], None]) -> None:
        self._model, self._before = model, before
        self._trained = dict(trainable(model))
        self._names = {id(parameter): name for name, parameter in self._trained.items()}
        self._of: dict[nn.Module, Parameters] = {}
        self._called: dict[nn.Module, None] = {}
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in self._names]
            if own:
                self._add(module, own)
        self._recorders = [
            module.register_forward_pre_hook(_Hook(self._record), prepend=True)
            for module in model.modules()
        ]

    def layers(self) -> list[list[str]]:
        """Names of the parameters of each module, each where it is first used, as far as known."""
        called = [module for module in self._called if module in self._of]
        modules = [*called, *(module for module in self._of if module not in self._called)]
        seen: set[int] = set()
        layers = []
        for module in modules:
            layers.append([self._names[id(p)] for p in self._of[module] if id(p) not in seen])
            seen.update(map(id, self._of[module]))
        return [layer for layer in layers if layer]

    def learn(self, used: Iterable[nn.Parameter]) -> None:
        """End the recording of calls: these parameters have got a gradient from them."""
        for recorder in self._recorders:
            recorder.remove()
        told = {id(p) for module in self._called for p in self._of.get(module, ())}
        known = {id(parameter) for parameter in used}
        for parameter in self._trained.values():
            if id(parameter) in told:
                continue
            around = list(self._around(parameter))
            ran = [module for module in around if module in self._called][:1]
            if id(parameter) not in known:
                ran = [module for module in around if module not in self._called] or ran
            for module in ran:
                self._add(module, [parameter])

    def _around(self, parameter: nn.Parameter) -> Iterator[nn.Module]:
        """The modules around the one that holds a parameter, from the nearest to the model."""
        path = self._names[id(parameter)].split(".")[:-1]
        while path:
            path.pop()
            yield self._model.get_submodule(".".join(path))

    def _add(self, module: nn.Module, parameters: Parameters) -> None:
        if module not in self._of:
            self._of[module] = []
            module.register_forward_pre_hook(_Hook(self._tell), prepend=True)
        self._of[module] += parameters

    def _tell(self, module: nn.Module, inputs: Any) -> None:
        self._before(self._of[module])

    def _record(self, module: nn.Module, inputs: Any) -> None:
        self._called.setdefault(module)


class _Hook:
    """A hook that does nothing in a copy of its module, of which no weight is due."""

    def __init__(self, method: Callable[[nn.Module, Any], None] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(module, inputs)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
