"""Writes made-up dumps of a job that hangs: trace_made_up.py FOLDER [--ranks N] [--steps N].

As a recorder with completion times writes them: a data-parallel and a tensor-parallel group, steps that
overlap, a rank that is a little late each time, and one that does not enter the last all-reduce. For the
page's tests and the documentation's picture; nothing here is measured.
"""

import argparse
import os
import pickle
import random
from pathlib import Path

START = 1_794_000_000_000_000_000
MILLISECOND = 1_000_000
CULPRIT, STRAGGLER = 2, 1
WAITED = 1300 * MILLISECOND


class Dump:
    def __init__(self, rank: int, ranks: int) -> None:
        half = [member for member in range(ranks) if member // 2 == rank // 2]
        groups = {"0": ("default_pg", list(range(ranks))), f"{1 + rank // 2}": (f"tp{rank // 2}", half)}
        self.config = {
            name: {"name": name, "desc": desc, "ranks": str(all_)} for name, (desc, all_) in groups.items()
        }
        self.entries: list[dict] = []
        self.numbers = dict.fromkeys(groups, 0)
        self.tensor_group = f"{1 + rank // 2}"

    def add(self, group: str, name: str, line: int, size: int, begin: int, end: int | None) -> None:
        self.numbers[group] += 1
        gathered = [size * 2] if name == "all_gather" else [size]
        frames = [
            {"name": name, "filename": "/opt/venv/lib/torch/distributed/distributed_c10d.py", "line": 4174},
            {
                "name": "forward" if name == "all_gather" else "train_step",
                "filename": "/home/ada/job/train.py",
                "line": line,
            },
            {"name": "main", "filename": "/home/ada/job/train.py", "line": 140},
        ]
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": int(group),
                "process_group": (group, self.config[group]["desc"]),
                "collective_seq_id": self.numbers[group],
                "p2p_seq_id": 0,
                "op_id": len(self.entries),
                "profiling_name": f"tenfold:{name}",
                "time_created_ns": begin,
                "duration_ms": None if end is None else (end - begin) / MILLISECOND,
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "output_sizes": [gathered],
                "output_dtypes": ["Float"],
                "state": "started" if end is None else "completed",
                "time_discovered_started_ns": begin,
                "time_discovered_completed_ns": end,
                "retired": end is not None,
                "timeout_ms": 30_000,
                "is_p2p": False,
                "thread_id": "1",
                "thread_name": "python",
                "frames": frames,
            }
        )

    def write(self, file: Path, now: int) -> None:
        file.write_bytes(
            pickle.dumps(
                {
                    "version": "2.10",
                    "pg_config": self.config,
                    "pg_status": {},
                    "comm_lib_version": "",
                    "entries": self.entries,
                },
                protocol=2,
            )
        )
        os.utime(file, ns=(now, now))  # `tenfold trace` takes a dump's time from its file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    chance = random.Random(7)
    dumps = [Dump(rank, options.ranks) for rank in range(options.ranks)]
    now = START
    for step in range(options.steps):
        arrived = []
        for rank, dump in enumerate(dumps):
            begin = now + chance.randrange(MILLISECOND) + (6 * MILLISECOND if rank == STRAGGLER else 0)
            arrived.append(begin)
            dump.add(
                dump.tensor_group, "all_gather", 71, 4096, begin - 5 * MILLISECOND, begin - 3 * MILLISECOND
            )
        end = max(arrived) + 4 * MILLISECOND
        for rank, dump in enumerate(dumps):
            is_last = step == options.steps - 1
            if is_last and rank == CULPRIT:
                continue
            dump.add("0", "all_reduce", 88, 25_600, arrived[rank], None if is_last else end + rank * 20_000)
            if not is_last:  # overlaps the first: two buckets under way
                dump.add(
                    "0",
                    "all_reduce",
                    88,
                    1_000,
                    arrived[rank] + MILLISECOND,
                    end + MILLISECOND + rank * 20_000,
                )
        now = end + 9 * MILLISECOND
    for rank, dump in enumerate(dumps):
        dump.write(options.folder / f"trace_{rank}", now + WAITED)


if __name__ == "__main__":
    main()
