"""Workloads of `kernels benchmark`, which times them and prints a table:

    pip install 'kernels[benchmark]'
    kernels benchmark .                                            # this checkout, built
    kernels benchmark phanerozoic/det-cross-entropy --version 1    # the published kernel

Each verify_* first asks for equal bytes from another way to the same result: another cut of the vocabulary, other batches, and on a GPU
the CPU. Then it returns torch's own loss, which the runner compares loosely and times (the column Ref).
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark

CPU_ROWS = 16  # of the batch, computed again by themselves on the CPU


def pairs(cuts):
    return list(zip(cuts, cuts[1:]))


def expect(same, what):
    if not same:
        raise RuntimeError(f"Verification failed: {what}")  # the runner prints it and exits with 1


def equal(a, b, what):
    # bits, not values: +0 is not -0
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    expect(a.dtype == b.dtype and torch.equal(a.detach().cpu().view(integer), b.detach().cpu().view(integer)), what + " is not the same bytes")


class Workloads:
    """Of one dtype. Not itself a Benchmark, for the runner would run it."""

    seed = 0
    dtype: torch.dtype

    def setup(self):
        rows, columns = (4096, 128256) if self.device == "cuda" else (64, 32000)
        self.logits = torch.randn(rows, columns, device=self.device, dtype=self.dtype)
        self.targets = torch.randint(columns, (rows,), device=self.device)
        self.targets[::16] = -100
        even = [columns * i // 8 for i in range(9)]
        uneven = [0, 1, columns // 5, columns // 5, columns - 77, columns]  # a single column, an empty shard
        self.cuts = {"8 shards": pairs(even), "5 uneven shards": pairs(uneven), "1 shard": [(0, columns)]}
        self.verified = False

    def first_time(self):
        # The last of several calls of verify_* is timed as the reference: it should be torch alone.
        first, self.verified = not self.verified, True
        return first

    def combine(self, shards, x, t):
        """(losses, row maxima, digits) of a vocabulary that is cut."""
        k = self.kernel
        rowmax = torch.stack([k.rowmax(x, lo, hi) for lo, hi in shards]).amax(0)
        digits = sum(k.denom_digits(x, rowmax, lo, hi) for lo, hi in shards)
        return k.finalize(digits, x, t, rowmax)[0], rowmax, digits

    def some_rows(self):
        return self.logits.detach()[:CPU_ROWS].cpu(), self.targets[:CPU_ROWS].cpu()

    # ---- the loss of each row

    def benchmark_forward(self):
        self.out = self.kernel.cross_entropy(self.logits, self.targets, "none")

    def verify_forward(self):
        if self.first_time():
            for cut, shards in self.cuts.items():
                equal(self.out, self.combine(shards, self.logits, self.targets)[0], f"the loss from {cut}")
            equal(self.out[:CPU_ROWS], self.kernel.cross_entropy(*self.some_rows(), "none"), f"the loss of {CPU_ROWS} rows alone on the CPU")
        return F.cross_entropy(self.logits.float(), self.targets, reduction="none")

    # ---- the mean and its gradient

    def setup_forward_backward(self):
        self.setup()
        self.logits.requires_grad_()

    def benchmark_forward_backward(self):
        self.logits.grad = None
        self.out = self.kernel.cross_entropy(self.logits, self.targets)
        self.out.backward()

    def verify_forward_backward(self):
        if not self.first_time():
            # in full float32, as is usual: the reference's gradient too ends in the dtype of the logits
            self.logits.grad = None
            loss = F.cross_entropy(self.logits.float(), self.targets)
            loss.backward()
            return loss.detach()

        k, x, t = self.kernel, self.logits.detach(), self.targets
        mean, grad = self.out.detach(), self.logits.grad
        one = torch.ones((), device=x.device)
        for cut, shards in self.cuts.items():
            losses, rowmax, digits = self.combine(shards, x, t)
            half = len(t) // 3
            sums = k.loss_digits(losses[half:], t[half:]) + k.loss_digits(losses[:half], t[:half])
            equal(mean, k.reduce_digits(sums, "mean"), f"the mean from {cut} and two parts of the batch")
            for lo, hi in shards:
                part = k.grad_logits(one, x, t, digits, rowmax, lo, hi, sums=sums)
                equal(grad[:, lo:hi].contiguous(), part, f"the gradient of columns {lo} to {hi} from {cut}")
        few, few_targets = self.some_rows()
        _, rowmax, digits = self.combine(self.cuts["5 uneven shards"], few, few_targets)
        equal(grad[:CPU_ROWS], k.grad_logits(one.cpu(), few, few_targets, digits, rowmax, sums=sums.cpu()), f"the gradient of {CPU_ROWS} rows alone on the CPU")

        leaf = x.clone().requires_grad_()
        loss = F.cross_entropy(leaf.float(), t)
        loss.backward()
        apart = (leaf.grad.float() - grad.float()).abs().max() * len(t)  # a gradient's size is 1 / rows
        expect(apart.item() < 1e-2, f"the gradient is {apart.item():.1e} from torch's")
        return loss.detach()

    # ---- the loss of each row, from eight shards of the vocabulary

    def benchmark_sharded(self):
        self.out = self.combine(self.cuts["8 shards"], self.logits, self.targets)[0]

    def verify_sharded(self):
        if self.first_time():
            equal(self.out, self.kernel.forward(self.logits, self.targets)[0], "the loss of the whole vocabulary")
            for cut, shards in self.cuts.items():
                equal(self.out, self.combine(shards[::-1], self.logits, self.targets)[0], f"the loss from {cut}, added in reverse")
            few, few_targets = self.some_rows()
            equal(self.out[:CPU_ROWS], self.combine(self.cuts["5 uneven shards"], few, few_targets)[0], f"the loss of {CPU_ROWS} rows alone on the CPU")
        return F.cross_entropy(self.logits.float(), self.targets, reduction="none")


class Float32(Workloads, Benchmark):
    dtype = torch.float32


class BFloat16(Workloads, Benchmark):
    dtype = torch.bfloat16
