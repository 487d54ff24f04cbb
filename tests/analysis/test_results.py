"""What all answers have in common."""

import dataclasses
import json
import sys
from typing import Any, ClassVar

import pandas
import pytest

from lightning_chakra import analysis
from lightning_chakra.analysis.results import Record, Result, html_table
from tests.analysis.test_golden import DATA


@dataclasses.dataclass(frozen=True, repr=False)
class Answer(Result):
    SCHEMA: ClassVar[str] = "lightning-chakra/answer/1"

    text: str

    def headline(self) -> str:
        return f"it is {self.text}"

    def tables(self) -> dict[str, list[Record]]:
        return {"parts": [{"part": self.text, "time_us": 1234.56, "of": None}], "none": []}


def answers() -> list[Result]:
    (capture,) = analysis.captures(str(DATA / "own"))
    return [analysis.summarize(capture, jobs=1), analysis.check(capture, jobs=1)]


def test_an_answer_is_short_where_it_is_printed() -> None:
    assert repr(Answer("<b>")) == "<Answer it is <b>>"
    for answer in answers():
        assert len(repr(answer)) < 120
        assert "\n" not in repr(answer)


def test_a_notebook_shows_tables_and_takes_no_name_for_markup() -> None:
    shown = Answer("<b>")._repr_html_()
    assert "it is &lt;b&gt;" in shown
    assert "<tr><td>&lt;b&gt;</td><td>1,234.6</td><td></td></tr>" in shown
    assert "none" not in shown  # a table without rows
    for answer in answers():
        assert "<table>" in answer._repr_html_()


def test_a_notebook_is_not_flooded() -> None:
    shown = html_table([{"row": number} for number in range(1000)], "rows")
    assert "<caption>rows (60 of 1000)</caption>" in shown
    assert shown.count("<tr>") == 61


def test_every_table_becomes_a_data_frame() -> None:
    for answer in answers():
        for name, rows in answer.tables().items():
            assert len(answer.to_pandas(name)) == len(rows)
    frame = answers()[0].to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns[:3]) == ["rank", "step", "mark_us"]
    with pytest.raises(ValueError, match="the tables of a Answer are parts, none"):
        Answer("x").to_pandas("part")


def test_without_pandas_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        Answer("x").to_pandas()


def test_the_dictionary_is_plain_and_says_its_schema() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, str | int | float)

    for answer in answers():
        assert answer.to_dict()["schema"] == answer.SCHEMA
        assert plain(answer.to_dict())
        json.dumps(answer.to_dict())


def test_every_kind_of_answer_keeps_the_rules() -> None:
    kinds = Result.__subclasses__()
    assert len({kind.SCHEMA for kind in kinds}) == len(kinds) > 2
    for kind in kinds:
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        assert kind.__repr__ is Result.__repr__, f"{kind}: repr=False"
