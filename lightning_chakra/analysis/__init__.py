"""Answers from traces, for programs and notebooks: what the command line prints, as plain data.

Neither torch nor Lightning is imported.
"""

from lightning_chakra.analysis.check import CheckResult, check
from lightning_chakra.analysis.summary import Summary, summarize
from lightning_chakra.traces.captures import Capture
from lightning_chakra.traces.captures import find_captures as captures
from lightning_chakra.traces.errors import CaptureError, ResultError

__all__ = ["Capture", "CaptureError", "CheckResult", "ResultError", "Summary", "captures", "check", "summarize"]
