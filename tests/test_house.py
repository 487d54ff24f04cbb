"""Who may import whom, and what the public surface looks like. The modules are read, not run."""

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.profiler

import lightning_chakra
from lightning_chakra import ChakraProfilerCallback

PACKAGE = Path(lightning_chakra.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)

# What each wing may import of this package: a wing, or single modules of one.
PURE = {"recording.layout", "recording.ranks", "recording.storage"}
WINGS: dict[str, set[str]] = {
    "recording": {"recording", "_version"},
    "traces": {"traces", *PURE},
    "analysis": {"analysis", "traces", *PURE},
    # files out of files: what a recording left is finished by what finishes it in a training
    "transform": {
        "transform",
        "traces",
        *PURE,
        "recording.leftovers",
        "recording.scratch",
        "recording.writer",
        "_version",
    },
    "cli": {"cli", "analysis", "transform", "traces", *PURE, "_version"},
    "callback": {"recording"},
    "loop": {"recording"},
    "autoload": {"callback", "recording.messages"},
    "__init__": {"_version", "callback", "loop", "recording.layout", "analysis"},
    "_version": set(),
}
MOST_LINES = 400
TORCH = {
    "callback", "recording.barrier", "recording.observer", "recording.private_torch", "recording.processes",
    "recording.recorder",
}  # fmt: skip


def _path(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.exists() else PACKAGE.joinpath(*module.split("."), "__init__.py")


def _imports(module: str, *, run_on_import: bool = False) -> Iterator[str]:
    """Full names of everything that ``module`` imports; only what its own import runs if asked for."""
    pending: list[ast.AST] = [ast.parse(_path(module).read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        lazy = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        if not (run_on_import and lazy):
            pending.extend(ast.iter_child_nodes(node))


@functools.cache
def _own(module: str, **options: bool) -> frozenset[str]:
    """The modules of this package that ``module`` imports."""
    found: set[str] = set()
    for name in _imports(module, **options):
        parts = name.split(".")
        while parts[0] == "lightning_chakra" and len(parts) > 1:
            if ".".join(parts[1:]) in MODULES:
                found.add(".".join(parts[1:]))
                break
            parts.pop()
    return frozenset(found)


def _roots(module: str) -> set[str]:
    return {name.split(".")[0] for name in _imports(module)}


def _wing(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_its_rules() -> None:
    assert {_wing(module) for module in MODULES} == set(WINGS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    allowed = WINGS[_wing(module)]
    assert {name for name in _own(module) if name not in allowed and _wing(name) not in allowed} == set()


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_itself_in_a_circle(module: str) -> None:
    seen: set[str] = set()
    pending = set(_own(module, run_on_import=True))
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending |= _own(name, run_on_import=True)
    assert module not in seen


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_too_long(module: str) -> None:
    assert len(_path(module).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_nothing_imports_the_callback_but_lazily() -> None:
    importers = {module for module in MODULES if "callback" in _own(module)}
    assert importers <= {"__init__", "autoload"}
    assert not any("callback" in _own(module, run_on_import=True) for module in MODULES)


def test_only_the_callback_knows_lightning() -> None:
    assert {m for m in MODULES if _roots(m) & {"lightning", "pytorch_lightning", "lightning_fabric"}} == {"callback"}


def test_who_knows_torch() -> None:
    assert {m for m in MODULES if "torch" in _roots(m)} == TORCH


def test_only_the_command_line_prints_and_reads_arguments() -> None:
    assert {_wing(m) for m in MODULES if _roots(m) & {"jsonargparse", "rich", "argparse"}} == {"cli"}


def test_the_package_and_the_background_side_load_without_torch_and_lightning() -> None:
    modules = ["", ".recording.writer", ".recording.scratch", ".recording.schedule", ".recording.settings", ".analysis"]
    code = (
        f"import sys; {'; '.join(f'import lightning_chakra{module}' for module in modules)}\n"
        "print([name for name in ('torch', 'lightning', 'pytorch_lightning') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_the_loop_loads_without_lightning() -> None:
    code = (
        "import sys, lightning_chakra.loop; lightning_chakra.loop.profile_window('traces')\n"
        "print([name for name in ('lightning', 'pytorch_lightning', 'lightning_fabric') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


# The table of arguments, which the README repeats.
DEFAULTS: dict[str, Any] = {
    "dirpath": None,
    "profile_ranks": [],
    "skip_first": 0,
    "wait": 9,
    "warmup": 1,
    "active": 2,
    "repeat": 1,
    "step_unit": "optimizer_step",
    "collect_shapes": False,
    "collect_callstack": False,
    "collect_chakra": False,
    "profile_memory": False,
    "with_flops": False,
    "with_modules": False,
    "barrier_timeout": 1800,
    "scratch_dir": None,
    "on_error": "warn",
}


def test_arguments_and_defaults() -> None:
    parameters = inspect.signature(ChakraProfilerCallback).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == DEFAULTS
    assert list(parameters) == list(DEFAULTS)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert kinds.pop("dirpath") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_what_is_handed_through_has_the_names_and_defaults_of_torch() -> None:
    ours = inspect.signature(ChakraProfilerCallback).parameters
    theirs = inspect.signature(torch.profiler.profile).parameters
    for name, torch_name in {
        "profile_memory": "profile_memory",
        "with_flops": "with_flops",
        "with_modules": "with_modules",
        "collect_shapes": "record_shapes",
        "collect_callstack": "with_stack",
    }.items():
        assert ours[name].default == theirs[torch_name].default
    schedule = inspect.signature(torch.profiler.schedule).parameters
    assert {"skip_first", "wait", "warmup", "active", "repeat"} <= set(schedule) & set(ours)


def test_every_argument_is_described() -> None:
    text = inspect.getdoc(ChakraProfilerCallback) or ""
    assert [name for name in DEFAULTS if f"\n    {name}: " not in text] == []


def test_every_argument_can_be_read_back() -> None:
    callback = ChakraProfilerCallback(profile_ranks=[0, 2], active=3, on_error="raise")
    given = {**DEFAULTS, "profile_ranks": [0, 2], "active": 3, "on_error": "raise"}
    assert {name: getattr(callback, name) for name in DEFAULTS} == given


def test_the_public_names() -> None:
    assert lightning_chakra.__all__ == ["ChakraProfilerCallback", "PublishedTrace", "__version__", "profile_window"]
    assert all(getattr(lightning_chakra, name) is not None for name in lightning_chakra.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ChakraProfiler'"):
        lightning_chakra.ChakraProfiler  # noqa: B018
