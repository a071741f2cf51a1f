"""Where the pinned compilers are and who they are.

Importing this module prepares the process for TileLang: `CUDA_HOME` points at the compilers inside
the same virtual environment and `torch` resolves to the stand-in beside this file. Import it before
`tilelang`.
"""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(importlib.metadata.distribution("tilelang").locate_file("")).resolve()
CUDA_HOME = SITE / "nvidia" / "cu13"
ARCH = "sm_90a"
DRIVER_MIN = 13000

os.environ["CUDA_HOME"] = str(CUDA_HOME)
os.environ["PATH"] = f"{CUDA_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
os.environ["TILELANG_DISABLE_CACHE"] = "1"
sys.path.insert(0, str(HERE / "torch_stub"))

TEMPLATES = SITE / "tilelang" / "src"
CUTLASS = SITE / "tilelang" / "3rdparty" / "cutlass" / "include"
NVCC = CUDA_HOME / "bin" / "nvcc"
PTXAS = CUDA_HOME / "bin" / "ptxas"
CICC = CUDA_HOME / "nvvm" / "bin" / "cicc"
NVCC_FLAGS = ("--cubin", "-O3", "-std=c++20", "-gencode", f"arch=compute_90a,code={ARCH}", "-w", "-Xptxas", "-v")


def sha256(data: bytes | str) -> str:
    """Lower-case hex digest."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _version(tool: Path) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"V([\d.]+)", text)[1]


@lru_cache
def identities() -> dict[str, str]:
    """Versions and file hashes of everything that shapes the bytes of a cubin."""
    library = SITE / "tilelang" / "lib" / "libtilelang.so"
    files = {"nvcc": NVCC, "ptxas": PTXAS, "cicc": CICC, "libtilelang": library}
    versions = {name: importlib.metadata.version(package) for name, package in
                (("tilelang", "tilelang"), ("tvm_ffi", "apache-tvm-ffi"), ("z3", "z3-solver"))}
    versions |= {"nvcc": _version(NVCC), "ptxas": _version(PTXAS)}
    return versions | {f"{name}_sha256": sha256(path.read_bytes()) for name, path in files.items()}
