"""What all gradient transforms share: they change gradients between their reduction and clipping.

A transform stands before any optimizer. Its runtime captures statistics during forward and backward
passes and, once the gradients are the final sums over micro-batches and ranks, replaces
them by others. Gradients and parameters may be sharded by rows over ranks (DTensors); each rank
works on its own rows, and what is summed over rows travels as a few numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.contracts.method import Context, Method, Strings
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.run_hooks import PassKind, RunHook
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks, joined, peer_errors
from modicum.core.ranks.sharding import own_part, shard_group
from modicum.optim.capture import Capture, CapturedLayer, trained_layers

if TYPE_CHECKING:
    from transformers import TrainerCallback


@dataclass(frozen=True)
class TransformContext(Context):
    """What a transform is bound to: a model that is loaded, and what its gradients are.

    Args:
        parameters: those that are trained, by the model's names (`Strategy.trained`); None: the
            model's own that take gradients.
        ranks: this process among those that share the batch.
        optimizer: the one that will use the gradients, for its learning rate.
        reduction: what stands in `.grad` when `apply` is called: the `sum` over ranks of gradients
            of losses that were scaled by the global count, as in modicum's trainer, or the `mean`
            over ranks, as under PyTorch's DistributedDataParallel. For one process it is the same.
    """

    parameters: Mapping[str, nn.Parameter] | None = None
    ranks: Ranks = field(default_factory=Ranks)
    optimizer: torch.optim.Optimizer | None = None
    reduction: Literal["sum", "mean"] = "mean"


NO_LAYERS = (
    "no linear or convolution layer has a dense weight that is trained (adapters freeze them, and "
    "compressors put factors in their place); leave the gradient transform out"
)


@dataclass(frozen=True)
class TransformQuery(OptimizerQuery):
    """What a transform's ledger is asked at: the optimizer's, and in how many parts the work is.

    Args:
        ranks: that share the batch.
        positions: of a layer's input in one rank's micro-batch.
    """

    ranks: int = 1
    positions: int = 0

    @property
    def layers(self) -> tuple[TrainedParameter, ...]:
        """Weights of linear and 2-D convolution layers, head and embeddings left out.

        A layer of another kind, such as one of two factors, calls its matrices otherwise.
        """
        named = (p for p in self.parameters if p.name.rpartition(".")[2] == "weight")
        return tuple(p for p in named if p.matrix or len(p.shape) == 4)


@dataclass(frozen=True)
class GradientRows:
    """This rank's rows of a layer's gradient G [rows, in], in the transform's precision.

    With a bias its gradient is G's last column, that of a constant input 1.

    Args:
        matrix, bias: what to work on.
        before: how many rows of the full one lie before these.
        targets: the gradients that they are of; another tensor where they are a copy.
    """

    matrix: Tensor
    bias: Tensor | None
    before: int
    targets: tuple[Tensor, ...]

    @property
    def own(self) -> slice:
        """The place of these rows among all."""
        return slice(self.before, self.before + len(self.matrix))

    def times(self, a: Tensor) -> Tensor:
        """G a [rows], where a [in], with a bias [in + 1], ends in the constant input."""
        product = self.matrix @ a[: self.matrix.shape[1]]
        return product if self.bias is None else product + self.bias * a[-1]

    def square(self) -> Tensor:
        """The sum of all elements' squares."""
        flat = self.matrix.flatten()
        return flat @ flat + (0 if self.bias is None else self.bias @ self.bias)

    def joined(self) -> Tensor:
        """The rows with the bias's gradient as their last column: [rows, in] or [rows, in + 1]."""
        return self.matrix if self.bias is None else torch.cat([self.matrix, self.bias[:, None]], 1)

    def put(self, joined: Tensor) -> None:
        """Put rows of that form in the gradients' place."""
        width = self.matrix.shape[1]
        for tensor, target in zip((joined[:, :width], joined[:, -1]), self.targets, strict=False):
            target.copy_(tensor.reshape(target.shape))

    def subtract(self, scale: Tensor, left: Tensor, a: Tensor) -> None:
        """Put scale G - left a^T in the gradients' place."""
        self.matrix.mul_(scale).addr_(left, a[: self.matrix.shape[1]], alpha=-1)
        changed = [self.matrix]
        if self.bias is not None:
            changed.append(self.bias.mul_(scale).sub_(left * a[-1]))
        for tensor, target in zip(changed, self.targets, strict=True):
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor.view(target.shape))


