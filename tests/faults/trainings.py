"""Trainings that go wrong, and what a test wants to know about how they ended."""

import dataclasses
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording.messages import ChakraProfilerWarning
from tests import harness, police
from tests.programs import QUIET, Count, Model
from tests.reading import check_kineto, check_pair, files, load

SHORT: dict[str, Any] = {"wait": 2, "warmup": 1, "active": 2, "collect_chakra": True}
"""Steps 3 and 4, both traces."""

PAIR = ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]

LIMIT = 100.0
"""Seconds after which a training that should take two is killed; the machine may be busy."""


class Boom(Exception):
    """What the faulty trainings raise; nothing else does."""


def fit(
    callback: dict[str, Any] | ChakraProfilerCallback,
    trainer: dict[str, Any] | None = None,
    model: LightningModule | None = None,
    *,
    before: list[Callback] | None = None,
    again: Path | None = None,
    swallow: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """One fit, and all that the rules are about: how it ended, what it warned of, what it left behind.

    Args:
        callback: Arguments of the callback, or the callback.
        trainer: Arguments of the trainer; ``callbacks`` run after ours.
        model: The model.
        before: Callbacks that run before ours.
        again: If given, a second plain fit in the same process writes there, to prove that it can.
        swallow: Whether an exception of the fit is returned rather than raised.
        arguments: Of ``Trainer.fit``.
    """
    profiler = callback if isinstance(callback, ChakraProfilerCallback) else ChakraProfilerCallback(**callback)
    count = Count()
    options = {**QUIET, **(trainer or {})}
    options["callbacks"] = [*(before or []), profiler, *options.get("callbacks", []), count]
    error = None
    with recorded() as told:
        lightning = Trainer(**options)
        try:
            lightning.fit(model or Model(), **arguments)
        except BaseException as caught:
            if not swallow:
                raise
            error = traceback.format_exception_only(caught)[-1].strip()
        lightning.strategy.teardown()
    outcome = {
        "error": error,
        "warnings": told,
        "batches": count.batches,
        "global_step": lightning.global_step,
        "weights": float(sum(p.detach().abs().sum() for p in lightning.lightning_module.parameters())),
        "traces": [dataclasses.asdict(trace) for trace in profiler.traces],
        "offences": police.offences(process_group=False),
    }
    if again is not None:
        outcome["again"] = fit({**SHORT, "dirpath": again}, {"max_steps": 5})
    return outcome


class recorded:  # reads as a function
    """Collect the callback's warnings in a list."""

    def __enter__(self) -> list[str]:
        self._messages: list[str] = []
        self._catcher = warnings.catch_warnings()
        self._catcher.__enter__()
        warnings.simplefilter("always", ChakraProfilerWarning)
        show = warnings.showwarning

        def keep(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, ChakraProfilerWarning):
                self._messages.append(str(message))
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = keep
        return self._messages

    def __exit__(self, *exc: Any) -> None:
        self._catcher.__exit__(*exc)


def outcome(*args: Any, program: Any = fit, **options: Any) -> dict[str, Any]:
    """Run :func:`fit` in a process of its own, which must end well; what it returned."""
    options.setdefault("timeout", LIMIT)
    (value,) = harness.succeed(harness.run(program, *args, **options))
    return value


def fitting(callback: Any, trainer: Any = None, model: Any = None, **more: Any) -> dict[str, Any]:
    """:func:`fit` in a process of its own, with keyword arguments."""
    return outcome(callback, trainer, model, more, program=_fit_with)


def _fit_with(callback: Any, trainer: Any, model: Any, more: dict[str, Any]) -> dict[str, Any]:
    return fit(callback, trainer, model, **more)


def check_clean(result: dict[str, Any], again: Path | None = None) -> None:
    """Rule (e)."""
    assert result["offences"] == []
    if again is not None:
        assert result["again"]["offences"] == []
        assert result["again"]["warnings"] == []
        check_pair(again, 0, [3, 4])


def check_files(out: Path, result: dict[str, Any], steps: list[int], *, partial: bool) -> None:
    """The pair of ``steps`` and nothing else was published; an empty list means no file at all."""
    if not steps:
        assert files(out) == []
        assert result["traces"] == []
        return
    assert files(out) == PAIR
    kineto, _ = check_pair(out, 0, steps)
    assert kineto["lightning_chakra"]["partial"] is partial
    kept = [(t["kind"], t["first_step"], t["last_step"], t["partial"]) for t in result["traces"]]
    assert kept == [(kind, steps[0], steps[-1], partial) for kind in ("kineto", "chakra")]


def check_only_kineto(out: Path, result: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """The Kineto trace of ``steps`` is whole, and there is no execution trace."""
    assert files(out) == PAIR[1:]
    kineto = load(out / PAIR[1])
    check_kineto(kineto, 0, steps)
    assert [t["kind"] for t in result["traces"]] == ["kineto"]
    return kineto


class Unsized(torch.utils.data.IterableDataset):
    """A stream whose length nobody knows."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.batches):
            yield torch.randn(32)
