"""The command line: `python -m tenfold.bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tenfold.bench import ddp, operations, overhead

EXAMPLES = """examples:
  python -m tenfold.bench --against gloo                      everything; some minutes
  python -m tenfold.bench operations --ops all_reduce --ranks 2 --sizes 8,64K,16M
  python -m tenfold.bench ddp --bucket-views                  tenfold's DDP, PyTorch's on tenfold, and on Gloo
  python -m tenfold.bench overhead                            calls that move no data
"""


def size(text: str) -> int:
    """Parses `8`, `64K` or `16M`, in powers of 1024."""
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    return int(number) * unit


def listed(convert: Any) -> Any:
    def parse(text: str) -> list[Any]:
        try:
            return [convert(item) for item in text.split(",")]
        except (ValueError, IndexError):
            raise argparse.ArgumentTypeError(
                f"invalid list `{text}`: expected numbers such as 2,4,8 or 8,64K,16M"
            ) from None

    return parse


def operation(name: str) -> str:
    if name not in operations.OPERATIONS:
        raise argparse.ArgumentTypeError(
            f"unknown operation `{name}`; expected one of {', '.join(operations.OPERATIONS)}"
        )
    return name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tenfold.bench",
        description="Compare tenfold with another backend under PyTorch, in one run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="overhead, operations, ddp (default: all three)"
    )
    parser.add_argument("--against", metavar="BACKEND", default="gloo", help="the peer (default: gloo)")
    parser.add_argument("--ranks", type=listed(int), help="processes (default: 2,4,8; ddp: 2,4)")
    parser.add_argument(
        "--sizes", type=listed(size), default=operations.SIZES, help="bytes, such as 8,64K,16M"
    )
    parser.add_argument("--ops", type=listed(operation), default=operations.OPERATIONS, help="operations")
    parser.add_argument("--megabytes", type=listed(int), default=[1, 25, 100], help="sizes of ddp's models")
    parser.add_argument("--rounds", type=int, default=15, help="of each kind (default: 15)")
    parser.add_argument(
        "--bucket-views", action="store_true", help="ddp with gradient_as_bucket_view, of every kind"
    )
    parser.add_argument(
        "--hook", choices=["shared"], help="ddp: PyTorch's on tenfold has its buckets in shared memory"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    return parser


def main() -> None:
    command = parser()
    options = command.parse_args()
    parts = options.parts or ["overhead", "operations", "ddp"]
    if unknown := set(parts) - {"overhead", "operations", "ddp"}:
        command.error(f"unknown part {', '.join(sorted(unknown))}; expected overhead, operations or ddp")
    backends = list(dict.fromkeys([options.against, "tenfold"]))
    rows: list[Any] = []
    if "operations" in parts:
        for ranks in options.ranks or [2, 4, 8]:
            found = operations.run(ranks, options.ops, options.sizes, backends, options.rounds)
            print(operations.table(found, options.against), "\n", flush=True)
            rows += found
    if "ddp" in parts:
        for ranks in options.ranks or ddp.RANKS:
            found = ddp.run(
                ranks,
                options.megabytes,
                options.against,
                options.rounds,
                bucket_views=options.bucket_views,
                shared_hook=options.hook == "shared",
            )
            print(ddp.table(found, options.against), "\n", flush=True)
            rows += found
    if "overhead" in parts:
        found = overhead.run(backends, options.rounds * 4)
        print(overhead.table(found), "\n", flush=True)
        rows += found
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
