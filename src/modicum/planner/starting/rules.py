"""Rules of thumb for a first run: learning rate, batch, epochs, steps, warm-up, held-out data.

Each gives a value and the reason, which goes into the recipe. They are where a search begins, not
where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from modicum.data.parts import Draw

Reasoned = tuple[float, str]

# Full training, by parameters below: GPT-3's table 2.1 (arXiv 2005.14165) for new models; for
# trained ones Alpaca's 2e-5 at 7 B and 1e-5 at 13 B, and more for smaller models.
_NEW = ((1e8, 1e-3), (5e8, 6e-4), (1e9, 3e-4), (math.inf, 2e-4))
_FULL = ((1e9, 1e-4), (5e9, 5e-5), (10e9, 2e-5), (math.inf, 1e-5))
# An adapter takes about ten times the rate of full training (QLoRA, arXiv 2305.14314, table 9:
# 2e-4 at 7 B and 13 B, 1e-4 above; "LoRA Without Regret", Thinking Machines 2025: the factor).
_ADAPTER = ((1e9, 1e-3), (5e9, 5e-4), (20e9, 2e-4), (math.inf, 1e-4))
# A classifier of texts: MiniLM's 2e-4 (docs/how-to/classify-texts.md), then BERT's 5e-5 and 2e-5
# (arXiv 1810.04805, A.3: the best of 5e-5, 3e-5, 2e-5), then as above; an adapter ten times that.
_CLASSES = ((5e7, 2e-4), (2e8, 5e-5), (1e9, 2e-5), (math.inf, 1e-5))
MOST_SEQUENCES = 16  # in an update, as in QLoRA's runs of 7 B and 13 B
_MANY_ROWS = 60_000  # Alpaca's 52,000 rows were gone through three times
_PASSES = 4  # over short text: as good as new text, by Muennighoff et al., arXiv 2305.16264
_FEW_UPDATES = 500


def learning_rate(parameters: int, *, new: bool, adapter: str | None) -> Reasoned:
    """The peak of the schedule, by what is trained and the size of the model."""
    table = _NEW if new else _FULL if adapter is None else _ADAPTER
    rate = next(rate for below, rate in table if parameters < below)
    size = f"{parameters / 1e9:.2g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
    if new:
        return rate, f"a new model of {size} parameters: GPT-3's table 2.1"
    if adapter is None:
        return rate, f"all of {size} parameters: Alpaca's 2e-5 at 7 B, more for smaller models"
    return rate, f"an adapter on {size} parameters: QLoRA's 2e-4 at 7 B, more for smaller models"


def class_rate(parameters: int, adapter: str | None) -> Reasoned:
    """The peak of the schedule for a classifier of texts, by what is trained and its size.

    >>> class_rate(110_000_000, None)[0], class_rate(110_000_000, "lora")[0]
    (5e-05, 0.0005)
    """
    rate = next(rate for below, rate in _CLASSES if parameters < below)
    size = f"{parameters / 1e9:.2g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
    bert = "BERT's 2e-5 to 5e-5, more for smaller models"
    if adapter is None:
        return rate, f"all of {size} parameters: {bert}"
    return float(f"{10 * rate:.1g}"), f"an adapter on {size} parameters: ten times {bert}"


def class_epochs() -> tuple[int, str]:
    """How often labelled texts are gone through."""
    return 3, "BERT took 2 to 4, of few rows and of many; watch the validation accuracy"


def batch_size(rows: int) -> tuple[int, str]:
    """Sequences in an update, of so many rows of tokens.

    >>> batch_size(100_000)[0], batch_size(20)[0]
    (16, 2)
    """
    size = MOST_SEQUENCES
    while size > 1 and rows // size < 8:
        size //= 2
    if size == MOST_SEQUENCES:
        return size, "sequences in an update, as in QLoRA's runs"
    return size, "sequences in an update; so few, since there are few rows"


def epochs(examples: int, *, new: bool = False) -> tuple[int, str]:
    """How often examples are gone through."""
    if examples > _MANY_ROWS:
        return 1, "many rows: once is enough to begin with"
    if new:
        return 3, "to see that it learns; a new model needs more, such as 20, to know its examples"
    return 3, "as Alpaca's 52,000 rows were; watch the validation loss, fewer may do"


def steps(rows: int, batch: int) -> tuple[int, str]:
    """Updates on continuous text of so many rows of tokens."""
    once = math.ceil(rows / batch)
    passes = min(_PASSES, max(1, math.ceil(_FEW_UPDATES / once)))
    if passes == 1:
        return once, "once through the text, about"
    return passes * once, f"{passes} times through the text: there is little of it"


def warmup_steps(updates: int, new: bool, *, head: bool = False) -> tuple[int, str]:
    """Updates over which the learning rate rises; BERT's tenth for a new head."""
    part = 0.1 if head else 0.05 if new else 0.03
    count = 0 if updates < 10 else max(1, round(part * updates))
    return count, f"{part:.0%} of about {updates:,} updates"


def evaluate_every(updates: int) -> tuple[int, str]:
    """Updates between two evaluations."""
    if updates > 5 * _FEW_UPDATES:
        return _FEW_UPDATES, "steps"
    return max(1, updates // 5), "steps: about five times in all"


def held_out(documents: int, examples: bool, seed: int | None = None) -> Reasoned:
    """The part of the documents to evaluate on.

    Args:
        documents: how many there are.
        examples: whether they are examples, not texts of any length.
        seed: of the run, which decides the ones that are held out; None: where `documents` is an
            estimate.
    """
    least = 20 if examples else 4
    if documents < least:
        return 0.0, f"nothing is held out, as there is so little: {documents}"
    part = float(f"{500 / documents:.1g}") if documents * 0.05 > 500 else 0.05
    count = f"about {max(1, round(part * documents)):,}"
    if seed is not None:
        count = f"{sum(Draw(part, seed=seed).flags(documents)):,}"
    return part, f"{count} of the documents, never trained"


def held_out_by_class(classes: Collection[int]) -> Reasoned:
    """The part of the texts to evaluate on, of each class, and why.

    Args:
        classes: how many texts each has.

    >>> held_out_by_class((100, 40)), held_out_by_class((9, 9, 9))[0]
    ((0.05, '7 of the texts, of each class its part; never trained'), 0.12)
    """
    texts, most = sum(classes), max(classes, default=0)
    part, why = held_out(texts, examples=True)
    if not part or most < 2:
        return 0.0, why if not part else "nothing is held out, as no class has two texts"
    if round(part * most) < 1:
        part = math.ceil(100 / most) / 100
    held = sum(min(round(part * count), count - 1) for count in classes)
    return part, f"{held:,} of the texts, of each class its part; never trained"


def checkpoint_every(seconds: float | None) -> tuple[str, str]:
    """How often a run of so many seconds is saved."""
    if seconds is not None and seconds < 600:
        return "1m", "what a crash can lose of a run of minutes"
    if seconds is not None and seconds > 36_000:
        return "15m", "what a crash can lose of a run of many hours"
    return "5m", "what a crash can lose"
