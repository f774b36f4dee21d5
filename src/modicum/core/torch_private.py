"""Every part of torch that torch calls private and this package uses, each in one small function.

Where such a part is gone or another in some version, this file or `torch_compiler` changes alone;
`tests/test_structure.py` holds that no other file names one. All of them were seen in torch 2.11,
2.12 and 2.13, and work there.

Names that begin with an underscore too, but are relied on everywhere, stay where they are used:
of modules `_parameters`, `_buffers`, `_modules`, `_forward_hooks`, `_forward_pre_hooks` and
`_backward_hooks`, and the methods `_save_to_state_dict`, `_load_from_state_dict` and `_apply`,
which are there to be overridden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Placement

COMPILED_NAME = "_orig_mod"
"""The name under which `torch.compile` keeps the module that it represents."""


# Tensors


def storage_address(tensor: Tensor) -> int:
    """What tells a tensor's storage from all others that live, `_cdata`."""
    address: int = tensor.untyped_storage()._cdata
    return address


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, `_version`."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, `_base`."""
    return tensor._base


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a sharded tensor begins in the full one, and its sizes."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(offsets), tuple(sizes)


# Modules and optimizers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a state dict holds the module's buffer, `_non_persistent_buffers_set`."""
    return buffer not in module._non_persistent_buffers_set


def hooks_with_keywords(module: nn.Module) -> dict[int, bool]:
    """Which of a module's forward hooks, by key, are given keywords too."""
    return module._forward_hooks_with_kwargs


