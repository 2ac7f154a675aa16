"""Train one small language model again and again, with the vocabulary cut in other places each time, and compare every bit.

    python demo/demo.py [--steps 40] [--out out/demo.png]

The model reads the source of Python's standard library (demo/corpus.py). Its loss comes from the kernel in this repository, built
by `make build`. Beside it the same trainings run on a loss whose shards are combined in float32. The exit code is 0 if the kernel's
loss curve and weights are the same bytes at every cut, and 1 if not.
"""

import argparse
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA; before torch starts it
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads sleep: much quicker where the processor is shared

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import corpus
import local_kernel
import losses
import plot
from model import Transformer
from progress import Progress


VOCABULARY, LENGTH, ROWS, SEED = 4096, 128, 8, 0
TOKENS = ROWS * LENGTH  # of one step


def even(shards: int) -> "tuple[int, ...]":
    return tuple(range(0, VOCABULARY + 1, VOCABULARY // shards))


# 1023 to 1024 is a single column, and 2500 to 2500 an empty shard.
CUTS = {
    "1": even(1),
    "2": even(2),
    "4": even(4),
    "8": even(8),
    "uneven": (0, 77, 700, 1900, 1999, VOCABULARY),
    "edge": (0, 1023, 1024, 2500, 2500, VOCABULARY),
}


@dataclass
class Run:
    losses: torch.Tensor  # float32 [steps, TOKENS]
    means: torch.Tensor  # float32 [steps]
    weights: torch.Tensor  # float32, all of them after the last step

    @property
    def curve_digest(self):
        return sha256(self.losses, self.means)

    @property
    def weights_digest(self):
        return sha256(self.weights)


def sha256(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for tensor in tensors:
        h.update(tensor.contiguous().numpy().tobytes())
    return h.hexdigest()


def load_kernel():
    """get_kernel("phanerozoic/det-cross-entropy", version=1, trust_remote_code=True), from this checkout instead of the Hub."""
    try:
        return local_kernel.load()
    except FileNotFoundError as error:
        raise SystemExit(f"The kernel is not built for this machine: run `make build`.\n\n{error}")


def train(dce, loss_of, bounds, data, device, tick) -> Run:
    """The same seed, first weights and batches each time: only `loss_of` and `bounds` change. The logits are always computed whole."""
    torch.manual_seed(SEED)
    model = Transformer(VOCABULARY, LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    token_losses, means = [], []
    for batch in data:
        logits = model(batch[:, :-1])
        mean, per_token = loss_of(dce, logits, batch[:, 1:].flatten(), bounds)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        token_losses.append(per_token.detach().cpu())
        means.append(mean.detach().cpu())
        tick()
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return Run(torch.stack(token_losses), torch.stack(means), weights)


def differing(run: Run, other: Run) -> torch.Tensor:
    """How many tokens' losses differ in at least one bit, step by step."""
    return (run.losses.view(torch.int32) != other.losses.view(torch.int32)).sum(1)


def table(title: str, runs: "dict[str, Run]", base: Run):
    print(f"\n{title}\n")
    print("  cut     shards   loss curve, SHA-256   weights, SHA-256    tokens differing from cut 1")
    print("                                                             in step 1      in all steps")
    for name, run in runs.items():
        shards, d = len(CUTS[name.split()[0]]) - 1, differing(run, base)
        first, total = f"{d[0]:,} of {TOKENS:,}", f"{d.sum():,} of {run.losses.numel():,}"
        print(f"  {name:8}{shards:^6}   {run.curve_digest[:16]}…     {run.weights_digest[:16]}…   {first:14} {total}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default 40)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the plot (default out/demo.png)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")

    start = time.monotonic()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dce = load_kernel()

    where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU, 2 threads"
    print(f"Kernel: {local_kernel.REPO}, spec {dce.spec_version}, torch {torch.__version__}, on {where}.")
    text = corpus.load(VOCABULARY)
    print(
        f"Text:   {text.files} modules of Python {sys.version.split()[0]}'s standard library, {len(text.tokens):,} tokens of a"
        f" vocabulary of {VOCABULARY:,}; SHA-256 {text.sha256[:16]}…"
    )
    print("        (another Python version is another text, and so has other digests)")
    print(
        f"Job:    train one small transformer {args.steps} steps of {TOKENS:,} tokens, from the same weights on the same batches,"
        f" {2 * len(CUTS) + 1} times.\n        Only the loss differs: how it is computed, and where it cuts the vocabulary."
        " The logits are computed whole.",
        flush=True,
    )

    data = corpus.batches(text.tokens, args.steps, ROWS, LENGTH, SEED).to(device)
    progress = Progress(args.steps * (2 * len(CUTS) + 1))

    def runs(label, loss_of, cuts):
        return {
            name: train(dce, loss_of, CUTS[name.split()[0]], data, device, lambda: progress.step(f"{label}, cut {name}"))
            for name in cuts
        }

    ours = runs("kernel", losses.deterministic, CUTS)
    usual = runs("float32", losses.float32, [*CUTS, "1 again"])

    base, usual_base = ours["1"], usual["1"]
    table("The kernel's loss:", ours, base)
    table("The float32 combine (per-shard maximum and sum of exponentials, rescaled, added):", usual, usual_base)

    same = all((r.curve_digest, r.weights_digest) == (base.curve_digest, base.weights_digest) for r in ours.values())
    control = differing(usual["1 again"], usual_base).sum() == 0
    cut = [run for name, run in usual.items() if name not in ("1", "1 again")]
    changed = sum(run.weights_digest != usual_base.weights_digest for run in cut)
    tokens = [int(differing(run, usual_base)[0]) for run in cut]
    final = torch.stack([run.means[-1] for run in usual.values()])

    print(f"\nThe mean loss went from {base.means[0]:.3f} to {base.means[-1]:.3f} (float32: {usual_base.means[-1]:.3f}).")
    if same:
        print(f"Kernel: all {len(ours)} cuts gave the same {base.losses.numel():,} token losses, the same mean in every step and the"
              f" same {base.weights.numel():,} weights, bit for bit.")
        print(f"        SHA-256 of it all: {sha256(base.losses, base.means, base.weights)}")
    else:
        print("Kernel: THE CUTS DISAGREE. This is a defect: please report this output.")
        for name, run in ours.items():
            steps = differing(run, base).nonzero()
            if len(steps):
                print(f"        cut {name}: differs first in step {int(steps[0]) + 1}")
    print(f"Float32: from the same weights (step 1), {min(tokens):,} to {max(tokens):,} of {TOKENS:,} tokens got another loss than"
          f" uncut; {changed} of {len(cut)} cuts ended with other weights,\n"
          f"        and the last mean losses lie {final.max() - final.min():.1e} apart. The uncut run again:"
          f" {'the same bits, so the cut is the only cause.' if control else 'OTHER BITS, so this machine is not deterministic.'}")

    def word_at(step, token):
        return text.tokenizer.decode([int(data[step, :, 1:].flatten()[token])])

    plot.draw(args.out, CUTS, ours, usual, differing, TOKENS, word_at)
    print(f"\nPlot: {args.out}   ({time.monotonic() - start:.0f} s in all)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
