"""Reading traces back, as strictly as the tools that users have."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any


def load(path: str | Path) -> dict[str, Any]:
    """A trace file as strict JSON."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def files(root: str | Path) -> list[str]:
    """All files below ``root``, relative to it."""
    root = Path(root)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def kineto_marks(trace: dict[str, Any]) -> list[int]:
    """The step numbers of a Kineto trace, in order of time."""
    marks = [
        (event["ts"], event["name"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and event.get("cat") == "user_annotation"
        and event["name"].startswith("ProfilerStep#")
    ]
    return [int(name.split("#")[1]) for _, name in sorted(marks)]


def et_marks(trace: dict[str, Any]) -> list[int]:
    """The step numbers of an execution trace, in order of node ids."""
    marks = [(node["id"], node["name"]) for node in trace["nodes"] if node["name"].startswith("ProfilerStep#")]
    return [int(name.split("#")[1]) for _, name in sorted(marks)]


def attribute(node: dict[str, Any], name: str) -> Any:
    return next((a["value"] for a in node["attrs"] if a["name"] == name), None)


def operators(kineto: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        event
        for event in kineto["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]


def unlinked(kineto: dict[str, Any], et: dict[str, Any]) -> list[str]:
    """Operators of the Kineto trace without a node of the same id and name in the execution trace, and the reverse."""
    nodes = {attribute(node, "rf_id"): node["name"] for node in et["nodes"]}
    lost = [
        event["name"]
        for event in operators(kineto)
        if nodes.get(event["args"].get("Record function id")) != event["name"] and not _cut(event, kineto)
    ]
    ids = {event["args"].get("Record function id") for event in operators(kineto)}
    roots = ("[pytorch|profiler|execution_trace", "## process_group:init ##")
    lost += [
        f"ET only: {node['name']}"
        for node in et["nodes"]
        if not node["name"].startswith(roots) and attribute(node, "rf_id") not in ids
    ]
    return lost


def _cut(event: dict[str, Any], kineto: dict[str, Any]) -> bool:
    """Whether the window ended while another thread was in this operator.

    The execution trace notes an operator when it ends. gloo wakes the thread that trains before its worker ends the
    range around a collective, so the last collective of a window may still be open.
    """
    marks = [e for e in operators(kineto) if e["name"].startswith("ProfilerStep#")]
    last = max(marks, key=lambda mark: mark["ts"])
    return event["tid"] != last["tid"] and event["ts"] + event["dur"] >= last["ts"] + last["dur"]


def well_formed(et: dict[str, Any]) -> list[str]:
    """What is wrong with the node graph of an execution trace."""
    counts = Counter(node["id"] for node in et["nodes"])
    wrong = [f"id {node} occurs {count} times" for node, count in counts.items() if count > 1]
    return wrong + [f"{n['id']} hangs on {n['ctrl_deps']}" for n in et["nodes"] if n["ctrl_deps"] not in counts]


def check_pair(root: str | Path, rank: int, steps: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the pair of ``rank`` below ``root`` and hold it against everything that must be true of every pair."""
    kineto = load(Path(root, "pytorch_profile", f"rank-{rank}.json.gz"))
    et = load(Path(root, "chakra", f"rank-{rank}.json.gz"))
    assert kineto_marks(kineto) == steps
    assert et_marks(et) == steps
    assert operators(kineto)
    assert unlinked(kineto, et) == []
    assert [problem for problem in well_formed(et) if "hangs on" not in problem] == []
    check_kineto(kineto, rank, steps)
    return kineto, et


def check_kineto(kineto: dict[str, Any], rank: int, steps: list[int]) -> None:
    assert kineto_marks(kineto) == steps
    entry = kineto["lightning_chakra"]
    assert entry["rank"] == kineto["distributedInfo"]["rank"] == rank
    assert (entry["first_step"], entry["last_step"]) == (steps[0], steps[-1])
