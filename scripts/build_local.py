#!/usr/bin/env python3
"""Build the kernel from build.toml without nix, in the layout that kernel-builder publishes.

    python scripts/build_local.py                         # the CPU variant, and the CUDA variant where nvcc is found
    python scripts/build_local.py --cuda-archs native     # CUDA for this machine's GPUs only; none, no CUDA variant

Writes build/<variant>/, which kernels.get_local_kernel(Path("build")) loads, and so does get_kernel with
LOCAL_KERNELS="phanerozoic/det-cross-entropy=<this folder>". Compiles only what changed; objects live in build/_work/.

The CUDA variant needs nvcc but neither a GPU nor a CUDA build of torch: the stable ABI's headers are the same in the CPU
wheel, and an empty library of the right name stands in for libtorch_cuda.so at link time.
"""
import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from generated import COMPAT_PY, OPS_PY, REGISTRATION_H

ROOT = Path(__file__).resolve().parent.parent

NINJA_RULES = """\
rule cxx
  command = $cxx $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = C++ $in
rule nvcc
  command = $nvcc $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = CUDA $in
rule link
  command = $cxx -shared -o $out $in $flags
  description = link $out
"""

WARNINGS = ["-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # the last two: false alarms of gcc 12's own avx512fintrin.h


def fail(message):
    sys.exit(f"build_local: {message}")


def write_if_changed(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def source_files(build):
    """Every file that a build is made of, relative to the root."""
    python = python_package(build)
    files = {"build.toml", *build["torch"]["src"], *(str(p.relative_to(ROOT)) for p in python.rglob("*.py"))}
    for kernel in build["kernel"].values():
        files.update(kernel["src"])
    return sorted(files)


def python_package(build):
    return ROOT / "torch-ext" / build["general"]["name"].replace("-", "_")


def source_id(build):
    """As kernel-builder: the commit's tree, marked where tracked files differ. Outside git: a hash of the sources."""
    git = lambda *args: subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True)
    top, tree = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD^{tree}")
    if tree.returncode == 0 and Path(top.stdout.strip()) == ROOT:
        dirty = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
        return tree.stdout[:7] + ("_dirty" if dirty else "")
    digest = hashlib.sha256()
    for name in source_files(build):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:7]


def torch_folder():
    spec = importlib.util.find_spec("torch")
    if spec is None:
        fail("torch is not installed in this Python; see CONTRIBUTING.md")
    return Path(spec.submodule_search_locations[0])


def find_nvcc():
    candidates = [shutil.which("nvcc"), os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"]
    return next((c for c in candidates if c and Path(c).exists()), None)


def cuda_version(nvcc):
    return re.search(r"release (\d+\.\d+)", subprocess.check_output([nvcc, "--version"], text=True)).group(1)


def cuda_libraries(nvcc):
    """The folder of libcudart_static.a, asked of nvcc itself (it may be a wrapper that lies elsewhere)."""
    told = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null", "-o", "/dev/null"], capture_output=True, text=True)
    for folder in re.findall(r'-L"?([^"\s]+)', told.stderr):
        if (Path(folder) / "libcudart_static.a").exists():
            return Path(folder).resolve()
    fail(f"{nvcc} has no libcudart_static.a")


def native_archs():
    told = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
    )
    if not told or told.returncode != 0:
        return []
    return sorted(set(re.findall(r"^\d+\.\d+$", told.stdout, re.M)), key=lambda a: tuple(map(int, a.split("."))))


def gencode(archs):
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        codes = [f"sm_{number}"] + ([f"compute_{number}"] if arch.endswith("+PTX") else [])
        flags += [f"-gencode=arch=compute_{number},code={code}" for code in codes]
    return flags


def compile_flags(build, kernel, backend, torch_dir, scratch):
    """Flags of C++ and of CUDA files of one section; `kernel` is the section, or [torch] for the binding."""
    version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    stable_major, stable_minor = map(int, build["torch"]["stable-abi"][backend].split("."))
    python_include = sysconfig.get_paths()["include"]
    if not (Path(python_include) / "Python.h").exists():
        fail(f"Python.h is not in {python_include}: install this Python's development headers (Debian: python3-dev)")
    common = [
        f"-std=c++{20 if version >= (2, 12) else 17}",  # what that torch's headers are written in
        f"-DTORCH_TARGET_VERSION=0x{stable_major << 56 | stable_minor << 48:016x}",
        "-DPy_LIMITED_API=0x03090000",
        "-DNDEBUG",
        *(["-DCUDA_KERNEL", "-DUSE_CUDA=1"] if backend == "cuda" else ["-DCPU_KERNEL"]),
        *(f"-I{ROOT / folder}" for folder in kernel.get("include", [])),
        f"-I{scratch}",
    ]
    system = ["-isystem", str(torch_dir / "include"), "-isystem", python_include]
    cxx = [*common, *system, "-fPIC", "-fno-gnu-unique", *WARNINGS, *kernel.get("cxx-flags", [])]
    cuda = [*common, *system, "-Xcompiler=" + ",".join(["-fPIC", "-fno-gnu-unique", *WARNINGS]), "-cudart=static", *kernel.get("cuda-flags", [])]
    return cxx, cuda


