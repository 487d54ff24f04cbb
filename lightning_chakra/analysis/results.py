"""What all answers have in common: a versioned dictionary of plain values."""

import dataclasses
from typing import Any, ClassVar


class Result:
    """The answer to a question about one capture; its subclasses are frozen dataclasses.

    Attributes:
        SCHEMA: Name and version of what :meth:`to_dict` gives. A field that is added leaves the version as it is; one
            that is removed, renamed or changed in meaning raises it.
    """

    SCHEMA: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The answer in plain values, as ``--json`` prints it for each window."""
        assert dataclasses.is_dataclass(self)
        return {"schema": self.SCHEMA, **dataclasses.asdict(self)}
