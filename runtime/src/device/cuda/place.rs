//! One code object as a [`Place`]: loaded and checked as a bundle's are, launched on operands of the caller's choice.
//!
//! [`KernelLaunch::of`] decides everything about a launch but addresses, and needs no device.

use super::driver::{
    Context, CudaError, DeviceMemory, DevicePtr, Event, Function, GraphNode, Module, ParamValue, PinnedMemory, Stream, TensorMapValue,
};
use super::{AdmitError, LinkError, link};
use crate::device::place::{Buffer, Image, KernelStep, PaddingRows, Place, Way};
use crate::device::{DeviceError, DeviceInfo};
use oxide_bundle::artifact::{ArtifactManifest, Param, ParamKind};
use oxide_bundle::plan::Bindings;
use std::sync::Arc;

/// Bytes of the staging memory between host and device.
const STAGING_BYTES: usize = 64 << 20;

/// A parameter before addresses are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The start of a buffer.
    Address {
        /// Which.
        buffer: usize,
    },
    /// A 32-bit value.
    Scalar(u32),
    /// A tensor map over a buffer.
    TensorMap {
        /// Which.
        buffer: usize,
        /// Index of the parameter, for the map's constant part.
        param: usize,
        /// Dimensions at the class bound, innermost first.
        dims: Vec<u64>,
        /// Strides of dimensions 1.. in bytes.
        strides_bytes: Vec<u64>,
    },
}

/// A launch before addresses are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelLaunch {
    /// Blocks, at the step's size.
    pub grid: [u32; 3],
    /// Parameters in the kernel's order.
    pub arguments: Vec<Argument>,
}

impl KernelLaunch {
    /// Binds the parameters of a manifest to a step's buffers.
    ///
    /// # Errors
    /// What does not fit: a role without operand, a map that reaches past its buffer, an address that is
    /// not aligned, a value that divides by zero.
    pub fn of(manifest: &ArtifactManifest, step: &KernelStep<'_>) -> Result<Self, String> {
        if manifest.contract != step.contract {
            return Err(format!("computes {} and the step wants {}", manifest.contract, step.contract));
        }
        let params = manifest.params.iter().enumerate();
        let arguments =
            params.map(|(index, param)| argument(index, param, step).map_err(|reason| format!("parameter {}: {reason}", param.name)));
        let arguments = arguments.collect::<Result<_, _>>()?;
        let mut grid = [1; 3];
        for (value, extent) in grid.iter_mut().zip(manifest.grid) {
            *value = extent.eval(step.sizes).ok_or("its grid divides by zero")?.max(1);
        }
        Ok(Self { grid, arguments })
    }
}

fn argument(index: usize, param: &Param, step: &KernelStep<'_>) -> Result<Argument, String> {
    if param.kind == ParamKind::Scalar {
        return scalar(param, step).map(Argument::Scalar);
    }
    let buffer = step.operand(param.role).ok_or_else(|| format!("wants {:?}, which the step does not give", param.role))?;
    let memory = step.buffers.get(buffer).ok_or("names no buffer")?;
    let start = memory.start * memory.image.element_bytes();
    if param.align != 0 && !start.is_multiple_of(param.align as usize) {
        return Err(format!("starts at byte {start}, which is not aligned to {}", param.align));
    }
    match param.kind {
        ParamKind::TensorMap => tensor_map(index, param, buffer, memory, step.bound),
        ParamKind::Pointer | ParamKind::Scalar => Ok(Argument::Address { buffer }),
    }
}

fn scalar(param: &Param, step: &KernelStep<'_>) -> Result<u32, String> {
    let extent = param.value.or_else(|| link::step_size(param.role, step.table_stride));
    let extent = extent.ok_or_else(|| format!("{:?} has no value", param.role))?;
    extent.eval(step.sizes).ok_or_else(|| "divides by zero".to_owned())
}

fn tensor_map(index: usize, param: &Param, buffer: usize, memory: &Buffer, bound: Bindings) -> Result<Argument, String> {
    let map = param.tensor_map.as_ref().ok_or("has no geometry")?;
    let (dims, strides_bytes) = link::map_extents(map, bound, (memory.len * memory.image.element_bytes()) as u64)?;
    Ok(Argument::TensorMap { buffer, param: index, dims, strides_bytes })
}

