"""The uses shown in the README. With a build in this checkout (`make build`) the kernel comes from here, otherwise from the Hub."""

import os
from pathlib import Path

import torch
from kernels import get_kernel

REPO, ROOT = "phanerozoic/det-cross-entropy", Path(__file__).resolve().parent
if (ROOT / "build").is_dir():
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO}={ROOT}")
# backend: a CUDA build of torch on a machine without a GPU would ask for the CUDA variant, which a local build need not have
dce = get_kernel(REPO, version=1, trust_remote_code=True, backend=None if torch.cuda.is_available() else "cpu")

device = "cuda" if torch.cuda.is_available() else "cpu"
N, V = 512, 32_000
logits = torch.randn(N, V, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1)).to(device)
targets[::16] = -100  # ignored

# One device has the whole vocabulary.
loss = dce.cross_entropy(logits, targets)
loss.backward()

# The vocabulary is cut. Each shard looks at its own columns; what is combined is a maximum and then integers, both exactly.
x, cuts = logits.detach(), [0, 1, 9_999, 9_999, 20_000, V]
shards = list(zip(cuts, cuts[1:]))
rowmax = torch.stack([dce.rowmax(x, lo, hi) for lo, hi in shards]).amax(0)
digits = sum(dce.denom_digits(x, rowmax, lo, hi) for lo, hi in shards)
losses, _ = dce.finalize(digits, x, targets, rowmax)
sums = dce.loss_digits(losses, targets)
mean = dce.reduce_digits(sums, "mean")
grad = torch.cat([dce.grad_logits(torch.ones_like(mean), x, targets, digits, rowmax, lo, hi, sums=sums) for lo, hi in shards], 1)

assert torch.equal(mean, loss.detach())
assert torch.equal(grad, logits.grad)
assert torch.equal(losses, dce.cross_entropy(x, targets, reduction="none"))
print(f"loss {loss.item():.6f}, whole and in {len(shards)} shards: the same bits, and so is the gradient {dce.digest(grad)}")
