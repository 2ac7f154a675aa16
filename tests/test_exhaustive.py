"""Compiles and runs exhaustive_term.cpp, every fp32 logit through the term of csrc/arith.h (about a minute on 2 cores), and exhaustive_map.cpp, the map
under a cap of csrc/logit.h (about 10 seconds)."""
import os
import re
import shutil
import subprocess

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))

# The largest relative error allowed, as a power of two: ERR_TERM of docs/SPEC.md.
BOUND = "-22.95"
# That of tanh.
MAP_BOUND = "-22.18"


def compiled(name, directory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    out = directory / name
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-pthread"]
    if os.uname().machine in ("x86_64", "AMD64"):
        flags.append("-mfma")               # without it std::fma is a library call, and minutes become an hour
    subprocess.run([compiler, *flags, os.path.join(HERE, name + ".cpp"), "-o", str(out)], check=True)
    return str(out)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled("exhaustive_term", tmp_path_factory.mktemp("exhaustive"))


@pytest.fixture(scope="module")
def map_program(tmp_path_factory):
    return compiled("exhaustive_map", tmp_path_factory.mktemp("exhaustive"))


def test_every_float(program):
    run = subprocess.run([program, BOUND, "2"], capture_output=True, text=True)
    print("\n" + run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.search(r"tried +(\d+)", run.stdout)[1]) == 2474639362         # both ends included


def test_the_program_can_fail(program):
    """A bound below the true error is refused: the exit status means something. Every 997th float is enough for that."""
    run = subprocess.run([program, "-23.2", "2", "997"], capture_output=True, text=True)
    assert run.returncode == 1 and "relative error is within the bound" in run.stdout


def test_the_map(map_program):
    run = subprocess.run([map_program, "2", "1", MAP_BOUND], capture_output=True, text=True)
    print("\n" + run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    # the floats of 17 binades and 32 itself, a 16th of those of 13, a 1024th of those of the 102 below and the subnormals
    assert int(re.search(r"tanh +tried (\d+)", run.stdout)[1]) == (17 << 23) + 1 + (13 << 19) + (102 << 13)


def test_the_map_can_fail(map_program):
    run = subprocess.run([map_program, "2", "997", "-23"], capture_output=True, text=True)
    assert run.returncode == 1 and "error of tanh is within the bound" in run.stdout
