"""What there is to know of an attention head before its exponentials become a truncated series.

Of sampled queries the scores of all their keys are made, and with them the attention weights, exact
and of each degree. Everything is a maximum, so batches and ranks go together as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.attention_calls import SeenAttention

# Added to a score, less than this is a mask and no change of the score.
_MASKED = -1e4
# Scores of some heads that are held at once.
_ELEMENTS = 1 << 20
# Of weights that no series gives, or whose sum is not positive.
WRONG = 2.0


@dataclass(frozen=True)
class HeadMaxima:
    """Largest values over what was seen of an attention's heads.

    Args:
        length, width: the longest row of keys that a query sees, and the head's width.
        biased: 1 where numbers are added to scores that are seen, else 0.
        entry: [heads], the largest entry of Q and K, each with half of the scale.
        score: [heads], the largest score of the sampled queries.
        errors: [degrees, heads], from degree 1: of weights by the series the largest distance of a
            row to the exact one, as the sum of absolute differences.
        kept_errors: the same without the largest keys, and without the worst rows.
    """

    length: float
    width: float
    biased: float
    entry: Tensor
    score: Tensor
    errors: Tensor
    kept_errors: Tensor

    @property
    def flat(self) -> list[float]:
        """All of it in one list, of which maxima can be taken over ranks."""
        each = (self.entry, self.score, self.errors, self.kept_errors)
        numbers = torch.cat([value.double().flatten().cpu() for value in each]).tolist()
        return [self.length, self.width, self.biased, *numbers]

    @classmethod
    def of_flat(cls, numbers: list[float], heads: int) -> HeadMaxima:
        """What `flat` gave."""
        length, width, biased, *others = numbers
        rows = torch.tensor(others, dtype=torch.float64).view(-1, heads)
        half = len(rows) // 2 + 1
        return cls(length, width, biased, rows[0], rows[1], rows[2:half], rows[half:])


@dataclass(frozen=True)
class Looking:
    """How closely heads are looked at.

    Args:
        degrees: from 1 to this.
        samples: queries of each sequence: half of them those of the largest norm, where series
            fail first, the others at equal distances.
        outliers: the share of queries, and of keys, that is left out for `kept_errors`: those of
            the largest norm.
    """

    degrees: int
    samples: int
    outliers: float


def measured(seen: SeenAttention, how: Looking, rows: int | None = None) -> HeadMaxima:
    """Measure what one call was given: of all heads, the first `rows` sequences."""
    half = math.sqrt(seen.scale)
    q, k = seen.query[:rows].float() * half, seen.key[:rows].float() * half
    groups = torch.arange(q.shape[1], device=q.device).split(_at_once(k.shape[-2], how))
    parts: list[list[Tensor]] = [[] for _ in range(3)]
    longest = biased = 0.0
    for heads in groups:
        found = [_measured(seen, row, heads, q[row], k[row], how) for row in range(len(q))]
        for part, each in zip(
            parts, zip(*(tensors for tensors, _, _ in found), strict=True), strict=True
        ):
            part.append(torch.stack(each).amax(0))
        longest = max([longest, *(length for _, length, _ in found)])
        biased = max([biased, *(float(added) for _, _, added in found)])
    score, errors, kept_errors = (torch.cat(part, -1) for part in parts)
    entry = torch.maximum(q.abs().amax((0, 2, 3)), k.abs().amax((0, 2, 3)))
    # What is no number is larger than any, so that maxima keep it.
    entry, score = (each.nan_to_num(torch.inf, torch.inf) for each in (entry, score))
    return HeadMaxima(longest, q.shape[-1], biased, entry, score, errors, kept_errors)


def _at_once(keys: int, how: Looking) -> int:
    """Heads whose scores are held at the same time."""
    return max(1, _ELEMENTS // (how.samples * keys))


def _measured(
    seen: SeenAttention, row: int, heads: Tensor, q: Tensor, k: Tensor, how: Looking
) -> tuple[list[Tensor], float, bool]:
    """Of some heads of a sequence the largest score, and both errors; the length; if biased."""
    q, k = q[heads], k[heads]
    maxima: list[Tensor] = []
    longest, biased = 0.0, False
    for share in (0.0, how.outliers):
        places, fine = _sampled(q, how.samples, share)
        scores = q.gather(1, places.unsqueeze(-1).expand(-1, -1, q.shape[-1])) @ k.mT
        shown, added = _shown(seen, row, heads, places)
        longest, biased = max(longest, float(shown.sum(-1).max())), biased or added
        shown = shown & fine.unsqueeze(-1)
        if dropped := min(math.ceil(share * k.shape[-2]), k.shape[-2] - 1):
            worst = k.norm(dim=-1).topk(dropped, -1).indices
            hidden = torch.zeros_like(shown[:, 0]).scatter_(-1, worst, True)
            shown = shown & ~hidden.unsqueeze(-2)
        if not maxima:
            maxima.append(scores.abs().masked_fill(~shown, 0).amax((-2, -1)))
        maxima.append(_distances(scores, shown, how.degrees).amax(-1))
    return maxima, longest, biased


def _sampled(q: Tensor, samples: int, outliers: float) -> tuple[Tensor, Tensor]:
    """Of q [heads, L, d] places [heads, n], and whether these are no outliers."""
    heads, length, _ = q.shape
    order = q.norm(dim=-1).argsort(-1, descending=True)
    dropped = min(math.ceil(outliers * length), length - 1)
    large = order[:, dropped : dropped + samples // 2]
    count = min(samples - samples // 2, length)
    spread = torch.arange(1, count + 1, device=q.device) * length // count - 1
    places = torch.cat([large, spread.expand(heads, -1)], -1)
    is_out = torch.zeros(heads, length, dtype=torch.bool, device=q.device)
    is_out.scatter_(-1, order[:, :dropped], True)
    return places, ~is_out.gather(-1, places)


def _shown(seen: SeenAttention, row: int, heads: Tensor, places: Tensor) -> tuple[Tensor, bool]:
    """Which keys the sampled queries see, [heads, n, S], and whether a mask changes scores."""
    (rows, every, length, _), total = seen.query.shape, seen.key.shape[-2]
    shown = torch.ones(*places.shape, total, dtype=torch.bool, device=places.device)
    if seen.causal:
        shown = torch.arange(total, device=places.device) <= places.unsqueeze(-1)
    if seen.mask is None:
        return shown, False
    mask = seen.mask.detach()[(None,) * (4 - seen.mask.ndim)].expand(rows, every, length, total)
    mask = mask[row, heads.unsqueeze(-1), places]
    if mask.dtype == torch.bool:
        return shown & mask, False
    visible = mask > _MASKED
    return shown & visible, bool((visible & (mask != 0)).any())


def _distances(scores: Tensor, shown: Tensor, degrees: int) -> Tensor:
    """How far each degree's rows of weights are from the exact ones: [degrees, heads, n]."""
    exact = scores.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0.0)
    found, sees = [], shown.any(-1)
    term = shown.to(scores.dtype)
    weights = term
    for degree in range(1, degrees + 1):
        term = term * scores / degree
        weights = weights + term
        total = weights.sum(-1, keepdim=True)
        away = (weights / total - exact).abs().sum(-1)
        usable = (total.squeeze(-1) > 0) & away.isfinite()
        away = torch.where(usable, away.clamp(max=WRONG), WRONG)
        found.append(torch.where(sees, away, 0.0))
    return torch.stack(found)


def needed_degree(errors: Tensor, tolerance: float) -> int | None:
    """The smallest degree of which all errors [degrees] are small enough; None: there is none."""
    fine = (errors <= tolerance).nonzero().flatten()
    return int(fine[0]) + 1 if len(fine) else None


def sufficient_degree(score: float, tolerance: float) -> int | None:
    """The degree g at which M^(g+1) / (g+1)! is small enough, for scores of at most M.

    >>> sufficient_degree(1.0, 1e-3), sufficient_degree(10.7, 1e-3)
    (6, 33)
    """
    term = 1.0
    for t in range(1, 1000 if math.isfinite(score) else 0):
        term *= score / t
        if t > 1 and term <= tolerance and score < t:
            return t - 1
    return None


def finite(number: Any) -> float | None:
    """A number as JSON has it."""
    value = float(number)
    return round(value, 6) if math.isfinite(value) else None
