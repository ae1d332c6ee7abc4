"""One section of the device benchmarks, or the report of all.

    python -m bench.device SECTION --out DIR [--quick]
    python -m bench.device report --out DIR

Each section prints a table and writes DIR/SECTION.json; one that fails costs the others nothing. With `--quick` and
`JAX_PLATFORMS=cpu` the shapes shrink until an interpreter can follow, which proves the script and measures nothing.

Ceilings are measured first, with a large copy and a large matrix product, and every figure is given as a share of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.device.attention import decode, decode_variants, prefill
from bench.device.measure import Row, ceilings, print_table
from bench.device.numerics import numerics
from bench.device.products import products
from bench.device.step import step

SECTIONS: dict[str, Callable[[bool, Path], list[Row]]] = {
    "ceilings": ceilings,
    "numerics": numerics,
    "products": products,
    "decode_variants": decode_variants,
    "decode": decode,
    "prefill": prefill,
    "step": step,
}


def run(section: str, out: Path, quick: bool) -> bool:
    """Whether the section ran to its end; what it found is in `out` either way."""
    started, rows, failure = time.perf_counter(), [], ""
    try:
        rows = SECTIONS[section](quick, out)
    except Exception:
        failure = traceback.format_exc()
        print(failure, file=sys.stderr)
    took = round(time.perf_counter() - started, 1)
    found = {"section": section, "seconds": took, "failure": failure, "rows": rows}
    (out / f"{section}.json").write_text(json.dumps(found, indent=1))
    return not failure


def report(out: Path) -> None:
    """Every section's table, and one JSON for all."""
    all_found: dict[str, Any] = {}
    for section in SECTIONS:
        path = out / f"{section}.json"
        found: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"failure": "did not end", "seconds": "?", "rows": []}
        )
        all_found[section] = found
        print(f"\n=== {section}: {found['seconds']} s", *found["failure"].splitlines()[-1:])
        print_table(found["rows"])
    (out / "device.json").write_text(json.dumps(all_found, indent=1))


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__)
    parser.add_argument("section", choices=[*SECTIONS, "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a machine without a GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section == "report":
        report(args.out)
        return 0
    ok = run(args.section, args.out, args.quick)
    print_table(json.loads((args.out / f"{args.section}.json").read_text())["rows"])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
