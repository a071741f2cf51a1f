//! Kernels, tensor maps and graphs.

use crate::Needs::{Context, Nothing, Queue};
use crate::books::{Node, Space};
use crate::calls::{export, quiet};
use crate::{Driver, call, code, raw};
use std::ffi::{c_char, c_void};
use std::fmt::Write as _;

/// First word of a tensor map that this driver encoded.
const TENSOR_MAP_MAGIC: u64 = 0x7465_6E73_6F72_6D61;
/// Handle of a function that no module has.
const FOREIGN_FUNCTION: u64 = 0xF0;

/// `CUtensorMap`.
type TensorMap = [u64; 16];

/// `CUlaunchConfig`.
#[derive(Copy, Clone)]
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: u64,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`.
#[derive(Copy, Clone)]
#[repr(C)]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

/// `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
struct KernelNodeParams {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    params: u64,
    extra: u64,
    kernel: u64,
    context: u64,
}

export! {
    cuModuleGetFunction(to: *mut u64, module: u64, symbol: *const c_char) Context |driver| {
        let symbol = raw::text(symbol)?;
        let handle = driver.books.function_of(module, &symbol)?;
        raw::put(to, handle)?;
        Ok(format!("symbol={symbol}"))
    };
    cuFuncGetAttribute(to: *mut i32, which: u32, function: u64) Context |driver| {
        let registers = driver.books.function(function)?.kernel.registers;
        match which {
            4 => raw::put(to, driver.script.registers.unwrap_or(registers) as i32).and_then(|()| quiet()),
            _ => Err(code::INVALID_VALUE),
        }
    };
    cuFuncGetParamInfo(function: u64, index: usize, offset: *mut usize, size: *mut usize) Context |driver| {
        let (at, bytes) = *driver.books.function(function)?.kernel.params.get(index).ok_or(code::INVALID_VALUE)?;
        raw::put(offset, at as usize)?;
        raw::put(size, bytes as usize).and_then(|()| quiet())
    };
    cuFuncSetAttribute(function: u64, which: u32, value: i32) Context |driver| {
        driver.books.function(function)?;
        let function = driver.books.functions.get_mut(&function).ok_or(code::INVALID_HANDLE)?;
        if which != 8 || !(0..=227 << 10).contains(&value) {
            return Err(code::INVALID_VALUE);
        }
        function.shared_bytes_max = value as u32;
        quiet()
    };
    cuTensorMapEncodeTiled(
        to: *mut TensorMap, dtype: u32, rank: u32, base: u64, dims: *const u64, strides: *const u64, boxes: *const u32,
        steps: *const u32, _interleave: u32, _swizzle: u32, _promotion: u32, _fill: u32
    ) Nothing |driver| {
        let rank = rank as usize;
        let (dims, boxes, steps) = (raw::list(dims, rank)?, raw::list(boxes, rank)?, raw::list(steps, rank)?);
        let strides = raw::list(strides, rank.saturating_sub(1))?;
        // As the driver numbers them: bytes, 16-bit, 32-bit, 64-bit.
        let element = match dtype { 0 => 1, 1 | 6 | 9 => 2, 2 | 3 | 7 => 4, 4 | 5 | 8 => 8, _ => return Err(code::INVALID_VALUE) };
        let sound = (1..=5).contains(&rank)
            && base.is_multiple_of(16)
            && dims.iter().all(|dim| (1..=1 << 32).contains(dim))
            && strides.iter().all(|stride| stride.is_multiple_of(16))
            && boxes.iter().all(|side| (1..=256).contains(side))
            && steps.iter().all(|step| (1..=8).contains(step));
        if !sound {
            return Err(code::INVALID_VALUE);
        }
        let bytes = dims[0] * element + dims[1..].iter().zip(&strides).map(|(dim, stride)| (dim - 1) * stride).sum::<u64>();
        driver.books.check(Space::Device, base, bytes)?;
        let mut map: TensorMap = [0; 16];
        map[..3].copy_from_slice(&[TENSOR_MAP_MAGIC, base, bytes]);
        raw::put(to, map).and_then(|()| quiet())
    };
    cuLaunchKernelEx(config: *const LaunchConfig, function: u64, params: *const *const c_void, _extra: u64) Queue |driver| {
        let config = raw::get(config, 0)?;
        let words = check_launch(driver, &config, function, params)?;
        let node = Node::Kernel { function };
        if !driver.books.record(config.stream, &node)? {
            driver.books.run(&node)?;
        }
        Ok(words)
    };

    cuStreamBeginCapture_v2(stream: u64, _mode: u32) Context |driver| {
        let capture = driver.books.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        *capture = Some(Vec::new());
        quiet()
    };
    cuStreamEndCapture(stream: u64, to: *mut u64) Context |driver| {
        let capture = driver.books.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        let mut nodes = capture.take().ok_or(code::INVALID_VALUE)?;
        match driver.script.foreign.as_deref() {
            Some("kernel") => nodes.push(Node::Kernel { function: FOREIGN_FUNCTION }),
            Some(_) => nodes.push(Node::Fill { to: 0, word: 0, words: 0 }),
            None => {}
        }
        let graph = driver.books.handle();
        let mut lines = String::new();
        for node in &nodes {
            let words = match node {
                Node::Kernel { function } => match driver.books.function(*function) {
                    Ok(function) => format!("kernel symbol={} sha256={}", function.kernel.symbol, function.sha256),
                    Err(_) => "kernel symbol=foreign".to_owned(),
                },
                Node::Copy { .. } => "copy".to_owned(),
                Node::Fill { .. } => "fill".to_owned(),
            };
            let _ = writeln!(lines, "node graph={graph:x} {words} -> 0");
        }
        driver.write_log(&lines);
        driver.books.graphs.insert(graph, nodes);
        raw::put(to, graph)?;
        Ok(format!("graph={graph:x}"))
    };
    cuGraphGetNodes(graph: u64, to: *mut u64, count: *mut usize) Context |driver| {
        let nodes = driver.books.graphs.get(&graph).ok_or(code::INVALID_HANDLE)?.clone();
        if to.is_null() {
            return raw::put(count, nodes.len()).and_then(|()| quiet());
        }
        let room = raw::get(count, 0)?;
        for (index, node) in nodes.into_iter().take(room).enumerate() {
            let handle = driver.books.handle();
            driver.books.nodes.insert(handle, node);
            raw::put(to.wrapping_add(index), handle)?;
        }
        quiet()
    };
    cuGraphNodeGetType(node: u64, to: *mut u32) Context |driver| {
        let kind = match driver.books.nodes.get(&node).ok_or(code::INVALID_HANDLE)? {
            Node::Kernel { .. } => 0,
            Node::Copy { .. } => 1,
            Node::Fill { .. } => 2,
        };
        raw::put(to, kind).and_then(|()| quiet())
    };
    cuGraphKernelNodeGetParams_v2(node: u64, to: *mut KernelNodeParams) Context |driver| {
        let Some(&Node::Kernel { function }) = driver.books.nodes.get(&node) else { return Err(code::INVALID_HANDLE) };
        let params = KernelNodeParams {
            function, grid: [1; 3], block: [1; 3], shared_bytes: 0, params: 0, extra: 0, kernel: 0, context: 0,
        };
        raw::put(to, params).and_then(|()| quiet())
    };
    cuGraphInstantiateWithFlags(to: *mut u64, graph: u64, _flags: u64) Context |driver| {
        let nodes = driver.books.graphs.get(&graph).ok_or(code::INVALID_HANDLE)?.clone();
        // The log calls an executable graph by the number of the graph that it came from.
        let handle = graph + 1;
        driver.books.execs.insert(handle, nodes);
        raw::put(to, handle).and_then(|()| quiet())
    };
    cuGraphUpload(exec: u64, stream: u64) Context |driver| {
        driver.books.execs.get(&exec).ok_or(code::INVALID_HANDLE)?;
        driver.books.streams.get(&stream).ok_or(code::INVALID_HANDLE).and_then(|_| quiet())
    };
    cuGraphLaunch(exec: u64, stream: u64) Context |driver| {
        driver.books.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        let nodes = driver.books.execs.get(&exec).ok_or(code::INVALID_HANDLE)?.clone();
        nodes.iter().try_for_each(|node| driver.books.run(node))?;
        Ok(format!("graph={:x}", exec - 1))
    };
    cuGraphExecDestroy(exec: u64) Context |driver| driver.books.execs.remove(&exec).ok_or(code::INVALID_HANDLE).and_then(|_| quiet());
    cuGraphDestroy(graph: u64) Context |driver| driver.books.graphs.remove(&graph).ok_or(code::INVALID_HANDLE).and_then(|_| quiet());
}

