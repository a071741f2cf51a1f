//! Binds a plan to addresses: every step of every entry becomes a launch with its parameters in place.
//!
//! Owns admission of code objects: each function's registers, parameter layout and shared memory must be
//! what its sealed manifest says. Knows manifests and addresses; runs nothing.

use super::driver::{CudaError, DeviceProperties, DevicePtr, Function, LaunchShape, Module, ParamValue, TensorMapGeometry, TensorMapValue};
use super::slots::{InputLayout, OutputLayout};
use oxide_bundle::Bundle;
use oxide_bundle::artifact::{ArtifactManifest, Param, ParamKind, TensorMap};
use oxide_bundle::contract::{Dim, Role};
use oxide_bundle::ids::{ArtifactId, EntryId, KernelId, StepId};
use oxide_bundle::plan::{Bindings, EntryDecl, Extent, Operand, Plan, Step, Sym, Value};

/// A code object that is not what its manifest says, or a plan that it cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The driver refused something.
    #[error("{what}: {source}")]
    Driver {
        /// Kernel or step.
        what: String,
        /// Driver's words.
        source: CudaError,
    },
    /// A kernel differs from its manifest.
    #[error("kernel {name} ({symbol}): {reason}")]
    Kernel {
        /// Artifact name.
        name: String,
        /// Symbol.
        symbol: String,
        /// The difference.
        reason: String,
    },
    /// A step cannot be bound.
    #[error("{entry} {step}: {reason}")]
    Step {
        /// Entry.
        entry: EntryId,
        /// Step.
        step: StepId,
        /// Why.
        reason: String,
    },
}

/// A loaded kernel.
pub(super) struct Kernel {
    pub(super) artifact: ArtifactId,
    pub(super) function: Function,
    pub(super) manifest: ArtifactManifest,
}

/// Addresses that launches are bound to.
pub(super) struct Addresses {
    pub(super) weights: DevicePtr,
    pub(super) arena: DevicePtr,
    pub(super) kv: DevicePtr,
    pub(super) inputs: DevicePtr,
    pub(super) outputs: DevicePtr,
    /// Pages of the pool, the padding page included.
    pub(super) kv_pages: u32,
}

/// A step ready to run.
pub(super) enum BoundStep {
    /// A kernel launch.
    Launch(BoundLaunch),
    /// A copy inside the arena.
    Copy { to: DevicePtr, from: DevicePtr, bytes: Extent },
}

/// A launch with every parameter in place.
pub(super) struct BoundLaunch {
    pub(super) kernel: usize,
    pub(super) function: Function,
    pub(super) shape: LaunchShape,
    pub(super) params: Vec<ParamValue>,
    grid: [Extent; 3],
    scalars: Vec<(usize, Extent)>,
}

impl BoundLaunch {
    /// Sets grid and scalars for one batch.
    pub(super) fn bind(&mut self, bindings: Bindings) {
        for (value, extent) in self.shape.grid.iter_mut().zip(self.grid) {
            *value = extent.eval(bindings).unwrap_or(1).max(1);
        }
        for &(index, extent) in &self.scalars {
            if let Some(ParamValue::Scalar(value)) = self.params.get_mut(index) {
                *value = extent.eval(bindings).unwrap_or(0);
            }
        }
    }
}

/// Loads every kernel of the plan and compares it with its manifest.
///
/// # Errors
/// On the first difference.
pub(super) fn load_kernels(bundle: &Bundle, device: &DeviceProperties) -> Result<(Vec<Module>, Vec<Kernel>), LinkError> {
    let mut modules = Vec::new();
    for (index, entry) in bundle.artifacts().iter().enumerate() {
        let code = bundle.artifact_code(ArtifactId(index as u32)).unwrap_or_default();
        let what = format!("kernel {}", entry.manifest.name);
        modules.push(Module::load(code).map_err(|source| LinkError::Driver { what, source })?);
    }
    let kernels = bundle.plan().kernels().iter().enumerate();
    let kernels = kernels.map(|(index, _)| load_kernel(bundle, KernelId(index as u32), &modules, device)).collect::<Result<_, _>>()?;
    Ok((modules, kernels))
}

