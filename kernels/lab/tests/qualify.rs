//! `oxide-lab qualify` from outside: sound kernels pass, broken ones are found and named, a hung or dead
//! one does not stop the others.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Seconds that a hung kernel gets: more than a sound one needs on a machine that stalls.
const TIMEOUT_S: &str = "30";

struct Run {
    output: Output,
    report: Value,
}

fn qualify(args: &[&str]) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("report.json");
    let mut lab = Command::new(env!("CARGO_BIN_EXE_oxide-lab"));
    lab.arg("qualify").args(args).args(["--jobs", "2", "--threads", "1", "--timeout", TIMEOUT_S, "--json"]).arg(&json);
    let output = lab.output().expect("runs");
    let text = std::fs::read_to_string(&json).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    Run { output, report: serde_json::from_str(&text).expect("JSON") }
}

impl Run {
    fn kernels(&self) -> &[Value] {
        self.report["kernels"].as_array().expect("kernels")
    }

    /// Everything said of the first kernel's faults.
    fn faults(&self) -> String {
        let kernel = &self.kernels()[0];
        let cases = kernel["cases"].as_array().expect("cases").iter().flat_map(|case| case["faults"].as_array().expect("faults"));
        let all: Vec<&str> = kernel["faults"].as_array().expect("faults").iter().chain(cases).filter_map(Value::as_str).collect();
        all.join("\n")
    }

    fn others_passed(&self) -> bool {
        self.kernels().len() > 1 && self.kernels()[1..].iter().all(|kernel| kernel["passed"] == true)
    }
}

#[test]
fn the_cpu_device_qualifies() {
    let run = qualify(&["--device", "cpu", "--cases", "12"]);
    let text = String::from_utf8_lossy(&run.output.stdout).into_owned();
    assert!(run.output.status.success(), "{text}");
    let families: Vec<&str> = run.kernels().iter().filter_map(|kernel| kernel["family"].as_str()).collect();
    for family in ["embed", "rms_norm", "linear", "linear_swiglu", "rope_append", "attend_decode", "attend_mixed", "sample"] {
        assert!(families.contains(&family) && text.contains(family), "{family}");
    }
    for kernel in run.kernels() {
        let cases = kernel["cases"].as_array().expect("cases");
        assert_eq!(cases.len(), 12);
        let worst = kernel["worst_of_tolerance"].as_f64().expect("a number");
        assert!((0.0..=1.0).contains(&worst), "{kernel}");
        let compared: u64 = cases
            .iter()
            .flat_map(|case| case["errors"].as_object().expect("errors").values())
            .filter_map(|error| error["values"].as_u64())
            .sum();
        assert!(compared > 0, "{}: nothing was compared", kernel["name"]);
        assert!(cases.iter().all(|case| case["equal"].as_array().expect("a list").len() >= 3), "{kernel}");
    }
}

#[test]
fn every_kind_of_broken_kernel_is_found() {
    for (fault, family, said) in [
        ("wrong", "rms_norm", "the reference has"),
        ("wrong", "sample", "the reference has"),
        ("wrong", "linear", "the reference has"),
        ("unwritten", "rms_norm", "not written"),
        ("nan", "linear", "NaN"),
        ("overrun", "embed", "behind its end"),
        ("underrun", "take_rows", "before its start"),
        ("unstable", "linear", "differs from the first run's"),
        ("scribble", "rms_norm", "only read"),
        ("padding", "rms_norm", "no declared output"),
    ] {
        let run = qualify(&["--device", "cpu", "--family", family, "--cases", "4", "--self-test", fault]);
        assert_eq!(run.output.status.code(), Some(1), "{fault} {family}");
        assert_eq!(run.kernels()[0]["passed"], false, "{fault} {family}");
        assert!(run.faults().contains(said), "{fault} {family}: {}", run.faults());
    }
}

#[test]
fn a_dead_kernel_is_named_and_the_others_go_on() {
    let run = qualify(&["--device", "cpu", "--artifact", "rms_norm", "--cases", "2", "--self-test", "abort"]);
    assert_eq!(run.output.status.code(), Some(1));
    assert!(run.faults().contains("died") && run.faults().contains("in case rms_norm[dim="), "{}", run.faults());
    assert!(run.others_passed());
}

#[test]
fn a_hung_kernel_is_ended_and_the_others_go_on() {
    let run = qualify(&["--device", "cpu", "--artifact", "rms_norm", "--cases", "2", "--self-test", "hang"]);
    assert_eq!(run.output.status.code(), Some(1));
    assert!(run.faults().contains(&format!("no end after {TIMEOUT_S} s")), "{}", run.faults());
    assert!(run.others_passed());
}

#[test]
fn operands_of_sealed_kernels_are_laid_out_as_their_manifests_say() {
    // The smallest model's kernels of every family, computed by the cpu device from the GPU's operands.
    let artifacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90");
    for named in ["256", "q4_kv2_d64", "sample_4096", "qk_norm"] {
        let run = qualify(&["--device", "twin", "--artifacts", artifacts.to_str().expect("UTF-8"), "--artifact", named, "--cases", "3"]);
        assert!(run.output.status.success(), "{named}: {}", String::from_utf8_lossy(&run.output.stdout));
        assert!(run.kernels().iter().all(|kernel| kernel["sha256"].as_str().is_some_and(|hash| hash.len() == 64)));
    }
}

#[test]
fn without_a_gpu_each_artifact_says_so() {
    let artifacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90");
    let run =
        qualify(&["--device", "cuda", "--artifacts", artifacts.to_str().expect("UTF-8"), "--artifact", "take_rows_256", "--cases", "2"]);
    let has_gpu = run.report["device"].as_str().is_some_and(|device| !device.is_empty());
    assert!(has_gpu || run.faults().contains("driver") || run.faults().contains("device"), "{}", run.faults());
    assert_eq!(run.output.status.success(), run.kernels()[0]["passed"] == true);
}

#[test]
fn a_record_names_device_command_and_hashes_and_is_not_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let record = folder.path().join("2026-01-01-qualify");
    let args =
        ["--device", "cpu", "--family", "take_rows", "--cases", "2", "--revision", "abc123", "--record", record.to_str().expect("UTF-8")];
    assert!(qualify(&args).output.status.success());
    let page = std::fs::read_to_string(record.join("README.md")).expect("a page");
    for part in ["| device | cpu: ", "`abc123`", "oxide-lab qualify --device cpu", "take_rows@portable", "seed 1"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(record.join("qualify.json").exists());
    let mut lab = Command::new(env!("CARGO_BIN_EXE_oxide-lab"));
    let again = lab.arg("qualify").args(args).output().expect("runs");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("not overwritten"));
}

#[test]
fn a_name_that_no_kernel_has_is_an_error() {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_oxide-lab"));
    let output = lab.args(["qualify", "--device", "cpu", "--family", "convolution"]).output().expect("runs");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("no kernel is called so"));
}
