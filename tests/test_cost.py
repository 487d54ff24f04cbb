"""What the callback must not cost: work on idle steps, memory, and silence while the writer keeps a fit waiting."""

import os
import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording import private_torch, session
from lightning_chakra.recording.layout import RawTrace, RawWindow
from lightning_chakra.recording.writer import TraceWriter
from tests import harness, programs, reading

FAR = 10**9


class Moved:
    """A trainer whose global step has moved on, as it has at the end of a step; it costs nothing itself."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step


class HookSpy(Callback):
    """Runs the hooks of another callback once more between two batches and sees what they call."""

    def __init__(self, other: ChakraProfilerCallback) -> None:
        self.other = other
        self.called: set[str] = set()
        self.blocks = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, after = Moved(FAR), Moved(FAR + 1)

        def step() -> None:
            self.other.on_train_batch_start(before, module, batch, batch_idx)
            after.global_step += 1
            self.other.on_train_batch_end(after, module, outputs, batch, batch_idx)

        step()
        sys.setprofile(self._note)
        step()
        sys.setprofile(None)
        at_first = sys.getallocatedblocks()
        for _ in range(1000):
            step()
        self.blocks = max(self.blocks, sys.getallocatedblocks() - at_first)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "step":
            self.called.add(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
        elif event == "c_call" and argument is not sys.setprofile:
            self.called.add(f"{argument.__module__}.{argument.__qualname__}")


def spied(callback: dict[str, Any], trainer: dict[str, Any] | None = None) -> tuple[set[str], int]:
    """What the hooks of an idle callback call, and the memory blocks that are more after a thousand steps."""
    profiler = ChakraProfilerCallback(wait=FAR, **callback)
    spy = HookSpy(profiler)
    result = programs.train_with(profiler, {"callbacks": [spy], **(trainer or {})}, programs.Model(3))
    assert result["batches"] == 3
    return spy.called, spy.blocks


# No call into torch, none into the operating system, none into Lightning: nothing but our own few lines.
HOOKS = {
    "lightning_chakra.callback.ChakraProfilerCallback.on_train_batch_start",
    "lightning_chakra.callback.ChakraProfilerCallback.on_train_batch_end",
    "lightning_chakra.callback.ChakraProfilerCallback.on_train_batch_end.<locals>.<lambda>",  # global_step
    "lightning_chakra.recording.door.Door._begin",
    "lightning_chakra.recording.door.Door._end",
    "lightning_chakra.recording.session.ProfilingSession.end_step",
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name")
def test_an_idle_step_is_two_hook_calls_and_nothing_else() -> None:
    called, blocks = spied({"dirpath": "never-written"})
    assert called <= HOOKS
    assert "lightning_chakra.recording.session.ProfilingSession.end_step" in called
    assert blocks < 10
    assert not os.path.exists("never-written")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name")
def test_a_rank_that_is_not_profiled_calls_no_more(out: Path) -> None:
    results = harness.succeed(
        harness.run(
            spied, {"dirpath": str(out), "profile_ranks": [0]}, {"devices": 2, "strategy": "ddp"}, ranks=2, timeout=60
        )
    )
    for called, blocks in results:
        assert called <= HOOKS
        assert blocks < 10


class Deep(programs.Model):
    """Many tiny operators: some 2 MB of raw Kineto file in each step."""

    def __init__(self) -> None:
        super().__init__(16)
        self.layer = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(300)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0, foreach=False)


class ResidentMemory(Callback):
    """Resident memory in KiB at the start of each batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append(_status("VmRSS"))


def memory_around_a_window(folder: str) -> list[int]:
    watch = ResidentMemory()
    programs.train({"dirpath": folder, "wait": 2, "active": 10}, {"callbacks": [watch]}, Deep())
    return watch.seen


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_window_gives_its_memory_back_within_a_step(out: Path) -> None:
    (seen,) = harness.succeed(harness.run(memory_around_a_window, str(out)))
    before, after = seen[2], seen[14]  # the window is steps 3 to 12
    assert after / before < 1.10, seen


