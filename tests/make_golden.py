"""Writes the golden digests, tests/golden.json and the package's copy, from what the CPU computes: python tests/make_golden.py

Only for a new spec version. Spec 1 is frozen: test_golden.py compares, it never writes.
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
