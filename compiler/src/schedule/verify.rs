//! Verifier of schedules: references resolve, roles are unique, nothing is read before it is written.

use super::{Call, Schedule, access};
use oxide_bundle::plan::{BufferKind, Value};
use std::collections::BTreeSet;

/// A schedule that does not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("schedule `{schedule}` is malformed:\n{}", problems.join("\n"))]
pub struct ScheduleError {
    /// Its name.
    pub schedule: String,
    /// `e0 s3: what is wrong`, one for each.
    pub problems: Vec<String>,
}

/// Checks every entry.
///
/// # Errors
/// All problems.
pub fn verify(schedule: &Schedule) -> Result<(), ScheduleError> {
    let mut problems = Vec::new();
    for (id, entry) in schedule.entries.iter().enumerate() {
        let mut written = BTreeSet::new();
        for (step, call) in entry.calls.iter().enumerate() {
            let found = call_problems(schedule, call, &mut written);
            problems.extend(found.into_iter().map(|problem| format!("e{id} s{step}: {problem}")));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ScheduleError { schedule: schedule.name.clone(), problems }) }
}

fn call_problems(schedule: &Schedule, call: &Call, written: &mut BTreeSet<u32>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut roles = BTreeSet::new();
    let mut outputs = Vec::new();
    for operand in &call.operands {
        if !roles.insert(operand.role) {
            problems.push(format!("role {:?} is bound twice", operand.role));
        }
        let (reads, writes) = access(operand.role);
        match operand.value {
            Value::Weight(id) if id.index() >= schedule.weights.len() => problems.push(format!("there is no weight {id}")),
            Value::Buffer(id) => match schedule.buffers.get(id.index()) {
                None => problems.push(format!("there is no buffer {id}")),
                Some(buffer) => {
                    if reads && buffer.kind == BufferKind::Scratch && !written.contains(&id.0) {
                        problems.push(format!("{id} ({}) is read before it is written", buffer.label));
                    }
                    outputs.extend(writes.then_some(id.0));
                }
            },
            _ => {}
        }
    }
    written.extend(outputs);
    problems
}
