#!/usr/bin/env python3
"""Vocabulary-parallel loss on the GPUs of one host, over NCCL: the bytes of one process whatever NCCL does, and what it costs beside two peers.

    python benchmarks/multi_gpu.py --processes 8 --out benchmarks/results/h200_x8.json      # every NCCL setting, each in a launch of its own
    torchrun --nproc-per-node 8 benchmarks/multi_gpu.py                                     # one launch, with the settings of the environment
    python benchmarks/multi_gpu.py --device cpu --processes 3                               # the same over gloo, small

Checked: loss and gradient against the CPU, and 20 training steps of examples/tensor_parallel_lm.py against one process, for even, uneven and shuffled shards; a captured
graph; the bytes that are sent; a NaN on one rank; overlap, gap, stale maximum, different targets. Exits with 1 if anything differs. Times come from the first setting only.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel

SETTINGS = {
    "default": {},
    "ring": {"NCCL_ALGO": "Ring"},
    "tree": {"NCCL_ALGO": "ring;allreduce:tree"},  # object gathers have no tree
    "ring, 1 channel": {"NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1"},
    "ring, 8 channels": {"NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8"},
}


def environment(device):
    from gpu_check import environment as of_gpu

    about = of_gpu(__file__) if device.type == "cuda" else {"torch": torch.__version__}
    about["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    about["settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}
    return {**about, "processes": dist.get_world_size()}


def example():
    spec = importlib.util.spec_from_file_location("tensor_parallel_lm", ROOT / "examples" / "tensor_parallel_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuts_of(columns, world):
    """Named lists of (first, last) columns by rank; the uneven ones hold an empty shard and one of a single column where there are ranks enough."""
    width = -(-columns // world)
    even = [(min(r * width, columns), min((r + 1) * width, columns)) for r in range(world)]
    bounds = [0, *[1, 1, columns // 3, columns // 2, columns // 2 + 1, columns - 7, columns - 1][: world - 1], columns]
    uneven = list(zip(bounds, bounds[1:]))
    return {"even": even, "uneven": uneven, "shuffled": uneven[::-2] + uneven[-2::-2]}


class Checks:
    """What a rank found; `failures` names what differs."""

    def __init__(self, dce, device):
        self.dce, self.device, self.rank, self.world = dce, device, dist.get_rank(), dist.get_world_size()
        self.failures, self.digests = [], {}

    def expect(self, good, what):
        if not good:
            self.failures.append(f"rank {self.rank}: {what}")

    def bytes(self):
        """Loss and gradient slices, against cross_entropy of the whole on this machine's CPU."""
        rows, columns = 96, 5003
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            generator = torch.Generator().manual_seed(7)
            x = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
            t = torch.randint(columns, (rows,), generator=generator)
            t[::7] = -100
            upstream = torch.linspace(-1, 2, rows)
            for reduction in ("mean", "sum", "none"):
                g = upstream if reduction == "none" else torch.tensor(0.7)
                leaf = x.clone().requires_grad_()
                golden = self.dce.cross_entropy(leaf, t, reduction)
                golden.backward(g)
                for name, cuts in cuts_of(columns, self.world).items():
                    lo, hi = cuts[self.rank]
                    shard = x[:, lo:hi].to(self.device).requires_grad_()
                    out = self.dce.vocab_parallel_cross_entropy(shard, t.to(self.device), reduction, vocab_start=lo)
                    out.backward(g.to(self.device))
                    what = f"{dtype} {reduction}, {name} shards"
                    self.expect(torch.equal(out.detach().cpu(), golden.detach()), f"loss, {what}")
                    self.expect(torch.equal(shard.grad.cpu(), leaf.grad[:, lo:hi]), f"gradient, {what}")
                self.digests[f"{dtype} {reduction}"] = self.dce.digest(golden)[:16], self.dce.digest(leaf.grad)[:16]

    def training(self):
        """20 steps: the model without a trunk against one CPU process, bytes of any device; the transformer against one process on this device."""
        lm = example()
        alone = [dist.new_group([r], backend="gloo") for r in range(self.world)][self.rank]
        on_device = [dist.new_group([r]) for r in range(self.world)][self.rank]
        whole = (0, lm.VOCABULARY)
        golden = {0: lm.train(self.dce, whole, alone, layers=0), 2: lm.train(self.dce, whole, on_device, device=self.device)}
        for layers, losses in golden.items():
            for name, cuts in cuts_of(lm.VOCABULARY, self.world).items():
                seen = lm.train(self.dce, cuts[self.rank], layers=layers, device=self.device)
                self.expect(torch.equal(seen, losses), f"training run with {layers} layers, {name} shards")
            self.digests[f"training, {layers} layers"] = self.dce.digest(losses)[:16]
        self.expect(losses[-1] < losses[0] - 0.5, "the example does not learn")

    def payload(self):
        """The bytes a token that all-reduces are given."""
        x, t = torch.zeros(7, 4, device=self.device), torch.zeros(7, dtype=torch.int64, device=self.device)
        for kw, size in (({}, 76), ({"label_smoothing": 0.1}, 108), ({"return_stats": True}, 96), ({"label_smoothing": 0.1, "return_stats": True}, 128)):
            with counting() as sent:
                self.dce.vocab_parallel_cross_entropy(x, t, validate=False, **kw)
            self.expect(len(sent) == 2 and sum(sent) == size * len(t), f"{sent} bytes sent of {len(t)} tokens with {kw}, expected {size} a token")

    def graph(self):
        """Forward and backward with both all-reduces, captured and replayed on other values."""
        if self.device.type != "cuda":
            return
        rows, width = 256, 1000
        generator = torch.Generator().manual_seed(11)
        whole = torch.randn(2, rows, width * self.world, generator=generator)
        targets = torch.randint(width * self.world, (2, rows), generator=generator)
        own = whole[:, :, self.rank * width : (self.rank + 1) * width].to(self.device)
        t = targets.to(self.device)
        x, tokens = own[0].clone().requires_grad_(), t[0].clone()

        def step():
            x.grad = None
            loss = self.dce.vocab_parallel_cross_entropy(x, tokens)
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
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread may go on
            loss = step()
        grad = x.grad
        with torch.no_grad():
            x.copy_(own[1])
            tokens.copy_(t[1])
        graph.replay()
        leaf = whole[1].clone().requires_grad_()
        golden = self.dce.cross_entropy(leaf, targets[1])
        golden.backward()
        self.expect(torch.equal(loss.cpu(), golden.detach()), "loss of a captured graph")
        self.expect(torch.equal(grad.cpu(), leaf.grad[:, self.rank * width : (self.rank + 1) * width]), "gradient of a captured graph")
        del graph

    def wrong(self):
        """NaN on every rank where ranks do not agree, and one message on all with validate=True."""
        rows, width = 16, 100
        generator = torch.Generator().manual_seed(13)
        whole = torch.randn(rows, width * self.world, generator=generator)
        targets = torch.randint(width * self.world, (rows,), generator=generator).to(self.device)
        x, start, last = whole[:, self.rank * width :][:, :width].to(self.device), self.rank * width, self.world - 1
        parallel = self.dce.vocab_parallel_cross_entropy

        def outcome(what, x, targets, start, raises=True, rows_of=slice(None)):
            leaf = x.clone().requires_grad_()
            losses = parallel(leaf, targets, "none", vocab_start=start, validate=False)
            losses.sum().backward()
            nan = torch.zeros(rows, dtype=torch.bool, device=self.device)
            nan[rows_of] = True
            self.expect(torch.equal(losses.isnan(), nan) and torch.equal(leaf.grad.isnan().all(1), nan), f"{what}: loss or gradient is not NaN just there")
            self.expect(bool(parallel(x, targets, vocab_start=start, validate=False).isnan()), f"{what}: the mean hides it")
            message = None
            try:
                parallel(x, targets, vocab_start=start, validate=True)
            except ValueError as error:
                message = str(error)
            messages = [None] * self.world
            dist.all_gather_object(messages, message)
            self.expect(len(set(messages)) == 1 and (messages[0] is not None) == raises, f"{what}: messages {messages}")
            self.digests[what] = messages[0]

        poisoned = x.clone()
        if self.rank == last:
            poisoned[3, 5] = float("nan")
        outcome("NaN on one rank", poisoned, targets, start, raises=False, rows_of=3)
        if self.world == 1:
            return
        outcome("overlap", x, targets, start - (self.rank == last))
        outcome("gap", x, targets, start + (self.rank == last))
        other = targets.clone()
        other[4] = (other[4] + (self.rank == last)) % (width * self.world)
        outcome("different targets", x, other, start, rows_of=4)
        other = targets.clone()
        other[9] = -100 if self.rank == last else other[9]
        outcome("ignored on one rank", x, other, start, rows_of=9)

        Ranks = self.dce._ranks.Ranks
        honest = Ranks.all_reduce

        def all_reduce(ranks, tensor, op=dist.ReduceOp.SUM):
            own = tensor.clone()
            honest(ranks, tensor, op)
            return own if op == dist.ReduceOp.MAX and self.rank == last else tensor

        Ranks.all_reduce = all_reduce
        try:
            outcome("stale maximum", x, targets, start, rows_of=(whole[:, last * width :].amax(1) < whole.amax(1)).to(self.device))
        finally:
            Ranks.all_reduce = honest