@pytest.mark.parametrize(
    "options", [{}, {"record_shapes": True, "profile_memory": True, "with_flops": True, "with_modules": True}]
)
def test_trace_only_leaves_nothing_out_of_the_file(tmp_path: Path, options: dict[str, bool]) -> None:
    def events(config: Any) -> Counter[Any]:
        profiler = private_torch.KinetoProfile(experimental_config=config, **options)
        profiler.prepare_trace()
        profiler.start_trace()
        model(torch.ones(2, 4)).sum().backward()
        profiler.stop_trace()
        profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
        found = reading.load(tmp_path / "kineto.json")["traceEvents"]
        return Counter((e["ph"], e.get("cat"), e["name"], *sorted(e.get("args", {}))) for e in found)

    config = private_torch.trace_only_config()
    if config is None:
        pytest.skip("this torch does not know it")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model(torch.ones(2, 4)).sum().backward()
    assert events(config) == events(None)


def write_big(folder: str, megabytes: int, compressor: str) -> float:
    """Publish a raw file of this size; MiB by which the resident memory grew at its peak."""
    if compressor != "isal":
        sys.modules["isal"] = None  # type: ignore[assignment]  # as if it were not installed
    raw = Path(folder, "window", "rank-0.json")
    raw.parent.mkdir()
    line = b'{"ph": "X", "name": "aten::addmm", "args": {"Record function id": 123456}},\n' * 13_000
    with raw.open("wb") as file:
        for _ in range(megabytes):
            file.write(line)
        file.write(b'], "traceName": "rank-0.json"}')
    target = f"{folder}/rank-0.json.gz"
    published = []
    writer = TraceWriter(published.append)
    peak = _peak_of_memory()
    writer.submit(RawWindow(0, 1, False, str(raw.parent), (RawTrace("kineto", str(raw), target),)))
    writer.close()
    assert writer.take_errors() == []
    assert len(published) == 1
    return peak()


def _peak_of_memory() -> Any:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    return lambda: (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compressor", ["isal", "standard library"])
@pytest.mark.parametrize("megabytes", [20, 200])
def test_the_writer_takes_the_same_little_memory_for_any_file(tmp_path: Path, megabytes: int, compressor: str) -> None:
    (grown,) = harness.succeed(harness.run(write_big, str(tmp_path), megabytes, compressor))
    assert grown < 16


class Slow(TraceWriter):
    """Publishes when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda trace: None)
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def _publish_window(self, window: RawWindow) -> None:
        self._done = 40_000_000
        self.reached.set()
        assert self.go_on.wait(30)
        super()._publish_window(window)


def wait_for_slow_writer(folder: str, rank: int, terminal: bool) -> str:
    """What is shown at the end of a fit whose writer has done 40 of 100 MB and goes on once the user has been told."""
    import fcntl
    import pty
    import termios

    raw = Path(folder, "window", "rank-0.json")
    raw.parent.mkdir()
    with raw.open("wb") as file:
        file.truncate(100_000_000)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # a new one has no width at all
    sys.stderr = os.fdopen(theirs, "w", buffering=1)
    writer = Slow()
    writer.submit(RawWindow(0, 1, False, str(raw.parent), (RawTrace("kineto", str(raw), f"{folder}/target.gz"),)))
    assert writer.reached.wait(30)

    def go_on() -> None:
        shown.append(os.read(ours, 4096).decode())
        writer.go_on.set()

    # What is shown before the writer is done must already tell where it stands.
    shown: list[str] = []
    reader = threading.Thread(target=go_on)
    reader.start()
    session._watch(writer, rank)
    reader.join(30)
    assert writer.join(0)
    writer.close()
    return shown[0]


BAR = "compressing traces:  40%"
LINE = "rank {} is compressing its traces, 40 of 100 MB so far"


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
@pytest.mark.parametrize(
    ("rank", "terminal", "text"), [(0, True, BAR), (1, True, LINE.format(1)), (0, False, LINE.format(0))]
)
def test_a_wait_at_the_end_is_a_bar_on_the_terminal_of_rank_zero_and_a_line_elsewhere(
    tmp_path: Path, rank: int, terminal: bool, text: str
) -> None:
    (shown,) = harness.succeed(harness.run(wait_for_slow_writer, str(tmp_path), rank, terminal))
    assert text in shown
