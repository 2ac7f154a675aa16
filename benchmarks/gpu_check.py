#!/usr/bin/env python3
"""Everything that only a GPU can show, in one call: the golden digests, byte equality with the CPU, graphs, compile, big tensors, bad targets, time against torch.

    python benchmarks/gpu_check.py --out benchmarks/results/h200.json

Exits with 1 if anything differs. The JSON says on what and how it was run.
"""

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel


def environment(script=__file__):
    smi = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.split("\n")[0].strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *sys.argv[1:]]),
    }


def median(f, repeats=20):
    """Median device milliseconds of f, host time hidden behind queued work."""
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda._sleep(20_000_000)
    for start, end in events:
        start.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) for s, e in events)[repeats // 2]


def random_case(generator, index):
    """Logits of many scales, layouts and dtypes; targets with ignored rows and, at times, wrong ones."""
    g = generator
    pick = lambda *xs: xs[int(torch.randint(len(xs), (), generator=g))]
    rows, columns = pick(1, 2, 3, 17, 64), pick(1, 2, 5, 31, 32, 33, 257, 1000, 4096, 5003, 32003, 70001)
    dtype = pick(torch.float32, torch.bfloat16, torch.float16)
    x = torch.randn(rows, columns + 13, generator=g) * pick(0.0, 1e-3, 1.0, 4.0, 16.0, 60.0, 400.0, 1e5, 3e6, 1e30)
    x += pick(0.0, 0.0, -20.0, 30.0, 1e4, -1e6, 2.0**20, 3e7)
    if index % 5 == 0:
        x[torch.rand(x.shape, generator=g) < 0.5] = -float("inf")
    if index % 11 == 0:
        x[0, 0] = pick(float("nan"), float("inf"), -float("inf"))
    lead = pick(0, 0, 1, 3, 8, 13)
    logits = x.to(dtype)[:, lead : lead + columns]
    targets = torch.randint(columns, (rows,), generator=g)
    targets[torch.rand(rows, generator=g) < 0.2] = -100
    if index % 7 == 0:
        targets[-1] = pick(columns, -1, 2**40, -(2**40))
    return logits, targets, torch.randn(rows, generator=g) * pick(1.0, 1e-30, 65536.0, 1e-4)


def batch_case(generator, index, most_rows=700):
    """A batch in the layout of a training step, as the fused kernel takes it, whose rows are of every kind: scales, offsets, masks, spreads too wide for its
    windows, maxima that shift the row, NaN, runs of ignored rows."""
    g = generator
    pick = lambda *xs: xs[int(torch.randint(len(xs), (), generator=g))]
    columns = (2048, 8192, 32000, 50304, 128256, 151936, 262144)[index % 7]
    rows = min(most_rows, max(1, pick(3, 140, 400, 700) * 32000 // max(columns, 32000)))
    dtype = pick(torch.float32, torch.bfloat16, torch.float16)
    x = torch.randn(rows, columns, generator=g)
    scales = torch.tensor([0.0, 1e-3, 1.0, 1.0, 1.0, 4.0, 16.0, 50.0, 1e5])
    offsets = torch.tensor([0.0, 0.0, 0.0, -20.0, 30.0, 1e4, -(2.0**20), 2.0**20, -2.1e6])
    x = x * scales[torch.randint(len(scales), (rows, 1), generator=g)] + offsets[torch.randint(len(offsets), (rows, 1), generator=g)]
    for row in range(rows):
        kind = pick(*range(12))
        if kind == 0:
            x[row, torch.rand(columns, generator=g) < 0.5] = -float("inf")
        elif kind == 1:
            x[row, : columns // 2] -= pick(20.0, 40.0, 60.0, 90.0, 110.0)  # whole slices deep below the rest
        elif kind == 2:
            x[row, int(torch.randint(columns, (), generator=g))] = pick(25.0, 60.0, 95.0, float("nan"), float("inf"), 2.0**21)
        elif kind == 3:
            x[row] = pick(-float("inf"), 0.0, -0.0, 3e6)
    targets = torch.randint(columns, (rows,), generator=g)
    ignored = torch.rand(rows, generator=g) < pick(0.0, 0.1, 0.9)
    targets[ignored] = -100
    if rows > 40:
        targets[rows // 3 : rows // 2] = -100  # a run
    if index % 3 == 0:
        targets[-1] = pick(columns, -1, 2**40)
    return x.to(dtype), targets, torch.randn(rows, generator=g)


def to_gpu(t):
    """The same strides on the device."""
    base = torch.empty(t.untyped_storage().size() // t.element_size(), dtype=t.dtype, device="cuda")
    base.copy_(torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()))
    return base.as_strided(t.shape, t.stride(), t.storage_offset())


def check_against_cpu(dce, make_case, cases, seed):
    generator = torch.Generator().manual_seed(seed)
    different = []
    for index in range(cases):
        logits, targets, upstream = make_case(generator, index)
        per_device = []
        for x, t, g in ((logits, targets, upstream), (to_gpu(logits), targets.cuda(), upstream.cuda())):
            out = list(dce.forward(x, t, validate=False))
            columns = x.shape[1]
            cuts = [0, columns // 3, columns // 3, columns - columns // 4, columns]
            maximum = torch.stack([dce.rowmax(x, lo, hi) for lo, hi in zip(cuts, cuts[1:])]).amax(0)
            digits = sum(dce.denom_digits(x, maximum, lo, hi) for lo, hi in zip(cuts, cuts[1:]))
            # torch's own amax may give another NaN than it was given
            out += [torch.where(maximum.isnan(), torch.full_like(maximum, float("nan")), maximum), digits, *dce.finalize(digits, x, t, maximum, validate=False)]
            out += [dce.grad_logits(g, x, t, digits, maximum, lo, hi, validate=False) for lo, hi in zip(cuts, cuts[1:])]
            for reduction in ("mean", "sum"):
                leaf = x.detach().requires_grad_()
                loss = dce.cross_entropy(leaf, t, reduction, validate=False)
                loss.backward()
                out += [loss.detach(), leaf.grad]
            layer = x.detach().clone().requires_grad_().clone()
            (in_place,) = torch.autograd.grad(dce.cross_entropy(layer, t, inplace_backward=True, validate=False), layer)
            out.append(in_place)
            per_device.append([dce.digest(o) for o in out])
        wrong = [i for i, (a, b) in enumerate(zip(*per_device)) if a != b]
        if wrong:
            different.append(f"case {index} {tuple(logits.shape)} {logits.dtype} outputs {wrong}")
    print(f"{cases} cases compared")
    return different


def options_of(index, columns, generator):
    """Keyword arguments of a case, by turns: each option alone, then several."""
    weight = torch.rand(columns, generator=generator) * 2 - 0.25
    valid = max(1, columns - (0, 1, 3, 8, 130, columns // 2)[index // 10 % 6])
    return (
        {"z_loss": 1e-3},
        {"weight": weight},
        {"valid_vocab": valid},
        {"num_items": 77},
        {"z_loss": 0.02, "weight": weight, "valid_vocab": valid},
        {"label_smoothing": 0.1},
        {"softcap": 15.0},
        {"logit_scale": 0.7, "valid_vocab": valid},
        {"label_smoothing": 0.3, "softcap": 30.0, "logit_scale": 1.5, "z_loss": 1e-4, "valid_vocab": valid},
        {"label_smoothing": 0.2, "weight": weight, "softcap": 50.0, "valid_vocab": valid},
    )[index % 10]


def check_options(dce, make_case, cases, seed):
    """The options and statistics on the GPU (fused, by stages, composed of shards, in place) against the CPU, byte for byte."""
    generator = torch.Generator().manual_seed(seed)
    different = []
    for index in range(cases):
        logits, targets, upstream = make_case(generator, index)
        columns = logits.shape[1]
        kw = options_of(index, columns, generator)
        valid = kw.get("valid_vocab", columns)
        if index % 2:
            targets[(targets >= valid) & (targets < columns)] = 0
        g_lse = torch.randn(len(targets), generator=generator)
        per_device = []
        for x, t, g, h in ((logits, targets, upstream, g_lse), (to_gpu(logits), targets.cuda(), upstream.cuda(), g_lse.cuda())):
            own = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
            a_row = {k: v for k, v in own.items() if k != "num_items"}
            mapped = {k: v for k, v in own.items() if k in ("logit_scale", "softcap")}
            out = {}

            def keep(name, *tensors):
                out.update({f"{name} {i}" if i else name: tensor.detach() for i, tensor in enumerate(tensors)})

            for reduction in ("mean", "sum", "none"):
                options = own if reduction == "mean" else a_row
                for with_stats in (False, True):
                    leaf = x.detach().requires_grad_()
                    loss, z, lse, *stats = dce.cross_entropy(leaf, t, reduction, return_z_loss=True, return_lse=True, return_stats=with_stats, validate=False, **options)
                    of_loss = g if reduction == "none" else torch.ones_like(loss)
                    name = f"{reduction}{' with stats' * with_stats}"
                    keep(f"{name}: loss, z, lse", loss, z, lse)
                    if with_stats:
                        keep(f"{name}: stats", *stats[0])
                    keep(f"{name}: gradient", torch.autograd.grad(loss, leaf, of_loss, retain_graph=True)[0])
                    keep(f"{name}: gradient with lse", torch.autograd.grad([loss, lse], leaf, [of_loss, h], retain_graph=True)[0])
                    keep(f"{name}: gradient of 0.7", torch.autograd.grad(loss, leaf, of_loss * 0.7)[0])
                keep(f"{reduction}: no gradient", *dce.cross_entropy(x, t, reduction, return_lse=True, return_z_loss=True, validate=False, **options))
            leaf = x.detach().clone().requires_grad_()
            loss, lse = dce.cross_entropy(leaf.clone(), t, return_lse=True, inplace_backward=True, validate=False, **own)
            keep("in place", torch.autograd.grad([loss, lse], leaf, [torch.ones_like(loss), h])[0])
            cuts = [0, columns // 3, columns // 3, columns - columns // 4, columns]
            shards = list(zip(cuts, cuts[1:]))
            clipped = [(min(lo, valid), min(hi, valid)) for lo, hi in shards]
            maximum = torch.stack([dce.rowmax(x, lo, hi) for lo, hi in clipped]).amax(0)
            digits = [dce.denom_digits(x, maximum, lo, hi, **mapped) for lo, hi in clipped]
            keep("digits", *digits)
            smoothing = [dce.logit_digits(x, maximum, lo, hi, weight=own.get("weight"), **mapped) for lo, hi in clipped]
            keep("sums of logits", *smoothing)
            smooth = {"logit_digits": sum(smoothing)} if "label_smoothing" in own else {}
            rows = dce.finalize(sum(digits), x, t, maximum, return_z_loss=True, return_lse=True, validate=False, **smooth, **a_row)
            keep("finalize", *rows)
            stats, least = zip(*(dce.stat_digits(x, t, maximum, lo, hi, **mapped) for lo, hi in clipped))
            keep("stat digits", *stats)
            keep("least", *least)
            least = torch.stack(least).amin(0)
            keep("stats", *dce.finalize_stats(sum(stats), least, sum(digits), x, t, maximum, valid_vocab=own.get("valid_vocab"), validate=False, **mapped))
            sums = dce.loss_digits(rows[0], t, weight=own.get("weight"))
            keep("sums", sums, dce.reduce_digits(sums), dce.finalize_mean(sums, 1001), dce.logprobs(x, t, validate=False, **mapped))
            of_shards = [dce.grad_logits(torch.ones_like(loss), x, t, sum(digits), maximum, lo, hi, sums=sums, grad_lse=h, validate=False, **a_row) for lo, hi in shards]
            keep("gradients of shards", *of_shards)
            per_device.append({name: dce.digest(tensor) for name, tensor in out.items()})
        on_cpu, on_gpu = per_device
        wrong = [name for name in on_cpu if on_cpu[name] != on_gpu[name]]
        if wrong:
            different.append(f"case {index} {tuple(logits.shape)} {logits.dtype} {sorted(kw)} valid {valid}: {wrong}")
    print(f"{cases} cases compared with options")
    return different


def check_corners(dce):
    """Batches that random ones miss: zeros in a table of scaled logits, a cap that falls across a border of exponents, a mean over nothing, many wide logits."""
    different = []

    def compare(name, x, **kw):
        t = torch.arange(len(x)) % x.shape[1]
        seen = []
        for device in ("cpu", "cuda"):
            leaf = x.to(device).requires_grad_()
            own = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
            losses, lse, stats = dce.cross_entropy(leaf.detach(), t.to(device), "none", return_lse=True, return_stats=True, **{k: v for k, v in own.items() if k != "num_items"})
            loss = dce.cross_entropy(leaf, t.to(device), validate=False, **own)
            (grad,) = torch.autograd.grad(loss, leaf)
            seen.append([dce.digest(y) for y in (losses, lse, *stats, loss.detach(), grad)])
        if seen[0] != seen[1]:
            different.append(f"{name}: {[i for i, (a, b) in enumerate(zip(*seen)) if a != b]}")

    tiny = torch.zeros(700, 32000)
    tiny[:, 0] = 2.0**-18
    tiny[:, 1::3] = 2.0**-26
    tiny[:, 2::3] = 1.5 * 2.0**-33
    for scale in (1.5, 20.0, 100.0, 2.0**20):
        for dtype in (torch.bfloat16, torch.float32):
            compare(f"scale {scale} {dtype}", tiny.to(dtype), logit_scale=scale)
    for cap in (2.0**-30, 2.0**-20, 2.0**-12, 2.0**-10):  # in the first two the slope is not 1 even for these; the last is looked up
        for dtype in (torch.bfloat16, torch.float32):
            compare(f"cap {cap} {dtype}", tiny.to(dtype), softcap=cap)
    # every bfloat16 that a row can look up, in one window of terms and in two, with and without -inf
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for name, low, high in (("one window", -10.0, 10.0), ("two", -31.9, 0.0)):
        for infinite in (False, True):
            row = torch.where((every >= low) & (every <= high) | (every == -torch.inf) & infinite, every, torch.tensor(low / 2, dtype=torch.bfloat16))
            x = row[torch.randperm(2**16)].repeat(560, 1)
            for kw in ({}, {"logit_scale": 1.5}, {"softcap": 30.0, "logit_scale": 1.25}):
                compare(f"every bfloat16, {name}, {infinite} {kw}", x, **kw)
    compare("scale and smoothing", tiny.bfloat16(), logit_scale=1.5, label_smoothing=0.1)
    # the greater logit of each pair is mapped to less, across a border of exponents, or of 2^20
    falls = (("0x1.69eb1ap1", "-0x1.64af56p-2", "-0x1.64af54p-2"), ("0x1.74f6b8p7", "0x1.5ef4aep4", "0x1.5ef4bp4"), ("0x1.19bfeap23", "0x1.011bfep20", "0x1.011cp20"))
    for cap, low, high in (map(float.fromhex, pair) for pair in falls):
        for columns in (65536, 262144):
            x = torch.full((140, columns), low)
            x[:, 0] = high
            compare(f"cap {cap} {columns}", x, softcap=cap)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare(f"no items {dtype}", torch.randn(700, 32000, dtype=torch.float32).to(dtype), num_items=0)
    wide = torch.full((150, 128256), torch.finfo(torch.float32).min)
    wide[:, ::7] = 1.0
    compare("wide", wide, label_smoothing=0.1)
    compare("wide, weighted", wide, label_smoothing=0.1, weight=torch.linspace(0.5, 1.5, 128256))
    return different


def check_ranks(dce, seed):
    """What ranks send each other of a row beside its digits, and what sums of that settle: the GPU against the CPU."""
    ops, generator, different = dce._registration.ops, torch.Generator().manual_seed(seed), []
    rows, columns, start = 1000, 300, 600
    t = torch.randint(-5, 4 * columns, (rows,), generator=generator)
    t[::7] = -100
    weight = torch.rand(4 * columns, generator=generator)
    half = torch.randint(2**32, (rows,), generator=generator)
    sums = torch.zeros(9 * rows, dtype=torch.int64)
    sums[8 * rows :] = torch.tensor([0, 1, 2, -1, -(2**31)])[half % 5] * 2**32 + half * (half % 3 > 0)
    options = (), (1e-3, 0, weight), (0.0, 850, None, 0.1, 1.5, 20.0, True), (0.0, 0, weight, 0.1, 1.0, 0.0, True, torch.tensor([7]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(rows, columns + 3, generator=generator) * 4).to(dtype)[:, 2 : columns + 2]
        for index, more in enumerate(options):
            seen = []
            for device in ("cpu", "cuda"):
                own, ids = x.to(device), t.to(device, (torch.int64, torch.int32)[index % 2])
                images = ops.order_images(ops.rowmax(own, 0, columns))
                words = ops.shard_words(own, ids, images, -100, 1, (7, -1)[index % 2], start, *(o.to(device) if isinstance(o, torch.Tensor) else o for o in more))
                settled = [y for ignored in (-100, -1) for y in ops.settle_targets(sums.to(device), ids, ignored)]
                seen.append([dce.digest(y) for y in (images, *words, *settled)])
            if seen[0] != seen[1]:
                different.append(f"words between ranks, {dtype}, options {index}: {[i for i, (a, b) in enumerate(zip(*seen)) if a != b]}")
    return different


def time_options(dce):
    """Milliseconds of a training step with each option, beside the plain one."""
    table = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows, columns = 4096, 128256
        x = torch.randn(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
        t = torch.randint(columns - 300, (rows,), device="cuda")
        weight = torch.rand(columns, device="cuda")

        def step(pick=lambda out: out, **kw):
            x.grad = None
            pick(dce.cross_entropy(x, t, **kw)).backward()

        table[f"{rows}x{columns} {str(dtype)[6:]}"] = {
            "plain": median(step),
            "z_loss": median(lambda: step(z_loss=1e-4)),
            "weight": median(lambda: step(weight=weight)),
            "num_items": median(lambda: step(num_items=4000)),
            "valid_vocab, a multiple of 8": median(lambda: step(valid_vocab=columns - 256)),
            "valid_vocab, odd": median(lambda: step(valid_vocab=columns - 255)),
            "label_smoothing": median(lambda: step(label_smoothing=0.1)),
            "logit_scale": median(lambda: step(logit_scale=0.5)),
            "softcap": median(lambda: step(softcap=30.0)),
            "return_stats": median(lambda: step(lambda out: out[0], return_stats=True)),
            "return_lse": median(lambda: step(lambda out: out[0], return_lse=True)),
            "return_lse, with a gradient": median(lambda: step(lambda out: out[0] + out[1].sum(), return_lse=True)),
            "all": median(lambda: step(lambda out: out[0], z_loss=1e-4, weight=weight, valid_vocab=columns - 255, return_z_loss=True, return_lse=True)),
        }
        del x, t
        torch.cuda.empty_cache()
    return table


def check_term(dce):
    """Every float32 with |x| <= 2^20: significand and exponent, GPU against CPU."""
    ops = dce._registration.ops
    last = 0x49800000
    compared, step = 0, 1 << 27
    for sign in (0, -(2**31)):
        for begin in range(0, last + 1, step):
            b = torch.arange(begin, min(begin + step, last + 1), dtype=torch.int32) + sign
            x = b.view(torch.float32)
            cpu, gpu = ops.term(x), ops.term(x.cuda())
            if not all(torch.equal(c, g.cpu()) for c, g in zip(cpu, gpu)):
                return compared, False
            compared += b.numel()
    return compared, True


def check_large(dce):
    """N * V beyond 2^31, and a row cut over blocks: equal to the rows alone."""
    wrong = []
    rows, columns = 17000, 131072
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    t = torch.randint(columns, (rows,), device="cuda")
    loss = dce.forward(x, t)[0]
    leaf = x.requires_grad_()
    dce.cross_entropy(leaf, t, "sum").backward()
    for row in (0, 8191, 16383, 16384, 16999):
        alone = x[row : row + 1].detach().clone().requires_grad_()
        one = dce.cross_entropy(alone, t[row : row + 1], "sum")
        one.backward()
        if not torch.equal(one.detach(), loss[row]) or not torch.equal(alone.grad[0], leaf.grad[row]):
            wrong.append(f"row {row} of {rows} x {columns}")
    return wrong


def check_full_windows(dce):
    """Rows in which a warp's windows together are just below a power of two, so that the carry from the lower decides (csrc/digits.h, window_words)."""
    wrong = []
    share = [21.125] * 1471 + [-1.046875] * 1083 + [20.375, 17.25, 15.0, 11.8125, 7.25, 0.65234375]  # one warp of twelve, 30720 columns in one block
    for kind, rest in (("one warp", 20.5), ("every warp", None)):
        row = torch.full((12, 320, 8), rest or 0.0)
        row[0 if rest else slice(None)] = torch.tensor(share).view(320, 8)
        vectors = row.view(12, 10, 32, 8).transpose(0, 1).reshape(1, -1)  # a warp takes every twelfth run of 32 vectors
        x = vectors.to(torch.bfloat16).repeat(132, 1)
        t = torch.zeros(132, dtype=torch.int64)
        if not torch.equal(dce.forward(x, t)[0], dce.forward(x.cuda(), t.cuda())[0].cpu()):
            wrong.append(f"full windows, {kind}")
    return wrong


def check_graph(dce, rows, columns, dtype, **options):
    x = torch.randn(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
    t = torch.randint(columns, (rows,), device="cuda")

    def step():
        x.grad = None
        loss = dce.cross_entropy(x, t, **options)
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        loss = step()
    grad = x.grad
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        t.copy_(torch.randint_like(t, columns))
    graph.replay()
    captured = loss.clone(), grad.clone()
    want = step()
    return [] if torch.equal(captured[0], want) and torch.equal(captured[1], x.grad) else ["captured graph differs from eager"]


def check_compile(dce):
    x = torch.randn(33, 5003, device="cuda")
    t = torch.randint(5003, (33,), device="cuda")
    results = []
    for f in (dce.cross_entropy, torch.compile(dce.cross_entropy, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        loss = f(leaf, t)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    return [] if all(torch.equal(a, b) for a, b in zip(*results)) else ["compiled loss or gradient differs from eager"]


def squares_case(generator, index):
    """A tensor for a sum of squares: of odd sizes and alignments, from one octave to all, at every height, with zeros, NaN and infinities, and what makes a warp's window move."""
    g = generator
    pick = lambda *xs: xs[int(torch.randint(len(xs), (), generator=g))]
    size = pick(0, 1, 2, 7, 8, 31, 33, 511, 512, 513, 1023, 1025, 4099, 65537, 1000003, 5000011)
    dtype = pick(torch.float32, torch.bfloat16, torch.float16)
    kind = index % 8
    x = torch.randn(size + 9, generator=g) * 2.0 ** pick(-140, -126, -60, -20, -10, 0, 10, 100, 124)
    if kind == 1:
        x *= torch.exp2(torch.randn(x.shape, generator=g) * pick(3.0, 10.0, 40.0))
    elif kind == 2:  # any bits at all, one NaN and infinity in 128 or fewer
        x = torch.randint(-(2**31), 2**31, x.shape, generator=g).to(torch.int32).view(torch.float32)
    elif kind == 3:  # runs of other heights
        x *= torch.exp2(torch.randint(-60, 60, (len(x) // 700 + 1,), generator=g).float()).repeat_interleave(700)[: len(x)]
    elif kind == 4:
        x[torch.rand(x.shape, generator=g) < pick(0.1, 0.999)] = 0.0
    elif kind == 5 and size:  # a few far above
        x[torch.randint(len(x), (5,), generator=g)] *= 2.0 ** pick(12, 25, 60)
    elif kind == 6:
        x = torch.full(x.shape, pick(float("inf"), float("nan"), torch.finfo(torch.float32).max, 2.0**-149, -2.0**126, 1.9999999))
    lead = pick(0, 0, 1, 3, 8)
    return x.to(dtype)[lead : lead + size]


def check_squares(dce, cases, seed):
    """Exact sums of squares and norms: the GPU against the CPU, on another stream, captured, and cut in two."""
    generator = torch.Generator().manual_seed(seed)
    wrong = []
    for index in range(cases):
        x = squares_case(generator, index)
        y, cut = to_gpu(x), len(x) // 3
        digits = dce.square_digits(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            got = dce.square_digits(y)
            norms = [dce.grad_norm(words) for words in (got, dce.square_digits(y[:cut]) + dce.square_digits(y[cut:]))]
        torch.cuda.synchronize()
        if not torch.equal(got.cpu(), digits) or any(dce.digest(n) != dce.digest(dce.grad_norm(digits)) for n in norms):
            wrong.append(f"squares, case {index}: {len(x)} {x.dtype}, {got.tolist()}, on the CPU {digits.tolist()}")
    print(f"{cases} sums of squares compared")
    x = torch.randn(3, 1000, 77, device="cuda")
    dce.grad_norm(dce.square_digits(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = dce.grad_norm(dce.square_digits(x))
    for _ in range(3):
        x.normal_()
        graph.replay()
        if not torch.equal(norm.cpu(), dce.grad_norm(dce.square_digits(x.cpu()))):
            wrong.append("squares, captured")
    if not torch.equal(torch.compile(lambda x: dce.grad_norm(dce.square_digits(x)), fullgraph=True)(x), norm):
        wrong.append("squares, compiled")
    return wrong


def time_squares(dce):
    """Milliseconds of a sum of squares of 2^29 elements, beside torch's norm, and gigabytes a second of ours."""
    table = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2**29, device="cuda", dtype=dtype)
        entry = {"square_digits": median(lambda: dce.square_digits(x)), "torch norm": median(lambda: torch.linalg.vector_norm(x))}
        small = x[: 2**20]
        entry |= {"square_digits, 2^20": median(lambda: dce.square_digits(small)), "grad_norm": median(lambda words=dce.square_digits(small): dce.grad_norm(words))}
        entry["GB/s"] = x.numel() * x.element_size() / entry["square_digits"] / 1e6
        x *= torch.exp2(torch.randn_like(x) * 12)
        entry["square_digits, exponents of deviation 12"] = median(lambda: dce.square_digits(x))
        table[str(dtype)[6:]] = entry
        del x, small
        torch.cuda.empty_cache()
    return table


def check_bad_targets(dce):
    """Targets far out of range: NaN, no fault, and the device goes on working."""
    wrong = []
    x = torch.randn(8, 1000, device="cuda", requires_grad=True)
    t = torch.tensor([1, 1000, -1, 2**62, -(2**62), 5, -100, 7], device="cuda")
    loss = dce.cross_entropy(x, t, "none")
    loss.sum().backward()
    bad = torch.tensor([False, True, True, True, True, False, False, False], device="cuda")
    if not torch.equal(loss.isnan(), bad) or not torch.equal(x.grad.isnan().all(1), bad) or not torch.equal(x.grad.isnan().any(1), bad):
        wrong.append("NaN is not exactly where the target is out of range")
    if not dce.cross_entropy(x, t).isnan():
        wrong.append("the mean hides a bad target")
    try:
        dce.cross_entropy(x, t, validate=True)
        wrong.append("validate=True raised nothing")
    except ValueError as error:
        if "row 1 has 1000" not in str(error):
            wrong.append(f"message: {error}")
    torch.cuda.synchronize()
    return wrong


def time_against_torch(dce):
    table = {}
    for dtype in (torch.bfloat16, torch.float32):
        rows, columns = 4096, 128256
        x = torch.randn(rows, columns, device="cuda", dtype=dtype, requires_grad=True)
        t = torch.randint(columns, (rows,), device="cuda")

        def step(f):
            x.grad = None
            f(x, t).backward()

        entry = {
            "copy": median(lambda: x.detach().clone()),
            "forward": median(lambda: dce.forward(x.detach(), t)),
            "step": median(lambda: step(dce.cross_entropy)),
            "forward_loss_only": median(lambda: dce.cross_entropy(x.detach(), t)),
            "step_upstream_2": median(lambda: step(lambda a, b: dce.cross_entropy(a, b) * 2.0)),
            "torch_step": median(lambda: step(torch.nn.functional.cross_entropy)),
        }
        maximum = dce.rowmax(x.detach())
        digits = dce.denom_digits(x.detach(), maximum)
        ones = torch.ones(rows, device="cuda")
        entry["rowmax"] = median(lambda: dce.rowmax(x.detach()))
        entry["denom_digits"] = median(lambda: dce.denom_digits(x.detach(), maximum))
        entry["grad_logits"] = median(lambda: dce.grad_logits(ones, x.detach(), t, digits, maximum))
        table[f"{rows}x{columns} {str(dtype)[6:]}"] = entry
        del x, t, maximum, digits
        torch.cuda.empty_cache()
    return table


def cpu_paths():
    """The golden cases on every instruction set this processor has; what ran is the library's business, so each is asked for by name."""
    code = "import local_kernel; print(local_kernel.load().self_test('cpu'))"
    return {
        path: subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", env={**os.environ, "DCE_CPU": path}, capture_output=True, text=True).stdout.strip()
        for path in ("portable", "avx2", "avx512")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    parser.add_argument("--cases", type=int, default=150, help="small cases of odd shapes and layouts")
    parser.add_argument("--batches", type=int, default=42, help="batches in the layout of a training step")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random cases and batches; by the clock")
    parser.add_argument("--most-rows", type=int, default=700, help="of such a batch: few under compute-sanitizer")
    parser.add_argument("--skip-time", action="store_true", help="skip the times")
    parser.add_argument("--skip-large", action="store_true", help="skip N * V beyond 2^31")
    parser.add_argument("--skip-term", action="store_true", help="skip the exhaustive comparison of the term")
    args = parser.parse_args()
    dce = local_kernel.load()
    report = environment()
    report["spec_version"], report["seed"] = dce.spec_version, args.seed
    failures = []

    def record(name, wrong, shown=None):
        report[name] = shown if shown is not None else (wrong or "equal")
        failures.extend(wrong)
        print(f"{name}: {report[name]}", flush=True)

    for device in ("cuda", "cpu"):
        result = dce.self_test(device)
        record(f"self_test {device}", result.different, str(result))
    batches = functools.partial(batch_case, most_rows=args.most_rows)
    paths = cpu_paths()
    record("cpu paths", [p for p, line in paths.items() if "equal the golden" not in line], paths)
    record("random cases against the CPU", check_against_cpu(dce, random_case, args.cases, args.seed), None)
    record("random batches against the CPU", check_against_cpu(dce, batches, args.batches, args.seed), None)
    record("full windows", check_full_windows(dce))
    record("graph", check_graph(dce, 64, 32000, torch.float32) + check_graph(dce, 200, 128256, torch.bfloat16))
    record("random cases with options against the CPU", check_options(dce, random_case, args.cases, args.seed), None)
    record("random batches with options against the CPU", check_options(dce, batches, args.batches, args.seed), None)
    record("graph with options", check_graph(dce, 200, 128256, torch.bfloat16, z_loss=1e-4, weight=torch.rand(128256, device="cuda"), valid_vocab=128256, num_items=torch.tensor(150, device="cuda")))
    record("corners", check_corners(dce))
    record("compile", check_compile(dce))
    record("bad targets", check_bad_targets(dce))
    record("words between ranks", check_ranks(dce, args.seed))
    record("sums of squares", check_squares(dce, 2 * args.cases, args.seed))
    if not args.skip_large:
        record("large", check_large(dce))
    if not args.skip_term:
        compared, equal = check_term(dce)
        record("term, every fp32 up to 2^20", [] if equal else ["term"], f"{compared} values, {'equal' if equal else 'different'}")
    if not args.skip_time:
        report["milliseconds"] = time_against_torch(dce)
        report["milliseconds with options"] = time_options(dce)
        report["milliseconds of a sum of squares"] = time_squares(dce)
        print(json.dumps([report["milliseconds"], report["milliseconds with options"], report["milliseconds of a sum of squares"]], indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
