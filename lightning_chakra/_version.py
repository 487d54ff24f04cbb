"""The version, in this one place: the build reads it, the traces carry it."""

__version__ = "0.1.0"
