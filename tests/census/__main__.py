"""``make census``: how large the product is, how its parts hang together, how many of them one request goes through.

python -m tests.census             prints the figures
python -m tests.census functions   prints also which functions a transfer and an offload enter
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.census.execution import entered, offload, transfer
from tests.census.source import count

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    counted = count(ROOT)
    rows: list[tuple[str, object]] = [(name.replace("_", " "), value) for name, value in counted._asdict().items()]
    requests = {"SEND": entered(ROOT, transfer), "OFFLOAD": entered(ROOT, offload)}
    for name, found in requests.items():
        rows += [(f"{name}: modules", len({file for file, _ in found})), (f"{name}: functions", len(found))]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}} {_shown(value, width)}")
    for name, found in requests.items() if arguments == ["functions"] else ():
        print("\n".join([f"\n{name}", *(f"  {file} {function}" for file, function in sorted(found))]))
    return 0


def _shown(value: object, indent: int) -> str:
    if isinstance(value, list):
        return f"{len(value)}" + "".join(f"\n{'':{indent}} {one}" for one in value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
