"""Who may import whom, and what the public surface looks like. The modules are read, not run."""

import ast
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
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# What the modules of the training side may import of this package. The command line has rules of its own.
ALLOWED = {
    "_version": set(),
    "messages": set(),
    "signals": set(),
    "memory": set(),
    "layout": set(),
    "schedule": set(),
    "ranks": set(),
    "private_torch": set(),
    "storage": {"layout"},
    "scratch": {"layout"},
    "observer": set(),
    "recorder": {"layout", "memory", "observer", "private_torch", "schedule", "scratch", "signals"},
    "barrier": {"messages", "private_torch", "ranks", "signals"},
    "mend": {"layout"},
    "writer": {"layout", "mend", "storage"},
    "session": {"barrier", "layout", "messages", "recorder", "schedule", "scratch", "signals", "writer"},
    "callback": {
        "_version", "barrier", "layout", "messages", "private_torch", "ranks", "recorder", "schedule", "scratch",
        "session", "storage", "writer",
    },
    "autoload": {"callback", "messages"},
    "__init__": {"_version", "callback", "layout"},
}  # fmt: skip


def _imports(module: str, *, run_on_import: bool = False) -> Iterator[str]:
    """Full names of everything that ``module`` imports; only what its own import runs if asked for."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    pending: list[ast.AST] = [tree]
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


def _own(module: str, **options: bool) -> set[str]:
    found = (name.split(".") for name in _imports(module, **options))
    return {parts[1] for parts in found if parts[0] == "lightning_chakra" and len(parts) > 1}


def _roots(module: str) -> set[str]:
    return {name.split(".")[0] for name in _imports(module)}


def test_the_rules_cover_every_module() -> None:
    assert {module for module in MODULES if module not in ALLOWED} == set()


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_imports_go_one_way(module: str) -> None:
    own = {name for name in _own(module) if not name.startswith("__")}
    assert own <= ALLOWED[module]


def test_nothing_imports_the_callback_but_lazily() -> None:
    importers = {module for module in MODULES if "callback" in _own(module)}
    assert importers <= {"__init__", "autoload"}
    assert not any("callback" in _own(module, run_on_import=True) for module in MODULES)


def test_only_the_callback_knows_lightning() -> None:
    assert {m for m in MODULES if _roots(m) & {"lightning", "pytorch_lightning", "lightning_fabric"}} == {"callback"}


def test_who_knows_torch() -> None:
    assert {m for m in MODULES if "torch" in _roots(m)} == {
        "barrier", "callback", "observer", "private_torch", "recorder",
    }  # fmt: skip


def test_the_package_and_the_background_side_load_without_torch_and_lightning() -> None:
    code = (
        "import sys, lightning_chakra, lightning_chakra.writer, lightning_chakra.scratch, lightning_chakra.schedule\n"
        "import lightning_chakra.ranks\n"
        "print([name for name in ('torch', 'lightning', 'pytorch_lightning') if name in sys.modules])"
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


def test_the_public_names() -> None:
    assert lightning_chakra.__all__ == ["ChakraProfilerCallback", "PublishedTrace", "__version__"]
    assert all(getattr(lightning_chakra, name) is not None for name in lightning_chakra.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ChakraProfiler'"):
        lightning_chakra.ChakraProfiler  # noqa: B018
