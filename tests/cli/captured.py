"""Captures to test with: one recorded by torch, made once per session, and ways to spoil a copy of it."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("LIGHTNING_CHAKRA_SHARED") or Path(__file__).parents[3] / "shared") / "traces"
"""Public GPU traces that others wrote (not part of the repository)."""

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no public GPU traces in ../shared/traces")

# Records what the callback records, two ranks one after the other: torch offers a profiler per process only.
RECORD = """
import gzip, json, os, sys
import torch
from torch.profiler import ExecutionTraceObserver, _KinetoProfile, record_function

out = sys.argv[1]
model = torch.nn.Linear(4, 4)
for rank in (0, 1):
    raw = {kind: os.path.join(out, f"{kind}-{rank}.json") for kind in ("pytorch_profile", "chakra")}
    observer = ExecutionTraceObserver()
    observer.register_callback(raw["chakra"])
    profiler = _KinetoProfile(record_shapes=True, with_stack=True, execution_trace_observer=observer)
    profiler.prepare_trace()
    profiler.start_trace()
    about = {
        "version": "0.1.0", "rank": rank, "world_size": 2, "profiled_ranks": [0, 1], "first_step": 10, "last_step": 11,
        "partial": False, "step_unit": "optimizer_step", "strategy": "DDPStrategy",
        "schedule": {"skip_first": 0, "wait": 9, "warmup": 1, "active": 2, "repeat": 1},
        "options": {"collect_shapes": True, "collect_callstack": True, "collect_chakra": True},
    }
    profiler.add_metadata_json("lightning_chakra", json.dumps(about))
    profiler.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": 2}))
    for step in (10, 11):
        with record_function(f"ProfilerStep#{step}"):
            model(torch.randn(2, 4)).sum().backward()
    profiler.stop_trace()
    observer.unregister_callback()
    profiler.export_chrome_trace(raw["pytorch_profile"])
    for kind, path in raw.items():
        os.makedirs(os.path.join(out, kind), exist_ok=True)
        with open(path, "rb") as file, gzip.open(os.path.join(out, kind, f"rank-{rank}.json.gz"), "wb") as packed:
            packed.write(file.read())
        os.remove(path)
# and what plain torch.profiler leaves without a schedule
os.mkdir(os.path.join(out, "plain"))
with torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(os.path.join(out, "plain"))):
    model(torch.randn(2, 4))
"""


def record(folder: Path) -> Path:
    """Record into ``folder``."""
    subprocess.run([sys.executable, "-c", RECORD, str(folder)], check=True, timeout=240, capture_output=True)
    return folder


def copy(source: Path, target: Path) -> Path:
    """Copy a capture, without what plain torch.profiler left."""
    for kind in ("pytorch_profile", "chakra"):
        shutil.copytree(source / kind, target / kind)
    return target


def text(path: Path) -> str:
    """The JSON of a trace."""
    return gzip.decompress(path.read_bytes()).decode()


def rewrite(path: Path, *changes: tuple[str, str], count: int = -1) -> None:
    """Replace text in a trace. Each text has to be there."""
    content = text(path)
    for old, new in changes:
        assert old in content, old
        content = content.replace(old, new, count)
    path.write_bytes(gzip.compress(content.encode()))


def write_kineto(path: Path, events: list[dict[str, Any]], **top: Any) -> Path:
    """Write a Kineto trace as torch lays it out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schemaVersion": 1, **top, "traceEvents": events, "traceName": "x.json"}
    content = json.dumps(document, indent=2).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path
