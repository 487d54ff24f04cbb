"""Kineto traces and Chakra execution traces from the ranks that matter of a PyTorch Lightning training."""

from typing import TYPE_CHECKING, Any

from lightning_chakra._version import __version__

if TYPE_CHECKING:
    from lightning_chakra.callback import ChakraProfilerCallback
    from lightning_chakra.loop import profile_window
    from lightning_chakra.recording.layout import PublishedTrace

__all__ = ["ChakraProfilerCallback", "PublishedTrace", "__version__", "profile_window"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that the command line does not pay for torch and lightning."""
    if name == "ChakraProfilerCallback":
        from lightning_chakra.callback import ChakraProfilerCallback

        return ChakraProfilerCallback
    if name == "profile_window":
        from lightning_chakra.loop import profile_window

        return profile_window
    if name == "PublishedTrace":
        from lightning_chakra.recording.layout import PublishedTrace

        return PublishedTrace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
