"""What can go wrong between a folder of traces and an answer. Pure."""


class TraceError(Exception):
    """A trace file that cannot be read: not there, cut, not gzip, not JSON. The text says what, not which file."""


class CaptureError(ValueError):
    """What was asked for is not there or cannot be had: no such folder, no traces in it, no such rank."""


class ResultError(Exception):
    """Something is wrong with the traces, the disk or a process, so that there is no result. The text says what."""
