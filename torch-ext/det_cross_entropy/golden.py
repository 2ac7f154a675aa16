"""The golden cases: inputs made from integers, so that no random generator takes part, and every quantity of the package on them.

The digests in ``golden_digests.py`` (and tests/golden.json) were made on the CPU and freeze spec 1.
"""

from typing import Callable, Dict, NamedTuple, Optional

import torch

from . import functional as F


def _uniform(seed: int, *shape: int) -> torch.Tensor:
    """int64 in [0, 2**31), by a multiplicative hash of the index (int64 wraps, the same everywhere)."""
    count = 1
    for size in shape:
        count *= size
    x = torch.arange(count, dtype=torch.int64) + seed * 1_000_003
    for _ in range(3):
        x = (x * 0x5851F42D4C957F2D + 0x14057B7EF767814F) ^ ((x >> 29) & 0x7FFFFFFFF)
    return ((x >> 32) & 0x7FFFFFFF).reshape(shape)


def normal_like(seed: int, rows: int, columns: int, sigma: float) -> torch.Tensor:
    """A sum of four uniforms, exact in float32 before it is scaled by a power of two; standard deviation about `sigma`."""
    parts = _uniform(seed, 4, rows, columns) & 0xFFFF
    return (parts.sum(0) - 131070).to(torch.float32) * (sigma / 32768.0)


class Case(NamedTuple):
    logits: Callable[[], torch.Tensor]
    dtype: torch.dtype
    ignored: int = 7  # every how many rows one is ignored; 0: none
    options: Optional[Callable[[torch.Tensor, int], Dict[str, dict]]] = None  # what is computed: the loss with these (of a weight and a valid vocabulary), or the plain one and its pieces


def _special() -> torch.Tensor:
    """Rows that reach every rule of the specification."""
    inf, nan = float("inf"), float("nan")
    base = normal_like(11, 24, 97, 1.0)
    base[0] = 0.0
    base[1] = -0.0
    base[2] = -inf
    base[3] = inf
    base[4, 50] = nan
    base[5] = -inf
    base[5, 3] = 2.5
    base[6] = -1e-40
    base[7, 1:] = -3e38
    base[8, 0] = 3e38
    base[9] = torch.arange(97) * -1.0  # windows and blocks, one octave and a bit at a time
    base[10] = torch.arange(97) * -2.75
    base[11] = 1e8
    base[12] = torch.arange(97) * 1e5 + 1e6  # across the shift at 2**20
    base[13] = -(torch.arange(97) * 1e5) - 2e6
    base[14] = 1048575.0 - torch.arange(97)
    base[15] = 1048576.0 - torch.arange(97)
    base[16] = -1048576.0 - torch.arange(97)
    base[17, :48] = -inf
    base[18] = 22.18  # n = 32: a block edge
    base[18, 1:] = 21.9
    base[19] = torch.tensor([20.0] + [0.0] * 96)
    base[20] = torch.tensor([90.0] + [0.0] * 96)
    base[21] = 2e6
    base[21, 40:] = 2e6 - 64
    base[22] = base[22] * 1e-38
    base[23, ::2] = 100.0
    return base


def _options(weight: torch.Tensor, valid: int) -> Dict[str, dict]:
    return {
        "z": {"z_loss": 2.0**-10 + 2.0**-30},
        "weight": {"weight": weight},
        "valid": {"valid_vocab": valid},
        "all": {"z_loss": 0.3, "weight": weight, "valid_vocab": valid},
    }


def _mapped(weight: torch.Tensor, valid: int) -> Dict[str, dict]:
    return {
        "smoothing": {"label_smoothing": 0.1},
        "smoothing_weight": {"label_smoothing": 0.1, "weight": weight},
        "uniform": {"label_smoothing": 1.0},
        "scale": {"logit_scale": 0.3},
        "cap": {"softcap": 30.0},
        "all": {"label_smoothing": 0.1, "logit_scale": 1.7, "softcap": 50.0, "z_loss": 0.3, "weight": weight, "valid_vocab": valid},
    }


CASES: Dict[str, Case] = {
    "normal-fp32": Case(lambda: normal_like(1, 37, 5003, 1.0), torch.float32),
    "normal-bf16": Case(lambda: normal_like(2, 37, 5003, 1.0), torch.bfloat16),
    "normal-fp16": Case(lambda: normal_like(3, 37, 5003, 1.0), torch.float16),
    "wide-fp32": Case(lambda: normal_like(4, 9, 8191, 16.0), torch.float32),
    "wide-bf16": Case(lambda: normal_like(5, 9, 8191, 16.0), torch.bfloat16),
    "wider-fp16": Case(lambda: normal_like(6, 9, 4096, 64.0), torch.float16),
    "one-long-row-bf16": Case(lambda: normal_like(7, 1, 262144, 4.0), torch.bfloat16, 0),
    "equal-fp32": Case(lambda: torch.full((2, 131073), 3.25), torch.float32, 0),
    "narrow-fp32": Case(lambda: normal_like(8, 64, 2, 8.0), torch.float32),
    "one-column-fp32": Case(lambda: normal_like(9, 5, 1, 1.0), torch.float32),
    "special-fp32": Case(_special, torch.float32, 0),
    "special-bf16": Case(_special, torch.bfloat16, 0),
    "special-fp16": Case(_special, torch.float16, 0),
    "options-fp32": Case(lambda: normal_like(1, 37, 5003, 1.0), torch.float32, 7, _options),
    "options-bf16": Case(lambda: normal_like(5, 9, 8192, 16.0), torch.bfloat16, 7, _options),
    "options-special-fp32": Case(_special, torch.float32, 0, _options),
    "options-special-fp16": Case(_special, torch.float16, 0, _options),
    "mapped-fp32": Case(lambda: normal_like(1, 37, 5003, 4.0), torch.float32, 7, _mapped),
    "mapped-bf16": Case(lambda: normal_like(5, 9, 8192, 16.0), torch.bfloat16, 7, _mapped),
    "mapped-special-fp32": Case(_special, torch.float32, 0, _mapped),
    "mapped-special-fp16": Case(_special, torch.float16, 0, _mapped),
}


