"""Rows for PyTorch's profiler, such as `tenfold:all_reduce`: from the call to the end of the operation."""

from torch.autograd.profiler import record_function

from tenfold.torch.work import Work


class ProfiledCall:
    """A row that was started. Made only while a profiler runs."""

    def __init__(self, title: str) -> None:
        self._row = record_function(title)
        self._row.__enter__()

    def end_with(self, work: Work | None) -> None:
        """Ends the row: now, or when a pending operation completes."""
        if work is None:
            self._row.__exit__(None, None, None)
        else:
            self._row._call_end_callbacks_on_future(work.get_future())
