"""Runs the Python code of the README and of the documentation as tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest.register_assert_rewrite("tests.reading")

pytest_plugins = ["tests.guard"]


@pytest.fixture
def in_empty_folder(tmp_path: Path) -> Iterator[None]:
    """What documented code writes goes to a folder of its own."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


def _namespace(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__documentation__"


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    fixtures=["in_empty_folder"],
    setup=_namespace,
).pytest()
