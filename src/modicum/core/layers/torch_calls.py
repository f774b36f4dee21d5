"""Which torch function is running: how hooks on tensors know what they are called for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Call:
    """A call of a torch function that is under way."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def argument(self, place: int, name: str) -> Any:
        """An argument, however it was given; None where it was not."""
        if place < len(self.arguments):
            return self.arguments[place]
        return self.keywords.get(name)


class Calls(TorchFunctionMode):
    """Knows which torch function is running, and tells of what it returned."""

    def __init__(self, done: Callable[[Call, Any], None] = lambda call, output: None) -> None:
        super().__init__()
        self.current: Call | None = None
        self._done = done

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        before, self.current = self.current, Call(func, args, kwargs or {})
        try:
            output = func(*args, **(kwargs or {}))
        finally:
            call, self.current = self.current, before
        self._done(call, output)
        return output
