"""One small model: modicum's adapters against peft's, from the same factors, step by step."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fidelity_models import NotMadeError, outputs, small_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from modicum.adapters import LoRA, MoS, PiSSA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.core.errors import InputError

STEPS, STEP = 3, 0.01  # each update changes the factors by so much of their norm
# Largest relative differences that are taken for the rounding of fp32.
CLOSE = {"peft": 1e-5, "trained": 1e-4, "factors": 1e-4, "exported": 1e-5}
CLOSE |= {
    "reloaded": 1e-5,
    "merged": 1e-4,
    "detached": 1e-4,
    "pissa": 1e-3,
    "pissa_merged": 1e-3,
    "mos_merged": 1e-4,
}
Case = dict[str, Any]


def check(model_type: str) -> Case:
    """What became of one architecture: equal, refused, not made or differs, and why."""
    try:
        model, inputs = small_model(model_type)
    except NotMadeError as error:
        return {"result": "not made", "why": str(error)}
    exact = copy.deepcopy(model).double()
    case = _compared(model, inputs)
    if case["result"] == "differs" and "apart" in case:
        # Some models make much of little: what is rounding goes with a finer one, the rest stays.
        finer = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        with suppress(Exception):
            again = _compared(exact, finer)
            if again["result"] == "equal":
                return again | {"float64": True, "apart_float32": case["apart"]}
    return case


def _compared(model: nn.Module, inputs: dict[str, Tensor]) -> Case:
    """The same of a model that is made."""
    name = type(model).__name__
    plain = copy.deepcopy(model)
    try:
        adapter = LoRA(rank=2).attach(model, seed=1)
    except InputError as error:
        changed = _changed(plain, model, inputs)
        if changed:
            return {"class": name, "result": "differs", "why": f"refused, but {changed}: {error}"}
        return {"class": name, "result": "refused", "why": str(error)}
    layers = len(adapter.sites)
    for _, layer in adapter.layers():
        layer.to(next(model.parameters()).dtype)  # factors as fine as the model, as peft's are
    try:
        apart, without_peft = _with_peft(plain, adapter, inputs)
        apart |= _others(plain, inputs)
    except InputError as error:  # by the first pass: a layer that the model never calls
        return {"class": name, "result": "refused", "why": str(error)}
    largest = {key: float(f"{value:.1e}") for key, value in apart.items()}
    case: Case = {"class": name, "layers": layers, "apart": largest}
    if wrong := [key for key, value in largest.items() if not value <= CLOSE[key]]:
        return case | {"result": "differs", "why": ", ".join(wrong)}
    return case | (without_peft or {"result": "equal"})


def _with_peft(
    plain: nn.Module, adapter: AttachedAdapter, inputs: dict[str, Tensor]
) -> tuple[dict[str, float], Case | None]:
    """Relative differences from peft's LoRA, before and after three updates, and once merged.

    Also why peft has no part in it, if so: the adapter was not written for it, or peft itself
    cannot adapt such a model. Then what is compared is modicum with itself.
    """
    model, apart, without_peft = adapter.model, {}, None
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        mine, theirs, other = dict(adapter.named_parameters()), None, None
        try:
            adapter.save(path / "first", form="peft")
        except InputError as error:
            without_peft = {"result": "refused", "why": str(error)}
        else:
            without_peft = _peft_fails(plain, inputs, path / "first")
            if without_peft is not None:
                return {}, without_peft
        if without_peft is None:
            theirs = _peft(plain, path / "first")
            apart["peft"] = _apart(_run(theirs, inputs), _run(model, inputs))
            other = _peft_factors(theirs)
            if mine.keys() != other.keys():
                different = sorted(mine.keys() ^ other.keys())
                raise AssertionError(f"peft adapts others: {different[:4]} of {len(different)}")
            other = {key: other[key] for key in mine}
        rate = _train(model, list(mine.values()), inputs)
        adapted = _run(model, inputs)
        adapter.save(path / "last")
        if theirs is not None and other is not None:
            _train(theirs, list(other.values()), inputs, rate)
            apart["factors"] = max(_apart([other[key]], [mine[key]]) for key in mine)
            apart["trained"] = _apart(_run(theirs, inputs), adapted)
            apart["exported"] = _apart(_run(_peft(plain, path / "last"), inputs), adapted)
        reloaded = copy.deepcopy(plain)
        load(reloaded, path / "last")
        apart["reloaded"] = _apart(_run(reloaded, inputs), adapted)
    adapter.merge()
    apart["merged"] = _apart(_run(model, inputs), adapted)
    adapter.unmerge()
    adapter.detach()
    apart["detached"] = _apart(_run(model, inputs), _run(plain, inputs))
    return apart, without_peft


def _others(plain: nn.Module, inputs: dict[str, Tensor]) -> dict[str, float]:
    """The same of PiSSA, which must leave the model as it was at first, and of MoS."""
    before, apart = _run(plain, inputs), {}
    for name, method in (("pissa", PiSSA(rank=1)), ("mos", MoS(rank=2, shards=1))):
        model = copy.deepcopy(plain)
        try:
            adapter = method.attach(model, seed=1)
        except InputError:
            if changed := _changed(plain, model, inputs):
                raise AssertionError(f"{name} was refused, but {changed}") from None
            continue
        if name == "pissa":
            apart["pissa"] = _apart(_run(model, inputs), before)
        with torch.no_grad():
            for number, parameter in enumerate(adapter.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        adapted = _run(model, inputs)
        adapter.merge()
        apart[f"{name}_merged"] = _apart(_run(model, inputs), adapted)
    return apart


def _peft_fails(plain: nn.Module, inputs: dict[str, Tensor], ours: Path) -> Case | None:
    """That peft by itself cannot train such a model, or not load again what it wrote, if so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = LoraConfig.from_pretrained(str(ours))
            config = LoraConfig(r=2, target_modules=written.target_modules)
            model = get_peft_model(copy.deepcopy(plain), config)
            _gradients(model.eval(), list(_peft_factors(model).values()), inputs)
            model.save_pretrained(f"{ours}-of-peft")
        _peft(plain, Path(f"{ours}-of-peft"))
    except Exception as error:  # whatever peft or the model says
        said = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        return {"result": "not made", "why": f"peft cannot, by itself: {said}"}
    return None


