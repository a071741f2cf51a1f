//! The waist between a conformance tool and hardware: a [`Place`] runs one kernel on given operands.
//!
//! A [`Device`](super::Device) runs whole entries of a plan; a place runs a single step outside any plan,
//! so that a tool can choose every operand, poison what must be written and see what was touched. Two
//! implementations: `cpu` calls the closed table of kernels, `cuda` launches one code object.
//!
//! **Invariant:** a place computes nothing of its own; it hands operands to the kernel that a plan would run.

use super::{DeviceError, DeviceInfo};
use oxide_bundle::contract::{Contract, Role};
use oxide_bundle::plan::{Bindings, WeightLayout};
use std::sync::Arc;

/// Typed memory of an operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Image {
    /// bf16, as bits.
    Bf16(Vec<u16>),
    /// f32.
    F32(Vec<f32>),
    /// 32-bit integers.
    U32(Vec<u32>),
}

impl Image {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::U32(values) => values.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one element.
    pub const fn element_bytes(&self) -> usize {
        match self {
            Self::Bf16(_) => 2,
            Self::F32(_) | Self::U32(_) => 4,
        }
    }

    /// The memory as bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Bf16(values) => bytemuck::cast_slice(values),
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::U32(values) => bytemuck::cast_slice(values),
        }
    }

    /// The memory as bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Bf16(values) => bytemuck::cast_slice_mut(values),
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::U32(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

/// An operand's memory, guards on both sides included.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Contents before the step, guards included. A place may keep a constant on its device as long as
    /// it meets the same `Arc`.
    pub image: Arc<Image>,
    /// First element of the operand; everything before is guard.
    pub start: usize,
    /// Elements of the operand at the class bound; everything after is guard.
    pub len: usize,
    /// Whether the kernel may write it.
    pub is_written: bool,
}

/// One kernel and its operands.
#[derive(Copy, Clone, Debug)]
pub struct KernelStep<'a> {
    /// What is computed.
    pub contract: Contract,
    /// Sizes of the step.
    pub sizes: Bindings,
    /// Bound of the class: buffers and tensor maps are this large.
    pub bound: Bindings,
    /// Rows of the activations: tokens or logit rows, as the step uses the kernel.
    pub rows: u32,
    /// Rows that activation buffers have, by the class bound.
    pub rows_max: u32,
    /// Entries of one block-table row.
    pub table_stride: u32,
    /// Layout of the weight operand.
    pub weight_layout: WeightLayout,
    /// Which buffer plays which role. Roles may share a buffer where the contract lets them.
    pub operands: &'a [(Role, usize)],
    /// The memory.
    pub buffers: &'a [Buffer],
}

impl KernelStep<'_> {
    /// The buffer of a role.
    pub fn operand(&self, role: Role) -> Option<usize> {
        self.operands.iter().find(|(found, _)| *found == role).map(|(_, buffer)| *buffer)
    }
}

/// How a step is run. Every way must give the same bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// The plain one.
    Eager,
    /// cpu: with another number of threads.
    OtherThreads,
    /// cuda: launched with programmatic stream serialisation.
    Pdl,
    /// cuda: captured into a graph and replayed.
    Graph,
}

impl Way {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::OtherThreads => "other_threads",
            Self::Pdl => "pdl",
            Self::Graph => "graph",
        }
    }
}

/// Whether a kernel may write output rows between the step's size and the class bound.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PaddingRows {
    /// It may leave anything there.
    Free,
    /// It must leave them alone.
    Untouched,
}

/// Runs one kernel at a time.
pub trait Place {
    /// Identity.
    fn info(&self) -> DeviceInfo;

    /// Ways to run beside [`Way::Eager`].
    fn ways(&self) -> Vec<Way>;

    /// What may happen to padding rows of outputs.
    fn padding_rows(&self) -> PaddingRows;

    /// Runs the step on fresh copies of its buffers. Returns the contents afterwards, guards included:
    /// of every written buffer, and of constants that the step changed.
    ///
    /// # Errors
    /// If an operand is missing or does not fit, or the device fails.
    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError>;
}
