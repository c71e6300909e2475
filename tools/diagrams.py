#!/usr/bin/env python3
"""Draws the book's diagrams into docs/images. Run it again after a change: python3 tools/diagrams.py"""

from html import escape
from pathlib import Path

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .small { font-size: 12px; fill: #59636e }
  .paper { fill: #ffffff; stroke: #d1d9e0 }
  .box { fill: #f6f8fa; stroke: #59636e }
  .compute { fill: #ddf4ff; stroke: #0969da }
  .drive { fill: #fff1e5; stroke: #bc4c00 }
  .memory { fill: #dafbe1; stroke: #1a7f37 }
  .lane { stroke: #d1d9e0 }
  .line { stroke: #59636e; stroke-width: 1.5; fill: none }
  .tip { fill: #59636e }
  .later { stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .small { fill: #9198a1 }
    .paper { fill: #0d1117; stroke: #3d444d }
    .box { fill: #151b23; stroke: #9198a1 }
    .compute { fill: #10273f; stroke: #4493f8 }
    .drive { fill: #3a2212; stroke: #db6d28 }
    .memory { fill: #12301c; stroke: #3fb950 }
    .lane { stroke: #3d444d }
    .line { stroke: #9198a1 }
    .tip { fill: #9198a1 }
  }
"""


class Drawing:
    """Shapes on a sheet that has colours of its own, for light and for dark pages."""

    def __init__(self, name, width, height, description):
        self.name = name
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{escape(description)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def box(self, x, y, width, height, lines, kind="box", title=True):
        """A box with its lines in the middle; the first one is its title."""
        self.shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            style = "title" if i == 0 and title else "small"
            self.text(x + width / 2, top + 18 * i, line, style, "middle")

    def text(self, x, y, words, style="", anchor="start"):
        self.shapes.append(f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(self, *points, style=""):
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self.shapes.append(f'<path class="line {style}" d="{path}" marker-end="url(#tip)"/>')

    def rule(self, x1, y1, x2, y2):
        self.shapes.append(f'<path class="lane" d="M{x1} {y1} L{x2} {y2}"/>')

    def write(self):
        path = Path(__file__).parent.parent / "docs/images" / f"{self.name}.svg"
        path.write_text("\n".join([*self.shapes, "</svg>", ""]), encoding="utf-8")


def tiers():
    d = Drawing("tiers", 760, 380, "Three tiers: GPU memory above memory above the drive")
    d.box(200, 24, 360, 84, ["GPU memory (--vram)", "dense weights, KV cache, scratch", "slots for the experts used most"], "compute")
    d.box(140, 148, 480, 84, ["memory (--memory)", "without a GPU: dense weights, KV cache, scratch", "slots for experts"], "memory")
    d.box(60, 272, 640, 84, ["drive", "the model file: every expert, exactly as it was downloaded", "Forebay never writes to it"], "drive")
    d.arrow((380, 148), (380, 110))
    d.text(392, 134, "upload over PCIe", "small")
    d.arrow((380, 272), (380, 234))
    d.text(392, 258, "direct reads, past the page cache", "small")
    d.text(24, 70, "fastest, smallest", "small")
    d.text(24, 194, "slower, larger", "small")
    d.text(24, 258, "slowest, largest", "small")
    d.text(736, 70, "only with a GPU", "small", "end")
    d.write()


def expert():
    d = Drawing("expert", 760, 420, "The path of an expert, from the router's choice to the layer's output")
    d.box(250, 20, 260, 58, ["router of the layer", "chooses 8 of 128 experts"])
    d.arrow((380, 78), (380, 106))
    d.box(250, 108, 260, 48, ["Is the expert in a slot?"])
    d.arrow((250, 132), (150, 132), (150, 266))
    d.text(200, 124, "yes: a hit", "small", "middle")
    d.arrow((510, 132), (620, 132), (620, 176))
    d.text(566, 124, "no: a miss", "small", "middle")
    d.box(500, 178, 240, 58, ["eviction policy", "frees the slot of another expert"], "memory")
    d.arrow((620, 236), (620, 266))
    d.box(500, 268, 240, 58, ["drive", "reads the expert into that slot"], "drive")
    d.arrow((500, 297), (272, 297))
    d.text(386, 288, "when its read is complete", "small", "middle")
    d.box(30, 268, 240, 58, ["compute the expert", "hits first, misses as they arrive"], "compute")
    d.arrow((150, 326), (150, 356))
    d.box(30, 358, 240, 48, ["weighted sum of the 8"])
    d.arrow((270, 382), (400, 382))
    d.text(412, 387, "next layer")
    d.write()


def token():
    d = Drawing("token", 760, 312, "A token's timeline: computing and reading in two layers")
    for y, name in [(48, "compute"), (148, "drive")]:
        d.text(24, y + 30, name, "title")
        d.rule(110, y + 52, 740, y + 52)
    d.text(270, 32, "layer 11", "small", "middle")
    d.text(520, 32, "layer 12", "small", "middle")
    d.box(110, 52, 92, 46, ["attention,", "router"], "compute", title=False)
    d.box(206, 52, 92, 46, ["7 experts", "in memory"], "compute", title=False)
    d.text(318, 80, "wait", "small", "middle")
    d.box(340, 52, 66, 46, ["8th", "expert"], "compute", title=False)
    d.box(412, 52, 92, 46, ["attention,", "router"], "compute", title=False)
    d.box(508, 52, 120, 46, ["8 experts", "in memory"], "compute", title=False)
    d.box(206, 152, 130, 46, ["demand read", "of the 8th expert"], "drive", title=False)
    d.box(340, 152, 164, 46, ["prefetch for layer 12:", "2 likely experts"], "drive later", title=False)
    d.arrow((202, 98), (206, 150))
    d.arrow((336, 152), (342, 100))
    d.arrow((504, 152), (510, 100))
    d.arrow((110, 232), (740, 232))
    d.text(740, 250, "time", "small", "end")
    d.text(110, 276, "Demand reads go first. Prefetch reads only what the drive has time for.", "small")
    d.text(110, 296, "Where all experts of a layer are in memory, the computation never waits for the drive.", "small")
    d.write()


def main():
    tiers()
    expert()
    token()


if __name__ == "__main__":
    main()
