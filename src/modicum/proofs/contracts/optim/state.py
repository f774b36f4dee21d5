"""What of an optimizer survives in a state dictionary and by name."""

from __future__ import annotations

import copy
import json

import torch
from torch import Tensor

from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.optim.subjects import (
    OptimizerSubject,
    TrainedOptimizer,
    assert_equal,
    llama,
    optimizers_check,
    small,
)


@optimizers_check()
def check_state_dict_round_trip(subject: OptimizerSubject) -> None:
    """State read from one optimizer and loaded into another is the same, dtypes included."""
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (TrainedOptimizer(small(subject), llama(dtype)) for _ in range(2))
        one.steps(0, 3)
        saved = copy.deepcopy(one.optimizer.state_dict())
        other.model.load_state_dict(one.model.state_dict())
        other.optimizer.load_state_dict(saved)
        theirs = other.optimizer.state_dict()["state"]
        assert theirs.keys() == saved["state"].keys(), "state of other parameters comes back"
        for number, entries in saved["state"].items():
            for key, value in entries.items():
                found = theirs[number][key]
                assert found.dtype == value.dtype, f"{key} is {found.dtype}, it was {value.dtype}"
                assert torch.equal(found, value), f"{key} comes back as something else"
        one.steps(3, 6)
        other.steps(3, 6)
        assert_equal(one.model, other.model, f"after a state dictionary's round trip, in {dtype}")


@optimizers_check()
def check_state_is_tensors_and_plain_values(subject: OptimizerSubject) -> None:
    """By name, every entry is a tensor or JSON, so that nothing needs to be pickled."""
    training = TrainedOptimizer(small(subject))
    training.steps(0, 2)
    for name, value in training.read()["optimizer"].items():
        if not isinstance(value, Tensor):
            assert json.loads(json.dumps(value)) == value, f"{name} is {type(value).__name__}"


@optimizers_check()
def check_resumes_to_the_bit(subject: OptimizerSubject) -> None:
    """Stopped after one to four steps and continued in a new model, it ends in the same bits."""
    if "exact_resume" not in subject.info.traits:
        raise NotApplicable("the method does not claim `exact_resume`")
    whole = TrainedOptimizer(small(subject))
    whole.steps(0, 6)
    for at in (1, 2, 3, 4):
        begun, continued = TrainedOptimizer(small(subject)), TrainedOptimizer(small(subject))
        begun.steps(0, at)
        continued.steps(7, 8)  # a stranger's state, of which nothing may be left
        continued.write(begun.read())
        continued.steps(at, 6)
        assert_equal(whole.model, continued.model, f"after an interruption at step {at}")
