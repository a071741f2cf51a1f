"""TileLang function to CUDA source and launch description. Needs no GPU and no CUDA compiler.

The order, kind and binding of the kernel's parameters are read from the lowered host module, never
guessed: pointers and tensor maps come first by name, then the dynamic dimensions.
"""

from dataclasses import dataclass

import toolchain
import tilelang
from tilelang import tvm
from tilelang.backend.module import create_backend_context
from tilelang.engine.lower import CompiledArtifact, device_codegen_without_compile, lower_to_host_device_ir
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit, substitute

TARGET = tvm.target.Target({"kind": "cuda", "arch": toolchain.ARCH})


@dataclass(frozen=True)
class Launch:
    """How the host launches the one kernel of a function."""

    symbol: str
    params: list
    grid: list
    block: list
    cluster: list
    shared_bytes: int
    pdl: bool
    cooperative: bool


def lower(name, func, pass_configs):
    """Lowers `func` under the global symbol `name`; the kernel's symbol is `<name>_kernel`."""
    func = func.with_attr("global_symbol", name)
    with tvm.transform.PassContext(opt_level=3, config=dict(pass_configs)), TARGET:
        context = create_backend_context(TARGET, None, "auto")
        host, device, params, target, target_host = lower_to_host_device_ir(func, context)
        device = _unroll_wait_loops(device)
        source = device_codegen_without_compile(device, context).inspect_source()
    return func, CompiledArtifact(host, device, params, source, target=target, target_host=target_host)


def _is_dynamic_wait(node):
    name = getattr(getattr(node, "op", None), "name", "")
    return isinstance(node, tirx.Call) and name.endswith("ptx_wait_group") and not isinstance(node.args[0], tirx.IntImm)


def _has_dynamic_wait(stmt):
    found = []
    post_order_visit(stmt, lambda node: found.append(node) if _is_dynamic_wait(node) else None)
    return bool(found)


def _unroll_one(loop):
    if loop.kind != tirx.ForKind.UNROLLED or not isinstance(loop.extent, tirx.IntImm) or not _has_dynamic_wait(loop.body):
        return None
    low = int(loop.min)
    at = lambda i: substitute(loop.body, {loop.loop_var: tirx.IntImm(loop.loop_var.dtype, low + i)})
    return tirx.SeqStmt([at(i) for i in range(int(loop.extent))])


def _unroll_wait_loops(module):
    """Unrolls loops around `ptx_wait_group(c - k)`.

    TileLang 0.1.15 emits such loops as the epilogue of an asynchronous pipeline with a dynamic trip
    count, and its code generator takes only constants there.
    """
    functions = {}
    for name, function in module.functions.items():
        if _has_dynamic_wait(function.body):
            function = function.with_body(ir_transform(function.body, None, _unroll_one, ["tirx.For"]))
        functions[name] = function
    return tirx.transform.ConvertSSA()(tvm.IRModule(functions, attrs=module.attrs))


# ---- expressions over dynamic dimensions ---------------------------------------------------------

_BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "/", "Div": "/"}


def _tree(expression):
    if isinstance(expression, int):
        return expression
    kind = type(expression).__name__
    if kind == "IntImm":
        return int(expression.value)
    if kind in ("Var", "SizeVar"):
        return expression.name
    if kind == "Cast":
        return _tree(expression.value)
    if kind == "Call" and expression.op.name.endswith("shift_right"):
        return ("/", _tree(expression.args[0]), 1 << _tree(expression.args[1]))
    if kind in _BINARY:
        return (_BINARY[kind], _tree(expression.a), _tree(expression.b))
    raise TypeError(f"expression {expression} of kind {kind} has no extent")


def _linear(tree):
    """`tree` as (variable, multiplier, addend, divisor) for `(variable · mul + add) / div`."""
    if isinstance(tree, int):
        return None, 0, tree, 1
    if isinstance(tree, str):
        return tree, 1, 0, 1
    op, left, right = tree
    var, mul, add, div = _linear(left)
    if op == "/" and isinstance(right, int) and div == 1:
        return var, mul, add, right
    if isinstance(right, int) and div == 1:
        if op == "*":
            return var, mul * right, add * right, 1
        return var, mul, add + (right if op == "+" else -right), 1
    if isinstance(right, int) and op == "+" and div != 1:
        return var, mul, add + right * div, div
    raise TypeError(f"{tree} is not linear in one dimension")


