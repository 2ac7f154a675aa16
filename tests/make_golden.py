"""Writes the golden digests, tests/golden.json and the package's copy, from what the CPU computes: python tests/make_golden.py

For a new spec version, or for cases of something new within a version: a digest that is there does not change. test_golden.py compares, it never writes.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel


def main():
    dce = local_kernel.load()
    digests = dce.audit.case_digests("cpu")
    frozen = json.loads((ROOT / "tests" / "golden.json").read_text())
    if frozen["spec_version"] == dce.spec_version:
        changed = [f"{case}/{key}" for case, quantities in frozen["digests"].items() for key in quantities if digests.get(case, {}).get(key) != quantities[key]]
        if changed:
            sys.exit(f"spec {dce.spec_version} is frozen, and these would change: {', '.join(changed)}")
    (ROOT / "tests" / "golden.json").write_text(json.dumps({"spec_version": dce.spec_version, "digests": digests}, indent=1) + "\n")
    lines = ['"""Written by tests/make_golden.py; the same as tests/golden.json."""\n\nDIGESTS = {\n']
    for case, quantities in digests.items():
        lines.append(f'    "{case}": {{\n')
        lines += [f'        "{key}": "{value}",\n' for key, value in quantities.items()]
        lines.append("    },\n")
    lines.append("}\n")
    (ROOT / "torch-ext" / "det_cross_entropy" / "golden_digests.py").write_text("".join(lines))


if __name__ == "__main__":
    main()
