"""Stand-in for PyTorch while kernels are lowered.

TileLang imports torch for its element-type names and for running kernels from Python. Lowering uses
the names only, so this module offers those and nothing that computes: the generated source is the
same as with the real package, and a 2 GB wheel stays out of the build.
"""

import sys
import types

__version__ = "2.8.0"


class dtype(str):
    """A named element type."""


class Tensor:
    """Never instantiated."""


class device:
    """Never instantiated."""


class Generator:
    """Never instantiated."""


strided = "strided"
contiguous_format = "contiguous_format"

for _name in (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 short int long half float double "
    "float16 float32 float64 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 complex64 complex128"
).split():
    globals()[_name] = dtype(_name)


def _module(name, **members):
    """Registers a submodule so that `import torch.x` finds it."""
    module = types.ModuleType(f"torch.{name}")
    module.__dict__.update(members)
    sys.modules[module.__name__] = module
    return module


def _no():
    return False


version = _module("version", hip=None, cuda=None)
cuda = _module("cuda", is_available=_no)
utils = _module("utils")
utils.cpp_extension = _module("utils.cpp_extension")
utils.dlpack = _module("utils.dlpack", to_dlpack=None)
nn = _module("nn", Module=type("Module", (), {}), Parameter=type("Parameter", (), {}))
nn.functional = _module("nn.functional")
fx = _module("fx", Node=type("Node", (), {}), GraphModule=type("GraphModule", (), {}))
backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=_no))
