"""One rank of many training cases, each in several roles: training.py FOLDER MODULE,... ROLE=BACKEND[/DDP]...

A role is a backend, and whose DistributedDataParallel: `reference=gloo`, `candidate=tenfold/tenfold`.

Importing PyTorch costs seconds and a group milliseconds: so one job runs everything, and every case under
every backend gets a group of its own. A case that fails ends there. The ranks meet in the store, not in the
group, before they go on, so that none meets a peer which is still waiting in a broken case.

Each rank writes FOLDER/<role>/<case>/<rank>.pt as soon as it can: either what the case
returned, or the text of the exception.
"""

import faulthandler
import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_class import ddp_class
from torch import Tensor
from torch.distributed.tensor import DTensor
from training_case import Case, Results, Scene, cases_of, seeded

PATIENCE = timedelta(seconds=15)  # of a collective; a case takes a fraction of a second
MEETING = timedelta(seconds=40)  # of ranks between cases: the slowest has spent its patience by then
HANGING = (
    60.0  # seconds after which a case that no time limit ended ends the process, which says where it was
)

ONLY = os.environ.get("TENFOLD_TEST_CASES", "")  # to look for a fault: only cases with this in their names

# Groups outlive their cases: Gloo aborts the process ("Resource deadlock avoided") if the last to let go of
# one is a callback on a thread of its own, which PowerSGD's are.
KEPT: list[dist.ProcessGroup] = []


def main() -> None:
    folder, modules, *roles = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=MEETING)
    for name, function in cases_of(*modules.split(",")).items():
        if ONLY not in name:
            continue
        for role, _, kind in (each.partition("=") for each in roles):
            faulthandler.dump_traceback_later(HANGING, exit=True)
            backend, _, ddp = kind.partition("/")
            scene = Scene(rank, world, Path(folder, role, name), ddp_class(ddp or "torch"))
            scene.folder.mkdir(parents=True, exist_ok=True)
            outcome = run(function, scene, backend, dist.PrefixStore(f"{name}/{role}", store))
            torch.save(outcome, scene.folder / f"{rank}.pt")
            meet(f"after/{name}/{role}", rank, world, store)
    faulthandler.cancel_dump_traceback_later()


def run(function: Case, scene: Scene, backend: str, store: dist.Store) -> Results | str:
    """What the case returned, as plain tensors and numbers; or what went wrong."""
    try:
        if backend not in dist.Backend.backend_list:
            importlib.import_module(f"{backend}.torch")  # registers it
        if backend == "gloo":
            # At DETAIL PyTorch's DDP crashes on Gloo once `torch._dynamo` is imported.
            dist.set_debug_level(dist.DebugLevel.OFF)
        else:
            dist.set_debug_level_from_env()
        dist.init_process_group(
            backend, store=store, rank=scene.rank, world_size=scene.world, timeout=PATIENCE
        )
        KEPT.append(dist.group.WORLD)
        assert dist.get_backend() == backend
        seeded()
        return {name: plain(value) for name, value in function(scene).items()}
    except Exception:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def plain(value: Tensor | float | str) -> Tensor | float | str:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor) and value.is_sparse:
        value = value.to_dense()
    return value.detach().clone() if isinstance(value, Tensor) else value


def meet(key: str, rank: int, world: int, store: dist.Store) -> None:
    store.set(f"{key}/{rank}", "")
    store.wait([f"{key}/{peer}" for peer in range(world)], MEETING)


if __name__ == "__main__":
    main()
