"""Programs that use the package and are known to be waiting."""

import signal
import subprocess
import time
from pathlib import Path

from processes import end_family, python

PATIENCE = 60.0


class Waiting:
    """One of our programs, blocked in the call that it says it makes."""

    def __init__(self, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            python(program, *arguments), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            line = self.process.stdout.readline()
            assert line == "waiting\n", f"it said {line!r}"
            self._until_it_sleeps()
        except BaseException:
            end_family(self.process)
            raise

    def _until_it_sleeps(self) -> None:
        """A thread that does not run and has nothing left to say is in the call."""
        status = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + PATIENCE
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.001)  # the kernel has no event for this

    def interrupt(self) -> str:
        """Sends Ctrl-C; what it says until its end, which is soon and good."""
        try:
            self.process.send_signal(signal.SIGINT)
            said, _ = self.process.communicate(timeout=PATIENCE)
            assert self.process.returncode == 0, said
            return said
        finally:
            end_family(self.process)
