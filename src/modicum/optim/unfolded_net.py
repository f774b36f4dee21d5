"""A recurrent net over time whose pre-activations and states are free variables tied by penalties.

The net is a_t = U x_t + W s_{t-1} + b, s_t = tanh(a_t), o = V s_T + c, from s_0 = 0, with the loss
on o, at the last step T of each sequence. With w_t = mu before the last step and rho at it, l the
multipliers, which the last step alone has, and r the residuals (a - Ux - Ws - b, s - tanh a,
o - Vs - c), what the blocks lower is

    L = loss(o) + 1/2 sum_t w_t (|r1_t|^2 + |r2_t|^2)_{t<T} + rho/2 sum_i |r_i - l_i / rho|^2_{t=T}.

Given the weights every sequence is by itself, and given all others so is every variable: no product
over time is formed, and the steps of a block are made for all t at once. Given the variables,
weights are least squares, whose normal equations add up over sequences, micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NEWTON_STEPS, MAJORIZED_STEPS = 10, 3
# Of (r - tanh a)^2 / 2 the second derivative is at most 1.24 for |r| <= 1, and this more for each
# unit beyond; with the 1 of the other term, and some room.
CURVATURE, BEYOND = 2.5, 0.77


@dataclass(frozen=True)
class Penalties:
    """How strongly variables are tied.

    Args:
        mu: weight of a constraint before the last step.
        rho: of one at the last step, which also has a multiplier.
        tau: how strongly a state keeps to what it was in its update.
        kappa: how strongly weights keep to what they were, as a part of the sum of all w_t.
    """

    mu: float
    rho: float
    tau: float
    kappa: float


@dataclass(frozen=True)
class NetWeights:
    """The net's weights: `recurrent` [h, d + h + 1] is (U, W, b), `output` [C, h + 1] is (V, c).

    Args:
        inputs: d, the channels of an input.
    """

    recurrent: Tensor
    output: Tensor
    inputs: int

    @property
    def within(self) -> Tensor:
        """W [h, h]."""
        return self.recurrent[:, self.inputs : -1]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """U, W, b, V and c."""
        u, out = self.recurrent[:, : self.inputs], self.output
        return u, self.within, self.recurrent[:, -1], out[:, :-1], out[:, -1]

    @property
    def finite(self) -> bool:
        """Whether all are numbers."""
        return bool(self.recurrent.isfinite().all() and self.output.isfinite().all())

    def with_recurrent(self, recurrent: Tensor) -> NetWeights:
        """The same with another (U, W, b)."""
        return replace(self, recurrent=recurrent)

    def with_output(self, output: Tensor) -> NetWeights:
        """The same with another (V, c)."""
        return replace(self, output=output)

    def states(self, x: Tensor, before: Tensor) -> Tensor:
        """U x_t + W s_{t-1} + b of x [..., d] and states [..., h]."""
        return with_ones(x, before) @ self.recurrent.T

    def outputs(self, states: Tensor) -> Tensor:
        """V s + c of states [N, h]."""
        return with_ones(states) @ self.output.T


def with_ones(*parts: Tensor) -> Tensor:
    """Columns of all parts next to each other, and one of ones."""
    return torch.cat([*parts, torch.ones_like(parts[0][..., :1])], -1)


@dataclass(frozen=True)
class NormalEquations:
    """Sums over rows z (inputs) and y (targets) with weights w: w z z^T, w y z^T, and of w."""

    matrix: Tensor
    right: Tensor
    weight: Tensor

    @classmethod
    def of(cls, z: Tensor, y: Tensor, w: Tensor) -> NormalEquations:
        """Those of z [rows, p], y [rows, q], w [rows, 1]."""
        weighed = z * w
        return cls(weighed.T @ z, y.T @ weighed, w.sum())

    def __add__(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations(
            self.matrix + other.matrix, self.right + other.right, self.weight + other.weight
        )

    def flat(self) -> Tensor:
        """All numbers in one tensor of float64: what ranks exchange."""
        parts = (self.matrix.flatten(), self.right.flatten(), self.weight.reshape(1))
        return torch.cat(parts).double()

    def filled(self, flat: Tensor) -> NormalEquations:
        """Equations of the same shapes, of what `flat` gave."""
        first, second = self.matrix.numel(), self.right.numel()
        matrix, right, weight = flat.split([first, second, 1])
        return NormalEquations(
            matrix.view_as(self.matrix), right.view_as(self.right), weight.squeeze()
        )

    def solved(self, before: Tensor, kappa: float) -> Tensor:
        """The weights that minimise sum w |y - M z|^2 + kappa (sum of w) |M - before|^2.

        In float64; the result has the dtype of `before`.
        """
        pull = kappa * self.weight.double()
        identity = torch.eye(len(self.matrix), dtype=torch.float64, device=before.device)
        right = self.right.double() + pull * before.double()
        found = torch.linalg.solve(self.matrix.double() + pull * identity, right, left=False)
        return found.to(before.dtype)


@dataclass
class UnfoldedNet:
    """The variables of some sequences, next to the sequences themselves.

    Args:
        x: [T, N, d].
        last: int64 [N], the number of each sequence's last step, from 0; what follows is padding.
        labels: int64 [N], or -100 for one that is not trained.
        a, s: [T, N, h]; `o`: [N, C]; `multipliers`: of a, s and o at the last step.
    """

    x: Tensor
    last: Tensor
    labels: Tensor
    penalties: Penalties
    a: Tensor = field(init=False)
    s: Tensor = field(init=False)
    o: Tensor = field(init=False)
    multipliers: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        steps = torch.arange(len(self.x), device=self.x.device)[:, None]
        mu, rho = self.penalties.mu, self.penalties.rho
        trained = self.labels >= 0
        self.at_last = ((steps == self.last) & trained)[..., None]
        inner = ((steps < self.last) & trained)[..., None]
        self.w = mu * inner.to(self.x.dtype) + rho * self.at_last.to(self.x.dtype)
        self.trained = trained[:, None]

    @torch.no_grad()
    def forward(self, weights: NetWeights) -> Tensor:
        """Set all variables by a forward pass, in which no residual is left; the outputs [N, C]."""
        width = len(weights.within)
        state = self.x.new_zeros(self.x.shape[1], width)
        found = []
        for x in self.x:
            found.append(weights.states(x, state))
            state = found[-1].tanh()
        self.a = torch.stack(found)
        self.s = self.a.tanh()
        self.o = weights.outputs(self.at_end(self.s))
        parts = (self.o.new_zeros(len(self.o), width) for _ in range(2))
        self.multipliers = [*parts, torch.zeros_like(self.o)]
        return self.o

    def at_end(self, values: Tensor) -> Tensor:
        """Of [T, N, h] those at each sequence's last step: [N, h]."""
        return values[self.last, torch.arange(len(self.last), device=self.last.device)]

    def before(self) -> Tensor:
        """s_{t-1} for every t: [T, N, h]."""
        return torch.cat([torch.zeros_like(self.s[:1]), self.s[:-1]])

    def shift(self, number: int) -> Tensor:
        """l / rho at the last steps of [T, N, h], and zeros elsewhere."""
        return self.at_last * (self.multipliers[number] / self.penalties.rho)

    # Blocks

    def update_o(self, weights: NetWeights) -> None:
        """o by damped Newton steps on loss(o) + rho/2 |o - q|^2, curved by 1/2 + rho at most."""
        rho = self.penalties.rho
        q = weights.outputs(self.at_end(self.s)) + self.multipliers[2] / rho
        aim = torch.zeros_like(self.o).scatter_(1, self.labels.clamp(min=0)[:, None], 1.0)
        for _ in range(NEWTON_STEPS):
            slope = (self.o.softmax(1) - aim) * self.trained + rho * (self.o - q)
            self.o = self.o - slope / (0.5 + rho)

    def output_equations(self) -> NormalEquations:
        """The least squares of (V, c): o - l3 / rho on [s_T, 1]."""
        rho = self.penalties.rho
        w = rho * self.trained.to(self.o.dtype)
        return NormalEquations.of(
            with_ones(self.at_end(self.s)), self.o - self.multipliers[2] / rho, w
        )

    def update_s(self, weights: NetWeights) -> None:
        """Every s_t by its linear equation; its matrix is one of three, by how far the end is."""
        mu, rho, tau = (getattr(self.penalties, name) for name in ("mu", "rho", "tau"))
        within, out, bias = weights.within, weights.output[:, :-1], weights.output[:, -1]
        ahead = self.a - weights.states(self.x, torch.zeros_like(self.s)) - self.shift(0)
        ahead = torch.cat([self.w[1:] * ahead[1:], torch.zeros_like(ahead[:1])]) @ within
        end = rho * (self.o - bias - self.multipliers[2] / rho) @ out
        right = self.w * (self.a.tanh() + self.shift(1)) + tau * self.s + ahead
        right = right + self.at_last * end
        eye = torch.eye(len(within), dtype=right.dtype, device=right.device)
        inner = (mu + tau) * eye + mu * within.T @ within
        next_to_last = (mu + tau) * eye + rho * within.T @ within
        last = (rho + tau) * eye + rho * out.T @ out
        followed = torch.cat([self.at_last[1:], torch.zeros_like(self.at_last[:1])])
        found = _solved(inner, right)
        found = torch.where(followed, _solved(next_to_last, right), found)
        found = torch.where(self.at_last, _solved(last, right), found)
        self.s = torch.where(self.w > 0, found, self.s)

    def update_a(self, weights: NetWeights) -> None:
        """Every a_t by steps that no curvature of its two terms makes too long."""
        q = weights.states(self.x, self.before()) + self.shift(0)
        aim = self.s - self.shift(1)
        size = 1 / (CURVATURE + BEYOND * (aim.abs() - 1).clamp(min=0))
        for _ in range(MAJORIZED_STEPS):
            t = self.a.tanh()
            slope = self.a - q - (aim - t) * (1 - t * t)
            self.a = torch.where(self.w > 0, self.a - size * slope, self.a)

    def recurrent_equations(self) -> NormalEquations:
        """The least squares of (U, W, b): a_t - l1 / rho on [x_t, s_{t-1}, 1], over all t."""
        z = with_ones(self.x, self.before()).flatten(0, 1)
        return NormalEquations.of(z, (self.a - self.shift(0)).flatten(0, 1), self.w.flatten(0, 1))

    def residuals(self, weights: NetWeights) -> list[Tensor]:
        """Of a, s and o at the last steps: [N, h], [N, h], [N, C]."""
        r1 = self.at_end(self.a - weights.states(self.x, self.before()))
        r2 = self.at_end(self.s - self.a.tanh())
        r3 = self.o - weights.outputs(self.at_end(self.s))
        return [r1, r2, r3]

    def update_multipliers(self, weights: NetWeights) -> None:
        """l falls by rho times the residual."""
        for number, residual in enumerate(self.residuals(weights)):
            self.multipliers[number] = (
                self.multipliers[number] - self.penalties.rho * residual * self.trained
            )

    def value(self, weights: NetWeights) -> Tensor:
        """L, one element."""
        rho = self.penalties.rho
        loss = torch.nn.functional.cross_entropy(
            self.o, self.labels, ignore_index=-100, reduction="sum"
        )
        r1 = self.a - weights.states(self.x, self.before()) - self.shift(0)
        r2 = self.s - self.a.tanh() - self.shift(1)
        r3 = (self.residuals(weights)[2] - self.multipliers[2] / rho) * self.trained
        tied = (self.w * (r1.square() + r2.square())).sum() + rho * r3.square().sum()
        return loss + tied / 2


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """s with matrix s = right for each row of [T, N, h]; the matrix is symmetric and definite."""
    factor = torch.linalg.cholesky(matrix)
    columns = right.flatten(0, -2).T
    return torch.cholesky_solve(columns, factor).T.view_as(right)
