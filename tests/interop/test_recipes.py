"""The recipes of docs/tools.md that need a reader, as they stand there, on traces of two ranks."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop

DOCS = Path(__file__).parents[2] / "docs" / "tools.md"
PYTHON = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
READERS = ("hta", "et_replay")


def test_there_are_recipes():
    assert len(PYTHON) >= 3


@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing")
        )
        for name in READERS
    ],
)
def test_python_recipe(two_ranks, reader):
    (code,) = [code for code in PYTHON if f"from {reader}" in code]
    path = os.pathsep.join([str(DOCS.parents[1]), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=two_ranks,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
