//! The CUDA driver as owned, checked types. All `unsafe` of the CUDA device is here.
//!
//! Nothing else in the crate calls `cudarc`. The library is loaded dynamically; every symbol is looked
//! up before the first call, since the bindings panic on a missing one. A type that owns a driver
//! object frees it on drop, and ignores the driver's answer then: by that time the device is going away.
//! **Invariant:** every type is used on the thread that made its [`Context`] current.

use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

/// Failure of a driver call.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No driver library.
    #[error("no CUDA driver: libcuda.so.1 cannot be loaded (is this a machine with an NVIDIA driver?)")]
    NoDriver,
    /// A driver without a function that this build needs.
    #[error("the CUDA driver lacks {symbols:?}: it is too old, or a stub; install driver 580 or newer")]
    MissingSymbols {
        /// Names.
        symbols: Vec<&'static str>,
    },
    /// No device, or not that one.
    #[error("CUDA device {ordinal} does not exist: the driver reports {count}")]
    NoDevice {
        /// Device asked for.
        ordinal: u32,
        /// Devices present.
        count: i32,
    },
    /// A call failed.
    #[error("{call} failed: {name} ({code}): {text}")]
    Call {
        /// Driver function.
        call: &'static str,
        /// Symbolic name of the error.
        name: String,
        /// Numeric code.
        code: u32,
        /// The driver's explanation.
        text: String,
    },
}

/// Driver functions that are called; looked up first.
const SYMBOLS: [&str; 46] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphLaunch",
    "cuGraphNodeGetType",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD32Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuTensorMapEncodeTiled",
];

impl CudaError {
    /// Code of the driver for memory that is not there.
    pub(super) const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
}

fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = null();
    let mut text = null();
    // SAFETY: both out-pointers are valid for the calls; the driver returns static strings or leaves them null.
    let (name, text) = unsafe {
        let _ = sys::cuGetErrorName(result, &mut name);
        let _ = sys::cuGetErrorString(result, &mut text);
        let read =
            |p: *const std::ffi::c_char| if p.is_null() { "unknown".to_owned() } else { CStr::from_ptr(p).to_string_lossy().into_owned() };
        (read(name), read(text))
    };
    Err(CudaError::Call { call, name, code: result as u32, text })
}

/// Calls a driver function and turns its result into a `Result`.
/// Only used in this module, where each argument is a valid pointer or handle owned by a type of this module.
macro_rules! cu {
    ($function:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: handles are alive (owned by a type of this module), out-pointers refer to live locals,
        // and `Context::open` has checked that the symbol exists.
        check(stringify!($function), unsafe { sys::$function($($argument),*) })
    };
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Marketing name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// Shared memory that a block may opt in to.
    pub shared_bytes_max: i32,
    /// Device memory.
    pub memory_bytes: u64,
    /// Driver API version (13000 is 13.0).
    pub driver: i32,
}

/// The primary context of a device, current on the thread that opened it.
#[derive(Debug)]
pub(super) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
    properties: DeviceProperties,
}

// SAFETY: a primary context may be made current on any thread; the owner calls `make_current` on the thread that uses it.
unsafe impl Send for Context {}

impl Context {
    /// Loads the driver, checks its symbols and opens device `ordinal`.
    ///
    /// # Errors
    /// No driver, an old driver, no such device.
    pub(super) fn open(ordinal: u32) -> Result<Self, CudaError> {
        load_driver()?;
        cu!(cuInit(0))?;
        let mut count = 0;
        cu!(cuDeviceGetCount(&mut count))?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let mut device = 0;
        cu!(cuDeviceGet(&mut device, ordinal as i32))?;
        let properties = properties(device)?;
        let mut raw = null_mut();
        cu!(cuDevicePrimaryCtxRetain(&mut raw, device))?;
        let context = Self { device, raw, properties };
        context.make_current()?;
        Ok(context)
    }

    /// Makes the context current on the calling thread.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        cu!(cuCtxSetCurrent(self.raw))
    }

    /// What the device is.
    pub(super) fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    /// Free and total device memory in bytes.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        cu!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = cu!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

fn load_driver() -> Result<(), CudaError> {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    // SAFETY: the library is present, so this does not panic.
    let library = unsafe { sys::culib() };
    // SAFETY: the looked-up address is not called, only its presence is tested.
    let missing = |name: &&&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err();
    let symbols: Vec<&'static str> = SYMBOLS.iter().filter(missing).copied().collect();
    if symbols.is_empty() { Ok(()) } else { Err(CudaError::MissingSymbols { symbols }) }
}

