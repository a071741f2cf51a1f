//! A record of a run, as `docs/results` keeps them: never edited afterwards.

use super::QualifyArgs;
use super::report::{Report, shown};
use anyhow::{Context, bail};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Refuses a folder that holds a record already.
///
/// # Errors
/// If it does.
pub(crate) fn refuse_old(folder: &Path) -> anyhow::Result<()> {
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{} is not empty: records are not overwritten", folder.display());
    }
    Ok(())
}

/// Writes `README.md` and `qualify.json`.
///
/// # Errors
/// If a file cannot be written.
pub(crate) fn write(folder: &Path, args: &QualifyArgs, report: &Report) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, text) in [("qualify.json", report.json()), ("README.md", page(args, report))] {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn page(args: &QualifyArgs, report: &Report) -> String {
    let mut out = String::from("# Qualification of kernels\n\n| | |\n|---|---|\n");
    let revision = args.revision.as_deref().unwrap_or("not given");
    let passed = report.kernels.len() - report.failed();
    let rows = [
        ("device", report.device.clone()),
        ("source", format!("revision `{revision}`, oxide-lab {}", report.version)),
        ("command", format!("`{}`", report.command)),
        ("cases", format!("{} a kernel, seed {}", report.cases, report.seed)),
        ("result", format!("{passed} passed, {} failed ([raw](qualify.json))", report.failed())),
    ];
    for (name, value) in rows {
        let _ = writeln!(out, "| {name} | {value} |");
    }
    out += "\nAn error is given as a share of its tolerance; the tolerances are in `runtime/src/device/tolerance.rs`.\n";
    out += "\n| kernel | SHA-256 | cases | worst of tolerance | verdict |\n|---|---|---|---|---|\n";
    for kernel in &report.kernels {
        let hash = kernel.sha256.as_ref().map_or_else(|| "cpu table".to_owned(), |hash| format!("`{hash}`"));
        let verdict = if kernel.passed { "pass" } else { "**fail**" };
        let _ = writeln!(out, "| `{}` | {hash} | {} | {} | {verdict} |", kernel.name, kernel.cases.len(), shown(kernel.worst_of_tolerance));
    }
    out
}
