#!/usr/bin/env python3
"""Check built variants: ABI of the library, and the machine code of each GPU kernel on each architecture.

    python scripts/check_binary.py [build/<variant> ...]        # default: every variant in build/

The ABI: only the stable C interface of torch and of Python 3.9 may be needed. The machine code: a result that is
specified to the bit cannot pass through an approximate unit or lose its subnormals, and the kernels that read every
logit must not fall back to slow paths. Prints registers and instruction counts; exits 1 on a violation.
"""
import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# ---- what is forbidden: a regular expression on an instruction, and why

APPROXIMATE = {
    r"^MUFU\.(EX2|LG2|SIN|COS|SQRT|RSQ)": "approximate function unit",
    r"^F(ADD|MUL|FMA)\S*\.FTZ": "flushes subnormals to zero",
}
SLOW = {
    r"^MUFU": "function unit, a quarter of the rate or less",
    r"^(?!F2I)\S*\.FTZ": "flushes subnormals to zero",
    r"^F2I": "conversion, a quarter of the rate or less",
    r"^(LDL|STL)": "local memory: registers spilled, or an array indexed at run time",
}
FP64 = {r"^D(ADD|MUL|FMA)": "fp64, 1/64 of the rate on most GPUs"}

# By the kernel's name; the first that matches. Each must match some kernel, so that a renamed one is noticed.
HOT = [
    (r"row_?max", SLOW | FP64),
    (r"accumulate", SLOW | FP64),
    (r"squares_kernel", SLOW | FP64),
    (r"backward|fused", SLOW),  # a few fp64 instructions a row
]
ELSEWHERE = APPROXIMATE  # integer division uses MUFU.RCP and F2I, which is exact

# C++ symbols that are not of the stable ABI.
UNSTABLE = re.compile(r"\b(c10|at|caffe2|torch(?!::stable|::headeronly))::")


def run(*command, env=None):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, env=env).stdout


def check_abi(library, python_abi="3.9", manylinux="manylinux_2_28"):
    from kernel_abi_check import ObjectFile

    undefined = [line.split(maxsplit=1)[1] for line in run("nm", "-DC", "--undefined-only", library).splitlines()]
    unstable = [symbol for symbol in undefined if UNSTABLE.search(symbol)]
    shims = [symbol for symbol in undefined if symbol.startswith(("aoti_torch_", "torch_"))]
    binary = ObjectFile(library)
    python = binary.check_python_abi(python_abi)
    glibc = sorted({f"{v.dep}_{v.version}" for v in binary.check_manylinux(manylinux)})
    print(f"  torch stable ABI: {len(shims)} C functions, {len(unstable)} C++ symbols outside it")
    print(f"  Python {python_abi} ABI: {len(python)} violations")
    print(f"  {manylinux}: {'yes' if not glibc else 'no, a local build needs ' + ', '.join(glibc)}")
    return [f"not in torch's stable ABI: {symbol}" for symbol in unstable] + [f"not in Python's stable ABI: {v!r}" for v in python]


def cuobjdump(*args):
    """The one on PATH, else that of the wheel; it calls nvdisasm, which lies beside it."""
    folders = [p for root in (getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or []) for p in Path(root).glob("cu*/bin")]
    path = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    tool = shutil.which("cuobjdump", path=path)
    if not tool:
        sys.exit("check_binary: cuobjdump is missing; pip install -r requirements.txt brings it")
    return run(tool, *args, env={**os.environ, "PATH": path})


def disassemble(library):
    """{(kernel, arch): [instruction, ...]} without what never executes: padding and the jump to itself that guards it."""
    code, arch, kernel = defaultdict(list), None, None
    for line in cuobjdump("-sass", library).splitlines():
        if match := re.match(r"\s+code for sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s+Function : (\S+)", line):
            kernel = match[1]
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\S[^;]*?)\s*;", line):
            code[kernel, arch].append(match[1])
    for instructions in code.values():
        while instructions and re.match(r"NOP|BRA", instructions[-1]):
            instructions.pop()
    return code


def registers(library):
    counts, arch, kernel = {}, None, None
    for line in cuobjdump("-res-usage", library).splitlines():
        if match := re.match(r"arch = sm_(\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            kernel = match[1]
        elif match := re.search(r"REG:(\d+)", line):
            counts[kernel, arch] = int(match[1])
    return counts


def check_kernels(library, declared_archs):
    code, regs = disassemble(library), registers(library)
    kernels = sorted({kernel for kernel, _ in code})
    archs = sorted({arch for _, arch in code}, key=lambda a: int(re.match(r"\d+", a)[0]))
    demangled = run("c++filt", "-p", *kernels).splitlines() if kernels else []
    names = {kernel: re.sub(r"^(\w+::|\(anonymous namespace\)::)*", "", name) for kernel, name in zip(kernels, demangled)}
    problems = []
    expected = [arch.replace("+PTX", "").replace(".", "") for arch in declared_archs]
    if archs != expected:
        problems.append(f"metadata.json says {', '.join(expected)}, the library holds code for {', '.join(archs) or 'nothing'}")
    for pattern, _ in HOT:
        if not any(re.search(pattern, name) for name in names.values()):
            problems.append(f"no kernel is named like '{pattern}': a rename? adjust HOT")

    width = max([len(name) for name in names.values()] + [6])
    print("\n  registers/instructions on each architecture\n")
    print(f"  {'kernel':{width}}  " + "".join(f"{'sm_' + arch:>11}" for arch in archs) + "  verdict")
    for kernel in sorted(kernels, key=names.get):
        rules = next((rules for pattern, rules in HOT if re.search(pattern, names[kernel])), ELSEWHERE)
        cells, bad = [], 0
        for arch in archs:
            instructions = code.get((kernel, arch), [])
            cells.append(f"{regs.get((kernel, arch), '?')}/{len(instructions)}")
            for pattern, why in rules.items():
                found = Counter(i.split()[0] for i in instructions if re.search(pattern, i.split()[0]))
                problems += [f"{names[kernel]} on sm_{arch}: {count} x {name}: {why}" for name, count in found.items()]
                bad += sum(found.values())
        verdict = f"{bad} forbidden" if bad else "ok" if rules is not ELSEWHERE else "ok (not hot)"
        print(f"  {names[kernel]:{width}}  " + "".join(f"{cell:>11}" for cell in cells) + f"  {verdict}")
    print()
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", type=Path, help="folders of variants; default: all in build/")
    variants = parser.parse_args().variants or sorted((ROOT / "build").glob("torch-*"))
    if not variants:
        sys.exit("check_binary: nothing in build/; run scripts/build_local.py")
    failed = False
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text())
        library = variant / f"{metadata['id']}.abi3.so"
        print(f"{variant.name}: {library.name}, {library.stat().st_size / 1e6:.1f} MB")
        problems = check_abi(library)
        if metadata["backend"]["type"] == "cuda":
            problems += check_kernels(library, metadata["backend"]["archs"])
        for problem in problems:
            print(f"  VIOLATION {problem}")
        print(f"  {'FAILED' if problems else 'ok'}", flush=True)
        failed = failed or bool(problems)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
