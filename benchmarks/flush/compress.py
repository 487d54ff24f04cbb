"""CPU time and size of compressors on a raw Kineto file and a raw execution trace, in pieces of 1 MiB."""

import gzip
import os
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from benchmarks.flush.bare import BareTorch
from benchmarks.flush.common import Tiny, arguments, fit, median, report, steps_for
from lightning_chakra.recording.writer import PIECE


def in_pieces(opener: Callable[[IO[bytes]], Any]) -> Callable[[str, str], None]:
    """The writer's loop around a compressor."""

    def compress(raw: str, target: str) -> None:
        with open(raw, "rb", buffering=0) as source, open(target, "wb") as sink, opener(sink) as compressed:
            while piece := source.read(PIECE):
                compressed.write(piece)

    return compress


def line_by_line(raw: str, target: str) -> None:
    """What torch does for names that end in ``.gz``."""
    with open(raw, "rb") as source, gzip.open(target, "wb") as sink:
        sink.writelines(source)


def standard(level: int) -> Callable[[str, str], None]:
    """The standard library."""
    return in_pieces(lambda sink: gzip.GzipFile("", "wb", level, sink))


def compressors() -> dict[str, Callable[[str, str], None]]:
    """All that are installed."""
    found = {
        "torch's loop": line_by_line,
        "standard library, level 6": standard(6),
        "standard library, level 1": standard(1),
    }
    try:
        from isal import igzip

        for level in range(4):
            found[f"isal, level {level}"] = in_pieces(
                lambda sink, level=level: igzip.IGzipFile("", "wb", level, sink)  # type: ignore[misc]
            )
    except ImportError:
        pass
    try:
        from zlib_ng import gzip_ng

        found["zlib-ng, level 6"] = in_pieces(lambda sink: gzip_ng.GzipNGFile("", "wb", 6, sink))
    except ImportError:
        pass
    return found


if __name__ == "__main__":
    args = arguments(__doc__, size=440.0, skip_torch=0)
    if args.quick:
        args.size, args.repeats = 20.0, 1
    with tempfile.TemporaryDirectory() as folder:
        # A transformer-like mix of names would compress alike: both files repeat the same keys for every operator.
        active = steps_for(args.size, chakra=True, layers=600, accelerator=args.accelerator)
        fit(Tiny(600, active + 2), [BareTorch(folder, 1, active, chakra=True)], args.accelerator)
        files = [os.path.join(folder, name) for name in ("kineto.json", "et.json")]
        seconds: dict[tuple[str, str], list[float]] = {}
        size: dict[tuple[str, str], float] = {}
        for _ in range(args.repeats):
            for name, compress in compressors().items():
                if args.skip_torch and name == "torch's loop":
                    continue
                for file in files:
                    began = time.process_time()
                    compress(file, file + ".gz")
                    seconds.setdefault((name, file), []).append(time.process_time() - began)
                    size[name, file] = os.path.getsize(file + ".gz") / 1e6
        reference = "standard library, level 6"
        rows = []
        for name in dict.fromkeys(name for name, _ in seconds):
            row: list[object] = [name]
            for file in files:
                speed = [a / b for a, b in zip(seconds[reference, file], seconds[name, file], strict=True)]
                row += [
                    f"{median(seconds[name, file]):.2f} s, {size[name, file]:.1f} MB",
                    f"{median(speed):.1f} x the speed, {size[name, file] / size[reference, file]:.2f} x the size",
                ]
            rows.append(row)
        raw = [f"{os.path.getsize(file) / 1e6:.0f} MB" for file in files]
    report(
        "Compressors",
        ["", f"Kineto, {raw[0]}", f"of {reference}", f"ET, {raw[1]}", f"of {reference}"],
        rows,
        args.accelerator,
        f"CPU time, medians of {args.repeats}.",
    )
