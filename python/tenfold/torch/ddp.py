"""`DistributedDataParallel`: PyTorch's, on tenfold's reducer.

It is a subclass of PyTorch's, so code for that class works with this one. Its arguments, its state dict,
`no_sync`, `join` and communication hooks are PyTorch's. The difference is the reducer: gradients are averaged
in buckets in shared memory, which peers on the same host read in place, and errors name parameters and ranks.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel
from torch.nn.parallel.distributed import _MixedPrecision

from tenfold.c10d import ddp
from tenfold.torch.memory import backend_of


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Trains a module on all ranks with the average of their gradients.

        dist.init_process_group("tenfold")
        model = tenfold.torch.DistributedDataParallel(module)

    Takes the arguments of `torch.nn.parallel.DistributedDataParallel`, and needs a group of the backend
    `tenfold`. Unlike PyTorch's class, it supports `mixed_precision` on the CPU.
    """

    @functools.wraps(parallel.DistributedDataParallel.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        given.apply_defaults()
        _check(**given.arguments)
        # PyTorch's mixed precision needs the streams of an accelerator; tenfold's is in `_run_ddp_forward`.
        precision = given.arguments["mixed_precision"] or _MixedPrecision()
        self._precision = precision
        given.arguments["mixed_precision"] = None
        super().__init__(*given.args, **given.kwargs)
        if precision.param_dtype is not None:
            self.mixed_precision = precision  # converts inputs
        if precision.buffer_dtype is not None:
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(precision.buffer_dtype)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        dtype = self._precision.param_dtype
        if dtype is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        # Converted by autograd, so that gradients have the parameters' own dtype.
        narrow = {
            name: _Narrowed.apply(parameter, dtype) if parameter.is_floating_point() else parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        }
        with self._inside_ddp_forward():
            return torch.func.functional_call(self.module, narrow, inputs, kwargs)

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        if self._use_python_reducer:  # torch.compile reduces gradients itself, in its graph
            super()._ddp_init_helper(parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
            return
        first, rebuilt = self._bucket_config.compute_bucket_size_limits(
            static_graph=static_graph, find_unused_parameters=self.find_unused_parameters
        )
        buckets, limits = ddp._compute_bucket_assignment_by_size(parameters, first, expect_sparse_gradient)
        self.reducer = ddp.Reducer(
            parameters,
            buckets[::-1],  # gradients are computed in about the reverse order of the parameters
            limits[::-1],
            self.process_group,
            expect_sparse_gradient,
            self.bucket_bytes_cap,
            self.find_unused_parameters,
            self.gradient_as_bucket_view,
            _names(self.module, parameters),
            self._bucket_config.first_bucket_bytes_cap,
            bucket_bytes_cap_list=rebuilt,
            static_graph=static_graph,
            reduce_dtype=self._precision.reduce_dtype or self._precision.param_dtype,
        )
        self.logger = ddp.Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Sets the hook that reduces buckets, as PyTorch's: `hook(state, bucket)` returns a future."""
        self._check_comm_hook(hook)
        ddp._register_comm_hook(self.reducer, state, hook)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__name__))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        ddp._register_builtin_comm_hook(self.reducer, comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """Checks a hook as PyTorch does, but allows bfloat16 on the CPU."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        parameters = inspect.signature(hook).parameters
        if "bucket" not in parameters:
            self._log_and_throw(
                ValueError,
                "Communication hook: its second parameter must be called `bucket`: hook(state, bucket).",
            )
        buckets = (inspect.Parameter.empty, dist.GradBucket, ddp.GradBucket)
        if parameters["bucket"].annotation not in buckets:
            self._log_and_throw(
                ValueError, "Communication hook: bucket annotation should be dist.GradBucket."
            )
        futures = (inspect.Signature.empty, torch.futures.Future[torch.Tensor])
        if inspect.signature(hook).return_annotation not in futures:
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    # Ranks with different numbers of batches: a rank without data takes part in the others' reductions.

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer._take_part()

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: this is a part of the method above."""


class _Narrowed(torch.autograd.Function):
    """Converts a parameter, as `Tensor.to`, whose backward cannot convert sparse gradients."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        context.dtype = parameter.dtype
        return parameter.to(dtype)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(context.dtype), None


def _names(module: torch.nn.Module, parameters: list[torch.Tensor]) -> dict[int, str]:
    """Returns the name of each parameter, for errors."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return {numbers[parameter]: name for name, parameter in module.named_parameters() if parameter in numbers}


def _check(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
    device_mesh: Any,
    init_sync: bool,
    **_: Any,
) -> None:
    """Checks for mistakes that PyTorch detects late, or on some ranks only."""
    group = process_group
    if group is None and device_mesh is not None:
        group = device_mesh.get_group(mesh_dim=0)
    group = group or dist.distributed_c10d._get_default_group()
    if dist.distributed_c10d._rank_not_in_group(group):
        return  # PyTorch raises the error
    backend_of(group)
    if not init_sync or torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
        return
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    lazy = torch.nn.parameter.UninitializedParameter
    if not any(isinstance(parameter, lazy) for parameter in parameters.values()):
        ddp.verify_named(group, parameters)
