"""The arguments of a recording, checked in one place. Pure: no folder is made and nothing of torch is touched.

Whatever lets a user record (the Lightning callback, a loop, other trainers) has these arguments under these names.
"""

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lightning_chakra.recording.layout import is_url, is_utf8
from lightning_chakra.recording.ranks import parse_ranks
from lightning_chakra.recording.schedule import ProfileSchedule

StepUnit = Literal["optimizer_step", "batch"]
OnError = Literal["warn", "raise"]


@dataclass(frozen=True)
class RecordOptions:
    """What to collect; the names and meanings of :class:`torch.profiler.profile`."""

    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    with_flops: bool = False
    with_modules: bool = False
    execution_trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user asked for. :class:`lightning_chakra.ChakraProfilerCallback` describes each argument.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that no training could use.
    """

    dirpath: "str | os.PathLike[str] | None" = None
    profile_ranks: "Collection[int] | int | str" = dataclasses.field(default_factory=list)
    skip_first: int = 0
    wait: int = 9
    warmup: int = 1
    active: int = 2
    repeat: int = 1
    step_unit: StepUnit = "optimizer_step"
    collect_shapes: bool = False
    collect_callstack: bool = False
    collect_chakra: bool = False
    profile_memory: bool = False
    with_flops: bool = False
    with_modules: bool = False
    barrier_timeout: float = 1800
    scratch_dir: "str | os.PathLike[str] | None" = None
    on_error: OnError = "warn"

    def __post_init__(self) -> None:
        for name in ("dirpath", "scratch_dir"):
            object.__setattr__(self, name, _path(name, getattr(self, name)))
        if self.scratch_dir is not None and is_url(str(self.scratch_dir)):
            raise ValueError(
                f"`scratch_dir={self.scratch_dir!r}` must be a local folder: torch writes raw files there."
            )
        if self.scratch_dir is not None and not is_utf8(str(self.scratch_dir)):
            raise ValueError(f"`scratch_dir={self.scratch_dir!r}` must be UTF-8: torch can write no raw file below it.")
        _choice("step_unit", self.step_unit, ("optimizer_step", "batch"))
        _choice("on_error", self.on_error, ("warn", "raise"))
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        timeout = self.barrier_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"`barrier_timeout={timeout!r}` must be a number of seconds.")
        if not 0 < timeout < 1e8:
            raise ValueError(f"`barrier_timeout={timeout}` must be more than 0 seconds and less than 1e8.")
        # asked for here, so that what is wrong with them is told now
        _ = self.ranks, self.schedule

    @cached_property
    def ranks(self) -> tuple[range, ...]:
        """``profile_ranks`` as ranges of global ranks; empty means all."""
        return parse_ranks(self.profile_ranks)

    @cached_property
    def schedule(self) -> ProfileSchedule:
        """Which steps to record."""
        return ProfileSchedule(self.skip_first, self.wait, self.warmup, self.active, self.repeat)

    @property
    def options(self) -> RecordOptions:
        """What to collect, in torch's words."""
        return RecordOptions(
            record_shapes=self.collect_shapes,
            with_stack=self.collect_callstack,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
            execution_trace=self.collect_chakra,
        )

    def describe(self) -> dict[str, Any]:
        """All that must be the same on all ranks, as plain data; folders may differ."""
        described = dataclasses.asdict(self)
        described["profile_ranks"] = [[ranks.start, ranks.stop, ranks.step] for ranks in self.ranks]
        return {name: value for name, value in described.items() if name not in ("dirpath", "scratch_dir")}

    def describe_options(self) -> dict[str, Any]:
        """What is collected, for the trace's own ``options`` entry."""
        return {name: getattr(self, name) for name in _FLAGS}


_FLAGS = ("collect_shapes", "collect_callstack", "collect_chakra", "profile_memory", "with_flops", "with_modules")


def _path(name: str, value: "str | os.PathLike[str] | None") -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}={value!r}` must be a path or None.")
    path = os.fspath(value)
    if not path:
        raise ValueError(f"`{name}` is empty; leave it out (None) for the default folder.")
    return path


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}={value!r}` must be True or False.")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` must be one of {', '.join(map(repr, choices))}.")