def _peft(plain: nn.Module, folder: Path) -> PeftModel:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(copy.deepcopy(plain), folder, is_trainable=True)
    lost = [str(one.message) for one in said if "adapter keys" in str(one.message)]
    if lost:
        raise AssertionError(lost[0][:200])
    return model.eval()


def _peft_factors(model: PeftModel) -> dict[str, nn.Parameter]:
    """peft's factors by modicum's names."""
    found = {}
    for name, parameter in model.named_parameters():
        layer, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
        if rest:
            found[f"{layer}.{rest.removeprefix('embedding_')[0]}"] = parameter
    return found


def _train(
    model: nn.Module,
    parameters: list[nn.Parameter],
    inputs: dict[str, Tensor],
    rate: float | None = None,
) -> float:
    """Plain gradient descent on a sum of all outputs; the rate, from norms if not given."""
    for _ in range(STEPS):
        slopes = _gradients(model, parameters, inputs)
        rate = rate or STEP * _norm(parameters) / max(_norm(slopes), 1e-20)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.sub_(slope, alpha=rate)
    return rate or 0.0


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().square().sum()) for tensor in tensors))


def _gradients(
    model: nn.Module, parameters: list[nn.Parameter], inputs: dict[str, Tensor]
) -> list[Tensor]:
    found = [value for value in outputs(model, inputs) if value.requires_grad]
    # In a fixed direction, as the sum of squares of a normalised output has no slope.
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(value.shape, generator=generator) for value in found]
    parts = (v.mul(d).mean() for v, d in zip(found, directions, strict=True))
    if not directions:
        return [torch.zeros_like(parameter) for parameter in parameters]
    loss = torch.stack(list(parts)).sum()
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
    used: list[Tensor | None] = list(slopes)  # None: what a layer gives is not used
    return [torch.zeros_like(p) if s is None else s for p, s in zip(parameters, used, strict=True)]


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    return outputs(model, inputs)


def _apart(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest entry."""
    worst = 0.0
    for one, other in zip(list(found), list(wanted), strict=True):
        if one.shape != other.shape or not bool(one.isfinite().all()):
            return float("inf")
        if other.numel():
            size = max(float(other.detach().abs().max()), 1e-6)
            worst = max(worst, float((one.detach() - other.detach()).abs().max()) / size)
    return worst


def _changed(plain: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> str | None:
    """What a method that refused has left behind, if anything."""
    before, after = plain.state_dict(), model.state_dict()
    if before.keys() != after.keys():
        return "names of weights are others"
    if any(not torch.equal(value, after[key]) for key, value in before.items()):
        return "weights are others"
    trained = [[p.requires_grad for p in one.parameters()] for one in (plain, model)]
    if trained[0] != trained[1]:
        return "other weights are trained"
    kinds = [[type(m) for m in one.modules()] for one in (plain, model)]
    if kinds[0] != kinds[1]:
        return "layers are others"
    return None if _apart(_run(model, inputs), _run(plain, inputs)) == 0 else "outputs are others"
