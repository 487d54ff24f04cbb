"""What is known about mlc-chakra 1.0.0: its needs, and its failures in one line each. Pure."""

import re

ET_REPLAY = (
    "pip install 'et_replay @ git+https://github.com/facebookresearch/param.git"
    "@7b19f586dd8b267333114992833a0d7e0d601630#subdirectory=et_replay'"
)
"""How to install the version that mlc-chakra 1.0.0 names (chakra/src/trace_link/et_replay_import_error.py)."""

CONVERTER_FORMATS = ("1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")
"""Formats of the execution trace that its converter reads (chakra/src/converter/pytorch_node.py)."""

_KNOWN = (
    (r"Failed to import et_replay", f"its linker needs et_replay, which is not on PyPI: {ET_REPLAY}"),
    (
        r"The name '(?P<x>[^']*)' does not correspond to a recognized collective",
        "it does not know the collective of the kernel {x} "
        "(it knows all-reduce, all-to-all, all-gather, reduce-scatter and broadcast)",
    ),
    (r"Unsupported schema version '(?P<x>[^']*)'", "it does not read execution traces of the format {x}"),
    (
        r"Duplicate correlation ID (?P<x>\d+)",
        "two kernel launches of the Kineto trace share the correlation number {x}",
    ),
    (r"Cyclic dependency", "the dependencies that it derived run in a circle"),
    (
        r"Exclusive duration calculation error for node '(?P<x>[^']*)'",
        "the children of {x} overlap in the Kineto trace",
    ),
    (r"'(?P<x>\w+)' object has no attribute 'comm_size'", "a collective kernel has no record_param_comms operator"),
    (r"has no attribute 'comm_size'", "a collective kernel has no record_param_comms operator"),
    (r"No module named '(?P<x>[\w.]+)'", "its package {x} is not installed"),
)

_NEEDS_DEVICE = (r"_construct_graph_from_kernels", r"cannot unpack non-iterable NoneType")

_CRITICAL_PATH = re.compile(r"Critical path analysis (?:encountered an invalid graph structure: |completed but )(.*)")


def explain(program: str, returncode: int, said: str, *, device: bool) -> str:
    """Why one of its programs failed.

    Args:
        program: The module that was run.
        returncode: Its exit status, negative for a signal.
        said: Its output.
        device: Whether the Kineto trace has device events.
    """
    name = "mlc-chakra's " + ("converter" if "converter" in program else "linker")
    if not device and any(re.search(pattern, said) for pattern in _NEEDS_DEVICE):
        return (
            f"{name}: it needs device events, and this trace has none (its critical path analysis starts from kernels)"
        )
    for pattern, text in _KNOWN:
        if match := re.search(pattern, said):
            return f"{name}: {text.format(**match.groupdict())}"
    if returncode in (-9, 137):
        return f"{name} was killed, most likely because the memory did not suffice: try fewer --jobs"
    if returncode in (-11, 139) or "RecursionError" in said:
        return f"{name} crashed: the operators are nested too deeply for the stack (try `ulimit -s unlimited`)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"{name} failed with exit code {returncode}: {lines[-1] if lines else 'it said nothing'}"


def lost_dependencies(said: str) -> str | None:
    """What its linker logs and passes over: without the critical path there are no dependencies between streams."""
    if (match := _CRITICAL_PATH.search(said)) is None:
        return None
    reason = match[1].strip()
    if "Cannot specify both 'axis' and" in reason:  # HTA 0.5.0 calls DataFrame.drop in a way that pandas 3 refuses
        reason = "HolisticTraceAnalysis 0.5.0 does not work with pandas 3: pip install 'pandas<3'"
    return f"the dependencies by synchronization are missing: {reason}"
