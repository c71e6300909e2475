"""Prints what `cargo bench -p forebay-kernels -- tokens?/` measured as a Markdown table.

For every quantised type and instruction set: gigabytes of weights a second for one token, and billions of
multiply-adds a second for 128 tokens.

Usage: python tools/kernel_table.py [FOLDER OF CRITERION'S RESULTS]
"""

import json
import sys
from pathlib import Path

ISAS = ["scalar", "avx2", "avx512"]
GROUPS = ["one token", "128 tokens"]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("target/criterion")
    types = sorted({path.name for group in GROUPS for path in folder.glob(f"{group}/*/*") if path.name != "report"})
    print("| type | " + " | ".join(f"{group}, {isa}" for group in GROUPS for isa in ISAS) + " |")
    print("|---|" + "---:|" * (len(GROUPS) * len(ISAS)))
    for name in types:
        cells = [cell(folder / group / isa / name / "new") for group in GROUPS for isa in ISAS]
        print(f"| {name} | " + " | ".join(cells) + " |")


def cell(folder: Path) -> str:
    """Units a nanosecond, of bytes or multiply-adds."""
    if not folder.is_dir():
        return ""
    throughput = json.loads((folder / "benchmark.json").read_text())["throughput"]
    nanoseconds = json.loads((folder / "estimates.json").read_text())["median"]["point_estimate"]
    return f"{next(iter(throughput.values())) / nanoseconds:.1f}"


if __name__ == "__main__":
    main()
