//! `oxide-lab qualify` from outside: sound kernels pass, broken ones are found and named, a hung or dead
//! one does not stop the others.

use oxide_testkit::{FakeCuda, repo};
use serde_json::Value;
use std::process::{Command, Output};

/// Seconds that a hung kernel gets: more than a sound one needs on a machine that stalls.
const TIMEOUT_S: &str = "60";

struct Run {
    output: Output,
    report: Value,
}

const LAB: &str = env!("CARGO_BIN_EXE_oxide-lab");

fn qualify(args: &[&str]) -> Run {
    qualify_with(Command::new(LAB), &[args, &["--jobs", "2"]].concat())
}

fn qualify_with(mut lab: Command, args: &[&str]) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("report.json");
    lab.arg("qualify").args(args).args(["--threads", "1", "--timeout", TIMEOUT_S, "--json"]).arg(&json);
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
    let artifacts = repo().join("artifacts/sm90");
    for named in ["x256", "256x768", "norm_256", "take_rows_256", "q4_kv2_d64", "sample_4096", "qk_norm"] {
        let run = qualify(&["--device", "twin", "--artifacts", artifacts.to_str().expect("UTF-8"), "--artifact", named, "--cases", "3"]);
        assert!(run.output.status.success(), "{named}: {}", String::from_utf8_lossy(&run.output.stdout));
        assert!(run.kernels().iter().all(|kernel| kernel["sha256"].as_str().is_some_and(|hash| hash.len() == 64)));
    }
}

#[test]
fn without_a_driver_each_artifact_says_so() {
    let run = on(&FakeCuda::absent(), "take_rows_256");
    assert_eq!(run.output.status.code(), Some(1));
    assert!(run.faults().contains("no CUDA driver"), "{}", run.faults());
}

/// A driver whose kernels do nothing: every launch is one that a driver takes, and every kernel is found out.
#[test]
fn a_gpu_that_computes_nothing_is_found_out_and_every_launch_is_legal() {
    for named in ["x256", "256x768", "norm_256", "embed_4096", "take_rows_256", "q4_kv2_d64", "fast512", "sample_4096", "qk_norm"] {
        let fake = FakeCuda::new("");
        let run = on(&fake, named);
        assert_eq!(run.output.status.code(), Some(1), "{named}");
        for kernel in run.kernels() {
            let cases = kernel["cases"].as_array().expect("cases");
            assert!(kernel["faults"].as_array().is_some_and(Vec::is_empty) && cases.len() == 2, "{kernel}");
            for fault in cases.iter().flat_map(|case| case["faults"].as_array().expect("faults")) {
                let fault = fault.as_str().expect("text");
                // A residual that nobody adds to is not the poison that a separate output keeps.
                let is_about_values = ["the reference has", "the cpu device has", "not written", "`in_place` differs"]
                    .iter()
                    .any(|part| fault.contains(part));
                assert!(is_about_values, "{named}: {fault}");
            }
            assert!(cases.iter().all(|case| !case["faults"].as_array().expect("faults").is_empty()), "{kernel}");
        }
        let calls = fake.calls();
        assert!(calls.iter().all(|call| call.code == 0 || call.name == "cuFuncGetParamInfo"), "{named}");
        let count = |name: &str| calls.iter().filter(|call| call.name == name).count();
        let cases = 2 * run.kernels().len();
        // Eager, again, with programmatic dependent launch, in a class of the exact size; and in place where there is a residual.
        assert!(
            count("cuLaunchKernelEx") >= 4 * cases && count("cuGraphLaunch") == cases,
            "{named}: {} {cases}",
            count("cuLaunchKernelEx")
        );
    }
}

/// Two cases of some artifacts on a driver.
fn on(fake: &FakeCuda, named: &str) -> Run {
    let artifacts = repo().join("artifacts/sm90");
    qualify_with(
        fake.command(LAB),
        &["--artifacts", artifacts.to_str().expect("UTF-8"), "--artifact", named, "--cases", "2", "--jobs", "1"],
    )
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
    let mut lab = Command::new(LAB);
    let again = lab.arg("qualify").args(args).output().expect("runs");
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("not overwritten"));
}

#[test]
fn a_name_that_no_kernel_has_is_an_error() {
    let mut lab = Command::new(LAB);
    let output = lab.args(["qualify", "--device", "cpu", "--family", "convolution"]).output().expect("runs");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("no kernel is called so"));
}
