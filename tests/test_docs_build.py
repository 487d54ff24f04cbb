"""The documentation site builds without a warning, and its diagrams are those that the script draws."""

import runpy
from pathlib import Path

import pytest

from tests import harness
from tests.test_house import PURE, WINGS

DOCS = Path(__file__).parents[1] / "docs"


def _build(out: Path) -> int:
    from sphinx.cmd.build import build_main

    return build_main(["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(out / "cache"), str(DOCS), str(out)])


def test_the_site_builds_without_warnings(out: Path) -> None:
    pytest.importorskip("sphinx", reason="the group `docs` is not installed; `make` installs it")
    (result,) = harness.run(_build, out)
    assert result.exitcode == 0
    assert (result.value, result.err) == (0, ""), result.err
    assert "barrier_timeout" in (out / "api.html").read_text(encoding="utf-8")
    for page in DOCS.glob("[!_]*.md"):
        assert (out / f"{page.stem}.html").exists()


@pytest.mark.parametrize("name", ["schedules.svg", "accumulation.svg", "flow.svg", "modules.svg"])
def test_the_diagrams_are_up_to_date(name: str) -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["pictures"]()
    assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == drawn[name], "run docs/pictures/draw.py"


def test_the_diagram_of_modules_shows_imports_that_are_allowed() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["IMPORTS"]
    named = {"pure": PURE}
    assert [pair for pair in drawn if not named.get(pair[1], {pair[1]}) <= WINGS[pair[0]] | PURE] == []
