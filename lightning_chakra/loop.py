"""A door for loops without a Lightning Trainer: plain PyTorch and Lightning Fabric. Imports no Lightning."""

from types import TracebackType
from typing import Any

from typing_extensions import Self

from lightning_chakra.recording.door import Door
from lightning_chakra.recording.processes import place_here


class profile_window(Door):  # used like a function, as torch.no_grad is
    """Record some steps of a loop: a context manager for plain loops, and a callback of Lightning Fabric.

    The arguments are those of :class:`lightning_chakra.ChakraProfilerCallback`, and so are the files. ``dirpath=None``
    is the folder ``traces`` in the current one. Steps count from the first one in the ``with`` statement.

    All ranks enter it together and call :meth:`step` alike. It is entered after the process group was initialized, and
    may be built before. An exception leaves it without a word to the other ranks; what was recorded is saved.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that no training could use.

    Example::

        with profile_window("traces", profile_ranks=[0], collect_chakra=True) as window:
            for batch in loader:
                train(batch)
                window.step()
    """

    global_step = 0
    """Optimizer steps so far, which is what the mark of the current step carries. A resumed training sets it before."""

    _entered = False  # whether a with statement tells the beginning and the end, now or earlier
    _hooked = False  # whether the hooks of Fabric do
    _batches = 0
    _moved = False  # whether an optimizer of Fabric stepped in this batch
    _strategy = ""

    def __enter__(self) -> Self:
        self._refuse_nested()
        self._entered = True
        self._enter()
        self._begin(self._number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abort()
            return
        if self._profiling is not None and self._profiling.session.in_step:
            self._profiling.session.cancel_step()
        self._finish()

    def step(self, global_step: int | None = None) -> None:
        """A step is over, and the next one begins. Called once for each optimizer step, on all ranks.

        Args:
            global_step: Number of optimizer steps so far, for resumed trainings; one more than before where it is left
                out. Where it has not moved, the gradients are accumulated and the step goes on.

        Raises:
            RuntimeError: It is called outside of a ``with`` statement.
        """
        if not self._entered:
            raise RuntimeError(
                "`profile_window.step()` is called outside of its `with` statement, so nothing could be recorded. Put "
                "the loop into `with profile_window(...) as window:`."
            )
        self._batches += 1
        self.global_step = self.global_step + 1 if global_step is None else global_step
        self._end(lambda: self.global_step)
        self._begin(self._number)

    def on_after_setup(self, fabric: Any, module: Any = None) -> None:
        """Fabric set a model up."""
        self._strategy = type(fabric.strategy).__name__

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """One of Fabric's optimizers stepped."""
        self._moved = True

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Called by ``fabric.call``, on all ranks; the first one opens the recording outside of ``with``."""
        if not (self._entered or self._hooked):
            self._refuse_nested()
            self._hooked = True
            self._enter()
        self._begin(self._number)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by ``fabric.call``. The step is over if an optimizer of Fabric stepped, or with every batch."""
        self._batches += 1
        self.global_step += self._moved
        self._moved = False
        self._end(lambda: self.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by ``fabric.call`` where no ``with`` statement tells the end."""
        if self._hooked:
            self._hooked = False
            self._finish()

    def _enter(self) -> None:
        self._batches = 0
        self._open(place_here(self.settings.barrier_timeout, self._strategy), str(self.settings.dirpath or "traces"))
        self._start(first=self._number(), global_step=self.global_step)

    def _number(self) -> int:
        return self._batches if self.settings.step_unit == "batch" else self.global_step