/// A constant operand that stays on the device while steps use it.
struct Constant {
    image: Arc<Image>,
    memory: DeviceMemory,
}

/// A loaded code object.
pub struct CudaPlace {
    // Dropped from top to bottom: memory and module before the context.
    constants: Vec<Constant>,
    staging: PinnedMemory,
    stream: Stream,
    function: Function,
    _module: Module,
    context: Context,
    manifest: ArtifactManifest,
}

impl CudaPlace {
    /// Loads a code object on a device and compares it with its manifest.
    ///
    /// # Errors
    /// If there is no such device, it is not the target, or the code object is not what its manifest says.
    pub fn open(ordinal: u32, manifest: &ArtifactManifest, cubin: &[u8]) -> Result<Self, AdmitError> {
        let context = Context::open(ordinal)?;
        let device = context.properties();
        let mut wrong = Vec::new();
        if device.capability != (9, 0) {
            wrong.push(format!(
                "the kernel needs compute capability 9.0, {} has {}.{}",
                device.name, device.capability.0, device.capability.1
            ));
        }
        if i64::from(device.driver) < i64::from(manifest.driver_min) {
            wrong.push(format!("the kernel needs driver API {}, this driver has {}", manifest.driver_min, device.driver));
        }
        if !wrong.is_empty() {
            return Err(AdmitError::Target(wrong));
        }
        let driver = |source| LinkError::Driver { what: format!("kernel {}", manifest.name), source };
        let module = Module::load(cubin).map_err(driver)?;
        let function = module.function(&manifest.symbol).map_err(driver)?;
        if let Some(reason) = link::admit_function(function, manifest, device).map_err(driver)? {
            return Err(LinkError::Kernel { name: manifest.name.clone(), symbol: manifest.symbol.clone(), reason }.into());
        }
        let (stream, staging) = (Stream::new()?, PinnedMemory::alloc(STAGING_BYTES)?);
        Ok(Self { constants: Vec::new(), staging, stream, function, _module: module, context, manifest: manifest.clone() })
    }

    fn failed(&self, reason: impl std::fmt::Display) -> DeviceError {
        DeviceError::Failed { message: format!("kernel {}: {reason} ({})", self.manifest.name, self.context.properties().name) }
    }

    fn drain(&self) -> Result<(), CudaError> {
        let event = Event::new()?;
        self.stream.record(&event)?;
        event.wait()
    }

    /// Device memory that holds a buffer's image, guards included.
    fn send(&mut self, image: &Image) -> Result<DeviceMemory, CudaError> {
        let bytes = image.bytes();
        let memory = DeviceMemory::alloc(bytes.len() as u64)?;
        for (index, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            self.staging.bytes_mut()[..chunk.len()].copy_from_slice(chunk);
            self.stream.upload(memory.ptr().offset((index * STAGING_BYTES) as u64), &self.staging, 0, chunk.len())?;
            self.drain()?;
        }
        Ok(memory)
    }

    /// Reads back into `image`, and says whether anything changed.
    fn fetch(&mut self, image: &mut Image, from: DevicePtr) -> Result<bool, CudaError> {
        let mut is_changed = false;
        for (index, chunk) in image.bytes_mut().chunks_mut(STAGING_BYTES).enumerate() {
            self.stream.download(&mut self.staging, 0, from.offset((index * STAGING_BYTES) as u64), chunk.len())?;
            self.drain()?;
            let found = &self.staging.bytes()[..chunk.len()];
            is_changed |= found != chunk;
            chunk.copy_from_slice(found);
        }
        Ok(is_changed)
    }

    /// Sends the constants that are not on the device yet, and forgets those that this step does not use.
    fn keep_constants(&mut self, step: &KernelStep<'_>) -> Result<(), CudaError> {
        let is_used = |constant: &Constant| step.buffers.iter().any(|buffer| Arc::ptr_eq(&buffer.image, &constant.image));
        self.constants.retain(is_used);
        for buffer in step.buffers.iter().filter(|buffer| !buffer.is_written) {
            if self.constant(buffer).is_none() {
                let memory = self.send(&buffer.image)?;
                self.constants.push(Constant { image: Arc::clone(&buffer.image), memory });
            }
        }
        Ok(())
    }

    fn constant(&self, buffer: &Buffer) -> Option<DevicePtr> {
        self.constants.iter().find(|constant| Arc::ptr_eq(&constant.image, &buffer.image)).map(|constant| constant.memory.ptr())
    }

