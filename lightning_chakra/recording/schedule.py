"""When to record: the map from steps to phases. Pure, and the same on every rank."""

import sys
from dataclasses import dataclass
from enum import Enum


def named_steps(first: int, last: int) -> str:
    """``step 3`` or ``steps 3-4``."""
    return f"step {first}" if first == last else f"steps {first}-{last}"


class Phase(Enum):
    """What the profiler does during one step."""

    IDLE = "idle"
    WARMUP = "warmup"
    ACTIVE = "active"


@dataclass(frozen=True)
class ProfileSchedule:
    """The steps to record, with the meaning of :func:`torch.profiler.schedule`, counted from the first step of a fit.

    Args:
        skip_first: Steps to leave alone once, before the first cycle.
        wait: Idle steps at the start of each cycle.
        warmup: Steps of each cycle on which the profiler is prepared but records nothing.
        active: Recorded steps of each cycle, its window.
        repeat: Number of cycles; 0 means until training ends.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is out of range.
    """

    skip_first: int = 0
    wait: int = 9
    warmup: int = 1
    active: int = 2
    repeat: int = 1

    def __post_init__(self) -> None:
        for name, least in (("skip_first", 0), ("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"`{name}` must be an integer number of steps, got {value!r}.")
            if value < least:
                hint = "; 0 repeats until training ends" if name == "repeat" else ""
                raise ValueError(f"`{name}={value}` must be at least {least}{hint}.")

    @property
    def cycle(self) -> int:
        """Steps in one cycle."""
        return self.wait + self.warmup + self.active

    @property
    def steps_needed(self) -> int:
        """Steps a fit must take to complete its first window."""
        return self.skip_first + self.cycle

    @property
    def steps_begun(self) -> int:
        """Steps a fit must take to begin its first window."""
        return self.skip_first + self.wait + self.warmup + 1

    def phase(self, step: int) -> Phase:
        """What happens on ``step``, counted from 0 at the first step of the fit."""
        step -= self.skip_first
        if step < 0 or (self.repeat and step >= self.repeat * self.cycle):
            return Phase.IDLE
        in_cycle = step % self.cycle
        if in_cycle < self.wait:
            return Phase.IDLE
        return Phase.WARMUP if in_cycle < self.wait + self.warmup else Phase.ACTIVE

    def next_busy(self, step: int) -> int:
        """The first step from ``step`` on that is not idle; :data:`sys.maxsize` if there is none."""
        step = max(0, step - self.skip_first)
        if self.repeat and step >= self.repeat * self.cycle:
            return sys.maxsize
        return self.skip_first + step + max(0, self.wait - step % self.cycle)

    def ends_window(self, step: int) -> bool:
        """Whether ``step`` is the last one of a window."""
        return self.phase(step) is Phase.ACTIVE and (step - self.skip_first + 1) % self.cycle == 0

    def describe(self, offset: int = 0) -> str:
        """The recorded steps in words, numbered from ``offset``, the number of the first step of the fit."""
        first = offset + self.skip_first + self.wait + self.warmup
        last = first + self.active - 1
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        if self.repeat == 1:
            return steps
        times = "until the training ends" if self.repeat == 0 else f"{self.repeat} windows in all"
        return f"{steps}, and again every {self.cycle} steps, {times}"