fn load_kernel(bundle: &Bundle, id: KernelId, modules: &[Module], device: &DeviceProperties) -> Result<Kernel, LinkError> {
    let decl = &bundle.plan().kernels()[id.index()];
    let refuse = |name: &str, reason: String| LinkError::Kernel { name: name.into(), symbol: decl.contract.to_string(), reason };
    let code = decl.code.as_ref().ok_or_else(|| refuse("none", "has no code object".into()))?;
    let entry =
        bundle.artifacts().get(code.artifact.index()).ok_or_else(|| refuse("none", format!("{} is not sealed in", code.artifact)))?;
    let module = modules.get(code.artifact.index()).ok_or_else(|| refuse(&entry.manifest.name, "is not loaded".into()))?;
    let manifest = entry.manifest.clone();
    let driver = |source| LinkError::Driver { what: format!("kernel {}", manifest.name), source };
    let function = module.function(&code.symbol).map_err(driver)?;
    let reason = if manifest.contract != decl.contract {
        Some(format!("computes {} and the plan wants {}", manifest.contract, decl.contract))
    } else {
        admit_function(function, &manifest, device).map_err(driver)?
    };
    if let Some(reason) = reason {
        return Err(refuse(&manifest.name, reason));
    }
    Ok(Kernel { artifact: code.artifact, function, manifest })
}

/// Compares a function with its manifest and gives it the shared memory that it wants, or says why it is refused.
pub(super) fn admit_function(
    function: Function,
    manifest: &ArtifactManifest,
    device: &DeviceProperties,
) -> Result<Option<String>, CudaError> {
    if i64::from(device.shared_bytes_max) < i64::from(manifest.shared_bytes) {
        return Ok(Some(format!("wants {} B of shared memory, the device has {}", manifest.shared_bytes, device.shared_bytes_max)));
    }
    let reason = differences(manifest, function)?;
    if reason.is_none() && manifest.shared_bytes > 0 {
        function.allow_shared(manifest.shared_bytes)?;
    }
    Ok(reason)
}

fn differences(manifest: &ArtifactManifest, function: Function) -> Result<Option<String>, CudaError> {
    let registers = function.registers()?;
    if registers as u32 != manifest.registers {
        return Ok(Some(format!("has {registers} registers, its manifest says {}", manifest.registers)));
    }
    let found = function.params();
    let wanted: Vec<_> = manifest.params.iter().map(|param| (param.offset as usize, param.size as usize)).collect();
    Ok((found != wanted).then(|| format!("has parameters at {found:?}, its manifest says {wanted:?}")))
}

/// Binds the steps of one entry.
///
/// # Errors
/// If a parameter has no operand, or a tensor map does not fit its operand.
pub(super) fn bind_entry(
    plan: &Plan,
    id: EntryId,
    kernels: &[Kernel],
    addresses: &Addresses,
    inputs: &InputLayout,
    outputs: &OutputLayout,
    pdl: bool,
) -> Result<Vec<BoundStep>, LinkError> {
    let entry = &plan.entries()[id.index()];
    let binder = Binder { plan, entry, id, addresses, inputs, outputs };
    let steps = entry.steps.iter().enumerate();
    steps.map(|(index, step)| binder.bind_step(StepId(index as u32), step, kernels, pdl)).collect()
}

/// Bindings at the bound of a class.
pub(super) fn bound_of(entry: &EntryDecl, kv_pages: u32) -> Bindings {
    Bindings { tokens: entry.class.tokens_max(), seqs: entry.class.seqs_max(), rows: entry.class.seqs_max(), kv_pages }
}

struct Binder<'a> {
    plan: &'a Plan,
    entry: &'a EntryDecl,
    id: EntryId,
    addresses: &'a Addresses,
    inputs: &'a InputLayout,
    outputs: &'a OutputLayout,
}