fn properties(device: sys::CUdevice) -> Result<DeviceProperties, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |which| {
        let mut value = 0;
        cu!(cuDeviceGetAttribute(&mut value, which, device)).map(|()| value)
    };
    let mut name = [0; 128];
    cu!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
    let mut memory = 0;
    cu!(cuDeviceTotalMem_v2(&mut memory, device))?;
    let mut driver = 0;
    cu!(cuDriverGetVersion(&mut driver))?;
    // SAFETY: the driver wrote a NUL-terminated string of at most 128 bytes.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(DeviceProperties {
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        memory_bytes: memory as u64,
        driver,
    })
}

/// An address on the device.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DevicePtr(pub(super) u64);

impl DevicePtr {
    /// The address `bytes` further on.
    pub(super) fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// Owned device memory.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    ptr: DevicePtr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates `bytes`, aligned to at least 256.
    ///
    /// # Errors
    /// Out of memory, or a driver failure.
    pub(super) fn alloc(bytes: u64) -> Result<Self, CudaError> {
        let mut ptr = 0;
        cu!(cuMemAlloc_v2(&mut ptr, bytes.max(1) as usize))?;
        Ok(Self { ptr: DevicePtr(ptr), bytes })
    }

    /// Its address.
    pub(super) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = cu!(cuMemFree_v2(self.ptr.0));
    }
}

/// Owned page-locked host memory: the only memory that transfers start from and end in.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: plain host memory with one owner.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes`, zeroed.
    ///
    /// # Errors
    /// Out of memory, or a driver failure.
    pub(super) fn alloc(bytes: usize) -> Result<Self, CudaError> {
        let mut ptr: *mut c_void = null_mut();
        cu!(cuMemHostAlloc(&mut ptr, bytes.max(1), 0))?;
        let ptr = ptr.cast::<u8>();
        // SAFETY: the driver returned `bytes` writable bytes.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(Self { ptr, bytes })
    }

    /// The bytes. A transfer that reads or writes them must have completed (the owner waits on its event).
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `bytes` initialised bytes as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }

    /// The bytes, writable; see [`Self::bytes`].
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is exclusive on the host.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = cu!(cuMemFreeHost(self.ptr.cast()));
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

// SAFETY: events are driver handles without thread affinity.
unsafe impl Send for Event {}

impl Event {
    /// Makes an event.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn new() -> Result<Self, CudaError> {
        let mut raw = null_mut();
        cu!(cuEventCreate(&mut raw, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32))?;
        Ok(Self(raw))
    }

    /// Blocks until the event has passed.
    ///
    /// # Errors
    /// If work before it failed.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        cu!(cuEventSynchronize(self.0))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = cu!(cuEventDestroy_v2(self.0));
    }
}

/// A code object on the device.
#[derive(Debug)]
pub(super) struct Module(sys::CUmodule);

// SAFETY: modules belong to the context, not to a thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads a cubin.
    ///
    /// # Errors
    /// If the driver refuses the image.
    pub(super) fn load(cubin: &[u8]) -> Result<Self, CudaError> {
        let mut raw = null_mut();
        cu!(cuModuleLoadData(&mut raw, cubin.as_ptr().cast()))?;
        Ok(Self(raw))
    }

    /// Finds a kernel.
    ///
    /// # Errors
    /// If there is no such symbol.
    pub(super) fn function(&self, symbol: &str) -> Result<Function, CudaError> {
        let symbol = CString::new(symbol).unwrap_or_default();
        let mut raw = null_mut();
        cu!(cuModuleGetFunction(&mut raw, self.0, symbol.as_ptr()))?;
        Ok(Function(raw))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = cu!(cuModuleUnload(self.0));
    }
}

/// A kernel of a loaded [`Module`], which must outlive it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: functions belong to their module, not to a thread.
unsafe impl Send for Function {}

impl Function {
    /// Registers of a thread.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn registers(self) -> Result<i32, CudaError> {
        let mut value = 0;
        cu!(cuFuncGetAttribute(&mut value, sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS, self.0))?;
        Ok(value)
    }

    /// Offset and size of every parameter.
    ///
    /// # Errors
    /// Never: the list ends where the driver refuses.
    pub(super) fn params(self) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            if cu!(cuFuncGetParamInfo(self.0, found.len(), &mut offset, &mut size)).is_err() {
                return found;
            }
            found.push((offset, size));
        }
    }

    /// Allows `bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// If the device has less.
    pub(super) fn allow_shared(self, bytes: u32) -> Result<(), CudaError> {
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        cu!(cuFuncSetAttribute(self.0, which, bytes as i32))
    }
}

