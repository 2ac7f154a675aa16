#!/usr/bin/env python3
"""Forward and backward of a mean loss, side by side with the kernels that are installed, in one run on one GPU; and what the loss costs on other shapes, logits and cuts.

    python benchmarks/compare.py --out benchmarks/results/h200_compare.json

Percent of the floor: logits read twice and written once, at the speed of a plain device copy measured in the same run, over the median device time.
Host time is hidden behind queued work. Peers: torch, torch.compile, liger_kernel, flash_attn (its triton loss), quack; those not installed are left out.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel
from gpu_check import environment, median

SHAPES = ((8192, 32000), (4096, 50304), (4096, 128256), (4096, 151936), (2048, 262144))


def peers():
    """name -> loss(logits, targets), the mean."""
    found = {"torch": torch.nn.functional.cross_entropy, "torch.compile": torch.compile(torch.nn.functional.cross_entropy)}
    try:
        from liger_kernel.transformers.functional import liger_cross_entropy

        found["Liger"] = liger_cross_entropy
    except ImportError:
        pass
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

        found["flash-attn triton"] = lambda x, t: cross_entropy_loss(x, t)[0].mean()
    except ImportError:
        pass
    try:
        from quack.cross_entropy import cross_entropy

        found["quack"] = lambda x, t: cross_entropy(x, t, reduction="mean")
    except ImportError:
        pass
    return found


# How real logits look, beside N(0, 1): each is to cost about the same.
def logits_like(kind, rows, columns, dtype):
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    if kind == "sigma 4":
        x *= 4
    elif kind == "LM-like":  # most entries 15 to 35 below the maximum
        x.uniform_(-15, 5)
        x[:, ::4001] = 20
    elif kind == "60 wide":  # farther below the maximum than two windows reach
        x.uniform_(-40, 20)
    elif kind == "all equal":
        x.fill_(1.5)
    elif kind == "half masked":
        x.masked_fill_(torch.rand(rows, columns, device="cuda") < 0.5, -float("inf"))
    return x


def step_of(loss_of, x, t):
    def step():
        x.grad = None
        loss_of(x, t).backward()

    return step


def wall(f, repeats=300):
    """Microseconds an iteration of f as a program sees them, the device kept busy by nothing else."""
    for _ in range(30):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


def random_problem(rows, columns, dtype):
    return torch.randn(rows, columns, device="cuda", dtype=dtype), torch.randint(columns, (rows,), device="cuda")


def side_by_side(dce, losses, rows, columns, dtype):
    """Milliseconds by kernel; and of our two steps, and of our forward."""
    x, t = random_problem(rows, columns, dtype)
    into = torch.empty_like(x)
    entry = {"floor_ms": 1.5 * median(lambda: into.copy_(x))}
    del into
    for name, loss_of in losses.items():
        leaf = x.clone().requires_grad_()  # some peers write over their input
        try:
            entry[name] = median(step_of(loss_of, leaf, t))
        except Exception as error:
            entry[name] = None
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        del leaf
    leaf = x.clone().requires_grad_()
    ones = torch.ones(rows, device="cuda")

    def two_steps():  # an upstream gradient for each row
        leaf.grad = None
        dce.cross_entropy(leaf, t, "none").backward(ones)

    entry["det-cross-entropy, two steps"] = median(two_steps)
    entry["det-cross-entropy, forward"] = median(lambda: dce.forward(x, t))
    return entry


def small(losses):
    """Few rows: device milliseconds and wall microseconds of an iteration."""
    table = {}
    for rows, columns in ((16, 128256), (8, 1024)):
        x, t = random_problem(rows, columns, torch.bfloat16)
        for name, loss_of in losses.items():
            leaf = x.clone().requires_grad_()
            table[f"{rows}x{columns} {name}"] = {"device_us": 1000 * median(step_of(loss_of, leaf, t)), "wall_us": wall(step_of(loss_of, leaf, t))}
    return table


def sharded(dce, rows, columns, dtype, shards=4):
    """Milliseconds of the mean and its gradient from shards on one device, and of the fused step."""
    x, t = random_problem(rows, columns, dtype)
    cuts = [(columns * i // shards, columns * (i + 1) // shards) for i in range(shards)]
    one = torch.ones((), device="cuda")

    def step():
        rowmax = torch.stack([dce.rowmax(x, lo, hi) for lo, hi in cuts]).amax(0)
        digits = sum(dce.denom_digits(x, rowmax, lo, hi) for lo, hi in cuts)
        losses, _ = dce.finalize(digits, x, t, rowmax)
        sums = dce.loss_digits(losses, t)
        dce.reduce_digits(sums)
        for lo, hi in cuts:
            dce.grad_logits(one, x, t, digits, rowmax, lo, hi, sums=sums)

    leaf = x.clone().requires_grad_()
    return {"sharded": median(step), "fused": median(step_of(dce.cross_entropy, leaf, t))}


def linearity(dce):
    """Milliseconds of a step in bfloat16 against rows and against columns."""
    table = {}
    for rows, columns in [(n, 128256) for n in (1024, 4096, 16384, 65536)] + [(8192, v) for v in (4096, 16384, 65536, 262144)]:
        x, t = random_problem(rows, columns, torch.bfloat16)
        x.requires_grad_()
        table[f"{rows}x{columns}"] = median(step_of(dce.cross_entropy, x, t), repeats=9)
        del x
        torch.cuda.empty_cache()
    return table


def memory(dce, losses):
    """Peak bytes of a step beside the logits, as a multiple of the logits' bytes; the gradient is 1 of them."""
    x, t = random_problem(4096, 128256, torch.bfloat16)
    table = {}
    for name, loss_of in {**losses, "det-cross-entropy, inplace_backward": None}.items():
        leaf = x.clone().requires_grad_()
        copy = x.nbytes if loss_of is None else 0  # the layer below, whose output the logits are
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if copy:
            layer = leaf * 1
            torch.autograd.grad(dce.cross_entropy(layer, t, inplace_backward=True), layer)
        else:
            loss_of(leaf, t).backward()
        table[name] = (torch.cuda.max_memory_allocated() - before - copy) / x.nbytes
        del leaf
    return table