impl Binder<'_> {
    fn refuse(&self, step: StepId, reason: String) -> LinkError {
        LinkError::Step { entry: self.id, step, reason }
    }

    fn bind_step(&self, id: StepId, step: &Step, kernels: &[Kernel], pdl: bool) -> Result<BoundStep, LinkError> {
        match step {
            Step::Copy { from, to, bytes } => {
                let address =
                    |buffer| self.address(Value::Buffer(buffer)).ok_or_else(|| self.refuse(id, format!("{buffer} has no address")));
                Ok(BoundStep::Copy { to: address(*to)?, from: address(*from)?, bytes: *bytes })
            }
            Step::Launch { kernel, grid, operands } => {
                let index = kernel.index();
                let kernel = kernels.get(index).ok_or_else(|| self.refuse(id, format!("{kernel} is not loaded")))?;
                self.bind_launch(id, index, kernel, *grid, operands, pdl).map(BoundStep::Launch)
            }
        }
    }

    fn bind_launch(
        &self,
        id: StepId,
        index: usize,
        kernel: &Kernel,
        grid: [Extent; 3],
        operands: &[Operand],
        pdl: bool,
    ) -> Result<BoundLaunch, LinkError> {
        let manifest = &kernel.manifest;
        if grid != manifest.grid {
            return Err(self.refuse(id, format!("grid {grid:?} differs from that of {}: {:?}", manifest.name, manifest.grid)));
        }
        let mut params = Vec::with_capacity(manifest.params.len());
        let mut scalars = Vec::new();
        for param in &manifest.params {
            if param.kind == ParamKind::Scalar {
                scalars.push((params.len(), self.scalar(id, param, operands)?));
            }
            params.push(self.param(id, param, operands)?);
        }
        let shape = launch_shape(manifest, [1; 3], pdl);
        let mut launch = BoundLaunch { kernel: index, function: kernel.function, shape, params, grid, scalars };
        launch.bind(bound_of(self.entry, self.addresses.kv_pages));
        Ok(launch)
    }

    fn param(&self, id: StepId, param: &Param, operands: &[Operand]) -> Result<ParamValue, LinkError> {
        match param.kind {
            ParamKind::Scalar => Ok(ParamValue::Scalar(0)),
            ParamKind::Pointer => {
                let address = self.address(self.value(id, param, operands)?);
                let address = address.ok_or_else(|| self.refuse(id, format!("parameter {} has no address", param.name)))?;
                if param.align != 0 && !address.0.is_multiple_of(u64::from(param.align)) {
                    return Err(self.refuse(id, format!("parameter {} is not aligned to {} bytes", param.name, param.align)));
                }
                Ok(ParamValue::Pointer(address.0))
            }
            ParamKind::TensorMap => self.tensor_map(id, param, self.value(id, param, operands)?),
        }
    }

    /// The operand of a parameter's role; slots need none, they name themselves.
    fn value(&self, id: StepId, param: &Param, operands: &[Operand]) -> Result<Value, LinkError> {
        match param.role {
            Role::Input(slot) => Ok(Value::Input(slot)),
            Role::Output(slot) => Ok(Value::Output(slot)),
            role => {
                let found = operands.iter().find(|operand| operand.role == role).map(|operand| operand.value);
                found.ok_or_else(|| self.refuse(id, format!("parameter {} wants {role:?}, which the step does not give", param.name)))
            }
        }
    }

    fn scalar(&self, id: StepId, param: &Param, operands: &[Operand]) -> Result<Extent, LinkError> {
        if let Some(extent) = param.value {
            return Ok(extent);
        }
        if let Some(extent) = step_size(param.role, self.plan.bounds().pages_per_seq_max) {
            return Ok(extent);
        }
        match operands.iter().find(|operand| operand.role == param.role).map(|operand| operand.value) {
            Some(Value::Scalar(extent)) => Ok(extent),
            _ => Err(self.refuse(id, format!("scalar {} has no value", param.name))),
        }
    }

    fn address(&self, value: Value) -> Option<DevicePtr> {
        let kv = self.plan.kv();
        let plane_bytes = u64::from(self.addresses.kv_pages) * kv.plane_page_bytes();
        match value {
            Value::Buffer(buffer) => Some(self.addresses.arena.offset(self.plan.buffers().get(buffer.index())?.offset_bytes)),
            Value::Weight(weight) => Some(self.addresses.weights.offset(self.plan.weights().get(weight.index())?.offset_bytes)),
            Value::KPlane(layer) => Some(self.addresses.kv.offset(2 * u64::from(layer) * plane_bytes)),
            Value::VPlane(layer) => Some(self.addresses.kv.offset((2 * u64::from(layer) + 1) * plane_bytes)),
            Value::Input(slot) => Some(self.addresses.inputs.offset(self.inputs.offset(slot))),
            Value::Output(slot) => Some(self.addresses.outputs.offset(self.outputs.offset(slot))),
            Value::Scalar(_) => None,
        }
    }

    fn bytes(&self, value: Value) -> Option<u64> {
        let kv = self.plan.kv();
        match value {
            Value::Buffer(buffer) => Some(self.plan.buffers().get(buffer.index())?.size_bytes),
            Value::Weight(weight) => Some(self.plan.weights().get(weight.index())?.size_bytes),
            Value::KPlane(_) | Value::VPlane(_) => Some(u64::from(self.addresses.kv_pages) * kv.plane_page_bytes()),
            Value::Input(_) | Value::Output(_) | Value::Scalar(_) => None,
        }
    }

    fn tensor_map(&self, id: StepId, param: &Param, value: Value) -> Result<ParamValue, LinkError> {
        let refuse = |reason: &str| self.refuse(id, format!("tensor map {}: {reason}", param.name));
        let map = param.tensor_map.as_ref().ok_or_else(|| refuse("has no geometry"))?;
        let base = self.address(value).ok_or_else(|| refuse("its operand has no address"))?;
        let bytes = self.bytes(value).ok_or_else(|| refuse("its operand has no size"))?;
        let bound = bound_of(self.entry, self.addresses.kv_pages);
        let (dims, strides) = map_extents(map, bound, bytes).map_err(refuse)?;
        let geometry = geometry(map, &dims, &strides);
        let encoded = TensorMapValue::encode(base, &geometry).map_err(|source| refuse(&source.to_string()))?;
        Ok(ParamValue::TensorMap(Box::new(encoded)))
    }
}

