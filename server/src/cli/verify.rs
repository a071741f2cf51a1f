//! `verify`: every hash; with `--full` also every tensor digest and the golden vectors; a policy if one is given.

use super::args::VerifyArgs;
use super::error::CliError;
use super::golden::{GoldenReport, run_golden};
use super::policy::Policy;
use super::{output, tools};
use crate::model::{LoadError, LoadOptions, LoadedModel};
use oxide_bundle::{Bundle, Mode};
use oxide_runtime::open::{OpenOptions, open_bundle};
use serde_json::json;

pub(super) fn run(args: &VerifyArgs, load: &LoadOptions) -> Result<(), CliError> {
    let trusted = tools::public_keys(&args.key)?;
    let policy = args.policy.as_deref().map(Policy::read).transpose()?;
    let mode = Mode::Full;
    let (bundle, golden) = match args.full {
        true => {
            let model = LoadedModel::load(&LoadOptions { mode, ..load.clone() })?;
            let golden = run_golden(&model)?;
            (model.bundle.clone(), Some(golden))
        }
        false => {
            let options = OpenOptions { access: load.access, mode, expect: load.expect };
            (open_bundle(&load.path, options).map_err(LoadError::from)?.bundle, None)
        }
    };
    let signer = match trusted.as_slice() {
        [] => None,
        trusted => Some(tools::signer(&bundle, &load.path, args.signature.as_deref(), trusted)?.to_string()),
    };
    if let Some(policy) = policy {
        policy.check(&bundle, &load.path)?;
    }
    report(args, &bundle, golden.as_ref(), signer.as_deref())?;
    golden.map_or(Ok(()), GoldenReport::into_result)
}

fn report(args: &VerifyArgs, bundle: &Bundle, golden: Option<&GoldenReport>, signer: Option<&str>) -> Result<(), CliError> {
    let value = json!({
        "seal": bundle.seal().to_string(),
        "sections": bundle.sections().len(),
        "weight_chunks": bundle.weight_chunk_count(),
        "tensors": bundle.tensors().len(),
        "signed_by": signer,
        "golden": golden.map(GoldenReport::to_json),
        "ok": golden.is_none_or(|golden| golden.failures.is_empty()),
    });
    output::report(args.json, &value, || {
        let hashes = format!(
            "seal      {}\nhashes    ok: {} sections, {} weight chunks, {} tensors\n",
            bundle.seal(),
            bundle.sections().len(),
            bundle.weight_chunk_count(),
            bundle.tensors().len()
        );
        let golden = golden.map(|golden| {
            let note = if golden.unproven { " (sealed with --no-golden: unproven)" } else { "" };
            format!("golden    {} of {} vectors reproduced{note}\n", golden.checked - golden.failures.len(), golden.checked)
        });
        let signed = signer.map(|key| format!("signed    by {key}\n")).unwrap_or_default();
        hashes + &signed + golden.as_deref().unwrap_or("golden    not run (use --full)\n")
    })
}
