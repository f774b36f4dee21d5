"""A model whose layers take factors: the runtime that puts them in, and takes them out again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.compress import files
from modicum.compress.base import Compressor
from modicum.compress.dense_layers import DenseLayer, all_layers, untied
from modicum.core.contracts.parameters import describe_parameter, metadata
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.factorize import decomposed
from modicum.core.layers.linear_forms import full_weight, linear_form
from modicum.core.layers.meta import materialise
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.ranks.sharding import whole


@dataclass(frozen=True)
class LayerReport:
    """What became of a layer.

    Args:
        bytes_before, bytes_after: of its weight.
        error: tr((W - X) M (W - X)^T), X the factors' product and M the method's metric.
        total: the same for X = 0.
    """

    name: str
    rank: int
    bytes_before: int
    bytes_after: int
    error: float
    total: float

    @property
    def relative_error(self) -> float:
        """The error over what there was, 0 for a layer that is zero."""
        return self.error / self.total if self.total else 0.0


@dataclass(frozen=True)
class CompressionReport:
    """What became of each compressed layer."""

    layers: tuple[LayerReport, ...]

    @property
    def bytes_before(self) -> int:
        """Of the weights of all these layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of their factors."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def error(self) -> float:
        """The sum of the layers' errors."""
        return sum(layer.error for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        sums = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        rows = [asdict(row) | {"relative_error": row.relative_error} for row in self.layers]
        return sums | {"layers": rows}


class CompressedModel:
    """The handle to a model and the factors in it; `Compressor.fit`, `wrap` and `bind` make it.

    Args:
        ranks: of the layers that take factors, by full name.
        method: what fits them; None where they were fitted before.

    Attributes:
        report: what `fit` did; None before.

    Raises:
        InputError: a layer is not there, is not dense, or has a tied weight.
    """

    def __init__(
        self, model: nn.Module, ranks: Mapping[str, int], method: Compressor | None = None
    ) -> None:
        self.model, self.ranks, self.method = model, dict(ranks), method
        there = all_layers(model)
        for name in ranks:
            if name not in there:
                problem = "the model has no dense linear layer of this name"
                raise InputError(problem, value=name, candidates=there)
        self.layers = {layer.name: layer for layer in untied(model, [there[n] for n in ranks])}
        self.report: CompressionReport | None = None
        self._dense: dict[str, nn.Module] = {}

    def wrap(self) -> None:
        """Put the forms in, their numbers undefined: to load factors into, or on meta."""
        for name in self.ranks:
            self._replace(name)

    def fit(
        self,
        calibration: Calibration,
        *,
        ranks: Ranks | None = None,
        cache: str | Path | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> CompressionReport:
        """Put the best factors in, layer by layer, so that one dense weight more is the peak.

        Make optimizers afterwards: parameters are new. Several `ranks` that hold the same weights
        share the decompositions and end with the same bits.

        Args:
            cache: a folder that keeps decompositions, from which other ranks are read off.
            progress: is called with the layers done, and of how many.

        Raises:
            InputError: the weights have no memory or factors already, or the calibration lacks a
                layer.
        """
        ranks = ranks or Ranks()
        names, rows = list(self.ranks), []
        for start in range(0, len(names), ranks.size):
            together = names[start : start + ranks.size]
            mine = together[ranks.rank] if ranks.rank < len(together) else None
            made = None if mine is None else self._factors(mine, calibration, cache)
            for owner, name in enumerate(together):
                rows.append(self._fill(name, made if name == mine else None, owner, ranks))
            if progress is not None:
                progress(len(rows), len(names))
        self.report = CompressionReport(tuple(rows))
        return self.report

    @torch.no_grad()
    def _factors(
        self, name: str, calibration: Calibration, cache: str | Path | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(down, up, [error, total]) of a layer, float64."""
        if self.method is None:
            raise InputError("the factors of this model were fitted before", value=name)
        layer, rank = self.layers[name], self.ranks[name]
        stored = self.model.get_submodule(name).get_parameter("weight")
        if stored.is_meta:
            raise InputError("fitting needs the trained weights, and this model has no memory")
        weight = stored.detach().T if layer.transposed else stored.detach()
        basis = decomposed(weight, self.method.metric(layer, calibration), cache)
        down, up = basis.factors(weight, rank)
        return down, up, down.new_tensor([basis.error(rank), basis.error(0)])

    @torch.no_grad()
    def _fill(
        self, name: str, made: tuple[Tensor, Tensor, Tensor] | None, owner: int, ranks: Ranks
    ) -> LayerReport:
        """Replace a layer by the factors that one rank made."""
        layer, rank = self.layers[name], self.ranks[name]
        form = self._replace(name)
        down, up = form.get_parameter("down"), form.get_parameter("up")
        shapes = (down.shape, up.shape, torch.Size([2]))
        flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=torch.float64)
        if made is not None:
            torch.cat([part.cpu().flatten() for part in made], out=flat)
        if not ranks.alone:
            with peer_errors():
                dist.broadcast(flat, owner)
        parts = flat.split([shape.numel() for shape in shapes])
        down.copy_(parts[0].view(down.shape))
        up.copy_(parts[1].view(up.shape))
        size, (error, total) = down.element_size(), parts[2].tolist()
        after = rank * (layer.in_features + layer.out_features) * size
        return LayerReport(name, rank, layer.elements * size, after, error, total)

    def _replace(self, name: str) -> nn.Module:
        """Put a form of undefined numbers in a dense layer's place; the bias stays the same."""
        if name in self._dense:
            raise InputError("this layer has factors already", value=name)
        layer, dense = self.layers[name], self.model.get_submodule(name)
        weight, bias = dense.get_parameter("weight"), dense._parameters["bias"]
        form = linear_form("low_rank").make(
            layer.in_features,
            layer.out_features,
            False,
            device=weight.device,
            dtype=weight.dtype,
            rank=self.ranks[name],
        )
        form.requires_grad_(weight.requires_grad).train(dense.training)
        for factor in form.parameters():
            describe_parameter(factor, metadata(weight))
        form.register_parameter("bias", bias)
        dense._parameters["bias"] = None
        self._dense[name] = dense.to("meta")
        self._put(layer, form)
        return form

    def _put(self, layer: DenseLayer, module: nn.Module) -> None:
        for name in layer.names:
            self.model.set_submodule(name, module)

    @torch.no_grad()
    def merge(self) -> None:
        """Put dense layers back whose weights are the factors' products; biases stay as they are.

        For files that know dense layers alone. Weights that are sharded over ranks are gathered.
        """
        for name, layer in self.layers.items():
            form = self.model.get_submodule(name)
            weight = whole(full_weight(form))
            dense = copy.deepcopy(self._dense.pop(name)).train(form.training)
            materialise(dense, weight.device)
            parameter = dense.get_parameter("weight")
            parameter.copy_(weight.T if layer.transposed else weight)
            parameter.requires_grad_(form.get_parameter("up").requires_grad)
            dense._parameters["bias"] = form._parameters.get("bias")
            self._put(layer, dense)

    def save(self, folder: str | Path, *, write: bool = True) -> Path:
        """Write the model with its factors; `modicum.compress.load` reads it. See `files.save`."""
        return files.save(self.model, self.ranks, self.method, folder, write=write)

    # State

    def _named(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{key}": parameter
            for name in self.ranks
            for key, parameter in self.model.get_submodule(name).named_parameters(recurse=False)
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The factors and biases of the layers by name: `name.down`, `name.up`, `name.bias`."""
        return {name: parameter.detach() for name, parameter in self._named().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put factors back into a model that was wrapped.

        Raises:
            InputError: names or shapes are others than this model's.
        """
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != given:
            different = sorted(name for name, _ in shapes.items() ^ given.items())[:3]
            raise InputError(f"these are not this model's factors; they differ in {different}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def close(self) -> None:
        """Forget how the dense layers looked; the factors stay."""
        self._dense.clear()


def load(model: nn.Module, folder: str | Path) -> CompressedModel:
    """Give a dense model the forms that `CompressedModel.save` found, and all its numbers.

    Raises:
        InputError: the folder holds no compressed model, or one of another model.
    """
    folder = Path(folder)
    ranks, tensors = files.read(folder)
    try:
        compressed = CompressedModel(model, ranks)
    except InputError as error:
        problem = f"the folder holds another model: {error.problem}"
        raise InputError(problem, file=folder, value=error.value) from None
    compressed.wrap()
    files.put(tensors, model, folder)
    return compressed
