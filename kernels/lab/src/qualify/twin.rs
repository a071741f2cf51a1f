//! The cpu device in the place of a sealed kernel: takes the operands of an sm90 step as they are laid
//! out for the GPU, and leaves what such a kernel should.
//!
//! A second witness beside the reference, that is quick enough for every element; and, without a GPU,
//! the way to check everything of `qualify` but the GPU itself. It rounds where manifests say that
//! kernels round, and computes fused contracts one by one.

use super::lower::{WeightCache, guarded, laid_out, poison, source_row};
use super::values::{as_type, round_bf16, widen};
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::contract::{Activation, Contract, Heads, Linear, Op, Role};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::plan::{RowOrder, WeightLayout};
use oxide_bundle::step::{InputSlot, NONE};
use oxide_runtime::device::cpu::CpuPlace;
use oxide_runtime::device::cuda::KernelLaunch;
use oxide_runtime::device::place::{Buffer, Image, KernelStep, PaddingRows, Place, Way};
use oxide_runtime::device::{DeviceError, DeviceInfo};
use std::sync::Arc;

/// The cpu device behind one manifest.
pub(crate) struct Twin {
    cpu: CpuPlace,
    manifest: ArtifactManifest,
    weights: WeightCache,
}

impl Twin {
    /// A twin of the kernel of a manifest.
    pub(crate) fn new(cpu: CpuPlace, manifest: &ArtifactManifest) -> Self {
        Self { cpu, manifest: manifest.clone(), weights: WeightCache::default() }
    }
}

impl Place for Twin {
    fn info(&self) -> DeviceInfo {
        let DeviceInfo { kind, name } = self.cpu.info();
        DeviceInfo { kind, name: format!("{name} in the place of a GPU") }
    }

    fn ways(&self) -> Vec<Way> {
        vec![Way::OtherThreads]
    }

    fn padding_rows(&self) -> PaddingRows {
        PaddingRows::Free
    }

    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError> {
        KernelLaunch::of(&self.manifest, step).map_err(|message| DeviceError::Failed { message })?;
        let mut run = Run { twin: self, step, way, images: contents(step) };
        run.step()?;
        Ok(run.images)
    }
}

fn contents(step: &KernelStep<'_>) -> Vec<Option<Image>> {
    step.buffers.iter().map(|buffer| buffer.is_written.then(|| (*buffer.image).clone())).collect()
}

/// Operands of one call of the cpu device.
#[derive(Default)]
struct Operands {
    roles: Vec<(Role, usize)>,
    buffers: Vec<Buffer>,
}

impl Operands {
    fn add(mut self, role: Role, buffer: Buffer) -> Self {
        self.roles.push((role, self.buffers.len()));
        self.buffers.push(buffer);
        self
    }

    fn f32(self, role: Role, values: Vec<f32>, is_written: bool) -> Self {
        let len = values.len();
        self.add(role, Buffer { image: Arc::new(Image::F32(values)), start: 0, len, is_written })
    }
}

struct Run<'a> {
    twin: &'a mut Twin,
    step: &'a KernelStep<'a>,
    way: Way,
    images: Vec<Option<Image>>,
}

