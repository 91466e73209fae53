"""Cases of what DDP's logger says."""

import torch.distributed as dist
from ddp_features import prefixed, small
from ddp_join import joined
from ddp_models import Mixed
from torch.nn.parallel import DistributedDataParallel
from training_case import (
    Results,
    Scene,
    case,
    perceptron,
    train,
)
from training_ddp import SMALL_BUCKET_MB, Fork, normalised

# What the same training must log with both DDPs. (`iteration` is that of PyTorch's last sample.)
LOGGED = [
    "module_name",
    "world_size",
    "rank",
    "bucket_sizes",
    "bucket_cap_bytes",
    "broadcast_buffers",
    "dtypes",
    "has_sync_bn",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "is_multi_device_module",
    "device_ids",
    "output_device",
    "num_buckets_reduced",
    "unused_parameter_size",
    "prev_iteration_grad_ready_order_indices",
    "has_rebuilt_buckets",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "torch_distributed_debug",
    "master_addr",
    "cuda_visible_devices",
]
OF_GLOO = {"gloo_socket_ifname", "gloo_device_transport", "gloo_num_threads"}
TIMES = [
    f"{prefix}{name}"
    for prefix in ["", "avg_"]
    for name in [
        "forward_compute_time",
        "backward_compute_time",
        "backward_comm_time",
        "backward_compute_comm_overlap_time",
    ]
]


def logged(model: DistributedDataParallel) -> Results:
    data = model._get_ddp_logging_data()
    results: Results = {name: str(data.get(name, "")) for name in LOGGED}
    results |= {f"{name} is positive": str(data.get(name, 0) > 0) for name in TIMES}
    return results


@case
def the_log(scene: Scene) -> Results:
    results: Results = {}
    kinds = {
        "plain": (perceptron(), {}),
        "views": (perceptron(), {"gradient_as_bucket_view": True}),
        "static": (Fork(0), {"static_graph": True}),
        "searching": (Fork(0), {"find_unused_parameters": True}),
        "mixed": (Mixed(), {}),
        "normalised": (normalised(), {"forward_sync_buffers": True}),
    }
    for kind, (inner, options) in kinds.items():
        model = small(scene, inner, **options)
        train(model, scene)
        results |= prefixed(kind, logged(model))
    return results


@case
def the_keys_of_the_log(scene: Scene) -> Results:
    """All of PyTorch's, but for those of Gloo; what else is there is of no concern."""
    model = small(scene)
    train(model, scene)
    reference = DistributedDataParallel(perceptron(), bucket_cap_mb=SMALL_BUCKET_MB)
    train(reference, scene)
    missing = set(reference._get_ddp_logging_data()) - set(model._get_ddp_logging_data()) - OF_GLOO
    return {"missing": " ".join(sorted(missing))}


@case
def the_log_of_a_hook_and_of_join(scene: Scene) -> Results:
    model = small(scene)
    model.register_comm_hook(None, dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    joined(scene, model)
    data = model._get_ddp_logging_data()
    return {name: str(data.get(name)) for name in ["comm_hook", "join_uneven_inputs"]}