/// A tensor map, as kernels take it by value.
#[derive(Copy, Clone)]
#[repr(transparent)]
pub(super) struct TensorMapValue(sys::CUtensorMap);

/// Geometry of a tensor map; enumerations as the driver numbers them.
#[derive(Clone, Debug)]
pub(super) struct TensorMapGeometry<'a> {
    /// Element type.
    pub dtype: u32,
    /// Dimensions, innermost first.
    pub dims: &'a [u64],
    /// Strides of dimensions 1.. in bytes.
    pub strides_bytes: &'a [u64],
    /// Box.
    pub box_dims: &'a [u32],
    /// Element strides.
    pub element_strides: &'a [u32],
    /// Interleave.
    pub interleave: u32,
    /// Swizzle.
    pub swizzle: u32,
    /// L2 promotion.
    pub l2_promotion: u32,
    /// Out-of-bounds fill.
    pub oob_fill: u32,
}

impl TensorMapValue {
    /// Encodes a tiled map over `base`.
    ///
    /// # Errors
    /// If the geometry is not encodable.
    pub(super) fn encode(base: DevicePtr, geometry: &TensorMapGeometry<'_>) -> Result<Self, CudaError> {
        let refuse = |text: &str| CudaError::Call { call: "cuTensorMapEncodeTiled", name: "geometry".into(), code: 1, text: text.into() };
        let rank = geometry.dims.len();
        let lists_agree =
            geometry.strides_bytes.len() + 1 == rank && geometry.box_dims.len() == rank && geometry.element_strides.len() == rank;
        if rank == 0 || rank > 5 || !lists_agree {
            return Err(refuse("ranks of dims, strides, box and element strides do not agree"));
        }
        let dtype = tensor_dtype(geometry.dtype).ok_or_else(|| refuse("element type is none of those that kernels use"))?;
        let swizzle = swizzle(geometry.swizzle).ok_or_else(|| refuse("unknown swizzle"))?;
        let promotion = l2_promotion(geometry.l2_promotion).ok_or_else(|| refuse("unknown L2 promotion"))?;
        if geometry.interleave != 0 || geometry.oob_fill != 0 {
            return Err(refuse("interleave and NaN fill are not supported"));
        }
        let mut raw = sys::CUtensorMap { opaque: [0; 16] };
        cu!(cuTensorMapEncodeTiled(
            &mut raw,
            dtype,
            rank as u32,
            base.0 as *mut c_void,
            geometry.dims.as_ptr(),
            geometry.strides_bytes.as_ptr(),
            geometry.box_dims.as_ptr(),
            geometry.element_strides.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            promotion,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))?;
        Ok(Self(raw))
    }
}

fn tensor_dtype(code: u32) -> Option<sys::CUtensorMapDataType> {
    use sys::CUtensorMapDataType as T;
    let known = [
        T::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        T::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        T::CU_TENSOR_MAP_DATA_TYPE_INT32,
        T::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        T::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        T::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    ];
    known.into_iter().find(|&value| value as u32 == code)
}

fn swizzle(code: u32) -> Option<sys::CUtensorMapSwizzle> {
    use sys::CUtensorMapSwizzle as S;
    let known = [S::CU_TENSOR_MAP_SWIZZLE_NONE, S::CU_TENSOR_MAP_SWIZZLE_32B, S::CU_TENSOR_MAP_SWIZZLE_64B, S::CU_TENSOR_MAP_SWIZZLE_128B];
    known.into_iter().find(|&value| value as u32 == code)
}

fn l2_promotion(code: u32) -> Option<sys::CUtensorMapL2promotion> {
    use sys::CUtensorMapL2promotion as P;
    let known = [
        P::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        P::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        P::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        P::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    ];
    known.into_iter().find(|&value| value as u32 == code)
}

/// Value of one kernel parameter.
#[derive(Clone)]
pub(super) enum ParamValue {
    /// An address.
    Pointer(u64),
    /// A 32-bit scalar.
    Scalar(u32),
    /// A tensor map; boxed to keep the enum small.
    TensorMap(Box<TensorMapValue>),
}