def extent(expression, scalars):
    """`expression` as an Extent; `scalars` gives the value of each dynamic dimension."""
    var, mul, add, div = _linear(_tree(expression))
    if var is None:
        if add % div:
            add += div - add % div
        return {"sym": None, "mul": add // div, "div": 1}
    base = scalars[var].value
    if add != div - 1:
        raise TypeError(f"{expression} is not a rounded-up quotient")
    if base["div"] != 1 and (mul, div) != (1, 1):
        raise TypeError(f"{expression} of the quotient {base} is not one quotient")
    return {"sym": base["sym"], "mul": base["mul"] * mul, "div": base["div"] * div}


# ---- launch description --------------------------------------------------------------------------


def _kernel_call(host, kernels):
    """The one kernel that the host function launches, and its arguments."""
    calls = []

    def visit(node):
        if isinstance(node, tirx.Call) and getattr(node.op, "name", "") == "tirx.tvm_call_packed":
            name = getattr(node.args[0], "value", str(node.args[0]))
            if name in kernels:
                calls.append((name, node.args[1:]))

    post_order_visit(host.body, visit)
    if len(calls) != 1:
        raise ValueError(f"{len(calls)} kernels in one function: write one kernel a function")
    return calls[0]


def _tensor_map(descriptor, scalars):
    """The encode arguments of a tiled tensor map; the innermost stride is implied."""
    kind = str(getattr(descriptor[0], "value", descriptor[0]))
    if kind != "__tvm_tensormap_create_tiled":
        raise ValueError(f"tensor map of kind {kind} is not supported")
    rank, rest = int(descriptor[3]), list(descriptor[5:])
    group = lambda i: rest[i * rank:(i + 1) * rank]
    interleave, swizzle, l2_promotion, oob_fill = (int(v) for v in rest[4 * rank:4 * rank + 4])
    return {
        "dtype": int(descriptor[2]),
        "dims": [extent(v, scalars) for v in group(0)],
        "strides_bytes": [extent(v, scalars) for v in group(1)[1:]],
        "box": [int(v) for v in group(2)],
        "element_strides": [int(v) for v in group(3)],
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": l2_promotion,
        "oob_fill": oob_fill,
    }


def _is_tensor_map(param):
    return "grid_constant" in str(getattr(param, "type_annotation", ""))


def _describe_map(param, argument, descriptors, buffers, taken, scalars):
    found = [value for key, value in descriptors.items() if key.same_as(argument)]
    descriptor = found[0] if found else next(v for k, v in descriptors.items() if k.name == param.name)
    name = param.name
    while name in taken:
        name += "_1"
    buffer = buffers[descriptor[4].name]
    return {"name": name, "kind": "tensor_map", "dtype": str(buffer.dtype), "source": buffer.name,
            "tensor_map": _tensor_map(descriptor, scalars)}


def _describe_params(function, arguments, descriptors, buffers, scalars):
    """The parameters in the cubin's order; the launch's grid and block follow them in `arguments`."""
    params = []
    for param, argument in zip(function.params, arguments):
        if _is_tensor_map(param):
            taken = {p["name"] for p in params}
            params.append(_describe_map(param, argument, descriptors, buffers, taken, scalars))
        elif str(param.dtype) == "handle":
            buffer = buffers[param.name]
            params.append({"name": buffer.name, "kind": "pointer", "dtype": str(buffer.dtype), "source": buffer.name})
        else:
            params.append({"name": param.name, "kind": "scalar", "dtype": str(param.dtype), "source": param.name})
    return params


def describe(func, lowered, scalars):
    """The `Launch` of a lowered function."""
    host = next(iter(lowered.host_mod.functions.values()))
    kernels = {gv.name_hint: f for gv, f in lowered.device_mod.functions.items()}
    symbol, arguments = _kernel_call(host, kernels)
    function = kernels[symbol]
    attrs = function.attrs
    get = lambda key, default: attrs[key] if key in attrs else default
    buffers = {b.data.name: b for b in (func.buffer_map[p] for p in func.params if p in func.buffer_map)}
    descriptors = dict(host.attrs["tma_descriptor_args"]) if "tma_descriptor_args" in host.attrs else {}
    threads = dict(attrs["thread_extent"])
    return Launch(
        symbol=symbol,
        params=_describe_params(function, arguments, descriptors, buffers, scalars),
        grid=[extent(threads.get(f"blockIdx.{axis}", 1), scalars) for axis in "xyz"],
        block=[int(threads.get(f"threadIdx.{axis}", 1)) for axis in "xyz"],
        cluster=[int(v) for v in get("cluster_dims", [1, 1, 1])],
        shared_bytes=int(get("dyn_shared_memory_buf", 0)),
        pdl="has_cuda_pdl_sync" in attrs,
        cooperative=bool(get("use_cooperative_groups", False)),
    )
