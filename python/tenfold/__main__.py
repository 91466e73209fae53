"""The command `tenfold`: the same code as the Rust binary, inside the extension module."""

import signal
import sys

from tenfold._tenfold import command


def main() -> int:
    # The command handles Ctrl-C itself; Python's handler would only run after the command has returned. If
    # SIGINT is ignored, as under `nohup`, it stays ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(sys.argv[1:], sys.executable)


if __name__ == "__main__":
    sys.exit(main())
