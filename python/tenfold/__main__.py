"""`python -m tenfold`: the command `tenfold`, a native program that comes with the package."""

import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

# What a program of Linux begins with.
_ELF = b"\x7fELF"


def _folders() -> list[str]:
    """Where installers put programs, the likeliest first."""
    package = Path(__file__).resolve().parent
    user = sysconfig.get_preferred_scheme("user")
    return [
        str(package.parent / "bin"),  # pip install --target
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", user),
        *(str(folder / "bin") for folder in package.parents[3:4]),  # pip install --prefix
    ]


def _is_program(path: str) -> bool:
    # An older version of this package has a script there, which calls this module.
    try:
        with open(path, "rb") as file:
            return file.read(len(_ELF)) == _ELF and os.access(path, os.X_OK)
    except OSError:
        return False


def main() -> NoReturn:
    found = [os.path.join(folder, "tenfold") for folder in _folders()]
    program = next(filter(_is_program, found), None)
    if program is None:
        print(
            f"error: the command `tenfold` is not installed; looked for {', '.join(found)}\n"
            "  hint: install the package with pip, or build the command with "
            "`cargo build --release -p tenfold-cli`",
            file=sys.stderr,
        )
        sys.exit(1)
    # Python programs that the command starts are run by this Python, unless the user chose another one.
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    # Python ignores these signals, and processes that the command starts would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, ["tenfold", *sys.argv[1:]])


if __name__ == "__main__":
    main()
