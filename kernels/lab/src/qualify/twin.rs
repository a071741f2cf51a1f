//! The cpu device in the place of a sealed kernel: takes the operands of an sm90 step as they are laid
//! out for the GPU, and leaves what such a kernel should.
//!
//! A second witness beside the reference, that is quick enough for every element; and, without a GPU,
//! the way to check everything of `qualify` but the GPU itself. It rounds where manifests say that
//! kernels round, and computes fused contracts one by one.

use super::lower::{WeightCache, guarded, laid_out, poison, source_row};
use super::values::{as_type, round_bf16, widen};
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::contract::{Activation, Contract, Heads, Linear, Op, Phase, Role};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::plan::{RowOrder, WeightLayout};
use oxide_bundle::step::{InputSlot, NONE};
use oxide_runtime::device::cpu::CpuPlace;
use oxide_runtime::device::cuda::KernelLaunch;
use oxide_runtime::device::place::{Buffer, Image, KernelStep, PaddingRows, Place, Way};
use oxide_runtime::device::{DeviceError, DeviceInfo};
use std::ops::Range;
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

    fn words(self, slot: InputSlot, words: Vec<u32>) -> Self {
        let len = words.len();
        self.add(Role::Input(slot), Buffer { image: Arc::new(Image::U32(words)), start: 0, len, is_written: false })
    }

    fn plane(self, role: Role, image: &Arc<Image>, is_written: bool) -> Self {
        self.add(role, Buffer { image: Arc::clone(image), start: 0, len: image.len(), is_written })
    }
}

/// Planes with one page more for each sequence, which holds what the sequence's last page does.
struct OwnPages {
    /// Block tables that name it in the place of the last page.
    tables: Vec<u32>,
    /// Slot of each sequence's newest token in it.
    newest: Vec<u32>,
    planes: [Arc<Image>; 2],
}

