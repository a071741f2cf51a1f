//! Gives every buffer an offset in one arena that all entries share.
//!
//! A scratch buffer lives, in each entry, from its first writer to its last reader; two buffers that
//! live together in any entry share no byte. Larger buffers are placed first, each at the lowest
//! offset that is free of its neighbours: deterministic, and near the bound for chains.

use super::{PassResult, Settings, Unit};
use crate::schedule::{Buffer, Entry, Schedule};
use oxide_bundle::ids::BufferId;
use oxide_bundle::plan::{BatchClass, Bindings, BufferKind, Value};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Alignment of buffers.
const BUFFER_ALIGN: u64 = 256;

/// Where buffers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Bytes of the arena.
    pub bytes: u64,
    /// Offset and size of each buffer of the schedule.
    pub places: Vec<(u64, u64)>,
}

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    let schedule = unit.schedule.as_ref().ok_or_else(|| "there is no schedule".to_owned())?;
    unit.arena = Some(plan(schedule)?);
    Ok(())
}

/// First and last call of a buffer, in each entry that uses it.
type Lives = BTreeMap<usize, (usize, usize)>;

fn plan(schedule: &Schedule) -> Result<Arena, String> {
    let lives = lives(schedule);
    let mut sizes = Vec::new();
    for (buffer, life) in schedule.buffers.iter().zip(&lives) {
        sizes.push(size(buffer, life, &schedule.entries)?);
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| (Reverse(sizes[index]), index));
    let mut places = vec![(0, 0); sizes.len()];
    let mut placed: Vec<usize> = Vec::new();
    for index in order {
        let overlaps = |&&other: &&usize| together(&schedule.buffers, &lives, index, other);
        let mut taken: Vec<(u64, u64)> = placed.iter().filter(overlaps).map(|&other| places[other]).collect();
        taken.sort_unstable();
        places[index] = (lowest_free(&taken, sizes[index]), sizes[index]);
        placed.push(index);
    }
    let bytes = places.iter().map(|&(offset, size)| align(offset + size)).max().unwrap_or(0);
    Ok(Arena { bytes, places })
}

/// Bindings at the bounds of a class.
pub(super) fn bindings(class: BatchClass) -> Bindings {
    Bindings { tokens: class.tokens_max(), seqs: class.seqs_max(), rows: class.seqs_max(), kv_pages: 0 }
}

fn lives(schedule: &Schedule) -> Vec<Lives> {
    let mut lives: Vec<Lives> = vec![Lives::new(); schedule.buffers.len()];
    for (entry_index, entry) in schedule.entries.iter().enumerate() {
        for (call_index, call) in entry.calls.iter().enumerate() {
            for operand in &call.operands {
                if let Value::Buffer(BufferId(id)) = operand.value
                    && let Some(life) = lives.get_mut(id as usize)
                {
                    life.entry(entry_index).or_insert((call_index, call_index)).1 = call_index;
                }
            }
        }
    }
    lives
}

fn size(buffer: &Buffer, life: &Lives, entries: &[Entry]) -> Result<u64, String> {
    let mut largest = 0;
    for entry in life.keys() {
        let elements = buffer.elements.eval(bindings(entries[*entry].class));
        let elements = elements.filter(|&n| n < u32::MAX).ok_or_else(|| format!("buffer {} has too many elements", buffer.label))?;
        largest = largest.max(u64::from(elements) * buffer.dtype.bytes());
    }
    Ok(largest)
}

fn together(buffers: &[Buffer], lives: &[Lives], a: usize, b: usize) -> bool {
    if buffers[a].kind == BufferKind::State || buffers[b].kind == BufferKind::State {
        return true;
    }
    let overlap = |(entry, &(first, last)): (&usize, &(usize, usize))| {
        lives[b].get(entry).is_some_and(|&(other_first, other_last)| first <= other_last && other_first <= last)
    };
    lives[a].iter().any(overlap)
}

/// The lowest aligned offset where `size` bytes touch none of `taken`, which is sorted.
fn lowest_free(taken: &[(u64, u64)], size: u64) -> u64 {
    let mut offset = 0;
    for &(start, length) in taken {
        if offset + size <= start {
            break;
        }
        offset = offset.max(align(start + length));
    }
    offset
}

const fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(BUFFER_ALIGN)
}
