"""What users install: the wheel and the source distribution, and the types they see."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_chakra import __version__

REPOSITORY = Path(__file__).parent.parent


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, built from the source distribution as an installer would."""
    folder = tmp_path_factory.mktemp("dist")
    # with the build back end of this environment: fetching another one takes longer than all the rest
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY)
    return {path.suffix: path for path in folder.iterdir()}


def test_metadata_renders(distributions: dict[str, Path]) -> None:
    _run(sys.executable, "-m", "twine", "check", "--strict", *distributions.values())


def test_the_wheel_holds_the_package_and_nothing_else(distributions: dict[str, Path]) -> None:
    names = zipfile.ZipFile(distributions[".whl"]).namelist()
    source = REPOSITORY / "lightning_chakra"
    expected = {
        str(path.relative_to(REPOSITORY))
        for path in source.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_what_builds_and_tests_it(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions[".gz"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "constraints.txt",
        "Makefile",
        "conftest.py",
    } <= names
    assert {"lightning_chakra/callback.py", "tests/harness.py", "docs/guide.md", "examples/demo.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "demo"))]


def test_the_wheel_installs_into_an_empty_environment(distributions: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", distributions[".whl"])
    # its dependencies are the ones of this environment: installing a second torch would take minutes
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert __version__ in _run(environment / "bin" / "lightning-chakra", "--version", cwd=tmp_path)
    where = _run(
        python, "-c", "import lightning_chakra as l; l.ChakraProfilerCallback(); print(l.__file__)", cwd=tmp_path
    )
    assert str(environment) in where


_USER_CODE = """
from lightning_chakra import ChakraProfilerCallback, PublishedTrace

callback = ChakraProfilerCallback("traces", profile_ranks=[0, 8], collect_chakra=True)
ChakraProfilerCallback(profile_ranks="0-255:8", step_unit="batch", on_error="raise", barrier_timeout=2.5)
traces: list[PublishedTrace] = callback.traces
size: int = traces[0].bytes
reveal_type(callback)
"""


def _mypy(code: str, folder: Path) -> Sequence[str]:
    file = folder / "user.py"
    file.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(REPOSITORY / ".mypy_cache"), str(file)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout.splitlines()


def test_users_see_the_types(tmp_path: Path) -> None:
    right = _mypy(_USER_CODE, tmp_path)
    assert 'Revealed type is "lightning_chakra.callback.ChakraProfilerCallback"' in "\n".join(right)
    assert right[-1].startswith("Success"), right
    wrong = _mypy(_USER_CODE.replace('"batch"', '"epoch"').replace("size: int", "size: str"), tmp_path)
    assert len([line for line in wrong if ": error:" in line]) == 2, wrong
