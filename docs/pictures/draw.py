"""Draws the diagrams of the documentation as SVG, from the code where there is code to draw from.

python docs/pictures/draw.py          # writes the files beside this one; a test holds them up to date
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lightning_chakra.recording.schedule import Phase, ProfileSchedule

FOLDER = Path(__file__).parent
FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"
COLORS = {Phase.IDLE: "#e8eaed", Phase.WARMUP: "#f6c453", Phase.ACTIVE: "#2f6fde"}
INK, MUTED, RED, GREEN, VIOLET = "#1f2933", "#667380", "#d64545", "#2e8b57", "#8656c7"


# who imports whom, as far as the diagram of modules shows it
IMPORTS = [
    ("autoload", "callback"), ("callback", "recording"), ("cli", "analysis"), ("cli", "transform"),
    ("analysis", "traces"), ("transform", "traces"), ("traces", "pure"), ("recording", "pure"),
]  # fmt: skip


class Picture:
    """A white panel with shapes on it; all lengths are in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>",
            "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M0 0 L8 4 L0 8 z' fill='{MUTED}'/></marker></defs>",
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='3' fill='{fill}' stroke='{stroke}'/>"
        )

    def text(
        self, x: float, y: float, text: str, size: float = 13, fill: str = INK, anchor: str = "start", weight: int = 400
    ) -> None:
        self._parts.append(
            f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size:g}' font-weight='{weight}' fill='{fill}' "
            f"text-anchor='{anchor}'>{escape(text)}</text>"
        )

    def block(self, x: float, y: float, width: float, height: float, text: str, fill: str, ink: str = "#fff") -> None:
        """A box with one or more lines of text in its middle."""
        self.box(x, y, width, height, fill)
        lines = text.split("\n")
        for index, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + (index - (len(lines) - 1) / 2) * 15
            self.text(x + width / 2, middle, line, 12, ink, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, arrow: bool = False, dash: bool = False) -> None:
        style = (" marker-end='url(#tip)'" if arrow else "") + (" stroke-dasharray='4 3'" if dash else "")
        self._parts.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{MUTED}' stroke-width='1.3'{style}/>"
        )

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def schedules(rows: Sequence[tuple[str, ProfileSchedule]], steps: int) -> str:
    """Which steps each schedule records, asked from :class:`ProfileSchedule` itself."""
    left, top, cell, row_height = 215, 44, 23, 40
    picture = Picture(left + steps * cell + 16, top + len(rows) * row_height + 34, "Recorded steps of some schedules")
    picture.text(12, 26, "step of this fit", 12, MUTED)
    for step in range(steps):
        picture.text(left + (step + 0.5) * cell, 26, str(step), 11, MUTED, "middle")
    for index, (label, schedule) in enumerate(rows):
        y = top + index * row_height
        picture.text(12, y + 17, label, 12)
        for step in range(steps):
            phase = schedule.phase(step)
            x = left + step * cell
            picture.box(x + 1, y, cell - 2, 26, COLORS[phase])
            if phase is Phase.ACTIVE:
                picture.text(x + cell / 2, y + 17, "R", 12, "#fff", "middle", 600)
            if schedule.ends_window(step):
                picture.box(x + cell - 2, y - 5, 3, 36, RED)
    y = top + len(rows) * row_height + 8
    entries = [
        (COLORS[Phase.IDLE], "idle"),
        (COLORS[Phase.WARMUP], "warmup"),
        (COLORS[Phase.ACTIVE], "recorded"),
        (RED, "export: all ranks wait"),
    ]
    x = float(left)
    for color, name in entries:
        picture.box(x, y, 12, 12, color)
        picture.text(x + 17, y + 11, name, 12, MUTED)
        x += 30 + 7 * len(name)
    return picture.svg()


def accumulation() -> str:
    """Batches, steps and marks with ``accumulate_grad_batches=2`` and a validation run in the window."""
    picture = Picture(860, 196, "Steps, batches and marks with gradient accumulation and validation")
    left, batch = 120, 62
    rows = {"batches": 40, "optimizer": 76, "marks": 112, "in the window": 150}
    for name, y in rows.items():
        picture.text(12, y + 17, name, 12, MUTED)
    x = float(left)
    begins: dict[int, float] = {}
    for number in range(8):
        step = number // 2
        if number == 6:  # between steps 11 and 12
            picture.block(x, rows["batches"], 130, 24, "validation", VIOLET)
            picture.block(x, rows["marks"], 130, 24, "validation", VIOLET)
            x += 136
        begins.setdefault(step, x)
        picture.block(x, rows["batches"], batch - 4, 24, f"batch {number + 20}", "#9fb3c8", INK)
        if number % 2:
            picture.block(x + 12, rows["optimizer"], batch - 28, 24, "step", GREEN)
            mark = step + 10
            recorded = mark >= 11
            begin = begins[step]
            if recorded:
                picture.block(
                    begin, rows["marks"], x + batch - 4 - begin, 24, f"ProfilerStep#{mark}", COLORS[Phase.ACTIVE]
                )
        x += batch
        if number % 2:
            x += 10
    window = begins[1]
    end = x - 14
    picture.line(window, rows["in the window"] + 12, end, rows["in the window"] + 12)
    for edge in (window, end):
        picture.line(edge, rows["in the window"] + 4, edge, rows["in the window"] + 20)
    picture.text(
        (window + end) / 2, rows["in the window"] + 32, "recorded: window of steps 11 to 13", 12, INK, "middle"
    )
    picture.text(12, 24, "accumulate_grad_batches=2, wait=10, warmup=1, active=3, val_check_interval=26", 12, INK)
    return picture.svg()


