//! Weights: checkpoint tensors → final layout, in bounded memory, in parallel, to the same bytes always.
//!
//! A weight is made in parts of a few MiB, each part from blocks of rows that are independent of each
//! other. Peak memory is a constant number of parts, whatever the size of the model.

mod blocks;
mod rope;

pub use rope::RopeTable;

use crate::checkpoint::{Inventory, Tensor};
use blocks::Blocks;
use oxide_bundle::ids::WeightId;
use oxide_bundle::plan::{RawPlan, WeightDecl, WeightLayout};
use std::io;

/// Bytes of a part, about.
const PART_BYTES: usize = 16 << 20;

/// Why weights could not be made.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// A tensor could not be read.
    #[error("weight {weight}: reading {file}: {source}")]
    Read {
        /// The weight.
        weight: String,
        /// The file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// The plan asks for what no tensor gives.
    #[error("weight {weight}: {problem}")]
    Plan {
        /// The weight.
        weight: String,
        /// What does not fit.
        problem: String,
    },
}

/// Makes every weight of a plan, by rising id, in parts; `write` gets each part in order.
///
/// # Errors
/// If a tensor cannot be read, does not fit the plan, or `write` fails.
pub fn write_all<E: From<WeightError>>(
    plan: &RawPlan,
    inventory: &Inventory,
    table: &RopeTable,
    mut write: impl FnMut(WeightId, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    for (id, decl) in (0..).map(WeightId).zip(&plan.weights) {
        if decl.sources.is_empty() {
            table.parts(decl, PART_BYTES)?.try_for_each(|part| write(id, &part))?;
        } else if decl.layout == WeightLayout::PanelK64 {
            let blocks = Blocks::new(decl, sources(decl, inventory)?)?;
            blocks.column_parts(PART_BYTES).try_for_each(|part| write(id, &part?))?;
        } else {
            let blocks = Blocks::new(decl, sources(decl, inventory)?)?;
            blocks.row_parts(PART_BYTES).try_for_each(|part| write(id, &part?))?;
        }
    }
    Ok(())
}

fn sources<'a>(decl: &WeightDecl, inventory: &'a Inventory) -> Result<Vec<&'a Tensor>, WeightError> {
    let find = |name: &String| {
        let absent = || WeightError::Plan { weight: decl.name.clone(), problem: format!("the checkpoint has no tensor {name}") };
        inventory.tensors.get(name).ok_or_else(absent)
    };
    decl.sources.iter().map(find).collect()
}
