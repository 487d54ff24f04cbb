"""Random trainings: whatever happens in them, the rules of the fault matrix hold."""

import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer

from tests import harness
from tests.faults.trainings import Boom, fit
from tests.programs import Model
from tests.reading import check_kineto, files, kineto_marks, load

BOOM, INTERRUPT, STOP = "raise", "interrupt", "stop"
OWN_START, OWN_STOP = "own profiler starts", "own profiler stops"
ENDINGS = (BOOM, INTERRUPT, STOP)
HOOKS = ("on_train_batch_start", "training_step", "optimizer_step", "on_train_batch_end", "validation_step")


@dataclass(frozen=True)
class Plan:
    """One random fit: its length, and what happens where."""

    batches: int
    epochs: int
    accumulate: int
    validate: bool
    events: tuple[tuple[int, str, str], ...]
    """Batch of the fit, hook, what happens there."""


events = st.tuples(st.integers(0, 9), st.sampled_from(HOOKS), st.sampled_from((*ENDINGS, OWN_START, OWN_STOP)))
plans = st.builds(
    Plan,
    batches=st.integers(0, 6),
    epochs=st.integers(1, 2),
    accumulate=st.sampled_from((1, 1, 2)),
    validate=st.booleans(),
    events=st.lists(events, max_size=3).map(tuple),
)
callbacks = st.fixed_dictionaries(
    {
        "wait": st.integers(0, 2),
        "warmup": st.integers(0, 2),
        "active": st.integers(1, 3),
        "repeat": st.integers(0, 2),
        "step_unit": st.sampled_from(("optimizer_step", "batch")),
        "collect_chakra": st.booleans(),
    }
)


class Planned(Model):
    """Does in each hook what the plan says."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.batches)
        self.plan = plan
        self.seen = -1
        self.own: Any = None

    def act(self, hook: str) -> None:
        for at, where, what in self.plan.events:
            if (at, where) != (self.seen, hook):
                continue
            if what == BOOM:
                raise Boom(hook)
            if what == INTERRUPT:
                os.kill(os.getpid(), signal.SIGTERM)
            if what == STOP:
                self.trainer.should_stop = True
            # not in the optimizer's range around training_step: see OwnProfiler in test_owners.py
            if what == OWN_START and self.own is None and hook != "training_step":
                self.own = torch.profiler.profile()
                self.own.start()
            if what == OWN_STOP:
                self.end_own()

    def end_own(self) -> None:
        if self.own is not None:
            self.own.stop()
            self.own = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.act("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.act("training_step")
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.act("optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.act("validation_step")
        return super().validation_step(batch, batch_idx)


class Interrupted(Exception):
    """What the handler of the random signals raises; Lightning leaves a handler of the user's alone."""


def _interrupt(number: int, frame: Any) -> None:
    raise Interrupted


def check_rules(result: dict[str, Any], plain: dict[str, Any], out: Path, callback: dict[str, Any], own: bool) -> None:
    """Rules (a) to (e) on one fit, given how the same fit went without a callback that records."""
    for key in ("error", "batches", "global_step"):  # (a)
        assert result[key] == plain[key], key
    kinds = ("kineto", "chakra") if callback["collect_chakra"] else ("kineto",)
    listed = {trace["path"]: trace for trace in result["traces"]}
    assert sorted(listed) == sorted(str(out / name) for name in files(out))  # (b)
    for path, trace in listed.items():
        content = load(path)
        if trace["kind"] == "kineto":
            check_kineto(content, 0, kineto_marks(content))
            assert content["lightning_chakra"]["partial"] is trace["partial"]  # (c)
            span = [kineto_marks(content)[0], kineto_marks(content)[-1]]
            assert span == [trace["first_step"], trace["last_step"]]
    if not own:  # with another owner of Kineto one of a pair may be missing, and a warning says so
        windows: dict[int, list[str]] = {}
        for trace in listed.values():
            windows.setdefault(trace["first_step"], []).append(trace["kind"])
        assert all(sorted(found) == sorted(kinds) for found in windows.values())
        # (d), but a busy machine may be slow to publish windows that follow one another
        assert all("no trace: " in text or "windows wait to be" in text for text in result["warnings"])
    assert len(result["warnings"]) == len(set(result["warnings"]))
    assert all(text.startswith(("rank 0, step", "no trace: ")) for text in result["warnings"])
    assert result["offences"] == []  # (e)


class EndsOwn(Callback):
    """Ends the user's profiler when the fit is over, before the process is policed."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        pl_module.end_own()

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.end_own()


def _fit_plan(plan: Plan, callback: dict[str, Any]) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "max_epochs": plan.epochs,
        "accumulate_grad_batches": plan.accumulate,
        "limit_val_batches": int(plan.validate),
        "num_sanity_val_steps": 0,
        "callbacks": [EndsOwn()],
        "logger": False,
    }
    if plan.validate and plan.batches:
        trainer |= {"val_check_interval": 1, "check_val_every_n_epoch": None}
    return fit(callback, trainer, Planned(plan))


def _random_fits(folder: Path, examples: int) -> int:
    """All examples in one process, as fits of one application: what one leaves behind, the next one meets."""
    signal.signal(signal.SIGTERM, _interrupt)
    done = 0

    @given(first=plans, second=plans, callback=callbacks)
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(first: Plan, second: Plan, callback: dict[str, Any]) -> None:
        nonlocal done
        print(first, second, callback, flush=True)  # a crash leaves the plan behind that did it
        for index, plan in enumerate((first, second)):
            out = folder / str(index)
            shutil.rmtree(out, ignore_errors=True)
            plain = _fit_plan(plan, {**callback, "dirpath": out, "wait": 1000})
            result = _fit_plan(plan, {**callback, "dirpath": out})
            own = any(what == OWN_START for _, _, what in plan.events)
            check_rules(result, plain, out, callback, own)
        done += 1

    check()
    sys.stdout.flush()
    return done


def test_rules_hold_in_random_trainings(tmp_path: Path) -> None:
    (done,) = harness.succeed(harness.run(_random_fits, tmp_path, 20, timeout=250))
    assert done >= 20
