"""A rank whose flight recorder is looked at: `recorder_rank.py CASE FOLDER RANK SIZE`.

What went wrong is left by the recorder itself, as `FOLDER/CASE/pickle/rank_<rank>`; what went well is written
at the end. The same as JSON is in `FOLDER/CASE/json`.
"""

import os
import sys
from pathlib import Path

case, folder, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
pickles, texts = folder / case / "pickle", folder / case / "json"
pickles.mkdir(parents=True, exist_ok=True)
texts.mkdir(parents=True, exist_ok=True)
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(pickles / "rank_")

import tenfold  # noqa: E402

TIMEOUT = 60.0  # only bounds a hang
SHORT = 5.0  # of the call that one rank does not join; the others come to it in that time


def main() -> None:
    store = tenfold.FileStore(str(folder / f"{case}.store"), size)
    group = tenfold.init(store, rank, size, timeout=TIMEOUT, name="world")
    group.describe("default_pg")
    numbers = bytearray(8)
    for _ in range(3):
        group.all_reduce(numbers)
    group.broadcast(numbers, root=1)
    outputs = [bytearray(8) for _ in range(size)]
    group.all_gather(outputs, numbers)
    half = (
        group.subgroup([0, 2] if rank % 2 == 0 else [1, 3], name=f"half {rank % 2}")
        if case == "clean"
        else None
    )
    if half:
        half.all_reduce(numbers)
        half.close()
    group.barrier()
    try:
        go_wrong(group, numbers)
    except tenfold.DistError as error:
        print(error)
    else:
        tenfold.c10d._dump_fr_trace_file(rank)
    finally:
        (texts / f"rank_{rank}").write_bytes(tenfold.c10d._dump_fr_trace_json())
    store.set(f"done {rank}", b"")
    store.wait([f"done {each}" for each in range(size)])


def go_wrong(group: tenfold.Group, numbers: bytearray) -> None:
    if case == "mismatch" and rank == 2:
        group.broadcast(numbers, root=0)
    elif case == "missing" and rank == 3:
        store = tenfold.FileStore(str(folder / "missing.told"), size)
        store.wait(["failed"])
        while group._inner.failure() is None:
            pass  # word of it is on its way
        group.barrier()
    elif case == "size" and rank == 1:
        group.all_reduce(bytearray(5))
    elif case == "missing":
        try:
            group.all_reduce(numbers, timeout=SHORT)
        finally:
            tenfold.FileStore(str(folder / "missing.told"), size).set("failed", b"")
    elif case != "clean":
        group.all_reduce(numbers)


main()
