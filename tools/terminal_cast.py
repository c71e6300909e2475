#!/usr/bin/env python3
"""Records a session of the demo model in a real terminal as an animated SVG: docs/images/terminal.svg.

Usage: python3 tools/terminal_cast.py [FOREBAY] [OUT]

FOREBAY is a release build [default: target/release/forebay]. It needs tmux and bash. Every line in the picture is what the
program wrote in this run; only pauses are shortened. A viewer without animations shows the last screen.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

COLUMNS, ROWS = 101, 30
# What is typed, and what the screen ends with when the next line may be typed.
SHELL, CHAT = "$", ">"
SCENE = [
    ("forebay plan --memory 58M | head -n 8", SHELL),
    ("forebay run --memory 58M --seed 20", CHAT),
    ("Tell me a story about a dragon.", CHAT),
    ("/bye", SHELL),
]
# What changes the style of the text after it.
STYLES = re.compile(r"(\x1b\[[0-9;]*m)")
PER_KEY = 0.05
# The longest pause that is shown, the pause before each line, and the rest at the end, in seconds.
LONGEST, BEFORE, REST = 1.5, 1.2, 8.0

CHAR, LINE, MARGIN, TITLE = 8.4, 19, 16, 34
STYLE = """
.paper { fill: #ffffff; stroke: #d1d9e0 } .bar { fill: #f6f8fa }
.dot { fill: #d1d9e0 } .name { font: 13px system-ui, sans-serif; fill: #59636e }
.row { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; white-space: pre }
.dim { fill: #59636e }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117; stroke: #3d444d } .bar { fill: #151b23 } .dot { fill: #3d444d }
  .name, .dim { fill: #9198a1 } .row { fill: #f0f6fc }
}
@media (prefers-reduced-motion: reduce) { #reel { animation: none !important } }
"""


class Terminal:
    """A shell in tmux, whose screen is recorded whenever it changes."""

    def __init__(self, forebay: Path, home: str):
        self.socket = f"forebay-cast-{os.getpid()}"
        self.frames: list[tuple[float, list[str]]] = []
        environment = f"env -i HOME={home} PATH={forebay.parent}:/usr/bin:/bin TERM=screen HISTFILE=/dev/null LANG=C.UTF-8 PS1='$ '"
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS),
                  f"{environment} bash --noprofile --norc")

    def tmux(self, *args: str) -> str:
        done = subprocess.run(["tmux", "-L", self.socket, *args], check=True, capture_output=True, text=True)
        return done.stdout

    def record(self) -> list[str]:
        rows = [row.rstrip() for row in self.tmux("capture-pane", "-p", "-e").splitlines()]
        if not self.frames or self.frames[-1][1] != rows:
            self.frames.append((time.monotonic(), rows))
        return rows

    def wait_for_prompt(self, prompt: str) -> None:
        """Waits until the last line is an empty prompt."""
        deadline = time.monotonic() + 120
        while True:
            rows = [row for row in self.record() if row]
            if rows and rows[-1] == prompt:
                return
            if time.monotonic() > deadline:
                raise SystemExit("the program did not end:\n" + "\n".join(rows))
            time.sleep(0.03)

    def type(self, text: str) -> None:
        for key in text:
            self.tmux("send-keys", "-l", key)
            time.sleep(PER_KEY)
            self.record()
        self.tmux("send-keys", "Enter")
        # The prompt of the line before is not the next one.
        before = self.frames[-1][1]
        while self.record() == before:
            time.sleep(0.01)

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True)


def record(forebay: Path) -> list[tuple[float, list[str]]]:
    with tempfile.TemporaryDirectory() as home:
        terminal = Terminal(forebay, home)
        try:
            terminal.wait_for_prompt(SHELL)
            for text, prompt in SCENE:
                terminal.type(text)
                terminal.wait_for_prompt(prompt)
        finally:
            terminal.close()
        return terminal.frames


def timed(frames: list[tuple[float, list[str]]]) -> list[tuple[float, list[str]]]:
    """The frames with the times at which they appear, in seconds from the start, without long pauses."""
    shown, clock = [], 0.0
    for i, (at, rows) in enumerate(frames):
        last = [row for row in rows if row][-1:]
        shown.append((clock, rows))
        following = frames[i + 1][0] - at if i + 1 < len(frames) else REST
        # A reader needs a moment before the next line is typed.
        pause = BEFORE if last in ([SHELL], [CHAT]) and i + 1 < len(frames) else 0.0
        clock += following if following == REST else min(max(following, pause), LONGEST)
    return shown + [(clock, [])]


def text(row: str, number: int) -> str:
    """A row, as wide as its columns in whatever font there is."""
    length = CHAR * len(STYLES.sub("", row))
    return f'<text id="r{number}" class="row" xml:space="preserve" textLength="{length:.1f}">{spans(row)}</text>'


def spans(row: str) -> str:
    """A row's text as SVG. Of the terminal's styles only dim is kept."""
    parts, dim = [], False
    for piece in STYLES.split(row):
        if piece.startswith("\x1b"):
            dim = "2" in piece[2:-1].split(";")
        elif piece:
            text = escape(piece, quote=False)
            parts.append(f'<tspan class="dim">{text}</tspan>' if dim else text)
    return "".join(parts)


def draw(shown: list[tuple[float, list[str]]]) -> str:
    *frames, (total, _) = shown
    height = max(max((i + 1 for i, row in enumerate(rows) if row), default=0) for _, rows in frames)
    screen = height * LINE + 8
    width = round(COLUMNS * CHAR) + 2 * MARGIN
    rows_seen: dict[str, int] = {}
    # The last frame is at the place that is seen without animations.
    placed, steps = [], []
    order = {len(frames) - 1: 0} | {i: i + 1 for i in range(len(frames) - 1)}
    for i, (at, rows) in enumerate(frames):
        top = order[i] * screen
        for line, row in enumerate(rows):
            if row:
                number = rows_seen.setdefault(row, len(rows_seen))
                placed.append(f'<use href="#r{number}" y="{top + (line + 1) * LINE - 4}"/>')
        steps.append(f"{100 * at / total:.3f}%{{transform:translateY({-top}px)}}")
    texts = [text(row, number) for row, number in rows_seen.items()]
    outer = TITLE + screen + MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {outer}" width="{width}" height="{outer}" role="img">',
        "<title>A terminal: forebay plan shows what is in memory, and forebay run tells a story</title>",
        f"<style>{STYLE}#reel {{ animation: reel {total:.1f}s infinite; animation-timing-function: steps(1, end) }}",
        f"@keyframes reel {{{''.join(steps)}}}</style>",
        f"<defs>{''.join(texts)}</defs>",
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{outer - 1}" rx="8"/>',
        f'<path class="bar" d="M1 {TITLE}V9a8 8 0 0 1 8-8H{width - 9}a8 8 0 0 1 8 8v{TITLE - 9}z"/>',
        "".join(f'<circle class="dot" cx="{20 + 18 * i}" cy="{TITLE / 2}" r="5"/>' for i in range(3)),
        f'<text class="name" x="{width / 2}" y="{TITLE / 2 + 4.5}" text-anchor="middle">forebay</text>',
        f'<svg x="{MARGIN}" y="{TITLE + 6}" width="{width - 2 * MARGIN}" height="{screen}">'
        f'<g id="reel">{"".join(placed)}</g></svg>',
        "</svg>",
    ]) + "\n"


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    forebay = Path(sys.argv[1] if len(sys.argv) > 1 else root / "target/release/forebay").resolve()
    out = Path(sys.argv[2] if len(sys.argv) > 2 else root / "docs/images/terminal.svg")
    frames = record(forebay)
    out.write_text(draw(timed(frames)))
    print(f"{out}: {len(frames)} screens, {out.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
