"""Draws what measure.py measured: tokens per second over memory, as an SVG that suits light and dark pages, and prints the table.

Usage: python tools/memory_plot/plot.py docs/images/memory.json docs/images/memory.svg
"""

import json
import math
import statistics
import sys
from pathlib import Path

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 56

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.note, .tick { fill: #57606a; font-size: 12px }
.grid { stroke: #d0d7de; stroke-width: 1 }
.size { stroke: #57606a; stroke-dasharray: 4 4 }
.ours { stroke: #0969da; fill: #0969da }
.theirs { stroke: #bc4c00; fill: #bc4c00 }
path { fill: none !important; stroke-width: 2.5 }
circle { stroke: none }
text.ours, text.theirs { stroke: none; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note, .tick { fill: #9198a1 } .grid { stroke: #30363d } .size { stroke: #9198a1 }
  .ours { stroke: #58a6ff; fill: #58a6ff } .theirs { stroke: #f0883e; fill: #f0883e }
}
"""


def main() -> None:
    data = json.loads(Path(sys.argv[1]).read_text())
    ours = medians(data["rows"], {"forebay"})
    # The better of llama.cpp's two ways at each limit.
    theirs = medians(data["rows"], {"llama.cpp", "llama.cpp, repacked"})
    Path(sys.argv[2]).write_text(draw(data["machine"], ours, theirs))
    print(table(data["rows"], ours, theirs))


def medians(rows: list[dict], programs: set[str]) -> dict[float, float]:
    """Tokens per second at each limit: the median over the rounds, of the best of these programs."""
    best: dict[float, float] = {}
    for limit in sorted({row["gib"] for row in rows}):
        for program in programs:
            speeds = [row["tok_per_s"] for row in rows
                      if row["gib"] == limit and row["program"] == program and row["tok_per_s"] is not None]
            if speeds:
                best[limit] = max(best.get(limit, 0.0), statistics.median(speeds))
    return best


def table(rows: list[dict], ours: dict[float, float], theirs: dict[float, float]) -> str:
    lines = ["| limit | Forebay | hit rate | llama.cpp | ratio |", "|---|---:|---:|---:|---:|"]
    for gib in sorted(ours.keys() & theirs.keys()):
        rates = [row["hit_rate"] for row in rows if row["gib"] == gib and row.get("hit_rate") is not None]
        rate = f"{100 * statistics.median(rates):.0f} %" if rates else "all in memory"
        lines.append(f"| {gib:g} GiB | {ours[gib]:.1f} | {rate} | {theirs[gib]:.3g} | {ours[gib] / theirs[gib]:.2g} |")
    return "\n".join(lines)


def draw(machine: dict, ours: dict[float, float], theirs: dict[float, float]) -> str:
    limits = sorted(ours.keys() | theirs.keys())
    fastest = max([*ours.values(), *theirs.values()])
    last = 10 ** math.ceil(math.log10(fastest))
    slowest = 10 ** math.floor(math.log10(min([*ours.values(), *theirs.values()])))
    span = limits[-1] - limits[0]

    def x(gib: float) -> float:
        return LEFT + 20 + (gib - limits[0]) / span * (WIDTH - LEFT - RIGHT - 40)

    def y(speed: float) -> float:
        share = math.log10(speed / slowest) / math.log10(last / slowest)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    size = machine["model_bytes"] / 2**30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Tokens per second over memory, Forebay and llama.cpp</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">Tokens per second, by the memory that the program may use</text>',
        f'<text class="note" x="{LEFT}" y="44">A synthetic 48-layer MoE model of {size:.1f} GiB; '
        f'{machine["threads"]} cores; each point in a memory control group of its own</text>',
    ]
    speed = slowest
    while speed <= last * 1.001:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:g}</text>')
        speed *= 10
    for gib in limits:
        parts.append(f'<text class="tick" x="{x(gib):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{gib:g} GiB</text>')
    if limits[0] < size < limits[-1]:
        parts.append(f'<line class="size" x1="{x(size):.1f}" x2="{x(size):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="note" x="{x(size) - 6:.1f}" y="{HEIGHT - BOTTOM - 8}" text-anchor="end">size of the model</text>')
    for name, kind, line in (("Forebay", "ours", ours), ("llama.cpp", "theirs", theirs)):
        points = [(x(gib), y(line[gib])) for gib in sorted(line)]
        parts.append(f'<path class="{kind}" d="M' + " L".join(f"{px:.1f} {py:.1f}" for px, py in points) + '"/>')
        for gib, (px, py) in zip(sorted(line), points):
            digits = f"{line[gib]:.1f}" if line[gib] >= 1 else f"{line[gib]:.2f}"
            parts.append(f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="4"/>')
            parts.append(f'<text class="{kind}" x="{px:.1f}" y="{py - 10:.1f}" text-anchor="middle">{digits}</text>')
        px, py = points[1]
        parts.append(f'<text class="{kind}" x="{px:.1f}" y="{py + 22:.1f}" text-anchor="middle">{name}</text>')
    parts.append(f'<text class="note" x="{LEFT}" y="{HEIGHT - 10}">Logarithmic scale. Data, script and machine: docs/performance.md</text>')
    return "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    main()
