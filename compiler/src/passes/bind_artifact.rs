//! Gives every parameter of a code object its source: by role, as its manifest says.

use super::select_kernels::Source;
use crate::catalogue::{Catalogue, Kernel};
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::contract::{Dim, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{Extent, Sym, Value};
use oxide_bundle::step::StepBounds;

/// A kernel of the catalogue.
pub(super) fn kernel(catalogue: &Catalogue, index: usize) -> Result<&Kernel, String> {
    catalogue.kernels().get(index).ok_or_else(|| format!("the catalogue has no kernel {index}"))
}

/// Sources of every parameter. `known` are the operands of the contract; each must be taken.
pub(super) fn bind(known: &[(Role, Source)], manifest: &ArtifactManifest, bounds: &StepBounds) -> Result<Vec<(Role, Source)>, String> {
    let mut operands: Vec<(Role, Source)> = Vec::new();
    for param in &manifest.params {
        if operands.iter().any(|(role, _)| *role == param.role) {
            continue;
        }
        let source = match param.role {
            Role::Input(slot) => Source::Fixed(Value::Input(slot)),
            Role::Output(slot) => Source::Fixed(Value::Output(slot)),
            Role::Scalar(dim) => Source::Fixed(Value::Scalar(scalar(dim, param.value, bounds)?)),
            Role::Workspace(_) | Role::Counters(_) => workspace(manifest, param.role)?,
            role => {
                let found = known.iter().find(|(known, _)| *known == role).map(|(_, source)| *source);
                found.ok_or_else(|| format!("kernel {} wants {role:?}, which its contract does not have", manifest.name))?
            }
        };
        operands.push((param.role, source));
    }
    match known.iter().find(|(role, _)| operands.iter().all(|(bound, _)| bound != role)) {
        Some((role, _)) => Err(format!("kernel {} does not take {role:?} of its contract", manifest.name)),
        None => Ok(operands),
    }
}

fn scalar(dim: Dim, value: Option<Extent>, bounds: &StepBounds) -> Result<Extent, String> {
    match (dim, value) {
        (_, Some(value)) => Ok(value),
        (Dim::Tokens, None) => Ok(Extent::sym(Sym::Tokens, 1)),
        (Dim::Seqs, None) => Ok(Extent::sym(Sym::Seqs, 1)),
        (Dim::Rows, None) => Ok(Extent::sym(Sym::Rows, 1)),
        (Dim::KvPages, None) => Ok(Extent::sym(Sym::KvPages, 1)),
        (Dim::TableStride, None) => Ok(Extent::lit(bounds.pages_per_seq_max)),
        (Dim::Constant, None) => Err("a constant parameter has no value in its manifest".to_owned()),
    }
}

fn workspace(manifest: &ArtifactManifest, role: Role) -> Result<Source, String> {
    let found = manifest.workspace.iter().find(|workspace| workspace.role == role);
    let found = found.ok_or_else(|| format!("kernel {} names {role:?} and does not declare it", manifest.name))?;
    let dtype = match found.dtype.as_str() {
        "float32" => DType::F32,
        "bfloat16" => DType::Bf16,
        "int32" | "uint32" => DType::U32,
        other => return Err(format!("kernel {} has a workspace of unknown element type {other}", manifest.name)),
    };
    Ok(Source::Workspace { dtype, elements: found.elements, zeroed: found.zeroed })
}