# ---- times


class ThreeAllReduces(torch.autograd.Function):
    """The usual way: fp32 maximum, target logit and sum of exponentials, each all-reduced. Mean over all tokens."""

    @staticmethod
    def local(x, maximum):
        e = (x.float() - maximum[:, None]).exp()
        return e, e.sum(1)

    @staticmethod
    def gradient(e, total, column, own, grad):
        e = e / total[:, None]
        hit = torch.arange(e.shape[1], device=e.device) == column[:, None]
        return ((e - (hit & own[:, None]).float()) * (grad / len(e))).to(torch.bfloat16)

    @staticmethod
    def forward(ctx, x, targets, start, local, gradient):
        maximum = x.amax(1).float()
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        own = (targets >= start) & (targets < start + x.shape[1])
        column = (targets - start).clamp(0, x.shape[1] - 1)
        logit = torch.where(own, x.gather(1, column[:, None])[:, 0].float() - maximum, 0.0)
        dist.all_reduce(logit)
        e, total = local(x, maximum)
        dist.all_reduce(total)
        ctx.save_for_backward(e, total, column, own)
        ctx.gradient = gradient
        return (total.log() - logit).mean()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient(*ctx.saved_tensors, grad), None, None, None, None


@contextlib.contextmanager
def counting():
    """Bytes that each call of all_reduce is given, as a list."""
    seen, plain, functional = [], dist.all_reduce, funcol.all_reduce

    def count(f):
        def counted(tensor, *args, **kw):
            seen.append(tensor.numel() * tensor.element_size())
            return f(tensor, *args, **kw)

        return counted

    dist.all_reduce, funcol.all_reduce = count(plain), count(functional)
    try:
        yield seen
    finally:
        dist.all_reduce, funcol.all_reduce = plain, functional