# Of a module: the hooks of its calls, with what says how each is called; and those of its state.
_CALL_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)
_STATE_HOOKS = (
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def exchange_call_hooks(one: nn.Module, other: nn.Module) -> None:
    """Give two modules the hooks of each other's calls; the handles of hooks still remove them."""
    for name in _CALL_HOOKS:
        vars(one)[name], vars(other)[name] = vars(other)[name], vars(one)[name]


def has_state_hooks(module: nn.Module) -> bool:
    """Whether hooks change what a state dict holds of a module, or takes."""
    return any(vars(module)[name] for name in _STATE_HOOKS)


def leave_out_of_ddp(model: nn.Module, names: Collection[str], *, leave_out: bool = True) -> None:
    """Have DistributedDataParallel not send buffers of these names, or send them again.

    It reads them from the module that it wraps, `_ddp_params_and_buffers_to_ignore`.
    """
    known = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    if now := known | set(names) if leave_out else known - set(names):
        model._ddp_params_and_buffers_to_ignore = sorted(now)  # type: ignore[assignment]
    elif known:
        del model._ddp_params_and_buffers_to_ignore


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, `_compiled_call_impl`."""
    return module._compiled_call_impl is not None


def padding_of(convolution: nn.Conv2d) -> list[int]:
    """A convolution's padding in the order of `F.pad`, `_reversed_padding_repeated_twice`."""
    return convolution._reversed_padding_repeated_twice


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning rate's scheduler that the optimizer has stepped, `_opt_called`."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# Which part of torch runs


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors that are made in here have shapes, strides, a device, and no memory.

    By `FakeTensorMode`; real tensors that meet them are taken for fake ones.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def data_decided(error: BaseException) -> str | None:
    """The operation whose result fake tensors do not know, where that was the error."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return str(error.func)
    return None


def is_plain_parameter(tensor: object) -> bool:
    """Whether it is a parameter of PyTorch's own class, real or fake, and of no library's."""
    fake = type(tensor).__module__ == "torch._subclasses.fake_tensor"
    return type(tensor) is nn.Parameter or (fake and isinstance(tensor, nn.Parameter))


@contextmanager
def running_operations(run: Callable[..., Any]) -> Iterator[None]:
    """Have every operation of ATen in here run by `run(operation, arguments, keywords)`.

    It sees what autograd and autocast have made of a program, backward passes too, and calls the
    operation itself. By `TorchDispatchMode`.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Running(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return run(func, args, kwargs or {})

    with Running():
        yield


def adds_in_place(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this sum is one that autograd would write into its first term, were there no mode.

    Where several uses of a tensor have gradients, the engine adds them up. It does so in place if
    it alone holds the first one, but under a dispatch mode it never does. It is known by what is
    counted of a gradient that nobody else holds.
    """
    if operation is not torch.ops.aten.add.Tensor or kwargs or len(args) != 2:
        return False
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False  # a forward pass, perhaps one that runs again
    into, other = args
    if not isinstance(other, Tensor) or (into.shape, into.dtype) != (other.shape, other.dtype):
        return False
    return _counts(into) == counts_of_a_sole_gradient()


def _counts(tensor: Tensor) -> tuple[int, int]:
    """Who refers to a tensor, and to its storage."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@functools.cache
def counts_of_a_sole_gradient() -> tuple[int, int]:
    """What `_counts` says, within `running_operations`, of a gradient that the engine alone holds.

    Ask it once before other operations are followed, as it runs some.
    """
    seen: list[tuple[int, int]] = []

    def run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is torch.ops.aten.add.Tensor:
            seen.append(_counts(args[0]))
        return operation(*args, **kwargs)

    with torch.enable_grad(), running_operations(run):
        used_twice = torch.ones(2, requires_grad=True) * 1
        torch.stack([used_twice.tanh(), used_twice.cos()]).sum().backward()
    return seen[-1]


def transforms_run() -> bool:
    """Whether one of `torch.func`'s transforms, or forward-mode differentiation, is at work."""
    from torch.autograd import forward_ad

    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def operators_shown(
    see: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> AbstractContextManager[Any]:
    """A context in which each operator that runs is given to `see`, from `_python_dispatch`.

    Args:
        see: called with the operator, its arguments and keywords; gives what the operator gives.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Shown(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return see(func, args, kwargs or {})

    return Shown()


def default_store() -> Store:
    """The store by which the processes of the default group found each other."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def call_timeout() -> timedelta | None:
    """How long a call of the default group may take, `options._timeout`; None: it is not known.

    A new group that is not given it has PyTorch's default.
    """
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    with suppress(AttributeError, IndexError, RuntimeError):  # not every backend has options
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def set_reducer_group(model: nn.Module, group: Any) -> None:
    """Have DistributedDataParallel's reducer exchange by this group, `_update_process_group`."""
    model.reducer._update_process_group(group)  # type: ignore[operator, union-attr]


def gather_early(module: FSDPModule) -> bool:
    """Let FSDP2 begin gathers ahead, `_set_unshard_async_op`; whether it can."""
    if not hasattr(module, "_set_unshard_async_op"):
        return False
    module._set_unshard_async_op(True)
    return True


def forget_partial_sums(module: FSDPModule) -> None:
    """Free the sums that FSDP2 keeps until it sums over replicas, `_partial_reduce_output`."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            group._partial_reduce_output = None


# Functional collectives

_FUNCTIONAL = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    *("all_to_all_single", "broadcast", "broadcast_", "shard_dim_alltoall"),
)


def functional_collectives() -> list[Any]:
    """The operators of `_c10d_functional`, and DTensor's own, that find a group by its name."""
    spaces = (torch.ops._c10d_functional, torch.ops._dtensor)
    places = [(space, name) for space in spaces for name in _FUNCTIONAL]
    return [getattr(space, name).default for space, name in places if hasattr(space, name)]


def place_of_group(operator: Any) -> int:
    """Which of such an operator's arguments names the group, by its `_schema`."""
    return [argument.name for argument in operator._schema.arguments].index("group_name")


def functional_wait() -> Any:
    """The operator that waits for what those give, `wait_tensor`."""
    return torch.ops._c10d_functional.wait_tensor.default


def kernel_of(operator: Any) -> Callable[..., Any]:
    """What an operator that is the same for all devices runs beneath autograd, `_op_dk`."""
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


def run_instead(kernels: dict[Any, Callable[..., Any]], device: str) -> Callable[[], None]:
    """Have operators run other kernels on a device; what is given has them run their own again.

    An operator to which somebody has given a kernel of this device is left alone.
    """
    libraries: dict[str, torch.library.Library] = {}
    for operator, kernel in kernels.items():
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), device):
            continue
        space = operator.namespace
        if space not in libraries:
            libraries[space] = torch.library.Library(space, "IMPL")
        libraries[space].impl(operator.name(), kernel, device)

    def end() -> None:
        for library in libraries.values():
            library._destroy()

    return end


def group_of(name: Any) -> Any:
    """The process group of a name, `_resolve_process_group`."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def give_name(group: Any, name: Any) -> Callable[[], None]:
    """Give C++ a group by a name, `_register_process_group`; what is given takes the name back."""
    torch._C._distributed_c10d._register_process_group(name, group)
    return functools.partial(torch._C._distributed_c10d._unregister_process_group, name)


def lend_backends(group: Any, other: Any) -> None:
    """Give another group the backends of a group, `_register_backend`."""
    other.bound_device_id = group.bound_device_id  # which backends take from their group
    kinds = group.BackendType.__members__
    for device in group._device_types:
        backend = group._get_backend(device)
        kind = kinds.get(backend.name().upper(), group.BackendType.CUSTOM)
        other._register_backend(device, kind, backend)


# The profiler


def begin_allocation_events() -> None:
    """Begin to note every allocation and release of memory on the CPU.

    By the calls beneath `torch.profiler.profile`, which itself keeps a gigabyte for a thousand
    steps. Operators are not asked for: they are no news, and one that ends after
    `end_allocation_events`, as an exchange that is still on its way, would write to freed memory.
    """
    from torch._C import _profiler as profiler
    from torch._C._autograd import _enable_profiler, _prepare_profiler

    config = profiler.ProfilerConfig(
        profiler.ProfilerState.KINETO, False, True, False, False, False,
        profiler._ExperimentalConfig(),
    )  # fmt: skip
    processor = {profiler.ProfilerActivity.CPU}
    scopes = {profiler.RecordScope.STATIC_RUNTIME_MODEL}  # what no program here ever enters
    _prepare_profiler(config, processor)
    _enable_profiler(config, processor, scopes)  # type: ignore[call-arg]


def allocations_noted() -> bool:
    """Whether a profiler notes what this thread allocates; those of other threads it does not."""
    from torch._C._autograd import _profiler_enabled

    return _profiler_enabled()


def end_allocation_events() -> list[Any]:
    """The profiler's event tree since then."""
    from torch._C._autograd import _disable_profiler

    return _disable_profiler().experimental_event_tree()
