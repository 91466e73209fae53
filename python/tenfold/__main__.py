"""The command `tenfold`: the same code as the Rust binary, inside the extension module."""

import signal
import sys

from tenfold._tenfold import command


def main() -> int:
    # The command has its own idea of Ctrl-C; Python's would only be heard once it is over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(sys.argv[1:], [sys.executable, "-m", "tenfold"])


if __name__ == "__main__":
    sys.exit(main())
