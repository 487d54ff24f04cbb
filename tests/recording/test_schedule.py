"""The schedule against torch's own."""

import inspect
import sys
from typing import Any

import pytest
import torch.profiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerAction

from lightning_chakra.recording.schedule import Phase, ProfileSchedule

_PHASES = {
    ProfilerAction.NONE: Phase.IDLE,
    ProfilerAction.WARMUP: Phase.WARMUP,
    ProfilerAction.RECORD: Phase.ACTIVE,
    ProfilerAction.RECORD_AND_SAVE: Phase.ACTIVE,
}

arguments = st.fixed_dictionaries(
    {
        "skip_first": st.integers(0, 4),
        "wait": st.integers(0, 4),
        "warmup": st.integers(0, 3),
        "active": st.integers(1, 3),
        "repeat": st.integers(0, 3),
    }
)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@given(arguments)
@settings(deadline=None, max_examples=100)
def test_every_step_has_the_phase_that_torch_gives_it(values: dict[str, int]) -> None:
    ours, theirs = ProfileSchedule(**values), torch.profiler.schedule(**values)
    for step in range(40):
        assert ours.phase(step) is _PHASES[theirs(step)]
        assert ours.ends_window(step) == (theirs(step) is ProfilerAction.RECORD_AND_SAVE)


@given(arguments)
@settings(deadline=None, max_examples=50)
def test_steps_needed_is_the_length_of_a_fit_that_completes_one_window(values: dict[str, int]) -> None:
    schedule = ProfileSchedule(**values)
    first_end = next(step for step in range(60) if schedule.ends_window(step))
    assert schedule.steps_needed == first_end + 1
    first_active = next(step for step in range(60) if schedule.phase(step) is Phase.ACTIVE)
    assert schedule.steps_begun == first_active + 1


@given(arguments, st.integers(0, 40))
@settings(deadline=None, max_examples=200)
def test_next_busy_is_the_next_step_that_is_not_idle(values: dict[str, int], step: int) -> None:
    schedule = ProfileSchedule(**values)
    busy = (later for later in range(step, step + 60) if schedule.phase(later) is not Phase.IDLE)
    assert schedule.next_busy(step) == next(busy, sys.maxsize)


def test_arguments_have_the_names_of_torch() -> None:
    theirs = inspect.signature(torch.profiler.schedule).parameters
    ours = inspect.signature(ProfileSchedule).parameters
    assert set(ours) <= set(theirs)
    # Where torch has a default that means "not at all", ours is a choice of steps and may differ.
    assert ours["skip_first"].default == theirs["skip_first"].default


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "steps 10 to 11"),
        ({"active": 1}, "step 10"),
        ({"repeat": 2}, "steps 10 to 11, and again every 12 steps, 2 windows in all"),
        ({"repeat": 0}, "steps 10 to 11, and again every 12 steps, until the training ends"),
        ({"skip_first": 5, "wait": 0, "warmup": 0}, "steps 5 to 6"),
    ],
)
def test_words(values: dict[str, int], words: str) -> None:
    assert ProfileSchedule(**values).describe() == words


def test_words_count_from_the_first_step_of_the_fit() -> None:
    assert ProfileSchedule().describe(7) == "steps 17 to 18"


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"skip_first": -1}, ValueError, "`skip_first=-1` must be at least 0"),
        ({"wait": -1}, ValueError, "`wait=-1` must be at least 0"),
        ({"warmup": -2}, ValueError, "`warmup=-2` must be at least 0"),
        ({"active": 0}, ValueError, "`active=0` must be at least 1"),
        ({"repeat": -1}, ValueError, "`repeat=-1` must be at least 0; 0 repeats until training ends"),
        ({"wait": 1.0}, TypeError, "`wait` must be an integer number of steps, got 1.0"),
        ({"active": True}, TypeError, "`active` must be an integer number of steps, got True"),
        ({"repeat": None}, TypeError, "`repeat` must be an integer number of steps, got None"),
        ({"warmup": "1"}, TypeError, "`warmup` must be an integer number of steps, got '1'"),
    ],
)
def test_wrong_values_are_told(values: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        ProfileSchedule(**values)
    assert told in str(caught.value)