/// Shape and attributes of a launch.
#[derive(Copy, Clone, Debug)]
pub(super) struct LaunchShape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster, `[1, 1, 1]` without.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Programmatic stream serialisation: the kernel may start while its predecessor ends.
    pub pdl: bool,
    /// Cooperative launch.
    pub cooperative: bool,
}

/// A queue of device work.
#[derive(Debug)]
pub(super) struct Stream(sys::CUstream);

// SAFETY: streams belong to the context, not to a thread.
unsafe impl Send for Stream {}

impl Stream {
    /// Makes a stream that does not synchronise with the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn new() -> Result<Self, CudaError> {
        let mut raw = null_mut();
        cu!(cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        Ok(Self(raw))
    }

    /// Marks the end of the work queued so far.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn record(&self, event: &Event) -> Result<(), CudaError> {
        cu!(cuEventRecord(event.0, self.0))
    }

    /// Copies `bytes` from pinned memory at `from` to the device. The source stays untouched until the stream has passed.
    ///
    /// # Errors
    /// If the range is outside the source, or the driver refuses.
    pub(super) fn upload(&self, to: DevicePtr, from: &PinnedMemory, at: usize, bytes: usize) -> Result<(), CudaError> {
        let source = from.bytes().get(at..at + bytes).ok_or_else(|| out_of_range("cuMemcpyHtoDAsync_v2"))?;
        cu!(cuMemcpyHtoDAsync_v2(to.0, source.as_ptr().cast(), bytes, self.0))
    }

    /// Copies `rows` of `width` bytes; `pitch` bytes apart on both sides.
    ///
    /// # Errors
    /// If the range is outside the source, or the driver refuses.
    pub(super) fn upload_rows(
        &self,
        to: DevicePtr,
        from: &PinnedMemory,
        at: usize,
        width: usize,
        rows: usize,
        pitch: usize,
    ) -> Result<(), CudaError> {
        let bytes = pitch * rows.saturating_sub(1) + width;
        let source = from.bytes().get(at..at + bytes).ok_or_else(|| out_of_range("cuMemcpy2DAsync_v2"))?;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: source.as_ptr().cast(),
            srcDevice: 0,
            srcArray: null_mut(),
            srcPitch: pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: null_mut(),
            dstDevice: to.0,
            dstArray: null_mut(),
            dstPitch: pitch,
            WidthInBytes: width,
            Height: rows,
        };
        cu!(cuMemcpy2DAsync_v2(&copy, self.0))
    }

    /// Copies `bytes` from the device into pinned memory at `at`.
    ///
    /// # Errors
    /// If the range is outside the destination, or the driver refuses.
    pub(super) fn download(&self, to: &mut PinnedMemory, at: usize, from: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        let target = to.bytes_mut().get_mut(at..at + bytes).ok_or_else(|| out_of_range("cuMemcpyDtoHAsync_v2"))?;
        cu!(cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), from.0, bytes, self.0))
    }

    /// Copies between device addresses.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64) -> Result<(), CudaError> {
        cu!(cuMemcpyDtoDAsync_v2(to.0, from.0, bytes as usize, self.0))
    }

    /// Fills `words` 32-bit words.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn fill(&self, to: DevicePtr, word: u32, words: u64) -> Result<(), CudaError> {
        if words == 0 {
            return Ok(());
        }
        cu!(cuMemsetD32Async(to.0, word, words as usize, self.0))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// If the driver refuses the launch. Failures inside the kernel surface at the next wait.
    pub(super) fn launch(&self, function: Function, shape: &LaunchShape, params: &[ParamValue]) -> Result<(), CudaError> {
        // SAFETY: attributes are plain data; zeroed ones are overwritten before use.
        let mut attributes: [sys::CUlaunchAttribute; 3] = unsafe { std::mem::zeroed() };
        let count = set_attributes(shape, &mut attributes);
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid[0],
            gridDimY: shape.grid[1],
            gridDimZ: shape.grid[2],
            blockDimX: shape.block[0],
            blockDimY: shape.block[1],
            blockDimZ: shape.block[2],
            sharedMemBytes: shape.shared_bytes,
            hStream: self.0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        let mut pointers = [null_mut::<c_void>(); PARAMS_MAX];
        if params.len() > PARAMS_MAX {
            return Err(out_of_range("cuLaunchKernelEx"));
        }
        for (pointer, param) in pointers.iter_mut().zip(params) {
            *pointer = match param {
                ParamValue::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
                ParamValue::Scalar(value) => std::ptr::from_ref(value).cast_mut().cast(),
                ParamValue::TensorMap(value) => std::ptr::from_ref(&value.0).cast_mut().cast(),
            };
        }
        cu!(cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), null_mut()))
    }

    /// Records what `body` queues into a graph, and instantiates it. Nothing runs.
    ///
    /// # Errors
    /// Whatever `body` fails with, or the driver's refusal.
    pub(super) fn capture<E: From<CudaError>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        cu!(cuStreamBeginCapture_v2(self.0, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))?;
        let recorded = body();
        let mut raw = null_mut();
        let ended = cu!(cuStreamEndCapture(self.0, &mut raw));
        // Owned from here on, also when `body` failed half-way.
        let mut graph = Graph { raw, exec: null_mut() };
        recorded?;
        ended?;
        cu!(cuGraphInstantiateWithFlags(&mut graph.exec, graph.raw, 0))?;
        cu!(cuGraphUpload(graph.exec, self.0))?;
        Ok(graph)
    }

    /// Replays a graph.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        cu!(cuGraphLaunch(graph.exec, self.0))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = cu!(cuStreamDestroy_v2(self.0));
    }
}

