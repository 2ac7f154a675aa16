"""`dce`: the kernel as built by scripts/build_local.py, loaded as a user would load it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import local_kernel


def load_kernel():
    try:
        return local_kernel.load()
    except FileNotFoundError as error:
        pytest.exit(f"the kernel is not built for this machine: run `make test`, or scripts/build_local.py first\n{error}", returncode=3)


@pytest.fixture(scope="session")
def dce():
    return load_kernel()
