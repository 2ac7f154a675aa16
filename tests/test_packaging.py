"""The package: what build.toml lists, what a built variant holds, and every way of loading it that is documented."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import local_kernel
import stub_hub
import torch
from conftest import ROOT
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

REPO_ID = "phanerozoic/det-cross-entropy"
BUILD = ROOT / "build"
VARIANTS = sorted(BUILD.glob("torch-*"))
BACKEND = local_kernel.backend()

# What a user types, with the loss of two equal logits as the proof that the library works.
USE = f"""
import torch
from kernels import get_kernel
kernel = get_kernel({REPO_ID!r}, {{arguments}}, backend={BACKEND!r})
loss = kernel.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
assert loss.item() == torch.tensor(2.0).log().item(), loss
print(kernel.__file__)
"""


def use(arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCAL_KERNELS", "KERNELS_"))}
    # HF_HUB_DISABLE_TELEMETRY is left out: with it, kernels 0.17.2 sends an empty user agent, an illegal header.
    environment = {**clean, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run([sys.executable, "-c", USE.format(arguments=arguments)], env=environment, cwd="/", capture_output=True, text=True)


@pytest.fixture(scope="module")
def build_toml():
    return tomllib.loads((ROOT / "build.toml").read_text())


def test_kernel_builder_accepts_build_toml():
    assert set(Build.open(ROOT).general.backends) == {Backend.CPU, Backend.CUDA}


def on_disk(*folders):
    files = (path for folder in folders for path in (ROOT / folder).iterdir())
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix in (".h", ".cpp", ".cu", ".cuh")}


def test_build_toml_lists_every_source_and_header(build_toml):
    # nix copies only what is listed, and a header that is missing there still builds here.
    kernels, shared = build_toml["kernel"], on_disk("csrc", "csrc/cpu")
    for files in (build_toml["torch"]["src"], kernels["cpu"]["src"], kernels["cuda"]["src"]):
        assert len(files) == len(set(files))
    assert set(build_toml["torch"]["src"]) == on_disk("torch-ext")
    assert set(kernels["cpu"]["src"]) == shared
    assert set(kernels["cuda"]["src"]) == shared | on_disk("csrc/cuda")
    assert {p.suffix for p in (ROOT / "csrc").rglob("*") if p.is_file()} <= {".h", ".cpp", ".cu", ".cuh"}


def test_flags_keep_results_exact(build_toml):
    for section in (build_toml["torch"], *build_toml["kernel"].values()):
        assert {"-ffp-contract=off", "-fno-fast-math"} <= set(section["cxx-flags"])
    assert {"--fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"} <= set(build_toml["kernel"]["cuda"]["cuda-flags"])


def test_some_variant_is_built():
    assert VARIANTS, "nothing in build/: run scripts/build_local.py"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_variant_is_what_its_metadata_says(variant, build_toml):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    general = build_toml["general"]
    assert (str(metadata.name), metadata.version, metadata.license) == (general["name"], general["version"], general["license"])
    assert metadata.id.startswith(f"_det_cross_entropy_{str(metadata.backend.backend_type).lower()}_")
    assert metadata.python_depends == []
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert (variant / f"{metadata.id}.abi3.so").is_file()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_variant_holds_the_current_python_files(variant):
    package = ROOT / "torch-ext" / "det_cross_entropy"
    for source in package.rglob("*.py"):
        assert (variant / source.relative_to(package)).read_bytes() == source.read_bytes(), f"build/ is older than {source.name}"


def test_get_kernel_from_a_local_build(tmp_path):
    result = use("version=1, trust_remote_code=True", LOCAL_KERNELS=f"{REPO_ID}={ROOT}", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent.parent == BUILD


@pytest.mark.parametrize("trust", ["True", f"[{REPO_ID!r}]"])
def test_get_kernel_by_download(tmp_path, trust):
    with stub_hub.serve(REPO_ID, BUILD) as hub:
        result = use(f"version=1, trust_remote_code={trust}", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert tmp_path in Path(result.stdout.strip()).parents
    assert stub_hub.REVISION in result.stdout
    assert not [line for line in hub.unknown if REPO_ID in line]
    assert any(line.startswith("GET") and line.endswith(".abi3.so") for line in hub.requests)


def test_downloaded_kernel_offline(tmp_path):
    # Reloading by version or revision offline fails in kernels 0.17.2 (it wants all variants cached); the snapshot's path works.
    with stub_hub.serve(REPO_ID, BUILD) as hub:
        first = use(f"revision={stub_hub.REVISION!r}, trust_remote_code=True", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    snapshot = Path(first.stdout.strip()).parents[2]
    again = use("version=1, trust_remote_code=True", LOCAL_KERNELS=f"{REPO_ID}={snapshot}", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


def test_get_kernel_refuses_without_trust(tmp_path):
    with stub_hub.serve(REPO_ID, BUILD) as hub:
        result = use("version=1", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    assert result.returncode != 0
    assert f"Kernel repository '{REPO_ID}' is not from a trusted publisher" in result.stderr
    assert not any("/resolve/" in line for line in hub.requests)  # nothing was downloaded


WITHOUT_DISTRIBUTED = """
import sys, types, torch
bare = types.ModuleType("torch.distributed")
bare.is_available = lambda: False
sys.modules["torch.distributed"] = torch.distributed = bare
"""


def test_a_torch_without_distributed(tmp_path):
    """It can do all but talk to other processes, and says so."""
    result = subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED + USE.format(arguments="version=1, trust_remote_code=True") + """
x, t = torch.zeros(3, 2), torch.tensor([0, 1, 0])
for call in (kernel.vocab_parallel_cross_entropy, kernel.data_parallel_cross_entropy, kernel.megatron.vocab_parallel_cross_entropy):
    try:
        call(x, t)
    except RuntimeError as error:
        assert "group: this torch has no torch.distributed" in str(error), error
    else:
        raise SystemExit(f"{call} works")
"""], env={**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={ROOT}"}, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
