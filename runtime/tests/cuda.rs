//! The CUDA device through its own interface, over a driver that needs no GPU: graphs and single launches run the
//! same kernels, a batch that does not fit reaches no driver, misuse is an error and not a panic.
//!
//! A driver library is found when a process starts, so each case runs in a child process of this same program.

use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::BatchClass;
use oxide_bundle::step::{NONE, SamplingRow};
use oxide_runtime::device::cuda::{CudaDevice, CudaOptions};
use oxide_runtime::device::{Device, DeviceError, StepInputs, StepOutputs};
use oxide_runtime::open::{OpenOptions, open_bundle};
use oxide_testkit::{DriverCall, FakeCuda, tiny_sm90_bundle};
use std::collections::BTreeMap;

/// Runs one ignored test of this file over the fake driver, and returns the driver's log.
fn child(name: &str) -> Vec<DriverCall> {
    let fake = FakeCuda::new("");
    let program = std::env::current_exe().expect("a test has a path");
    let output = fake.command(program).args(["--exact", name, "--ignored", "--nocapture"]).output().expect("the test runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    fake.calls()
}

fn link(graphs: bool, pdl: bool) -> CudaDevice {
    let opened = open_bundle(&tiny_sm90_bundle(), OpenOptions::default()).expect("the bundle opens");
    let options = CudaOptions { ordinal: 0, kv_pages: Some(8), graphs, pdl };
    CudaDevice::link(&opened.bundle, &opened.weights, options).expect("the bundle is admitted")
}

/// One token of one sequence at position 3 of page 0.
fn one_token(device: &CudaDevice) -> StepInputs {
    StepInputs {
        token_ids: vec![7],
        token_sources: vec![NONE],
        positions: vec![3],
        kv_slots: vec![3],
        block_tables: vec![0; device.plan().bounds().pages_per_seq_max as usize],
        query_starts: vec![0, 1],
        kv_lens: vec![4],
        logit_rows: vec![0],
        sampling: vec![SamplingRow::GREEDY],
        bias_starts: vec![0, 0],
        history_starts: vec![0, 0],
        ..StepInputs::default()
    }
}

/// Runs every decode class once.
fn decode_each_class(device: &mut CudaDevice) -> usize {
    let inputs = one_token(device);
    let classes: Vec<_> = device.plan().entries().iter().map(|entry| entry.class).collect();
    let decodes: Vec<_> = (0..classes.len()).filter(|&index| matches!(classes[index], BatchClass::Decode { .. })).collect();
    for &entry in &decodes {
        device.submit(EntryId(entry as u32), &inputs).expect("the step is taken");
        let mut outputs = StepOutputs::default();
        device.collect(&mut outputs).expect("the step ends");
        assert_eq!(outputs.sampled_ids, [0], "kernels write nothing, and memory is zeroed");
    }
    decodes.len()
}

#[test]
#[ignore = "run by its parent, in a process that finds the fake driver"]
fn child_with_graphs() {
    assert!(decode_each_class(&mut link(true, true)) > 4);
}

#[test]
#[ignore = "run by its parent, in a process that finds the fake driver"]
fn child_without_graphs() {
    assert!(decode_each_class(&mut link(false, false)) > 4);
}

#[test]
#[ignore = "run by its parent, in a process that finds the fake driver"]
fn child_misused() {
    let mut device = link(true, true);
    let inputs = one_token(&device);
    let first = EntryId(0);
    let over = |result: Result<(), DeviceError>| assert!(matches!(result, Err(DeviceError::OverEntry { .. })), "{result:?}");
    over(device.submit(EntryId(99), &inputs));
    over(device.submit(first, &StepInputs { kv_lens: vec![4, 4], ..inputs.clone() }));
    let bias = device.plan().bounds().bias_max as usize + 1;
    over(device.submit(first, &StepInputs { bias_ids: vec![0; bias], bias_values: vec![0.0; bias], ..inputs.clone() }));
    for _ in 0..device.depth() {
        device.submit(first, &inputs).expect("there is room");
    }
    over(device.submit(first, &inputs));
    for _ in 0..device.depth() {
        device.collect(&mut StepOutputs::default()).expect("the step ends");
    }
    let refused = |result: Result<(), DeviceError>, words: &str| {
        let message = result.expect_err("it is refused").to_string();
        assert!(message.contains(words), "{message}");
    };
    refused(device.collect(&mut StepOutputs::default()), "nothing was submitted");
    refused(device.copy_pages(&[(0, 8)]), "copy of page 0 to 8 in a pool of 8 pages");
    device.copy_pages(&[(0, 7)]).expect("both pages are there");
}

fn named<'a>(calls: &'a [DriverCall], name: &str) -> Vec<&'a DriverCall> {
    calls.iter().filter(|call| call.name == name).collect()
}

/// How often each kernel is named by calls.
fn kernels(calls: &[&DriverCall]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for call in calls {
        *counts.entry(call.get("sha256").unwrap_or("none").to_owned()).or_default() += 1;
    }
    counts
}

#[test]
fn graphs_and_single_launches_run_the_same_kernels() {
    let (graphs, singles) = (child("child_with_graphs"), child("child_without_graphs"));
    let (nodes, launches) = (named(&graphs, "node"), named(&singles, "cuLaunchKernelEx"));
    assert!(launches.len() > 100);
    assert_eq!(kernels(&nodes), kernels(&launches));
    assert_eq!(named(&graphs, "cuLaunchKernelEx").len(), 0, "every decode class is a graph");
    assert_eq!(named(&graphs, "cuGraphLaunch").len(), named(&graphs, "cuStreamEndCapture").len());
    assert_eq!(named(&singles, "cuStreamBeginCapture_v2").len(), 0);
}

#[test]
fn what_does_not_fit_reaches_no_driver() {
    let calls = child("child_misused");
    assert_eq!(named(&calls, "cuGraphLaunch").len(), 2, "only what was in order ran");
    let planes = named(&calls, "cuMemcpyDtoDAsync_v2").len();
    assert!(planes > 0 && planes.is_multiple_of(2), "one copy a plane, for the one pair that was in order");
    assert!(calls.iter().all(|call| call.code == 0 || call.name == "cuFuncGetParamInfo"), "the driver had nothing to refuse");
}
