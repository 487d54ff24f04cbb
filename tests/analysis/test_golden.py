"""Answers are the same to the last digit as those of the release that they were kept from (``data/*.json.gz``).

The traces of ``own`` lie beside them; those of others are read where they are and not kept here.
"""

import gzip
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_chakra.cli import main

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "traces"
SETS = sorted(path.name.removesuffix(".summary.json.gz") for path in DATA.glob("*.summary.json.gz"))


def _find(name: str, tmp_path: Path) -> Path:
    if name == "own":
        return DATA / "own"
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} has the public traces, and is not here")
    if name == "dlrm":
        with tarfile.open(SHARED / "param-dlrm-8gpu" / "dlrm_kineto.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path / "dlrm_kineto"
    if name.startswith("hta-"):
        return SHARED / "hta" / f"{name.removeprefix('hta-')}.json.gz"
    return SHARED / {"megatron": "astrasim-megatron-tp8"}.get(name, name)


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What the new answer lacks or has otherwise; what it has more is fine."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key not in new:
                yield f"{where}.{key} is gone"
            else:
                yield from _differences(value, new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{where}[{index}]")
    elif old != new:
        yield f"{where}: {old!r} became {new!r}"


@pytest.mark.parametrize("command", ["summary", "check"])
@pytest.mark.parametrize("name", SETS)
def test_the_answer_is_the_same(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _find(name, tmp_path)
    monkeypatch.chdir(path.parent)
    main([command, path.name, "--json", "--jobs", "1", *(["--top", "100000"] if command == "summary" else [])])
    with gzip.open(DATA / f"{name}.{command}.json.gz", "rt") as file:
        old = json.load(file)
    assert list(_differences(old, json.loads(capsys.readouterr().out))) == []
