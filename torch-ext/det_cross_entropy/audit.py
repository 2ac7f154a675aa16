"""What an auditor runs: digests of bytes, and the golden cases on the device at hand."""

import ctypes
import hashlib
from typing import Dict, List, NamedTuple, Optional

import torch

from . import golden
from .golden_digests import DIGESTS


def digest(tensor):
    """SHA-256, in hex, of a tensor's elements in row-major order, little-endian: equal for equal bytes, whatever device or strides."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    flat = tensor.detach().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    return hashlib.sha256(ctypes.string_at(flat.data_ptr(), size) if size else b"").hexdigest()


class SelfTest(NamedTuple):
    """What ``self_test`` saw: ``equal``, the number of digests compared, and each that differs as "case/quantity"."""

    device: str
    compared: int
    different: List[str]

    @property
    def equal(self) -> bool:
        return not self.different

    def __str__(self) -> str:
        if self.equal:
            return f"self_test on {self.device}: all {self.compared} digests equal the golden ones"
        return f"self_test on {self.device}: {len(self.different)} of {self.compared} digests differ: {', '.join(self.different)}"


def case_digests(device) -> Dict[str, Dict[str, str]]:
    """Digests of every quantity of every golden case, computed on `device`."""
    return {name: {key: digest(value) for key, value in golden.run(name, device).items()} for name in golden.CASES}


def self_test(device: Optional[str] = None) -> SelfTest:
    """Recomputes the golden cases on `device` (default: the current GPU if there is one, else the CPU) and compares digests."""
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that this torch can use, got {device!r}")
    seen = case_digests(device)
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device)
    different = [f"{case}/{key}" for case, want in DIGESTS.items() for key in want if seen.get(case, {}).get(key) != want[key]]
    return SelfTest(name, sum(map(len, DIGESTS.values())), different)


__all__ = ["SelfTest", "case_digests", "digest", "self_test"]