impl Run<'_> {
    fn step(&mut self) -> Result<(), DeviceError> {
        let rows = self.step.rows as usize;
        match self.step.contract.op {
            Op::Embed { dim, .. } => {
                let operands = self.shared(&[Role::Weight, Role::Input(InputSlot::TokenIds), Role::Input(InputSlot::TokenSources)]);
                let operands = self.share(operands, Role::Output(oxide_bundle::step::OutputSlot::SampledIds));
                let out = self.call(self.step.contract.op, operands, rows * dim as usize, WeightLayout::RowMajor)?;
                self.put(Role::Out, &out);
            }
            Op::RmsNorm { dim, eps } => {
                let out = self.norm(self.values(Role::X, rows * dim as usize), dim, eps)?;
                self.put(Role::Out, &out);
            }
            Op::AddRmsNorm { dim, eps } => {
                let mut x = self.values(Role::X, rows * dim as usize);
                let residual = self.values(Role::Residual, x.len());
                x.iter_mut().zip(residual).for_each(|(x, residual)| *x = round_bf16(*x + residual));
                self.put(Role::Residual, &x);
                let out = self.norm(x, dim, eps)?;
                self.put(Role::Out, &out);
            }
            Op::QkNorm { heads, .. } => {
                let x = self.values(Role::X, rows * heads.qkv_width() as usize);
                let operands = self.shared(&[Role::NormWeight]);
                let out = self.call_in_place(self.step.contract.op, operands, x)?;
                self.put(Role::Out, &out);
            }
            Op::Linear(linear) => {
                let out = self.linear(linear)?;
                self.put(Role::Out, &out);
            }
            Op::RopeAppend { heads } => self.rope_append(heads, self.values(Role::X, rows * heads.qkv_width() as usize))?,
            Op::QkvRopeAppend { linear, heads } => {
                let qkv = self.linear(linear)?;
                self.rope_append(heads, qkv)?;
            }
            Op::Attend { heads, .. } => {
                let width = (heads.q * heads.dim) as usize;
                let roles = [InputSlot::QueryStarts, InputSlot::KvLens, InputSlot::BlockTables].map(Role::Input);
                let operands = self.shared(&roles).f32(Role::X, self.values(Role::X, rows * width), false);
                let operands = self.share(self.share(operands, Role::KPlane), Role::VPlane);
                let out = self.call(self.step.contract.op, operands, rows * width, WeightLayout::RowMajor)?;
                self.put(Role::Out, &out);
            }
            Op::TakeRows { dim } => {
                let x = self.values(Role::X, self.step.sizes.tokens as usize * dim as usize);
                let operands = self.shared(&[Role::Input(InputSlot::LogitRows)]).f32(Role::X, x, false);
                let out = self.call(self.step.contract.op, operands, rows * dim as usize, WeightLayout::RowMajor)?;
                self.put(Role::Out, &out);
            }
            Op::Sample { .. } => self.sample()?,
        }
        Ok(())
    }

    /// The first elements of an operand, as f32.
    fn values(&self, role: Role, count: usize) -> Vec<f32> {
        self.step.operand(role).map_or_else(Vec::new, |index| {
            let buffer = &self.step.buffers[index];
            widen(&buffer.image, buffer.start, count)
        })
    }

    /// Operands that the cpu device takes as they are.
    fn shared(&self, roles: &[Role]) -> Operands {
        roles.iter().fold(Operands::default(), |operands, role| self.share(operands, *role))
    }

    fn share(&self, operands: Operands, role: Role) -> Operands {
        match self.step.operand(role) {
            Some(index) => operands.add(role, self.step.buffers[index].clone()),
            None => operands,
        }
    }

    fn run(&mut self, op: Op, operands: &Operands, weight_layout: WeightLayout) -> Result<Vec<Option<Image>>, DeviceError> {
        let contract = Contract { op, act: DType::F32, weight: DType::Bf16, kv: DType::Bf16, out: DType::F32 };
        let step = KernelStep { contract, weight_layout, operands: &operands.roles, buffers: &operands.buffers, ..*self.step };
        self.twin.cpu.run(&step, self.way)
    }

    fn call(&mut self, op: Op, operands: Operands, count: usize, layout: WeightLayout) -> Result<Vec<f32>, DeviceError> {
        let operands = operands.f32(Role::Out, vec![f32::NAN; count], true);
        let mut images = self.run(op, &operands, layout)?;
        Ok(images.pop().flatten().map_or_else(Vec::new, |image| widen(&image, 0, count)))
    }

    fn call_in_place(&mut self, op: Op, operands: Operands, x: Vec<f32>) -> Result<Vec<f32>, DeviceError> {
        let count = x.len();
        let operands = operands.f32(Role::Out, x, true);
        let mut images = self.run(op, &operands, WeightLayout::RowMajor)?;
        Ok(images.pop().flatten().map_or_else(Vec::new, |image| widen(&image, 0, count)))
    }

    fn norm(&mut self, x: Vec<f32>, dim: u32, eps: F32Bits) -> Result<Vec<f32>, DeviceError> {
        let count = x.len();
        let operands = self.shared(&[Role::NormWeight]).f32(Role::X, x, false);
        self.call(Op::RmsNorm { dim, eps }, operands, count, WeightLayout::RowMajor)
    }

    /// The projection, in f32 before the result is rounded.
    fn linear(&mut self, linear: Linear) -> Result<Vec<f32>, DeviceError> {
        let rows = self.step.rows as usize;
        let mut x = self.values(Role::X, rows * linear.k as usize);
        if let Some(eps) = linear.norm {
            x = self.norm(x, linear.k, eps)?.into_iter().map(round_bf16).collect();
        }
        let mut operands = Operands::default().f32(Role::X, x, false);
        let order = self.twin.manifest.row_order;
        for (role, width, is_panel) in [(Role::Weight, linear.k as usize, true), (Role::Bias, 1, false)] {
            if let Some(index) = self.step.operand(role) {
                let buffer = &self.step.buffers[index];
                let swiglu = linear.act == Activation::SwiGlu;
                let image = self.twin.weights.get(&buffer.image, Some(order), || for_cpu(buffer, width, order, swiglu, is_panel));
                let len = image.len() - 2 * super::lower::GUARD;
                operands = operands.add(role, Buffer { image, start: super::lower::GUARD, len, is_written: false });
            }
        }
        let count = rows * linear.out_width() as usize;
        if linear.residual {
            operands = operands.f32(Role::Residual, self.values(Role::Residual, count), false);
        }
        self.call(Op::Linear(Linear { norm: None, ..linear }), operands, count, WeightLayout::Panel16)
    }

    fn rope_append(&mut self, heads: Heads, qkv: Vec<f32>) -> Result<(), DeviceError> {
        let rows = self.step.rows as usize;
        let padding = (self.step.sizes.kv_pages - 1) * heads.page_tokens;
        let slots = self.step.operand(Role::Input(InputSlot::KvSlots)).map(|index| &self.step.buffers[index]);
        let slots: Vec<u32> = match slots.map(|buffer| (&*buffer.image, buffer.start)) {
            // The cpu device appends every token: those without a slot go to the page that nobody reads.
            Some((Image::U32(slots), start)) => {
                slots[start..start + rows].iter().map(|slot| if *slot == NONE { padding } else { *slot }).collect()
            }
            _ => Vec::new(),
        };
        let len = slots.len();
        let slots = Buffer { image: Arc::new(Image::U32(slots)), start: 0, len, is_written: false };
        let operands = self.shared(&[Role::Input(InputSlot::Positions), Role::RopeTable, Role::KPlane, Role::VPlane]);
        let (k, v) = (operands.roles.len() - 2, operands.roles.len() - 1);
        let count = rows * (heads.q * heads.dim) as usize;
        let out = vec![f32::NAN; count];
        let operands = operands.f32(Role::X, qkv, false).add(Role::Input(InputSlot::KvSlots), slots).f32(Role::Out, out, true);
        let mut images = self.run(Op::RopeAppend { heads }, &operands, WeightLayout::RowMajor)?;
        if let Some(out) = images.pop().flatten() {
            self.put(Role::Out, &widen(&out, 0, count));
        }
        for (role, from) in [(Role::KPlane, k), (Role::VPlane, v)] {
            if let Some(index) = self.step.operand(role) {
                self.images[index] = images[from].take();
            }
        }
        Ok(())
    }

    fn sample(&mut self) -> Result<(), DeviceError> {
        let known = |role: &Role| !matches!(role, Role::Workspace(_) | Role::Counters(_));
        let roles: Vec<Role> = self.step.operands.iter().map(|(role, _)| *role).filter(known).collect();
        let operands = self.shared(&roles);
        let images = self.run(self.step.contract.op, &operands, WeightLayout::RowMajor)?;
        for (role, image) in roles.into_iter().zip(images) {
            if let (Some(index), Some(image)) = (self.step.operand(role), image) {
                self.images[index] = Some(image);
            }
        }
        Ok(())
    }

    /// Stores values at the start of a written operand, rounded to its type.
    fn put(&mut self, role: Role, values: &[f32]) {
        let Some(index) = self.step.operand(role) else { return };
        let start = self.step.buffers[index].start;
        let Some(image) = &mut self.images[index] else { return };
        let dtype = if matches!(image, Image::Bf16(_)) { DType::Bf16 } else { DType::F32 };
        let rounded = as_type(values.to_vec(), dtype);
        let at = start * image.element_bytes();
        image.bytes_mut()[at..at + rounded.bytes().len()].copy_from_slice(rounded.bytes());
    }
}

/// A weight or bias of an sm90 kernel in the cpu device's layout.
fn for_cpu(buffer: &Buffer, width: usize, order: RowOrder, swiglu: bool, is_panel: bool) -> Image {
    let Image::Bf16(bits) = &*buffer.image else { return guarded(&buffer.image, buffer.image.len()) };
    let bits = &bits[buffer.start..buffer.start + buffer.len];
    let n = bits.len() / width;
    let Image::Bf16(mut natural) = poison(DType::Bf16, bits.len()) else { unreachable!("asked for bf16") };
    for row in 0..n {
        natural[source_row(row, n, order) * width..][..width].copy_from_slice(&bits[row * width..][..width]);
    }
    let order = if swiglu { RowOrder::Interleave(16) } else { RowOrder::Concat };
    laid_out(&Image::Bf16(natural), width, order, is_panel)
}