def plot(report, path):
    """Percent of the floor by shape, a bar a kernel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in next(iter(report["shapes"].values())) if n != "floor_ms" and "," not in n]
    colours = ["#0b6e4f", "#b0b7bf", "#8d99a6", "#d9a441", "#4a7fb5", "#9467bd"]
    figure, axes = plt.subplots(1, 2, figsize=(13, 4), sharey=True)
    for axis, dtype in zip(axes, ("bfloat16", "float32")):
        shapes = {label.split()[1]: entry for label, entry in report["shapes"].items() if label.startswith(dtype)}
        for i, name in enumerate(names):
            heights = [100 * entry["floor_ms"] / entry[name] if entry[name] else 0 for entry in shapes.values()]
            axis.bar([x + 0.16 * (i - len(names) / 2 + 0.5) for x in range(len(shapes))], heights, 0.16, label=name, color=colours[i])
        axis.axhline(100, color="black", linewidth=0.8)
        axis.set_xticks(range(len(shapes)), shapes)
        axis.set_title(dtype)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of two reads and a write")
    axes[0].legend(fontsize=8, ncols=2)
    figure.suptitle(f"Mean loss and backward, {report['gpu']}, torch {report['torch']}, {report['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "compare.json")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="only draw what --out already holds")
    args = parser.parse_args()
    if args.plot:
        return plot(json.loads(args.out.read_text()), args.plot)
    dce = local_kernel.load()
    losses = {"det-cross-entropy": dce.cross_entropy, **peers()}
    report = {**environment(__file__), "shapes": {}, "logits": {}}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in SHAPES:
            label = f"{str(dtype)[6:]} {rows}x{columns}"
            entry = report["shapes"][label] = side_by_side(dce, losses, rows, columns, dtype)
            floor = entry["floor_ms"]
            shown = "  ".join(f"{name} {100 * floor / ms:.0f}% ({ms:.3f})" for name, ms in entry.items() if ms and name != "floor_ms")
            print(f"{label}: floor {floor:.3f} ms  {shown}", flush=True)
            torch.cuda.empty_cache()
    rows, columns = 4096, 128256
    for dtype in (torch.bfloat16, torch.float32):
        t = torch.randint(columns, (rows,), device="cuda")
        for kind in ("N(0, 1)", "sigma 4", "LM-like", "60 wide", "all equal", "half masked", "half ignored"):
            x = logits_like(kind, rows, columns, dtype).requires_grad_()
            some = torch.where(torch.arange(rows, device="cuda") % 2 == 0, t, -100) if kind == "half ignored" else t
            report["logits"][f"{str(dtype)[6:]} {kind}"] = median(step_of(dce.cross_entropy, x, some))
            del x
    report["sharded"] = {f"{str(d)[6:]} 4096x128256": sharded(dce, 4096, 128256, d) for d in (torch.bfloat16, torch.float32)}
    report["small"] = small(losses)
    report["linearity"] = linearity(dce)
    report["memory"] = memory(dce, losses)
    for part in ("logits", "sharded", "small", "linearity", "memory"):
        print(part, json.dumps(report[part], indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