def link_flags(backend, torch_dir, nvcc, work, cxx):
    # torch must be named as needed by the library itself, or loading it misses aoti_torch_* symbols.
    flags = [f"-L{torch_dir / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    if backend == "cuda":
        if not (torch_dir / "lib" / "libtorch_cuda.so").exists():
            stub = work / "stub" / "libtorch_cuda.so"
            stub.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([cxx, "-shared", "-x", "c", "/dev/null", "-o", stub, "-Wl,-soname,libtorch_cuda.so"], check=True)
            flags.append(f"-L{stub.parent}")
        flags += ["-ltorch_cuda", "-Wl,--as-needed", f"-L{cuda_libraries(nvcc)}"]
        flags += ["-Wl,--exclude-libs,ALL", "-lcudart_static", "-ldl", "-lpthread", "-lrt"]
    return flags


def ninja_path(path):
    return re.sub(r"([$ :])", r"$\1", str(path))


def ninja_flags(flags):
    return shlex.join(map(str, flags)).replace("$", "$$")


def write_ninja(build, backend, archs, ops_name, work, nvcc):
    torch_dir, cxx = torch_folder(), os.environ.get("CXX", "g++")
    lines, objects = [f"cxx = {cxx}", f"nvcc = {nvcc}", NINJA_RULES], []
    kernels = [k for k in build["kernel"].values() if k["backend"] == backend]
    for section in [build["torch"], *kernels]:
        cxx_flags, cuda_flags = compile_flags(build, section, backend, torch_dir, work / "include")
        for source in section["src"]:
            rule = {".cpp": "cxx", ".cu": "nvcc"}.get(Path(source).suffix)
            if rule:
                flags = cxx_flags if rule == "cxx" else cuda_flags + gencode(archs)
                objects.append(ninja_path(f"obj/{source}.o"))
                lines += [f"build {objects[-1]}: {rule} {ninja_path(ROOT / source)}", f"  flags = {ninja_flags(flags)}"]
    library = work / f"{ops_name}.abi3.so"
    flags = link_flags(backend, torch_dir, nvcc, work, cxx)
    lines += [f"build {library.name}: link {' '.join(objects)}", f"  flags = {ninja_flags(flags)}"]
    write_if_changed(work / "build.ninja", "\n".join([*lines, f"default {library.name}", ""]))
    return library


def install(build, backend, archs, ops_name, library, target):
    """Lay the variant out beside its place, then swap it in; an identical one is left alone."""
    from kernels._rust import Digest, DigestAlgorithm

    general, stage = build["general"], library.parent / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    shutil.copytree(python_package(build), stage, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(library, stage)
    write_if_changed(stage / "_ops.py", OPS_PY.format(ops_name=ops_name))
    write_if_changed(stage / general["name"].replace("-", "_") / "__init__.py", COMPAT_PY.format(ops_name=ops_name))
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, stage)
    metadata = {
        "name": general["name"],
        "id": ops_name,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": "sha256", "files": digest.files},
    }
    text = json.dumps(metadata, indent=2) + "\n"
    (stage / "metadata.json").write_text(text)
    built = target / "metadata.json"
    if built.exists() and built.read_text() == text and Digest.hash_variant(DigestAlgorithm.SHA256, target).files == digest.files:
        return False
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(stage, target)
    return True


def build_variant(build, backend, archs, jobs):
    nvcc = find_nvcc() if backend == "cuda" else ""
    name = build["general"]["name"].replace("-", "_")
    ops_name = f"_{name}_{backend}_{source_id(build)}"
    abi = build["torch"]["stable-abi"][backend].replace(".", "")
    compute = "cpu" if backend == "cpu" else "cu" + cuda_version(nvcc).replace(".", "")
    variant = f"torch-stable-abi{abi}-{compute}-{platform.machine()}-{platform.system().lower()}"
    work = ROOT / "build" / "_work" / "-".join([variant, *(arch.replace("+PTX", "p") for arch in archs)])
    write_if_changed(work / "include" / "registration.h", REGISTRATION_H.format(ops_name=ops_name))
    library = write_ninja(build, backend, archs, ops_name, work, nvcc)
    ninja = Path(sys.executable).parent / "ninja"  # that of requirements.txt first: another release starts its log anew
    ninja = ninja if ninja.exists() else shutil.which("ninja") or fail("ninja is missing; see requirements.txt")
    if subprocess.run([ninja, *(["-j", str(jobs)] if jobs else [])], cwd=work).returncode:
        fail(f"{variant}: compilation failed")
    changed = install(build, backend, archs, ops_name, library, ROOT / "build" / variant)
    for old in work.glob("*.abi3.so"):  # of earlier ids
        if old != library:
            old.unlink()
    print(f"build/{variant}: {ops_name}" + (f" for {', '.join(archs)}" if archs else "") + ("" if changed else " (unchanged)"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cpu, and cuda where nvcc is found")
    parser.add_argument("--cuda-archs", help="such as 9.0 or 8.0,9.0+PTX, or native; default: build.toml's list")
    parser.add_argument("-j", "--jobs", type=int, help="compilations at a time; default: ninja's choice")
    args = parser.parse_args()

    from kernels._rust import Build

    Build.open(ROOT)  # kernel-builder's own check of the file
    build = tomllib.loads((ROOT / "build.toml").read_text())
    archs = next(k["cuda-capabilities"] for k in build["kernel"].values() if k["backend"] == "cuda")
    if args.cuda_archs:
        archs = native_archs() if args.cuda_archs == "native" else args.cuda_archs.split(",")

    if args.backend in ("auto", "cpu"):
        build_variant(build, "cpu", [], args.jobs)
    if args.backend == "cuda" and not find_nvcc():
        fail("nvcc is not on PATH, nor under $CUDA_HOME/bin")
    if args.backend == "cuda" and not archs:
        fail("--cuda-archs native: nvidia-smi finds no GPU here")
    if args.backend == "cuda" or (args.backend == "auto" and find_nvcc() and archs):
        build_variant(build, "cuda", archs, args.jobs)


if __name__ == "__main__":
    main()
