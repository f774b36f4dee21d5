"""What an optimizer keeps of rows that mean something else from here on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modicum.core.contracts.row_meanings import Sources, move_rows, move_state_rows
from modicum.proofs.contracts.adapters.subjects import assert_close
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.optim.subjects import (
    RATE,
    OptimizerSubject,
    numbers,
    optimizers_check,
    small,
)

ROWS, COLUMNS = 31, 18
REVERSED = tuple(range(ROWS))[::-1]
SOME_NEW: Sources = [None if row % 3 == 1 else row for row in range(ROWS)]


class _OneMatrix:
    """A matrix, its optimizer, and gradients by the number of the step."""

    def __init__(self, subject: OptimizerSubject) -> None:
        self.matrix = nn.Parameter(numbers(ROWS, COLUMNS, name="matrix"))
        self.optimizer = small(subject).bind([{"params": [self.matrix], "lr": RATE}])

    def steps(self, first: int, last: int, order: Sources | None = None) -> None:
        """Some updates, with the rows of their gradients in an order."""
        for step in range(first, last):
            self.matrix.grad = numbers(ROWS, COLUMNS, name=f"gradient {step}")
            if order is not None:
                move_rows(self.matrix.grad, order)
            self.optimizer.step()

    def move(self, sources: Sources) -> bool:
        """Move the rows of weight and state."""
        with torch.no_grad():
            move_rows(self.matrix, sources)
        return move_state_rows(self.optimizer, self.matrix, sources)

    def kept(self) -> dict[str, Tensor]:
        """A copy of the state's tensors."""
        state = self.optimizer.state.get(self.matrix, {})
        return {name: v.clone() for name, v in state.items() if isinstance(v, Tensor)}


@optimizers_check()
def check_state_follows_rows(subject: OptimizerSubject) -> None:
    """With rows of weights, gradients and state in another order, each row is trained as before."""
    one, other = _OneMatrix(subject), _OneMatrix(subject)
    one.steps(0, 4)
    other.steps(0, 2)
    if not other.move(REVERSED):
        raise NotApplicable("its state of a matrix has no rows, and begins anew")
    other.steps(2, 4, REVERSED)
    with torch.no_grad():
        move_rows(other.matrix, REVERSED)
    assert_close(other.matrix.detach(), one.matrix.detach(), 1e-5, "moved, rows go elsewhere")


@optimizers_check()
def check_new_rows_are_new(subject: OptimizerSubject) -> None:
    """Of new rows nothing is kept, of the others every bit; or all is forgotten."""
    training = _OneMatrix(subject)
    training.steps(0, 3)
    before = training.kept()
    if training.move(SOME_NEW):
        for name, now in training.kept().items():
            then = before[name]
            if now.numel() > 1 and now.shape[0] == ROWS:
                for row, source in enumerate(SOME_NEW):
                    new = torch.zeros_like(now[row]) if source is None else then[row]
                    assert torch.equal(now[row], new), f"row {row} of {name} is another"
            else:
                assert torch.equal(now, then), f"{name} is another"
    else:
        assert not training.kept(), "state without rows stays"
    training.steps(3, 6)
    assert bool(training.matrix.isfinite().all()), "with new rows the matrix is not finite"
    training.move([None] * ROWS)
    assert not training.kept(), "of a matrix that is new something is kept"
    fresh = _OneMatrix(subject)
    with torch.no_grad():
        for each in (training, fresh):
            each.matrix.copy_(numbers(ROWS, COLUMNS, name="again"))
            each.steps(0, 2)
    assert_close(training.matrix.detach(), fresh.matrix.detach(), 1e-6, "it is trained otherwise")
