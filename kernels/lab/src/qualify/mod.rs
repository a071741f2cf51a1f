//! `qualify`: every kernel of a device against the f64 reference.
//!
//! Cases are drawn over the whole domain that a contract or a manifest declares, edges first, with
//! hostile values. Outputs are poisoned, guards lie around every operand, and the same bytes must come
//! from a second run, from a graph, with other threads, in a class of the exact size and with the
//! residual in place. Each kernel is checked in a process of its own, so that one that hangs or faults
//! is named and the others go on.

mod broken;
mod case;
mod check;
mod child;
mod lower;
mod problems;
mod record;
mod report;
mod subject;
mod twin;
mod values;

use anyhow::{Context, bail};
use broken::{Broken, Fault};
use clap::{Args, ValueEnum};
use oxide_runtime::device::cpu::{CpuPlace, Isa};
use oxide_runtime::device::cuda::CudaPlace;
use oxide_runtime::device::place::Place;
use std::path::PathBuf;
use subject::{Kind, Subject, artifact_subjects, cpu_subjects};
use twin::Twin;

/// Where kernels run.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The cpu device's own kernels
    Cpu,
    /// Sealed artifacts on an NVIDIA GPU
    Cuda,
    /// The contracts of sealed artifacts, computed by the cpu device: checks this tool without a GPU
    Twin,
}

/// Options of `qualify`.
#[derive(Args, Clone, Debug)]
pub(crate) struct QualifyArgs {
    /// Device
    #[arg(long, value_enum, default_value = "cuda")]
    device: Device,
    /// Only kernels of this operator (`linear`, `attend_decode`, …)
    #[arg(long, value_name = "NAME")]
    family: Option<String>,
    /// Only kernels whose name holds this, or whose SHA-256 starts with it
    #[arg(long, value_name = "HASH|NAME")]
    artifact: Option<String>,
    /// Folder of artifacts (cuda)
    #[arg(long, value_name = "DIR", default_value = "artifacts/sm90")]
    artifacts: PathBuf,
    /// Cases of each kernel: edges of its domain first, then random ones
    #[arg(long, value_name = "N", default_value_t = 24)]
    cases: usize,
    /// Seed of shapes and values
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Kernels checked at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: usize,
    /// Threads of the cpu kernels
    #[arg(long, value_name = "N", default_value_t = 2)]
    threads: usize,
    /// Seconds that one kernel may take before its process is ended
    #[arg(long, value_name = "S", default_value_t = 600)]
    timeout: u64,
    /// GPU number
    #[arg(long, value_name = "N", default_value_t = 0)]
    ordinal: u32,
    /// Write all results to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a record of the run, for `docs/results`, to a new folder
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Source revision that the record names
    #[arg(long, value_name = "REV", requires = "record")]
    revision: Option<String>,
    /// Break the first kernel in this way, to see that the check finds it
    #[arg(long, value_enum, value_name = "FAULT")]
    self_test: Option<Fault>,
    /// Check one kernel in this process and print its cases as JSON lines
    #[arg(long, hide = true, value_name = "NAME")]
    one: Option<String>,
}

/// Checks kernels.
///
/// # Errors
/// If none is chosen, a file cannot be written, or a kernel fails.
pub(crate) fn run(args: &QualifyArgs) -> anyhow::Result<()> {
    let subjects = chosen(args)?;
    if let Some(name) = &args.one {
        let subject = subjects.iter().find(|subject| subject.name == *name).with_context(|| format!("there is no kernel `{name}`"))?;
        return child::run_one(args, subject);
    }
    if subjects.is_empty() {
        bail!("no kernel is called so; leave out --family and --artifact to check all");
    }
    if let Some(folder) = &args.record {
        record::refuse_old(folder)?;
    }
    let results = child::run_all(args, &subjects);
    let report = report::Report::new(args, &results);
    if let Some(path) = &args.json {
        std::fs::write(path, report.json()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(folder) = &args.record {
        record::write(folder, args, &report)?;
    }
    print!("{}", report.table());
    let failed = report.failed();
    if failed > 0 { bail!("{failed} of {} kernels failed", results.len()) } else { Ok(()) }
}

fn chosen(args: &QualifyArgs) -> anyhow::Result<Vec<Subject>> {
    let all = match args.device {
        Device::Cpu => cpu_subjects(),
        Device::Cuda | Device::Twin => artifact_subjects(&args.artifacts)?,
    };
    let is_named = |subject: &Subject, wanted: &str| {
        subject.name.contains(wanted) || subject.sha256().is_some_and(|sha256| wanted.len() >= 6 && sha256.starts_with(wanted))
    };
    let fits = |subject: &Subject| {
        args.family.as_ref().is_none_or(|family| subject.family == family)
            && args.artifact.as_ref().is_none_or(|wanted| is_named(subject, wanted))
    };
    Ok(all.into_iter().filter(fits).collect())
}

/// The place where a subject's kernel runs, and the witness that it is compared with beside the reference.
fn places(args: &QualifyArgs, subject: &Subject) -> anyhow::Result<(Box<dyn Place>, Option<Twin>)> {
    let cpu = |isa| CpuPlace::new(isa, args.threads);
    let (place, witness): (Box<dyn Place>, _) = match (&subject.kind, args.device) {
        (Kind::Cpu { isa, .. }, _) => (Box::new(cpu(*isa)?), None),
        (Kind::Artifact { manifest, .. }, Device::Twin) => (Box::new(Twin::new(cpu(Isa::best())?, manifest)), None),
        (Kind::Artifact { manifest, code }, Device::Cpu | Device::Cuda) => {
            (Box::new(CudaPlace::open(args.ordinal, manifest, code)?), Some(Twin::new(cpu(Isa::best())?, manifest)))
        }
    };
    Ok(match args.self_test {
        None => (place, witness),
        Some(fault) => (Box::new(Broken::new(place, fault)), witness),
    })
}