    fn params(&self, launch: &KernelLaunch, step: &KernelStep<'_>, bases: &[DevicePtr]) -> Result<Vec<ParamValue>, DeviceError> {
        let at = |buffer: usize| {
            let memory = &step.buffers[buffer];
            bases[buffer].offset((memory.start * memory.image.element_bytes()) as u64)
        };
        let value = |argument: &Argument| match argument {
            Argument::Address { buffer } => Ok(ParamValue::Pointer(at(*buffer).0)),
            Argument::Scalar(value) => Ok(ParamValue::Scalar(*value)),
            Argument::TensorMap { buffer, param, dims, strides_bytes } => {
                let map = self.manifest.params[*param].tensor_map.as_ref().ok_or_else(|| self.failed("a tensor map has no geometry"))?;
                let encoded = TensorMapValue::encode(at(*buffer), &link::geometry(map, dims, strides_bytes));
                encoded.map(|map| ParamValue::TensorMap(Box::new(map))).map_err(|error| self.failed(error))
            }
        };
        launch.arguments.iter().map(value).collect()
    }

    fn launch(&self, launch: &KernelLaunch, params: &[ParamValue], way: Way) -> Result<(), DeviceError> {
        let shape = link::launch_shape(&self.manifest, launch.grid, way == Way::Pdl);
        let eager = || self.stream.launch(self.function, &shape, params);
        match way {
            Way::Eager | Way::Pdl => eager().map_err(|error| self.failed(error))?,
            Way::OtherThreads => return Err(self.failed("a GPU has no number of threads to vary")),
            Way::Graph => {
                let graph = self.stream.capture(eager).map_err(|error| self.failed(error))?;
                let nodes = graph.nodes().map_err(|error| self.failed(error))?;
                if nodes != [GraphNode::Kernel(self.function)] {
                    return Err(self.failed(format!("its graph holds {nodes:?}")));
                }
                self.stream.replay(&graph).map_err(|error| self.failed(error))?;
                // The graph is freed below, so it must have run.
                self.drain().map_err(|error| self.failed(error))?;
            }
        }
        self.drain().map_err(|error| self.failed(error))
    }

    fn contents(&mut self, step: &KernelStep<'_>, bases: &[DevicePtr]) -> Result<Vec<Option<Image>>, CudaError> {
        let mut found = Vec::with_capacity(step.buffers.len());
        for (buffer, base) in step.buffers.iter().zip(bases) {
            let mut image = (*buffer.image).clone();
            let is_changed = self.fetch(&mut image, *base)?;
            if is_changed && !buffer.is_written {
                // The damaged copy must not serve another step.
                self.constants.retain(|constant| !Arc::ptr_eq(&constant.image, &buffer.image));
            }
            found.push((is_changed || buffer.is_written).then_some(image));
        }
        Ok(found)
    }
}

impl Place for CudaPlace {
    fn info(&self) -> DeviceInfo {
        let properties = self.context.properties();
        let (major, minor) = (properties.driver / 1000, properties.driver % 1000 / 10);
        DeviceInfo { kind: "cuda", name: format!("{} (driver API {major}.{minor})", properties.name) }
    }

    fn ways(&self) -> Vec<Way> {
        if self.manifest.pdl { vec![Way::Pdl, Way::Graph] } else { vec![Way::Graph] }
    }

    fn padding_rows(&self) -> PaddingRows {
        PaddingRows::Free
    }

    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError> {
        let launch = KernelLaunch::of(&self.manifest, step).map_err(|reason| self.failed(reason))?;
        self.keep_constants(step).map_err(|error| self.failed(error))?;
        let mut written = Vec::new();
        let mut bases = Vec::with_capacity(step.buffers.len());
        for buffer in step.buffers {
            match self.constant(buffer).filter(|_| !buffer.is_written) {
                Some(base) => bases.push(base),
                None => {
                    let memory = self.send(&buffer.image).map_err(|error| self.failed(error))?;
                    bases.push(memory.ptr());
                    written.push(memory);
                }
            }
        }
        let params = self.params(&launch, step, &bases)?;
        self.launch(&launch, &params, way)?;
        self.contents(step, &bases).map_err(|error| self.failed(error))
    }
}