/// The launch of a kernel on `grid` blocks.
pub(super) fn launch_shape(manifest: &ArtifactManifest, grid: [u32; 3], pdl: bool) -> LaunchShape {
    LaunchShape {
        grid,
        block: manifest.block,
        cluster: manifest.cluster,
        shared_bytes: manifest.shared_bytes,
        pdl: pdl && manifest.pdl,
        cooperative: manifest.cooperative,
    }
}

/// What a scalar that names a size of the step is, if it names one.
pub(super) fn step_size(role: Role, table_stride: u32) -> Option<Extent> {
    match role {
        Role::Scalar(Dim::Tokens) => Some(Extent::sym(Sym::Tokens, 1)),
        Role::Scalar(Dim::Seqs) => Some(Extent::sym(Sym::Seqs, 1)),
        Role::Scalar(Dim::Rows) => Some(Extent::sym(Sym::Rows, 1)),
        Role::Scalar(Dim::KvPages) => Some(Extent::sym(Sym::KvPages, 1)),
        Role::Scalar(Dim::TableStride) => Some(Extent::lit(table_stride)),
        _ => None,
    }
}

/// Dimensions and strides in bytes of a map at the class bound, within an operand of `bytes` bytes.
///
/// # Errors
/// If an extent divides by zero, or the operand holds not even one row.
pub(super) fn map_extents(map: &TensorMap, bound: Bindings, bytes: u64) -> Result<(Vec<u64>, Vec<u64>), &'static str> {
    let list = |extents: &[Extent]| extents.iter().map(|extent| extent.eval(bound).map(u64::from)).collect::<Option<Vec<u64>>>();
    let mut dims = list(&map.dims).ok_or("a dimension divides by zero")?;
    let strides = list(&map.strides_bytes).ok_or("a stride divides by zero")?;
    clamp_outer(&mut dims, &strides, bytes).ok_or("its operand is smaller than one row")?;
    Ok((dims, strides))
}

/// Limits the outermost dimension to what the operand holds, so that a map never reaches past it.
fn clamp_outer(dims: &mut [u64], strides: &[u64], bytes: u64) -> Option<()> {
    if let (Some(outer), Some(stride)) = (dims.last_mut(), strides.last()) {
        *outer = (*outer).min(bytes.checked_div(*stride)?);
        return (*outer > 0).then_some(());
    }
    Some(())
}

pub(super) fn geometry<'a>(map: &'a TensorMap, dims: &'a [u64], strides: &'a [u64]) -> TensorMapGeometry<'a> {
    TensorMapGeometry {
        dtype: map.dtype,
        dims,
        strides_bytes: strides,
        box_dims: &map.box_dims,
        element_strides: &map.element_strides,
        interleave: map.interleave,
        swizzle: map.swizzle,
        l2_promotion: map.l2_promotion,
        oob_fill: map.oob_fill,
    }
}
