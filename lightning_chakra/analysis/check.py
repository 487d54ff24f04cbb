"""Is a capture good? Facts about every file, and what is wrong with them."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from lightning_chakra.analysis.results import Record, Result
from lightning_chakra.analysis.rules import Problem, Severity, judge, numbers
from lightning_chakra.recording.layout import Kind
from lightning_chakra.traces.captures import Capture
from lightning_chakra.traces.facts import ChakraFacts, KinetoFacts, RankFacts, read_facts
from lightning_chakra.traces.jobs import map_ranks


@dataclass(frozen=True, repr=False)
class CheckResult(Result):
    """Whether one capture is good.

    Attributes:
        capture: What was looked at.
        ranks: What is in the traces of each rank.
        problems: What is wrong or worth knowing, the worst first.
    """

    SCHEMA: ClassVar[str] = "lightning-chakra/check/1"

    capture: Capture
    ranks: tuple[RankFacts, ...]
    problems: tuple[Problem, ...]

    @property
    def good(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(problem.severity == "note" for problem in self.problems)

    def headline(self) -> str:
        """See :meth:`Result.headline`."""
        counts = Counter(problem.severity for problem in self.problems)
        found = ", ".join(
            f"{counts[word]} {word}{'s' * (counts[word] != 1)}" for word in get_args(Severity) if counts[word]
        )
        return f"{self.capture.name}: {'good' if self.good else 'not good'}" + (f", {found}" if found else "")

    def tables(self) -> dict[str, list[Record]]:
        """See :meth:`Result.tables`: ``problems``, and the ``files`` that were looked at."""
        files: list[tuple[Kind, KinetoFacts | ChakraFacts | None]] = []
        for rank in self.ranks:
            files += [("kineto", rank.kineto), ("chakra", rank.chakra)]
        return {
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "files": [
                {"file": trace.name, "kind": kind, "error": trace.error, "steps": numbers(trace.steps)}
                for kind, trace in files
                if trace is not None
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Result.to_dict`."""
        return {
            "schema": self.SCHEMA,
            "name": self.capture.name,
            "foreign": self.capture.foreign,
            "good": self.good,
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
        }


def check(capture: Capture, *, jobs: int = 0, executor: Executor | None = None) -> CheckResult:
    """Look at every trace of a capture.

    Args:
        capture: One of :func:`lightning_chakra.analysis.captures`.
        jobs: Processes at a time; 0: one per CPU, at most 8.
        executor: What reads the ranks instead of processes of this machine.
    """
    return check_all([capture], jobs=jobs, executor=executor)[0]


def check_all(captures: Sequence[Capture], *, jobs: int = 0, executor: Executor | None = None) -> list[CheckResult]:
    """The same for several captures, all ranks of all of them at the same time."""
    tasks = [(index, pair) for index, capture in enumerate(captures) for pair in capture.pairs()]
    facts = map_ranks(read_facts, [pair for _, pair in tasks], jobs, executor)
    results = []
    for index, capture in enumerate(captures):
        ranks = [fact for (owner, _), fact in zip(tasks, facts, strict=True) if owner == index]
        results.append(CheckResult(capture, tuple(ranks), tuple(judge(capture, ranks))))
    return results