def milliseconds(step, device, repeats):
    """Medians over repeats, then the slowest rank: {"device": host time hidden behind queued work, "wall": an iteration with nothing queued}."""
    for _ in range(3):
        step()
    wall = []
    for _ in range(repeats):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        wall.append((time.perf_counter() - begin) * 1e3)
    own = [sorted(wall)[repeats // 2]]
    if device.type == "cuda":
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        for start, end in events:
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        own.append(sorted(s.elapsed_time(e) for s, e in events)[repeats // 2])
    slowest = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(("wall", "device"), slowest.tolist()))


def times(dce, device, rows, columns, repeats):
    """Forward and backward of a mean over bf16 logits [rows, columns / W]."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = columns // world
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(width * world, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    mesh = init_device_mesh(device.type, (world,))
    sharded = DTensor.from_local(x.detach(), mesh, [Shard(1)], run_check=False).requires_grad_()
    compiled = [torch.compile(f) for f in (ThreeAllReduces.local, ThreeAllReduces.gradient)] if device.type == "cuda" else None

    def ours():
        x.grad = None
        dce.vocab_parallel_cross_entropy(x, targets, validate=False).backward()

    def torch_loss_parallel():
        sharded.grad = None
        with loss_parallel():
            F.cross_entropy(sharded, targets).backward()

    def three(local=ThreeAllReduces.local, gradient=ThreeAllReduces.gradient):
        x.grad = None
        ThreeAllReduces.apply(x, targets, rank * width, local, gradient).backward()

    steps = {"det-cross-entropy": ours, "torch loss_parallel": torch_loss_parallel, "three all-reduces": three}
    if compiled:
        steps["three all-reduces, compiled"] = lambda: three(*compiled)
    table = {}
    for name, step in steps.items():
        with counting() as sent:
            step()
        table[name] = {**milliseconds(step, device, repeats), "all_reduces": len(sent), "payload_bytes_a_token": sum(sent) / rows}
        table[name]["ring_bytes_a_rank"] = round(2 * (world - 1) / world * sum(sent))
    return {f"{rows} x {columns} bf16": table}


# ---- one launch, or all


def run(args):
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0))) if args.device == "cuda" else torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])) if device.type == "cuda" else 1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dce = local_kernel.load()
    checks = Checks(dce, device)
    for check in (checks.bytes, checks.payload, checks.training, checks.graph, checks.wrong):
        check()
    failures = [None] * checks.world
    dist.all_gather_object(failures, checks.failures)
    report = {**environment(device), "failures": sum(failures, []), "digests": checks.digests}
    if not args.skip_time:
        torch.use_deterministic_algorithms(False)
        report["milliseconds"] = times(dce, device, args.rows, args.columns, args.repeats)
    if dist.get_rank() == 0:
        text = json.dumps(report, indent=1)
        args.out.write_text(text + "\n") if args.out else print(text)
    dist.destroy_process_group()
    return 1 if report["failures"] else 0


def launch_all(args):
    """Each setting in processes of its own, for NCCL reads them once; then one report."""
    settings = SETTINGS if args.device == "cuda" else {"default": {}}
    reports = {}
    for name, variables in settings.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}", __file__, f"--device={args.device}"]
            command += [f"--out={out}", f"--rows={args.rows}", f"--columns={args.columns}", f"--repeats={args.repeats}"]
            command += ["--skip-time"] if args.skip_time or reports else []
            begin = time.time()
            done = subprocess.run(command, env={**os.environ, **variables, "OMP_NUM_THREADS": "1"}, timeout=args.timeout)
            reports[name] = json.loads(out.read_text()) if out.exists() else {"failures": [f"exit status {done.returncode}"], "digests": {}}
        print(f"{name}: {reports[name]['failures'] or 'equal'} ({time.time() - begin:.0f} s)", flush=True)
    first = next(iter(reports.values()))
    failures = [f"{name}: {f}" for name, r in reports.items() for f in r["failures"]]
    failures += [f"{name}: digests differ from those of the first setting" for name, r in reports.items() if r["digests"] != first["digests"]]
    command = " ".join(["python", "benchmarks/multi_gpu.py", *sys.argv[1:]])
    merged = {**first, "command": command, "failures": failures, "settings": {name: {"variables": SETTINGS[name], "failures": r["failures"]} for name, r in reports.items()}}
    print(json.dumps(merged.get("milliseconds"), indent=1))
    if args.out:
        args.out.write_text(json.dumps(merged, indent=1) + "\n")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2, help="where torchrun does not say it")
    parser.add_argument("--out", type=Path, help="JSON; default: printed")
    parser.add_argument("--rows", type=int, help="tokens, for times; default 8192, or 64 on the CPU")
    parser.add_argument("--columns", type=int, help="vocabulary, for times; default 128256, or 1024 on the CPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=300, help="seconds a setting may take")
    parser.add_argument("--skip-time", action="store_true", help="only the checks")
    args = parser.parse_args()
    args.rows = args.rows or (8192 if args.device == "cuda" else 64)
    args.columns = args.columns or (128256 if args.device == "cuda" else 1024)
    return run(args) if "RANK" in os.environ else launch_all(args)


if __name__ == "__main__":
    sys.exit(main())
