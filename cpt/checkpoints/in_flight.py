"""One save at a time: in this thread, or in one behind it while training goes on."""

from collections.abc import Callable
from threading import Thread


class SaveInFlight:
    """Runs saves one after another; what one raises comes out of `wait`."""

    def __init__(self) -> None:
        self.thread: Thread | None = None
        self.problem: BaseException | None = None

    def run(self, save: Callable[[], None], *, in_background: bool) -> None:
        """Do it now, or begin it and return. The one before must have been waited for."""
        assert self.thread is None, "at most one save is in flight"
        if not in_background:
            save()
            return
        self.thread = Thread(target=self._keep_problem, args=(save,), name="save", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Return when no save is in flight; raises what the last one raised."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def _keep_problem(self, save: Callable[[], None]) -> None:
        try:
            save()
        except BaseException as problem:  # the thread that trains raises it
            self.problem = problem
