"""The command lines of docs/tools.md: the recipes are run on a recorded capture, all others are parsed."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_chakra.cli import COMMANDS, _build_parser, main

TEXT = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
RECIPES = TEXT.partition("## Recipes")[2].partition("\n## ")[0]


def commands(text):
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    calls = [call.strip() for line in lines for call in line.partition("  #")[0].split("&&")]
    return [shlex.split(call)[1:] for call in calls if call.startswith("lightning-chakra ")]


def test_the_recipes_run(capture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    capture.rename("traces")
    run = [arguments for arguments in commands(RECIPES) if arguments[0] != "convert"]  # tests/interop runs that
    assert [arguments[0] for arguments in run] == ["check", "merge"]
    for arguments in run:
        assert main(arguments) == 0, capsys.readouterr()
    assert Path("timeline.json.gz").exists()


@pytest.mark.parametrize("arguments", commands(TEXT), ids=" ".join)
def test_every_command_line_is_understood(arguments):
    parser, _ = _build_parser()
    call = [a for a in arguments if a not in (">", "summary.json")]
    assert parser.parse_args(call).command == arguments[0]


def test_every_command_and_option_is_documented():
    _, modules = _build_parser()
    assert set(modules) == set(COMMANDS)
    for command in COMMANDS:
        section = re.search(rf"## `{command}`.*?(?=\n## |\Z)", TEXT, re.S)
        assert section is not None, command
        source = Path(str(modules[command].__file__)).read_text(encoding="utf-8")
        options = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source))
        missing = {option for option in options if option not in section[0]} - {"--json"}
        assert not missing, f"{command}: {missing}"
