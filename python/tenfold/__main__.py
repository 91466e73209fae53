"""The command `tenfold`: the same code as the Rust binary, inside the extension module."""

import signal
import sys

from tenfold._tenfold import command


def main() -> int:
    # The command has its own idea of Ctrl-C; Python's would only be heard once it is over. Who was told to
    # ignore it, as under `nohup`, goes on to.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(sys.argv[1:], sys.executable)


if __name__ == "__main__":
    sys.exit(main())
