"""What a compressor computes: its factors, their error, and the dense weight they represent."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.compress.compressed_model import CompressedModel
from modicum.compress.low_rank_base import FactorCompressor, LowRankCompressor
from modicum.core.layers.factorize import decompose
from modicum.core.layers.linear_forms import full_weight
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.compress.subjects import (
    CompressSubject,
    assert_close,
    calibrated,
    compress_check,
    compressed,
    llama,
    shapes,
    small,
    tokens,
)


@compress_check()
def check_the_report_tells_the_error(subject: CompressSubject) -> None:
    """The reported error is the factors' distance from the weight in the method's metric, to 1e-5.

    No plain SVD of the rank is nearer in that metric.
    """
    value, model = small(subject), llama()
    if not isinstance(value, FactorCompressor):
        raise NotApplicable("the method has no metric on a layer's inputs")
    calibration = calibrated(value, model)
    before = dict(model.named_parameters())
    handle = value.fit(model, calibration)
    assert handle.report is not None, "fitting leaves no report"
    for row in handle.report.layers:
        weight = before[f"{row.name}.weight"].detach().double()
        metric = value.metric(handle.layers[row.name], calibration)
        found = _error(weight, full_weight(model.get_submodule(row.name)).double(), metric)
        total = _error(weight, torch.zeros_like(weight), metric)
        assert abs(row.total - total) <= 1e-9 * total, f"{row.name}: total {row.total}, not {total}"
        assert abs(row.error - found) <= 1e-5 * total, f"{row.name}: {row.error}, found {found}"
        down, up = decompose(weight).factors(weight, int(row.form.arguments["rank"]))
        plain = _error(weight, up @ down, metric)
        assert row.error <= plain + 1e-9 * total, f"{row.name}: a plain SVD is nearer"


@compress_check()
def check_merged_equals_factored(subject: CompressSubject) -> None:
    """With the dense layers' shapes back in place the model computes what it did small, to 1e-5."""
    full = shapes(llama())
    handle, ids = compressed(small(subject)), tokens()
    beside = handle.model(ids)
    assert shapes(handle.model) != full, "nothing has become smaller"
    handle.merge()
    assert shapes(handle.model) == full, "merging leaves other shapes behind"
    assert_close(handle.model(ids), beside, 1e-5, "the merged model computes something else")


@compress_check()
def check_a_larger_share_is_nearer(subject: CompressSubject) -> None:
    """The error falls as the share grows, with the weight and the calibration unchanged."""
    if not isinstance(small(subject), LowRankCompressor):
        raise NotApplicable("the method has no share")
    model = llama()
    calibration = calibrated(small(subject), model)
    errors = []
    for share in (0.2, 0.5, 0.8):
        handle = small(subject, share=share, rank=None).fit(llama(), calibration)
        assert isinstance(handle, CompressedModel)
        errors.append(handle.report.error if handle.report else 0.0)
    assert errors[0] > errors[1] > errors[2], f"errors at 0.2, 0.5, 0.8 are {errors}"


@compress_check()
def check_fitting_twice_gives_the_same_bits(subject: CompressSubject) -> None:
    """Two fits of one model are equal to the bit, and leave the random generators alone."""
    state = torch.get_rng_state()
    one, other = (compressed(small(subject)).state_dict() for _ in range(2))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs between two fits"
    assert torch.equal(torch.get_rng_state(), state), "fitting draws from torch's generator"


@compress_check()
def check_low_precision(subject: CompressSubject) -> None:
    """A bf16 model keeps its dtype, and layers are within 10 % of those made from its fp32 copy."""
    handle = compressed(small(subject), llama().bfloat16())
    assert {p.dtype for p in handle.model.parameters()} == {torch.bfloat16}
    wide = compressed(small(subject), llama().bfloat16().float())
    if not isinstance(handle, CompressedModel):
        return  # what is kept is as it was, which has a check of its own
    assert isinstance(wide, CompressedModel)
    for name in handle.layers:
        one, other = (full_weight(h.model.get_submodule(name)).float() for h in (handle, wide))
        gap = (one - other).norm() / other.norm()
        # More than factors' rounding: the calibrations differ by that of activations.
        assert gap < 0.1, f"{name} is off by {gap:.2%} of the weight"


def _error(weight: Tensor, other: Tensor, metric: Tensor | None) -> float:
    gap = weight - other
    if metric is None:
        return gap.square().sum().item()
    scaled = gap * metric if metric.ndim == 1 else gap @ metric
    return (scaled * gap).sum().item()
