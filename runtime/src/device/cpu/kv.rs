//! The paged KV pool: one key and one value plane a layer, `[pages, page_tokens, kv_heads, head_dim]`.
//!
//! Planes are allocated zeroed and untouched, so memory is used as pages fill.

use oxide_bundle::dtype::DType;
use oxide_bundle::plan::KvGeometry;

/// A plane.
enum Plane {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

/// A plane to read.
#[derive(Copy, Clone)]
pub(crate) enum PlaneRef<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [u16]),
}

/// A plane to write.
pub(crate) enum PlaneMut<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// bf16.
    Bf16(&'a mut [u16]),
}

/// All planes of a device.
pub(crate) struct KvPool {
    k: Vec<Plane>,
    v: Vec<Plane>,
    page_elements: usize,
    pages: usize,
}

impl KvPool {
    /// A pool of `pages` pages; `None` if it does not fit the address space or memory is refused.
    pub(crate) fn new(geometry: &KvGeometry, pages: u32) -> Option<Self> {
        let page_elements = [geometry.page_tokens, geometry.kv_heads, geometry.head_dim]
            .into_iter()
            .try_fold(1_usize, |product, factor| product.checked_mul(factor as usize))?;
        let pages = pages as usize;
        let elements = page_elements.checked_mul(pages)?;
        let plane = || Plane::new(geometry.dtype, elements);
        let planes = || (0..geometry.layers).map(|_| plane()).collect::<Option<Vec<_>>>();
        Some(Self { k: planes()?, v: planes()?, page_elements, pages })
    }

    /// Pages.
    pub(crate) fn pages(&self) -> u32 {
        self.pages as u32
    }

    /// Key and value plane of a layer, to read.
    pub(crate) fn layer(&self, k: u32, v: u32) -> (PlaneRef<'_>, PlaneRef<'_>) {
        (self.k[k as usize].get(), self.v[v as usize].get())
    }

    /// Key and value plane of a layer, to write.
    pub(crate) fn layer_mut(&mut self, k: u32, v: u32) -> (PlaneMut<'_>, PlaneMut<'_>) {
        (self.k[k as usize].get_mut(), self.v[v as usize].get_mut())
    }

    /// Copies page `from` over page `to` in every plane. Both must exist.
    pub(crate) fn copy_page(&mut self, from: u32, to: u32) {
        let (len, from, to) = (self.page_elements, from as usize * self.page_elements, to as usize * self.page_elements);
        for plane in self.k.iter_mut().chain(&mut self.v) {
            match plane {
                Plane::F32(plane) => plane.copy_within(from..from + len, to),
                Plane::Bf16(plane) => plane.copy_within(from..from + len, to),
            }
        }
    }
}

impl Plane {
    fn new(dtype: DType, elements: usize) -> Option<Self> {
        match dtype {
            DType::F32 => zeroed(elements).map(Self::F32),
            DType::Bf16 => zeroed(elements).map(Self::Bf16),
            DType::F16 | DType::U32 => None,
        }
    }

    fn get(&self) -> PlaneRef<'_> {
        match self {
            Self::F32(plane) => PlaneRef::F32(plane),
            Self::Bf16(plane) => PlaneRef::Bf16(plane),
        }
    }

    fn get_mut(&mut self) -> PlaneMut<'_> {
        match self {
            Self::F32(plane) => PlaneMut::F32(plane),
            Self::Bf16(plane) => PlaneMut::Bf16(plane),
        }
    }
}

/// `len` zeros from the system's zero pages; `None` if it refuses.
fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Option<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).ok()
}
