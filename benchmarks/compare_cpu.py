#!/usr/bin/env python3
"""Forward and backward on the CPU beside torch, in turns in one run: python benchmarks/compare_cpu.py [--out FILE]"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel

SHAPES = ((512, 50304), (64, 128256))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    dce = local_kernel.load()
    report = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__, "seconds": {}}
    for rows, columns in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, columns, dtype=dtype, requires_grad=True)
            t = torch.randint(columns, (rows,))
            times = {"det-cross-entropy": [], "torch": []}
            for _ in range(args.repeats + 1):
                for name, loss_of in (("det-cross-entropy", dce.cross_entropy), ("torch", torch.nn.functional.cross_entropy)):
                    x.grad = None
                    start = time.perf_counter()
                    loss_of(x, t).backward()
                    times[name].append(time.perf_counter() - start)
            ours, theirs = (sorted(v[1:])[args.repeats // 2] for v in times.values())  # the first of each warms up
            ratio = sorted(b / a for a, b in zip(*(v[1:] for v in times.values())))[args.repeats // 2]
            label = f"{str(dtype)[6:]} {rows}x{columns}"
            report["seconds"][label] = {"det-cross-entropy": ours, "torch": theirs, "ratio": ratio}
            print(f"{label}: {1e3 * ours:.1f} ms, torch {1e3 * theirs:.1f} ms, ratio {ratio:.2f}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