def flow() -> str:
    """One window of a profiled rank and of another one, from the last recorded step to the published file."""
    picture = Picture(900, 300, "From the last recorded step to the published file")
    left = 118
    y0, y1, y2, y3 = 24, 72, 138, 212
    for y, name in ((y0, "rank 0"), (y1, "  its writer"), (y2, "rank 1"), (y3, "files of rank 0")):
        picture.text(12, y + 20, name.strip(), 13, INK, weight=600 if name[0] == "r" else 400)
    picture.text(12, y0 + 35, "profiled", 11, MUTED)
    picture.text(12, y2 + 35, "not profiled", 11, MUTED)
    blue = COLORS[Phase.ACTIVE]
    picture.block(left, y0, 84, 30, "step 10", blue)
    picture.block(left + 88, y0, 84, 30, "step 11", blue)
    picture.block(left + 176, y0, 60, 30, "stop", RED)
    picture.block(left + 240, y0, 106, 30, "export raw", RED)
    picture.block(left + 350, y0, 50, 30, "meet", VIOLET)
    for index in range(4):
        picture.block(left + 404 + index * 88, y0, 84, 30, f"step {12 + index}", "#9fb3c8", INK)
        picture.block(left + 404 + index * 88, y2, 84, 30, f"step {12 + index}", "#9fb3c8", INK)
    picture.block(left, y2, 84, 30, "step 10", "#9fb3c8", INK)
    picture.block(left + 88, y2, 84, 30, "step 11", "#9fb3c8", INK)
    picture.block(left + 176, y2, 224, 30, "waits at the barrier (gloo, 30 min)", VIOLET)
    picture.block(left + 404, y1, 120, 26, "gzip, in pieces", GREEN)
    picture.block(left + 528, y1, 50, 26, "check", GREEN)
    picture.block(left + 582, y1, 60, 26, "rename", GREEN)
    picture.line(left + 400, y0 + 30, left + 408, y1, arrow=True)
    picture.line(left + 375, y0 + 30, left + 375, y2, dash=True)
    for x, width, name, ink in (
        (240, 160, "scratch: rank-0.json", MUTED),
        (404, 174, "rank-0.json.gz.PID.part", MUTED),
        (582, 174, "rank-0.json.gz", GREEN),
    ):
        picture.box(left + x, y3, width, 28, "#ffffff", ink)
        picture.text(left + x + width / 2, y3 + 18, name, 12, ink, "middle", 600 if ink == GREEN else 400)
    picture.line(left + 293, y0 + 30, left + 293, y3, arrow=True, dash=True)
    picture.line(left + 464, y1 + 26, left + 464, y3, arrow=True, dash=True)
    picture.line(left + 612, y1 + 26, left + 612, y3, arrow=True, dash=True)
    picture.line(left, 264, left + 752, 264, arrow=True)
    picture.text(left + 725, 254, "time", 12, MUTED)
    for begin, end, name, color in (
        (0, 172, "the window", blue),
        (176, 400, "all ranks stand still", RED),
        (404, 642, "training goes on", GREEN),
    ):
        picture.box(left + begin, 261, end - begin, 6, color)
        picture.text(left + (begin + end) / 2, 286, name, 12, color, "middle", 600)
    return picture.svg()


def modules() -> str:
    """The wings of the package and who imports whom; what the house rules test holds."""
    picture = Picture(890, 340, "The wings of the package and the direction of their imports")
    grey, blue = "#c3d0dc", COLORS[Phase.ACTIVE]
    places = {
        "callback": (20, 24, 250, blue, "Lightning's hooks"),
        "autoload": (300, 24, 180, grey, "LIGHTNING_CHAKRA"),
        "cli": (560, 24, 310, grey, "lightning-chakra: arguments, tables"),
        "analysis": (470, 110, 190, VIOLET, "events to answers"),
        "transform": (680, 110, 190, VIOLET, "files to other files"),
        "traces": (560, 196, 310, GREEN, "files to events, no torch"),
        "recording": (20, 196, 460, blue, "session, recorder, barrier, writer: steps to files"),
        "pure": (300, 276, 320, grey, "recording.layout, .ranks, .storage"),
    }
    for begin, end in IMPORTS:
        bx, by, bw, *_ = places[begin]
        ex, ey, ew, *_ = places[end]
        if by == ey:
            picture.line(bx, by + 22, ex + ew, ey + 22, arrow=True)
        else:
            middle = max(bx, ex) + (min(bx + bw, ex + ew) - max(bx, ex)) / 2
            picture.line(middle, by + 44, middle, ey, arrow=True)
    for name, (x, y, width, color, note) in places.items():
        picture.block(x, y, width, 44, f"{name}\n{note}", color, INK if color == grey else "#fff")
    return picture.svg()


def pictures() -> dict[str, str]:
    """The name and the content of every diagram."""
    rows = [
        ("the defaults", ProfileSchedule()),
        ("wait=3, repeat=2", ProfileSchedule(wait=3, repeat=2)),
        ("skip_first=5, wait=4, repeat=0", ProfileSchedule(skip_first=5, wait=4, repeat=0)),
        ("wait=0, warmup=0, active=3", ProfileSchedule(wait=0, warmup=0, active=3)),
    ]
    return {
        "schedules.svg": schedules(rows, 25),
        "accumulation.svg": accumulation(),
        "flow.svg": flow(),
        "modules.svg": modules(),
    }


if __name__ == "__main__":
    for name, content in pictures().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
