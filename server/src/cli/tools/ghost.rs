//! `ghost`: the same plan and kernels with weights that follow from a rule, in a file that leaves them out.
//!
//! For capacity tests and bug reports: it loads, fits and runs as the original does, and gives nothing of the model
//! away but its shape, tokenizer and template.

use super::args::GhostArgs;
use crate::cli::error::CliError;
use crate::cli::paths::refuse_overwriting;
use crate::cli::{output, size};
use crate::model::{LoadError, LoadOptions};
use oxide_bundle::container::seal_ghost;
use oxide_bundle::ids::ArtifactId;
use oxide_bundle::manifest::{Golden, GoldenStatus, Manifest, Provenance};
use oxide_bundle::section::Artifact;
use oxide_bundle::{Bundle, Contents};
use oxide_runtime::open::OpenError;
use serde_json::json;

pub(super) fn run(args: &GhostArgs, load: &LoadOptions) -> Result<(), CliError> {
    refuse_overwriting(&args.output, [load.path.as_path()])?;
    let bundle = super::open(load)?;
    let sealed = seal_ghost(contents(&bundle));
    let (bytes, report) = sealed.map_err(|source| LoadError::from(OpenError::Refused { path: load.path.clone(), source }))?;
    super::write_file(&args.output, &bytes)?;
    let value = json!({
        "of": bundle.seal().to_string(),
        "seal": report.seal.to_string(),
        "output": args.output,
        "stored_bytes": bytes.len(),
        "sealed_bytes": report.sealed_bytes,
    });
    output::report(args.json, &value, || {
        let (stored, whole) = (size::human(bytes.len() as u64), size::human(report.sealed_bytes));
        format!("wrote     {} ({stored}, {whole} when loaded)\nseal      {}\n", args.output.display(), report.seal)
    })
}

fn contents(bundle: &Bundle) -> Contents {
    let ids = (0..bundle.artifacts().len() as u32).map(ArtifactId);
    let artifacts = ids
        .zip(bundle.artifacts())
        .map(|(id, entry)| Artifact { code: bundle.artifact_code(id).unwrap_or_default().to_vec(), manifest: entry.manifest.clone() });
    let manifest = bundle.manifest();
    let mut options = bundle.provenance().options.clone();
    options.insert("ghost-of".to_owned(), bundle.seal().to_string());
    Contents {
        manifest: Manifest { name: format!("{}-ghost", manifest.name), golden: GoldenStatus::Unproven, ..manifest.clone() },
        plan: bundle.plan().raw().clone(),
        artifacts: artifacts.collect(),
        driver_min: bundle.superblock().target.driver_min,
        tokenizer_json: bundle.tokenizer_json().to_vec(),
        template: bundle.template().clone(),
        golden: Golden { greedy: Vec::new(), ..bundle.golden().clone() },
        provenance: Provenance { options, ..bundle.provenance().clone() },
        licences: format!("{}\nThis is a ghost: the weights are generated, not the model's.\n", bundle.licences()),
    }
}
