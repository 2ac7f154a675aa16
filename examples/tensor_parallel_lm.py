#!/usr/bin/env python3
"""A small transformer whose head is cut over the vocabulary: one digest of the loss curve, whatever the number of processes.

    python scripts/build_local.py --backend cpu
    torchrun --nproc-per-node 3 examples/tensor_parallel_lm.py

The loss is exact, so the rest must not depend on the cut either. The trunk is replicated: every process computes all of it, in the same way. The head multiplies
in fixed point: its sums are integers below 2^53, which fp64 adds without rounding, so neither the width of a shard nor the order in which ranks add matters.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WIDTH, HEADS = 1000, 64, 4
BATCH, LENGTH = 8, 32
LEARNING_RATE = 2.0


def fixed(x, fraction, integer):
    """x as fp64 integers in units of 2^-fraction, |x| at most 2^integer."""
    return (x.double() * 2.0**fraction).round().clamp(-(2.0 ** (fraction + integer)), 2.0 ** (fraction + integer))


class ExactHead(torch.autograd.Function):
    """h [N, D] @ weight [V_rank, D]^T, float32; the gradient for h is added over the group.

    The gradient of a mean adds to at most 2 in magnitude over all tokens and columns, 2^33 in its units; times a weight of 2^17 or an h of 2^16 units, sums stay below 2^53.
    """

    @staticmethod
    def forward(ctx, h, weight, group):
        ctx.group = group
        h, weight = fixed(h, 12, 4), fixed(weight, 14, 3)
        ctx.save_for_backward(h, weight)
        return (h @ weight.t() * 2.0**-26).float()

    @staticmethod
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        grad = fixed(grad, 32, 0)
        grad_h = grad @ weight
        dist.all_reduce(grad_h, group=ctx.group)
        return (grad_h * 2.0**-46).float(), (grad.t() @ h * 2.0**-44).float(), None


class ExactEmbedding(torch.autograd.Function):
    """Rows of weight; their gradients are added in fixed point, in whatever order."""

    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.size = weight.shape
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.size, dtype=torch.float64, device=grad.device)
        total.index_add_(0, tokens.flatten(), fixed(grad, 36, 4).flatten(0, 1))
        return None, (total * 2.0**-36).float()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.think = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h):
        q, k, v = self.qkv(self.attend(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        mixed = torch.softmax(scores.masked_fill(later, -float("inf")), -1) @ v
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.down(torch.relu(self.up(self.think(h))))


def batches(steps):
    """Tokens [B, L + 1] in which each mostly follows from the one before; the first two targets of every sequence are ignored."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        for i in range(1, LENGTH + 1):
            follows = torch.rand(BATCH, generator=generator) < 0.9
            tokens[:, i] = torch.where(follows, (7 * tokens[:, i - 1] + 3) % VOCABULARY, tokens[:, i])
        targets = tokens[:, 1:].clone()
        targets[:, :2] = -100
        yield tokens[:, :-1], targets


def train(dce, cut, group=None, steps=20, layers=2, device="cpu"):
    """Loss curve, float32 [steps], with columns cut[0] to cut[1] of the head in this process. With layers = 0 every device gives the same bytes."""
    torch.manual_seed(0)
    embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    head = torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5
    trunk = nn.Sequential(*(Block() for _ in range(layers)), *([nn.LayerNorm(WIDTH)] if layers else [])).to(device)
    embedding, head = nn.Parameter(embedding.detach().to(device)), nn.Parameter(head[cut[0] : cut[1]].to(device))
    parameters = [embedding, head, *trunk.parameters()]
    losses = []
    for tokens, targets in batches(steps):
        h = trunk(ExactEmbedding.apply(tokens.to(device), embedding))
        logits = ExactHead.apply(h.flatten(0, 1), head, group)
        loss = dce.vocab_parallel_cross_entropy(logits, targets.flatten().to(device), group=group, vocab_start=cut[0])
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in parameters:
                p -= LEARNING_RATE * p.grad
                p.grad = None
    return torch.stack(losses).cpu()


def even_cut(rank, world):
    """As torch.chunk cuts; at 3 processes the last one holds 332 columns, the others 334."""
    width = -(-VOCABULARY // world)
    return min(rank * width, VOCABULARY), min((rank + 1) * width, VOCABULARY)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    import local_kernel

    dce = local_kernel.load()
    torch.set_num_threads(1)  # torchrun sets this too, but not for one process
    torch.use_deterministic_algorithms(True)
    device = "cpu"
    if args.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = train(dce, even_cut(rank, world), steps=args.steps, device=device)
    if rank == 0:
        digest = hashlib.sha256(losses.numpy().tobytes()).hexdigest()
        print(f"{world} process{'es' if world > 1 else ''}: mean loss {losses[0]:.3f} to {losses[-1]:.3f} in {args.steps} steps; loss curve {digest[:32]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
