//! Schedule and arena → wire plan: tables in order, weights at their offsets, code objects by id.

use super::{Arena, PassResult, Settings, Unit};
use crate::graph::Weight;
use crate::schedule::{Call, Schedule};
use oxide_bundle::container::layout::TENSOR_ALIGN;
use oxide_bundle::contract::Contract;
use oxide_bundle::ids::{ArtifactId, KernelId};
use oxide_bundle::plan::{BufferDecl, EntryDecl, KernelCode, KernelDecl, PLAN_VERSION, RawPlan, Step, WeightDecl, WeightLayout};
use std::collections::BTreeMap;

/// Alignment of a layer's weights in the weight section.
const SLAB_ALIGN: u64 = 64 << 10;

pub(super) fn run(unit: &mut Unit, settings: &Settings) -> PassResult {
    let missing = |what: &str| format!("there is no {what}");
    let schedule = unit.schedule.as_ref().ok_or_else(|| missing("schedule"))?;
    let arena = unit.arena.as_ref().ok_or_else(|| missing("arena"))?;
    let mut kernels = Kernels { settings, artifacts: artifacts_used(schedule), ids: BTreeMap::new(), decls: Vec::new() };
    let mut entries = Vec::new();
    for entry in &schedule.entries {
        let steps = entry.calls.iter().map(|call| kernels.step(call)).collect::<Result<_, _>>()?;
        entries.push(EntryDecl { class: entry.class, steps });
    }
    unit.plan = Some(RawPlan {
        version: PLAN_VERSION,
        bounds: settings.bounds,
        kv: settings.kv,
        arena_bytes: arena.bytes,
        buffers: buffers(schedule, arena),
        weights: weights(&schedule.weights)?,
        kernels: kernels.decls,
        entries,
    });
    Ok(())
}

/// Code objects of the catalogue that a plan uses, in order of their ids: the rest is not sealed.
pub fn artifacts_used(schedule: &Schedule) -> Vec<usize> {
    let mut used: Vec<usize> = schedule.entries.iter().flat_map(|entry| entry.calls.iter().filter_map(|call| call.artifact)).collect();
    used.sort_unstable();
    used.dedup();
    used
}

/// Place of a weight's slab: the embedding and tables, then each layer, then the head.
pub(super) fn slab(name: &str) -> (u32, u32) {
    let layer = name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()).and_then(|layer| layer.parse().ok());
    match (layer, name) {
        (Some(layer), _) => (1, layer),
        (None, "norm" | "head") => (2, 0),
        (None, _) => (0, 0),
    }
}

struct Kernels<'a> {
    settings: &'a Settings,
    /// Catalogue positions by artifact id.
    artifacts: Vec<usize>,
    ids: BTreeMap<(Contract, Option<usize>), KernelId>,
    decls: Vec<KernelDecl>,
}

impl Kernels<'_> {
    fn step(&mut self, call: &Call) -> Result<Step, String> {
        let kernel = self.id(call)?;
        Ok(Step::Launch { kernel, grid: call.grid, operands: call.operands.clone() })
    }

    fn id(&mut self, call: &Call) -> Result<KernelId, String> {
        let key = (call.contract, call.artifact);
        if let Some(&found) = self.ids.get(&key) {
            return Ok(found);
        }
        let code = call.artifact.map(|index| self.code(index)).transpose()?;
        let id = KernelId(self.decls.len() as u32);
        self.decls.push(KernelDecl { contract: call.contract, code });
        self.ids.insert(key, id);
        Ok(id)
    }

    fn code(&self, index: usize) -> Result<KernelCode, String> {
        let kernel = self.settings.catalogue.kernels().get(index).ok_or_else(|| format!("the catalogue has no kernel {index}"))?;
        let id = self.artifacts.binary_search(&index).map_err(|_| format!("kernel {index} is not in the schedule"))?;
        Ok(KernelCode { artifact: ArtifactId(id as u32), symbol: kernel.manifest.symbol.clone() })
    }
}

fn buffers(schedule: &Schedule, arena: &Arena) -> Vec<BufferDecl> {
    let decl = |(buffer, &(offset_bytes, size_bytes)): (&crate::schedule::Buffer, &(u64, u64))| BufferDecl {
        label: buffer.label.clone(),
        dtype: buffer.dtype,
        elements: buffer.elements,
        kind: buffer.kind,
        offset_bytes,
        size_bytes,
    };
    schedule.buffers.iter().zip(&arena.places).map(decl).collect()
}

fn weights(weights: &[Weight]) -> Result<Vec<WeightDecl>, String> {
    let mut end = 0_u64;
    let mut current = None;
    let mut decls = Vec::new();
    for weight in weights {
        let size_bytes = size_bytes(weight).ok_or_else(|| format!("weight @{} is too large", weight.name))?;
        let slab = slab(&weight.name);
        let align = if current == Some(slab) { TENSOR_ALIGN } else { SLAB_ALIGN };
        let offset_bytes = end.next_multiple_of(align);
        end = offset_bytes.checked_add(size_bytes).ok_or_else(|| format!("weight @{} ends beyond the address space", weight.name))?;
        current = Some(slab);
        let Weight { name, sources, dtype, shape, layout, rows } = weight.clone();
        decls.push(WeightDecl { name, sources, dtype, shape, layout, rows, offset_bytes, size_bytes });
    }
    Ok(decls)
}

fn size_bytes(weight: &Weight) -> Option<u64> {
    let rows = u64::from(*weight.shape.first()?);
    let rows = match weight.layout {
        WeightLayout::Panel16 => rows.next_multiple_of(16),
        WeightLayout::RowMajor | WeightLayout::PanelK64 => rows,
    };
    weight.shape.iter().skip(1).try_fold(rows, |n, &dim| n.checked_mul(u64::from(dim)))?.checked_mul(weight.dtype.bytes())
}
