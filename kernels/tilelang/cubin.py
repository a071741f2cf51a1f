"""CUDA source to cubin, reproducible to the byte, and what the cubin says about its kernel."""

import fcntl
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import toolchain

WORK = Path(tempfile.gettempdir()) / "oxide-kernels"
_PATH_HASHES = re.compile(rb"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}(_\d+_kernel_cu_)[0-9a-f]{8}")
_SIZED_VALUE, _EIATTR_KPARAM_INFO = 0x04, 0x1704


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the parameter block."""

    offset: int
    size: int


@dataclass(frozen=True)
class Code:
    """A compiled cubin."""

    data: bytes
    registers: int
    spill_bytes: int
    params: list


def build(name, symbol, source, fast_math):
    """Compiles `source` in a folder fixed by `name`: some symbol names hash the source's path."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "kernel.cu").write_text(source)
        log = _nvcc(folder, fast_math)
        data = _PATH_HASHES.sub(rb"\g<1>00000000\g<2>00000000", (folder / "kernel.cubin").read_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    registers, spill = _resources(log, symbol)
    return Code(data, registers, spill, parameter_layout(data, symbol))


def _nvcc(folder, fast_math):
    command = [str(toolchain.NVCC), *toolchain.NVCC_FLAGS, *(["--use_fast_math"] if fast_math else []),
               f"-I{toolchain.TEMPLATES}", f"-I{toolchain.CUTLASS}", "-o", "kernel.cubin", "kernel.cu"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"nvcc failed:\n{result.stderr[-4000:]}")
    return result.stderr


def _resources(log, symbol):
    """Registers and spilled bytes of `symbol` from ptxas's report."""
    part = log.split(f"Compiling entry function '{symbol}'", 1)[1].split("Compiling entry function", 1)[0]
    if "C7510" in log or "serialized" in log:
        raise RuntimeError("ptxas serialised wgmma: the accumulators are touched while a group is in flight")
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
    return int(re.search(r"Used (\d+) registers", part)[1]), max(int(stores), int(loads))


def _section(data, wanted):
    """Bytes of an ELF64 section by name."""
    offset, = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    header = lambda i: struct.unpack_from("<IIQQQQ", data, offset + i * size)
    strings = header(names)[4]
    for i in range(count):
        name, _, _, _, start, length = header(i)
        if data[strings + name:data.index(b"\0", strings + name)] == wanted:
            return data[start:start + length]
    raise ValueError(f"cubin has no section {wanted.decode()}")


def parameter_layout(data, symbol):
    """Offset and size of each parameter, in order, from the kernel's `.nv.info` section."""
    info, at, places = _section(data, f".nv.info.{symbol}".encode()), 0, {}
    while at < len(info):
        attribute, value = struct.unpack_from("<HH", info, at)
        at += 4
        if attribute & 0xFF != _SIZED_VALUE:
            continue
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", info, at)
            places[ordinal] = Place(offset, packed >> 18)
        at += value
    return [places[i] for i in range(len(places))]
