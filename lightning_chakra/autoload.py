"""Adding the callback to a job whose code cannot be changed, through an environment variable. Off by default.

Lightning asks installed packages for callbacks when a Trainer is built. Ours answers with one only if
``LIGHTNING_CHAKRA`` is set, and imports nothing else before it knows that.
"""

import inspect
import os
import shlex
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_chakra.callback import ChakraProfilerCallback

VARIABLE = "LIGHTNING_CHAKRA"

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def callbacks_from_environment() -> "list[ChakraProfilerCallback]":
    """The callback that ``LIGHTNING_CHAKRA`` asks for, in a list; an empty list without it.

    The value holds arguments of :class:`~lightning_chakra.ChakraProfilerCallback` as ``name=value``, separated by
    spaces (quoted as in a shell): ``profile_ranks=0-7:8 wait=50 collect_chakra=true``. The value ``1`` takes the
    defaults, and an empty value or ``0`` means off. It must be the same on all ranks of a job, as every callback must.

    Raises:
        ValueError: The variable cannot be read, or the callback does not accept an argument.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value or _WORDS.get(value.lower()) is False:
        return []

    from lightning_chakra.callback import ChakraProfilerCallback

    items = [] if _WORDS.get(value.lower()) else _split(value)
    parameters = dict(inspect.signature(ChakraProfilerCallback).parameters)
    arguments: dict[str, object] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or name not in parameters:
            raise ValueError(
                f"{VARIABLE}={value!r}: cannot read {item!r}. It takes name=value with one of the arguments "
                f"{', '.join(parameters)}; for example {VARIABLE}='profile_ranks=0-7:8 wait=50 collect_chakra=true'."
            )
        if name in arguments:
            raise ValueError(f"{VARIABLE}={value!r}: `{name}` is given twice.")
        try:
            arguments[name] = _convert(text, parameters[name].default)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={value!r}: `{name}` {error}.") from None
    try:
        return [ChakraProfilerCallback(**arguments)]  # type: ignore[arg-type]  # checked by the callback itself
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={value!r}: {error}") from None


def callbacks_for_pytorch_lightning() -> "list[ChakraProfilerCallback]":
    """The same for a Trainer of ``pytorch_lightning``; one before 2.6 fails on a callback of ``lightning.pytorch``."""
    callbacks = callbacks_from_environment()
    if not callbacks:
        return []
    release = version("pytorch-lightning")
    if tuple(map(int, release.split(".")[:2])) < (2, 6):
        from lightning_chakra.recording.messages import warn

        warn(
            f"no trace: {VARIABLE} is set, and a Trainer of pytorch_lightning {release} takes no callback of "
            "lightning.pytorch. Update pytorch-lightning to 2.6 or later."
        )
        return []
    return callbacks


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={value!r}: {error}.") from None


def _convert(text: str, default: object) -> object:
    """Read ``text`` as the type of the argument's default; paths, ranks and choices stay text."""
    if isinstance(default, bool):
        if text.lower() not in _WORDS:
            raise ValueError(f"must be true or false, not {text!r}")
        return _WORDS[text.lower()]
    if isinstance(default, int):
        try:
            return float(text) if "." in text else int(text)
        except ValueError:
            raise ValueError(f"must be a number, not {text!r}") from None
    return text