const PLANES: [Role; 2] = [Role::KPlane, Role::VPlane];

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
            Op::RopeAttend { heads } => self.rope_attend(heads)?,
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
        // The cpu device appends every token: those without a slot go to the page that nobody reads.
        let slots = self.words(InputSlot::KvSlots, rows).into_iter().map(|slot| if slot == NONE { padding } else { slot }).collect();
        let operands = self.shared(&[Role::Input(InputSlot::Positions), Role::RopeTable, Role::KPlane, Role::VPlane]);
        let (k, v) = (operands.roles.len() - 2, operands.roles.len() - 1);
        let count = rows * (heads.q * heads.dim) as usize;
        let out = vec![f32::NAN; count];
        let operands = operands.f32(Role::X, qkv, false).words(InputSlot::KvSlots, slots).f32(Role::Out, out, true);
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

    /// The first `count` words of a step input.
    fn words(&self, slot: InputSlot, count: usize) -> Vec<u32> {
        let buffer = self.step.operand(Role::Input(slot)).map(|index| &self.step.buffers[index]);
        match buffer.map(|buffer| (&*buffer.image, buffer.start)) {
            Some((Image::U32(words), start)) => words[start..start + count].to_vec(),
            _ => Vec::new(),
        }
    }

    /// Rotation and append, then attention. Each sequence's newest token goes to a page of its own, so that
    /// a token without a slot is attended to and no page of the pool is written for it.
    fn rope_attend(&mut self, heads: Heads) -> Result<(), DeviceError> {
        let rows = self.step.rows as usize;
        let width = (heads.kv * heads.dim) as usize;
        let lens = self.words(InputSlot::KvLens, rows);
        let mut own = self.own_pages(&lens, heads.page_tokens as usize, width);
        let q = self.rotate_to(&mut own, heads)?;
        let operands = Operands::default().words(InputSlot::QueryStarts, (0..=rows as u32).collect());
        let operands = operands.words(InputSlot::KvLens, lens.clone()).words(InputSlot::BlockTables, own.tables);
        let count = q.len();
        let operands =
            operands.f32(Role::X, q, false).plane(Role::KPlane, &own.planes[0], false).plane(Role::VPlane, &own.planes[1], false);
        let out = self.call(Op::Attend { heads, phase: Phase::Decode }, operands, count, WeightLayout::RowMajor)?;
        self.put(Role::Out, &out);
        let slots = self.words(InputSlot::KvSlots, rows);
        for row in (0..rows).filter(|row| lens[*row] > 0 && slots[*row] != NONE) {
            let from = own.newest[row] as usize * width;
            for (role, plane) in PLANES.into_iter().zip(&own.planes) {
                self.put_row(role, slots[row] as usize * width, plane, from..from + width);
            }
        }
        Ok(())
    }

    fn own_pages(&self, lens: &[u32], page: usize, width: usize) -> OwnPages {
        let (stride, pages, elements) = (self.step.table_stride as usize, self.step.sizes.kv_pages as usize, page * width);
        let mut tables = self.words(InputSlot::BlockTables, lens.len() * stride);
        let last = |len: u32| (len as usize).saturating_sub(1);
        let newest = lens.iter().enumerate().map(|(seq, len)| ((pages + seq) * page + last(*len) % page) as u32).collect();
        let planes = PLANES.map(|role| {
            let mut plane = poison(DType::Bf16, (pages + lens.len()) * elements);
            let Some(pool) = self.step.operand(role).map(|index| &self.step.buffers[index]) else { return Arc::new(plane) };
            copy(&mut plane, 0, &pool.image, pool.start..pool.start + pages * elements);
            for (seq, len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
                let from = pool.start + tables[seq * stride + last(*len) / page] as usize * elements;
                copy(&mut plane, (pages + seq) * elements, &pool.image, from..from + elements);
            }
            Arc::new(plane)
        });
        for (seq, len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
            tables[seq * stride + last(*len) / page] = (pages + seq) as u32;
        }
        OwnPages { tables, newest, planes }
    }

    /// Appends every row to its own page. Q, rounded as a kernel rounds it.
    fn rotate_to(&mut self, own: &mut OwnPages, heads: Heads) -> Result<Vec<f32>, DeviceError> {
        let rows = self.step.rows as usize;
        let count = rows * (heads.q * heads.dim) as usize;
        let operands = self.shared(&[Role::Input(InputSlot::Positions), Role::RopeTable]).words(InputSlot::KvSlots, own.newest.clone());
        let operands = operands.f32(Role::X, self.values(Role::X, rows * heads.qkv_width() as usize), false);
        let operands = operands.plane(Role::KPlane, &own.planes[0], true).plane(Role::VPlane, &own.planes[1], true);
        let operands = operands.f32(Role::Out, vec![f32::NAN; count], true);
        let mut images = self.run(Op::RopeAppend { heads }, &operands, WeightLayout::RowMajor)?;
        let [Some(Some(q)), Some(Some(v)), Some(Some(k))] = [images.pop(), images.pop(), images.pop()] else {
            return Err(DeviceError::Failed { message: "the cpu device returned no planes".to_owned() });
        };
        own.planes = [k, v].map(Arc::new);
        Ok(widen(&q, 0, count).into_iter().map(round_bf16).collect())
    }

    /// Stores elements of an image from an element of a written operand of the same type on.
    fn put_row(&mut self, role: Role, at: usize, from: &Image, range: Range<usize>) {
        let Some(index) = self.step.operand(role) else { return };
        let start = self.step.buffers[index].start;
        if let Some(image) = &mut self.images[index] {
            copy(image, start + at, from, range);
        }
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

/// Copies elements between images of one type.
fn copy(to: &mut Image, at: usize, from: &Image, range: Range<usize>) {
    let bytes = from.element_bytes();
    to.bytes_mut()[at * bytes..][..range.len() * bytes].copy_from_slice(&from.bytes()[range.start * bytes..range.end * bytes]);
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