def inputs(name: str, device="cpu"):
    """(logits, targets, upstream gradient of each row) of a case, made on the CPU and moved."""
    case = CASES[name]
    logits = case.logits().to(case.dtype)
    rows, columns = logits.shape
    targets = _uniform(100, rows) % columns
    if case.options:
        targets %= columns - columns // 9  # all of them in the valid vocabulary
    if case.ignored:
        targets[:: case.ignored] = -100
    upstream = ((_uniform(101, rows) & 0xFFFF) - 32768).to(torch.float32) / 65536.0
    return logits.to(device), targets.to(device), upstream.to(device)


def run_options(name: str, device="cpu") -> Dict[str, torch.Tensor]:
    """Loss, z-loss, lse and gradients of a case with the options one by one and all together; lse has an upstream gradient of its own."""
    logits, targets, upstream = inputs(name, device)
    columns = logits.shape[1]
    weight = (((_uniform(102, columns) & 0xFFFF) - 8192).to(torch.float32) / 32768.0).to(device)  # from -0.25 to 1.75
    case, valid = CASES[name], columns - columns // 9
    out = {}
    for key, options in case.options(weight, valid).items():
        for reduction in ("none", "mean", "items"):
            leaf = logits.detach().clone().requires_grad_()
            more = {"reduction": "none"} if reduction == "none" else {"num_items": 1001} if reduction == "items" else {}
            loss, z, lse = F.cross_entropy(leaf, targets, return_z_loss=True, return_lse=True, **options, **more)
            torch.autograd.backward([loss, lse], [upstream if reduction == "none" else upstream[0], upstream.flip(0)])
            out[f"{key}_{reduction}"], out[f"{key}_grad_{reduction}"] = loss.detach(), leaf.grad
        out[f"{key}_z_loss"], out[f"{key}_lse"] = z, lse.detach()
        if case.options is _mapped:
            out.update({f"{key}_{field}": value for field, value in run_words(logits, targets, **options).items()})
    return out


def run_words(logits, targets, label_smoothing=0.0, weight=None, valid_vocab=None, z_loss=0.0, **mapping) -> Dict[str, torch.Tensor]:
    """The words of three uneven shards and an empty one, added, and what they become."""
    valid = valid_vocab or logits.shape[1]
    cuts = [0, valid // 5, valid // 5, valid - valid // 3, valid]
    shards = list(zip(cuts, cuts[1:]))
    maximum = torch.stack([F.rowmax(logits, lo, hi) for lo, hi in shards]).amax(0)
    digits = sum(F.denom_digits(logits, maximum, lo, hi, **mapping) for lo, hi in shards)
    words = sum(F.logit_digits(logits, maximum, lo, hi, weight=weight, **mapping) for lo, hi in reversed(shards))
    stats, least = zip(*[F.stat_digits(logits, targets, maximum, lo, hi, **mapping) for lo, hi in shards])
    loss, denom = F.finalize(
        digits, logits, targets, maximum, label_smoothing=label_smoothing, logit_digits=words if label_smoothing else None, weight=weight, valid_vocab=valid_vocab, z_loss=z_loss, **mapping
    )
    row = F.finalize_stats(sum(stats), torch.stack(least).amin(0), digits, logits, targets, maximum, valid_vocab=valid_vocab, **mapping)
    out = {"digits": F.carry_digits(digits), "logit_digits": words, "stat_digits": sum(stats), "sharded_loss": loss, "sharded_denom": denom}
    return {**out, "logprob": row.logprob, "entropy": row.entropy, "max_abs": row.max_abs, "hit": row.hit.to(torch.int32)}


def run(name: str, device="cpu") -> Dict[str, torch.Tensor]:
    """Every quantity of a case; the vocabulary is cut in three uneven shards where it says so."""
    if CASES[name].options:
        return run_options(name, device)
    logits, targets, upstream = inputs(name, device)
    columns = logits.shape[1]
    out = {}
    out["loss"], out["rowmax"], out["denom"] = F.forward(logits, targets)
    cuts = [0, columns // 5, columns // 5, columns - columns // 3, columns]  # uneven, one empty
    shards = list(zip(cuts, cuts[1:]))
    maximum = torch.stack([F.rowmax(logits, lo, hi) for lo, hi in shards]).amax(0)
    digits = sum(F.denom_digits(logits, maximum, lo, hi) for lo, hi in reversed(shards))
    out["digits"] = F.carry_digits(digits)
    out["sharded_loss"], out["sharded_denom"] = F.finalize(digits, logits, targets, maximum)
    out["grad_none"] = torch.cat([F.grad_logits(upstream, logits, targets, digits, maximum, lo, hi) for lo, hi in shards], 1)
    out["sums"] = F.loss_digits(out["loss"], targets)
    out["squares"] = F.square_digits(logits)
    out["norm"] = F.grad_norm(out["squares"])
    for reduction in ("mean", "sum"):
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, targets, reduction)
        loss.backward()
        out[reduction], out["grad_" + reduction] = loss.detach(), leaf.grad
    return out


__all__ = ["CASES", "Case", "inputs", "normal_like", "run", "run_options", "run_words"]