/// Most parameters that a kernel may have.
const PARAMS_MAX: usize = 48;

fn out_of_range(call: &'static str) -> CudaError {
    CudaError::Call { call, name: "range".into(), code: 1, text: "arguments are outside their bounds".into() }
}

fn set_attributes(shape: &LaunchShape, attributes: &mut [sys::CUlaunchAttribute; 3]) -> u32 {
    use sys::CUlaunchAttributeID as Id;
    let mut count = 0;
    if shape.pdl {
        attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count += 1;
    }
    if shape.cooperative {
        attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        attributes[count].value.cooperative = 1;
        count += 1;
    }
    if shape.cluster != [1, 1, 1] {
        attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        // SAFETY: the union's active member becomes `clusterDim`; all of its fields are written.
        let cluster = unsafe { &mut attributes[count].value.clusterDim };
        cluster.x = shape.cluster[0];
        cluster.y = shape.cluster[1];
        cluster.z = shape.cluster[2];
        count += 1;
    }
    count as u32
}

/// An instantiated graph.
#[derive(Debug)]
pub(super) struct Graph {
    raw: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: graphs have no thread affinity; the device has one owner.
unsafe impl Send for Graph {}

/// A node of a captured graph.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum GraphNode {
    /// A kernel, by function.
    Kernel(Function),
    /// A copy.
    Copy,
    /// Anything else, by the driver's number.
    Other(u32),
}

impl Graph {
    /// The nodes, as the driver lists them.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn nodes(&self) -> Result<Vec<GraphNode>, CudaError> {
        let mut count = 0;
        cu!(cuGraphGetNodes(self.raw, null_mut(), &mut count))?;
        let mut raw = vec![null_mut(); count];
        cu!(cuGraphGetNodes(self.raw, raw.as_mut_ptr(), &mut count))?;
        raw.into_iter().map(graph_node).collect()
    }
}

fn graph_node(node: sys::CUgraphNode) -> Result<GraphNode, CudaError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    cu!(cuGraphNodeGetType(node, &mut kind))?;
    match kind {
        sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => {}
        sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => return Ok(GraphNode::Copy),
        other => return Ok(GraphNode::Other(other as u32)),
    }
    // SAFETY: an all-zero parameter block is valid; the driver fills it.
    let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    cu!(cuGraphKernelNodeGetParams_v2(node, &mut params))?;
    Ok(GraphNode::Kernel(Function(params.func)))
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.exec.is_null() {
            let _ = cu!(cuGraphExecDestroy(self.exec));
        }
        if !self.raw.is_null() {
            let _ = cu!(cuGraphDestroy(self.raw));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SYMBOLS;
    use std::collections::BTreeSet;

    #[test]
    fn exactly_the_functions_that_are_called_are_looked_up_first() {
        let source = include_str!("driver.rs");
        let names = |before: &str| -> BTreeSet<&str> {
            let rest = source.split(before).skip(1);
            rest.map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default())
                .filter(|name| name.starts_with("cu") && name.chars().nth(2).is_some_and(char::is_uppercase))
                .collect()
        };
        let called: BTreeSet<&str> = names("cu!(").union(&names("sys::")).copied().collect();
        assert_eq!(called, SYMBOLS.into_iter().collect());
    }
}
