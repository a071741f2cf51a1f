//! Results: one JSON document, and a table.

use super::QualifyArgs;
use super::check::CaseReport;
use super::subject::Subject;
use serde::Serialize;
use std::fmt::Write;

/// What was found of one kernel.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct KernelReport {
    /// Name of the kernel.
    pub(crate) name: String,
    /// Operator.
    pub(crate) family: String,
    /// SHA-256 of the code object, if it has one.
    pub(crate) sha256: Option<String>,
    /// What it computes.
    pub(crate) contract: String,
    /// Device that it ran on.
    #[serde(skip)]
    pub(crate) device: String,
    /// Whether everything was right.
    pub(crate) passed: bool,
    /// Largest error of all cases as a share of its tolerance.
    pub(crate) worst_of_tolerance: f64,
    /// What is wrong beside the cases: hung, died.
    pub(crate) faults: Vec<String>,
    /// Wall time.
    pub(crate) seconds: f64,
    /// Its cases.
    pub(crate) cases: Vec<CaseReport>,
}

impl KernelReport {
    /// Of a kernel that nothing is known of.
    pub(crate) fn new(subject: &Subject) -> Self {
        Self {
            name: subject.name.clone(),
            family: subject.family.to_owned(),
            sha256: subject.sha256().map(str::to_owned),
            contract: subject.contract(),
            ..Self::default()
        }
    }

    /// Notes what is wrong.
    pub(crate) fn fault(&mut self, fault: String) {
        self.faults.push(fault);
    }

    fn is_right(&self) -> bool {
        self.faults.is_empty() && !self.cases.is_empty() && self.cases.iter().all(CaseReport::passed)
    }

    fn worst(&self) -> f64 {
        self.cases.iter().flat_map(|case| case.errors.values()).map(|error| error.of_tolerance).fold(0.0, f64::max)
    }

    fn first_fault(&self) -> Option<String> {
        let case = self.cases.iter().find(|case| !case.passed());
        self.faults.first().cloned().or_else(|| case.map(|case| format!("{}: {}", case.case, case.faults.join("; "))))
    }

    /// One line of the table.
    pub(crate) fn line(&self) -> String {
        let verdict = if self.is_right() { "pass" } else { "FAIL" };
        let mut line =
            format!("{verdict} {:<46} {:>4} cases {:>9} {:>7.1} s", self.name, self.cases.len(), shown(self.worst()), self.seconds);
        if let Some(fault) = self.first_fault() {
            line += "  ";
            line += &fault;
        }
        line
    }
}

/// All kernels of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Version of `oxide-lab`.
    pub(crate) version: &'static str,
    /// Device as the first kernel found it.
    pub(crate) device: String,
    /// Seed of shapes and values.
    pub(crate) seed: u64,
    /// Cases of each kernel.
    pub(crate) cases: usize,
    /// The command line.
    pub(crate) command: String,
    /// Fault that was put in on purpose.
    pub(crate) self_test: Option<String>,
    /// Kernels, by name.
    pub(crate) kernels: Vec<KernelReport>,
}

impl Report {
    /// Sums up.
    pub(crate) fn new(args: &QualifyArgs, results: &[KernelReport]) -> Self {
        let sum = |kernel: &KernelReport| KernelReport { passed: kernel.is_right(), worst_of_tolerance: kernel.worst(), ..kernel.clone() };
        let device = results.iter().map(|kernel| kernel.device.clone()).find(|device| !device.is_empty());
        let arguments = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        Self {
            version: env!("CARGO_PKG_VERSION"),
            device: device.unwrap_or_default(),
            seed: args.seed,
            cases: args.cases,
            command: format!("oxide-lab {arguments}"),
            self_test: args.self_test.map(|fault| format!("{fault:?}")),
            kernels: results.iter().map(sum).collect(),
        }
    }

    /// Kernels that failed.
    pub(crate) fn failed(&self) -> usize {
        self.kernels.iter().filter(|kernel| !kernel.passed).count()
    }

    /// The document.
    pub(crate) fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data becomes JSON");
        text.push('\n');
        text
    }

    /// The table: a line an operator, and every failure.
    pub(crate) fn table(&self) -> String {
        let mut out = format!("{}\n", self.device);
        let mut families: Vec<&str> = self.kernels.iter().map(|kernel| kernel.family.as_str()).collect();
        families.sort_unstable();
        families.dedup();
        let _ = writeln!(out, "{:<18} {:>8} {:>8} {:>8} {:>20}", "operator", "kernels", "cases", "failed", "worst of tolerance");
        for family in families {
            let of: Vec<&KernelReport> = self.kernels.iter().filter(|kernel| kernel.family == family).collect();
            let cases: usize = of.iter().map(|kernel| kernel.cases.len()).sum();
            let failed = of.iter().filter(|kernel| !kernel.passed).count();
            let worst = of.iter().map(|kernel| kernel.worst_of_tolerance).fold(0.0, f64::max);
            let _ = writeln!(out, "{family:<18} {:>8} {cases:>8} {failed:>8} {:>20}", of.len(), shown(worst));
        }
        for kernel in self.kernels.iter().filter(|kernel| !kernel.passed) {
            let _ = writeln!(out, "{}", kernel.line());
        }
        let _ = writeln!(out, "{} passed, {} failed", self.kernels.len() - self.failed(), self.failed());
        out
    }
}

/// A share of a tolerance in a table; what is no number is beyond all.
pub(crate) fn shown(share: f64) -> String {
    if share < 1e6 { format!("{share:.3}") } else { "beyond".to_owned() }
}
