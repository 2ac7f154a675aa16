"""`dce`: the kernel as built by scripts/build_local.py, loaded as a user would load it."""
from pathlib import Path

import kernels
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def load_kernel():
    # A CUDA build of torch on a machine without a GPU would ask for the CUDA variant, which need not be there.
    backend = None if torch.cuda.is_available() else "cpu"
    try:
        return kernels.get_local_kernel(ROOT / "build", backend=backend)
    except FileNotFoundError as error:
        pytest.exit(f"the kernel is not built for this machine: run `make test`, or scripts/build_local.py first\n{error}", returncode=3)


@pytest.fixture(scope="session")
def dce():
    return load_kernel()
