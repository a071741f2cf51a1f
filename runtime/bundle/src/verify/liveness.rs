//! Liveness of scratch buffers, recomputed from the steps of each entry.
//!
//! A buffer lives from the step that first writes it to the last step that touches it, both included:
//! a step's inputs and outputs are alive together. Two buffers alive at one step share no byte.

use super::roles::{Access, access};
use super::{Place, PlanErrorKind, Report};
use crate::ids::{BufferId, EntryId, StepId};
use crate::plan::{BufferDecl, BufferKind, EntryDecl, RawPlan, Step, Value};
use std::collections::BTreeMap;

/// Checks every entry.
pub(super) fn check(raw: &RawPlan, report: &mut Report) {
    for (index, entry) in (0..).zip(&raw.entries) {
        let lives = lives(raw, EntryId(index), entry, report);
        check_overlaps(raw, EntryId(index), &lives, report);
    }
}

/// The steps that a buffer lives through.
#[derive(Copy, Clone)]
struct Life {
    buffer: BufferId,
    first: u32,
    last: u32,
}

fn lives(raw: &RawPlan, entry_id: EntryId, entry: &EntryDecl, report: &mut Report) -> Vec<Life> {
    let mut lives: BTreeMap<u32, Life> = BTreeMap::new();
    for (step, uses) in (0..).zip(entry.steps.iter().map(uses)) {
        for (buffer, access) in uses {
            let Some(decl) = raw.buffers.get(buffer.index()).filter(|decl| decl.kind == BufferKind::Scratch) else { continue };
            let born = !lives.contains_key(&buffer.0);
            report.require(
                !born || access == Access::Write,
                || Place::Step(entry_id, StepId(step)),
                PlanErrorKind::ReadBeforeWrite,
                || format!("reads {buffer} {}, which no step before it wrote", decl.label),
            );
            lives.entry(buffer.0).or_insert(Life { buffer, first: step, last: step }).last = step;
        }
    }
    let mut lives: Vec<Life> = lives.into_values().collect();
    lives.sort_by_key(|life| life.first);
    lives
}

/// Buffers of a step, reads before writes, so that a step cannot satisfy its own read.
fn uses(step: &Step) -> Vec<(BufferId, Access)> {
    match step {
        Step::Launch { operands, .. } => {
            let mut uses: Vec<(BufferId, Access)> = Vec::with_capacity(operands.len());
            for operand in operands {
                if let Value::Buffer(id) = operand.value {
                    uses.push((id, access(operand.role)));
                }
            }
            uses.sort_by_key(|(_, access)| *access == Access::Write);
            uses
        }
        Step::Copy { from, to, .. } => vec![(*from, Access::Read), (*to, Access::Write)],
    }
}

/// `lives` is sorted by first step; `alive` holds those that reach the current one.
fn check_overlaps(raw: &RawPlan, entry_id: EntryId, lives: &[Life], report: &mut Report) {
    let decl = |id: BufferId| raw.buffers.get(id.index());
    let mut alive: Vec<Life> = Vec::new();
    for life in lives {
        alive.retain(|other| other.last >= life.first);
        for other in &alive {
            let (Some(a), Some(b)) = (decl(life.buffer), decl(other.buffer)) else { continue };
            report.require(
                !a.shares_bytes(b),
                || Place::Step(entry_id, StepId(life.first)),
                PlanErrorKind::LiveOverlap,
                || {
                    let (new, old) = (describe(life.buffer, a), describe(other.buffer, b));
                    format!("{new} shares bytes with {old}, which lives through {} to {}", StepId(other.first), StepId(other.last))
                },
            );
        }
        alive.push(*life);
    }
}

fn describe(id: BufferId, buffer: &BufferDecl) -> String {
    format!("{id} {} ({}..{})", buffer.label, buffer.offset_bytes, buffer.offset_bytes.saturating_add(buffer.size_bytes))
}
