"""What a session tells the user to do about windows that did not come, or did not get out. Pure."""

import os

from lightning_chakra.recording.schedule import ProfileSchedule, named_steps
from lightning_chakra.recording.writer import PublishError


def resting(batches: int) -> str:
    """The warning about a training whose steps cannot be counted."""
    return (
        f"no step in {batches} batches, and so no trace: `trainer.global_step` did not move. Under manual optimization "
        "it moves with the optimizers that `self.optimizers()` gives, and not with raw ones "
        "(`use_pl_optimizer=False`, or the module's own). "
        'Give the callback `step_unit="batch"`, which counts batches.'
    )


def too_short(schedule: ProfileSchedule, steps: int, *, certain: bool) -> str:
    """The warning about a fit that ends before its first window begins."""
    had = "had" if certain else "will have at most"
    return (
        f"no trace: the schedule skip_first={schedule.skip_first}, wait={schedule.wait}, warmup={schedule.warmup}, "
        f"active={schedule.active} needs {schedule.steps_needed} steps, this fit {had} {steps}. Lower `wait` or train "
        "for longer."
    )


def describe_lost(rank: int, error: PublishError) -> str:
    """The warning about a file that was not published."""
    window = error.window
    steps = named_steps(window.first_step, window.last_step)
    fate = (
        f"The raw file is kept: {error.raw.path}; `lightning-chakra recover {window.folder}` publishes it."
        if os.path.exists(error.raw.path)
        else "It is lost."
    )
    return f"rank {rank}, {steps}: {error.raw.target} was not published: {error.reason}. {fate} The training goes on."
