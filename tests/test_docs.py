"""What the documentation shows besides Python: YAML for LightningCLI, command lines, and the names of arguments."""

import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.cli import _build_parser, main
from tests import harness, programs

ROOT = Path(__file__).parents[1]
# tools.md has tests of its own, beside those of the commands
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("[!_]*.md") if page.name != "tools.md"),
]
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(content):
            if match["language"] in languages:
                line = content.count("\n", 0, match.start()) + 1
                yield Block(str(page.relative_to(ROOT)), line, textwrap.dedent(match["text"]))


def _commands(program: str) -> Iterator[Any]:
    """The arguments of each command line with ``program`` in a shell block, its continuations joined."""
    for block in _blocks("bash", "console", "sh", "shell"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if any(word == ">" or "|" in word for word in words):
                words = words[: next(i for i, word in enumerate(words) if word == ">" or "|" in word)]
            if program in words[:2]:
                yield pytest.param(words[words.index(program) + 1 :], id=f"{block}: {' '.join(words)[:60]}")


def _parse(arguments: list[str]) -> Any:
    return LightningCLI(DemoModel, BoringDataModule, run=False, args=arguments, save_config_callback=None).trainer


@pytest.mark.parametrize("block", [b for b in _blocks("yaml") if "trainer:" in b.text], ids=str)
def test_yaml_is_what_lightning_cli_takes(block: Block, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(block.text, encoding="utf-8")
    trainer = _parse(["--config", str(config), "--trainer.accelerator=cpu", "--trainer.logger=false"])
    assert any(isinstance(callback, ChakraProfilerCallback) for callback in trainer.callbacks)


@pytest.mark.parametrize("arguments", _commands("train.py"))
def test_command_lines_of_a_training(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples" / "cli")
    _parse([argument for argument in arguments if argument != "fit"] + ["--trainer.accelerator=cpu"])


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``traces/`` of two ranks."""
    folder = tmp_path_factory.mktemp("documented")
    callback = {"dirpath": folder / "traces", "collect_chakra": True}
    harness.succeed(harness.run(programs.train, callback, {"devices": 2, "strategy": "ddp"}, ranks=2))
    return folder


@pytest.mark.parametrize("arguments", _commands("lightning-chakra"))
def test_command_lines_of_the_package(
    arguments: list[str],
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, _ = _build_parser()
    assert parser.parse_args(arguments).command == arguments[0]
    if arguments[0] in ("check", "summary", "merge") and arguments[1:2] == ["traces"]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "traces").symlink_to(traces / "traces")
        assert main(arguments) == 0, capsys.readouterr()


def test_the_tables_name_every_argument_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("## Arguments") : readme.index("## What it costs")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(ChakraProfilerCallback).parameters)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = {" ".join(entry.split()[:2]) for entry in re.findall(r"entry: \.venv/bin/(.*)", hooks)}
    linted = {" ".join(line.split()[:2]) for line in re.findall(r"\$\(BIN\)/(.*)", recipe)}
    assert {line.removesuffix(" examples/*.sh") for line in linted} == entries