/// Refuses what a driver refuses at a launch, and what a kernel could not survive: parameters that are no live addresses.
fn check_launch(driver: &mut Driver, config: &LaunchConfig, function: u64, params: *const *const c_void) -> Result<String, u32> {
    let function = driver.books.function(function)?.clone();
    let threads: u32 = config.block.iter().product();
    let shape = config.grid.iter().all(|&side| side > 0)
        && config.grid[1].max(config.grid[2]) < 1 << 16
        && (1..=1024).contains(&threads)
        && config.shared_bytes <= function.shared_bytes_max;
    if !shape {
        return Err(code::INVALID_VALUE);
    }
    for attribute in raw::list(config.attributes, config.attribute_count as usize)? {
        let fits = match attribute.id {
            2 | 6 => attribute.value[0] <= 1,
            4 => (0..3).all(|axis| attribute.value[axis] > 0 && config.grid[axis].is_multiple_of(attribute.value[axis])),
            _ => false,
        };
        if !fits {
            return Err(code::INVALID_VALUE);
        }
    }
    for (index, (_, size)) in function.kernel.params.iter().enumerate() {
        let param = raw::get(params, index)?;
        match size {
            8 => driver.books.check(Space::Device, raw::get(param.cast::<u64>(), 0)?, 1)?,
            128 => {
                let map = raw::get(param.cast::<TensorMap>(), 0)?;
                if map[0] != TENSOR_MAP_MAGIC {
                    return Err(code::INVALID_VALUE);
                }
                driver.books.check(Space::Device, map[1], map[2])?;
            }
            _ => drop(raw::get(param.cast::<u32>(), 0)?),
        }
    }
    let grid = config.grid.map(|side| side.to_string()).join("x");
    Ok(format!("symbol={} sha256={} grid={grid}", function.kernel.symbol, function.sha256))
}