class TransformRuntime(RunHook, ABC):
    """A transform at work on a model's layers. Subclasses own the state and give `apply`.

    A run hook: forward passes for an update are captured, and gradients are changed once they are
    final.

    Raises:
        InputError: no layer of the model has a weight that is trained, or one is sharded over ranks
            and another is not.
    """

    reads_output_gradients = True
    capture: Capture

    def __init__(self, context: TransformContext, exclude: Sequence[str] = ()) -> None:
        self.context = context
        known = context.parameters
        self.parameters = dict(trainable(context.model)) if known is None else dict(known)
        self.layers = trained_layers(context.model, self.parameters, exclude)
        if not self.layers:
            raise InputError(NO_LAYERS)
        first = self.parameters[self.layers[0].weight]
        self.shards = shard_group(first)
        for layer in self.layers:
            if shard_group(self.parameters[layer.weight]) is not self.shards:
                raise InputError(
                    f"{layer.name} is sharded otherwise than {self.layers[0].name}; leave one "
                    "of them out",
                    field="exclude",
                )
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)

    def capturing(
        self, on: bool = True, mask: Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Around forward and backward: capture, counting the positions in `mask` alone; or do not.

        Without it all positions of every forward pass count that has a backward one. Rehearsals,
        whose gradients are thrown away, belong into `capturing(False)`.
        """
        return self.capture.capturing(on, mask)

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """Capture, or in a pass from which nothing is learned do not."""
        learned = kind in ("train", "recompute")
        return nullcontext() if learned else self.capturing(False)

    def after_backward(self) -> None:
        """Change the final gradients of an update."""
        self.apply()

    def rows(self, layer: CapturedLayer) -> GradientRows | None:
        """This rank's rows of the layer's gradient; None where there is none in this update."""
        gradient = self.parameters[layer.weight].grad
        if gradient is None:
            return None
        bias = self.parameters[layer.bias].grad if layer.bias else None
        target, before = own_part(gradient)
        matrix = target.to(self.dtype).flatten(1)
        if bias is None:
            return GradientRows(matrix, None, before, (target,))
        beside, _ = own_part(bias)
        return GradientRows(matrix, beside.to(self.dtype), before, (target, beside))

    def each(self, work: Callable[[int, GradientRows], None]) -> None:
        """Do `work(number of the layer, its rows)` for every layer that has a gradient."""
        for index, layer in enumerate(self.layers):
            self._one(work, index, layer)

    def _one(
        self, work: Callable[[int, GradientRows], None], index: int, layer: CapturedLayer
    ) -> None:
        # A function of its own, so that copies of one layer's rows are gone before the next's.
        rows = self.rows(layer)
        if rows is not None:
            work(index, rows)

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Add up what each rank has of its own rows, in place."""
        if self.shards is not None:
            with self.context.ranks.clock(WIRE), peer_errors():
                dist.all_reduce(values, group=self.shards)
        return values

    def check_clip(self, bound: float | None) -> None:
        """Make sure that a KL clip with this bound can be done.

        Raises:
            InputError: it needs the learning rate, and the context has no optimizer.
        """
        if bound and self.context.optimizer is None:
            raise InputError(
                "the KL clip needs the learning rate; give the context the optimizer, or set "
                "kl_clip to None",
                field="kl_clip",
                value=bound,
            )

    def clip(self, bound: float | None, along: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The KL clip: what to multiply all preconditioned gradients P with.

        Args:
            bound: kappa: min(1, sqrt(kappa / (<P, G> lr^2))); 0: P gets the norm of G; None: 1.
            along, before, after: <P, G>, <G, G> and <P, P>, each over all layers.
        """
        if bound is None:
            return torch.ones_like(along)
        # Where all is zero, or rounding makes it less, there is nothing to clip.
        least = torch.finfo(along.dtype).tiny
        if not bound:
            return (before / after.clamp(min=least)).sqrt()
        assert self.context.optimizer is not None
        rate = max(float(group["lr"]) for group in self.context.optimizer.param_groups)
        return (bound / (along.clamp(min=0) * rate**2).clamp(min=least)).sqrt().clamp(max=1)

    @abstractmethod
    def apply(self, loss_scale: float = 1.0) -> None:
        """Transform the gradients, which are final, and begin anew to capture.

        Args:
            loss_scale: what the loss was multiplied with before its backward pass and the gradients
                were divided by since, such as a `GradScaler`'s scale.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on: the same on all ranks, tensors and JSON by name."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back.

        Raises:
            InputError: names or shapes are others than this model's.
        """

    def close(self) -> None:
        """Take the hooks off the model."""
        self.capture.close()


class GradientTransform(Method):
    """The value of a gradient transform.

    Args:
        exclude: layers to leave as they are, by full name, last name or pattern. Embeddings and the
            output head of a language model are left out in any case.
    """

    exclude: Strings = ()

    @abstractmethod
    def bind(self, context: TransformContext) -> TransformRuntime:
        """Put hooks on the context's model and return the runtime."""

    def callback(self) -> TrainerCallback:
        """The transform for `transformers.Trainer(callbacks=[...])`, bound when training begins.

        There gradients are clipped before any callback sees them, so `max_grad_norm=0` gives the
        usual order, and after a resume averages begin anew, since checkpoints do not hold them.
        """
        from modicum.core.contracts.trainer_callback import callback_of

        return callback_of(self._begun)

    def lightning_callback(self) -> Any:
        """The transform for Lightning's `Trainer(callbacks=[...])`, bound when training begins.

        After a resume averages begin anew, since checkpoints do not hold them.
        """
        from modicum.core.contracts.lightning_callback import lightning_callback_of

        return lightning_callback_of(self._begun)

    def _begun(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TransformRuntime:
        with joined() as ranks:
            return self.bind(TransformContext(model, ranks=ranks, optimizer=optimizer))
