//! What is refused before anything is launched, and by which name.

#[expect(dead_code, unreachable_pub, reason = "shared with the tests of the format, which use all of it")]
#[path = "../../../runtime/bundle/tests/fixture/forge.rs"]
mod forge;

use crate::support::*;
use forge::{LENGTH, OFFSET, entry, replace, u64_at};
use oxide_bundle::container::SectionKind;
use oxide_bundle::section::{ArtifactEntry, KernelIndex};
use oxide_bundle::{Digest, msgpack};
use oxide_testkit::{FakeCuda, binary, tiny_sm90_bundle};
use std::path::PathBuf;
use std::process::Command;

/// Exit code of a device that refuses the bundle.
const DEVICE: i32 = 4;

/// A refusal by the device, of the untouched bundle.
fn refuses(fake: &FakeCuda, words: &[&str]) {
    generate(fake, 4).failed(DEVICE, words);
    assert_no_launch(fake);
}

#[test]
fn a_machine_that_is_not_the_target_is_refused_by_what_it_lacks() {
    refuses(&FakeCuda::absent(), &["no CUDA driver", "libcuda.so.1"]);
    refuses(&FakeCuda::new("devices 0"), &["cuInit", "CUDA_ERROR_NO_DEVICE"]);
    refuses(&FakeCuda::new("fail cuDeviceGetCount 1 100"), &["cuDeviceGetCount", "CUDA_ERROR_NO_DEVICE"]);
    refuses(&FakeCuda::new("capability 8 0\nname Fake A100"), &["needs compute capability 9.0", "Fake A100 has 8.0"]);
    refuses(&FakeCuda::new("driver 12080"), &["kernel ", "needs driver API 13.0, this driver has 12.8", "install a newer driver"]);
    let both = FakeCuda::new("capability 10 0\ndriver 12000");
    refuses(&both, &["has 10.0", "this driver has 12.0"]);
    assert!(both.calls().iter().all(|call| call.name != "cuModuleLoadData"), "nothing is loaded for the wrong device");
}

#[test]
fn a_driver_without_a_function_is_refused_by_the_function_s_name() {
    for symbol in ["cuTensorMapEncodeTiled", "cuGraphUpload", "cuLaunchKernelEx", "cuFuncGetParamInfo", "cuInit"] {
        let fake = FakeCuda::without(symbol);
        refuses(&fake, &["lacks", symbol, "install driver 580 or newer"]);
        assert!(fake.calls().is_empty(), "nothing is called");
    }
}

#[test]
fn what_the_driver_says_of_a_kernel_must_be_what_its_manifest_says() {
    refuses(&FakeCuda::new("registers 3"), &["kernel ", "has 3 registers, its manifest says "]);
    refuses(&FakeCuda::new("fail cuModuleLoadData 2 209"), &["kernel ", "cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU"]);
    refuses(&FakeCuda::new("fail cuModuleGetFunction 3 500"), &["kernel ", "cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND"]);
    refuses(&FakeCuda::new("fail cuLaunchKernelEx@capture 3 701"), &["e0 s2 (kernel ", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"]);
    refuses(&FakeCuda::new("fail cuGraphInstantiateWithFlags 2 1"), &["the graph of entry e1", "cuGraphInstantiateWithFlags"]);
}

#[test]
fn a_graph_with_a_stray_node_is_refused() {
    for (kind, node) in [("kernel", "Kernel"), ("memset", "Other(2)")] {
        let fake = FakeCuda::new(&format!("foreign {kind}"));
        refuses(&fake, &["the graph of entry e0", "no sealed kernel", node]);
        assert_freed(&fake.calls());
    }
}

#[test]
fn whatever_is_refused_is_given_back() {
    for script in
        ["registers 3", "fail cuMemAlloc_v2 1 2", "fail cuMemHostAlloc 3 2", "fail cuEventCreate 2 2", "fail cuMemcpyHtoDAsync_v2 2 1"]
    {
        let fake = FakeCuda::new(script);
        refuses(&fake, &["failed"].map(|word| if script.starts_with("registers") { "registers" } else { word }));
        assert_freed(&fake.calls());
    }
    for call in ["cuGraphUpload", "cuLaunchKernelEx@capture", "cuStreamBeginCapture_v2", "cuGraphGetNodes"] {
        let fake = FakeCuda::new(&format!("fail {call} 2 1"));
        refuses(&fake, &["CUDA_ERROR_INVALID_VALUE"]);
        assert_freed(&fake.calls());
    }
}

/// The parts that a refusal for want of memory prints, and the flags that make them smaller.
const LEDGER: [&str; 6] = ["weights ", "activations ", "step inputs ", "step outputs ", "KV cache ", "the largest consumers: "];

#[test]
fn too_little_memory_prints_the_ledger_the_largest_consumers_and_their_flags() {
    let message = |fake: &FakeCuda, more: &[&str]| {
        let mut args = vec!["generate", "--prompt-ids", "1", "-n", "1"];
        args.extend(more);
        let run = run(fake, &tiny_sm90_bundle(), &args);
        run.failed(DEVICE, &[&["not enough device memory: "], &LEDGER[..]].concat());
        assert_no_launch(fake);
        run.err
    };
    let largest = |message: &str| message.split("the largest consumers: ").nth(1).expect("they are named").to_owned();

    let full = FakeCuda::new("free 550000000");
    let said = message(&full, &[]);
    assert!(said.contains("550000000 B of 151397597184 B are free"), "{said}");
    let named = largest(&said);
    assert_eq!(named.matches(" B (").count(), 3, "{named}");
    assert!(named.starts_with("activations ") && named.contains("(a smaller --max-seqs of oxide-compile)"), "{named}");
    assert!(named.contains("(a smaller model)"), "{named}");
    assert_eq!(count(&full.calls(), "cuMemAlloc_v2"), 0, "what cannot fit is not tried");

    let said = message(&FakeCuda::new(""), &["--kv-memory", "2GiB"]);
    assert!(largest(&said).starts_with("KV cache 2147"), "{said}");
    assert!(said.contains("(a smaller --kv-memory)"), "{said}");

    let said = message(&FakeCuda::new("fail cuMemAlloc_v2 1 2"), &["--kv-memory", "1MiB"]);
    assert!(said.contains("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)"), "{said}");
}

/// The flags that the refusal names are there.
#[test]
fn the_flags_that_a_refusal_names_exist() {
    let help = |program: PathBuf, args: &[&str]| {
        String::from_utf8(Command::new(program).args(args).output().expect("the program runs").stdout).expect("output is UTF-8")
    };
    let compile = help(binary("oxide-compile"), &["--help"]);
    assert!(compile.contains("--max-seqs") && compile.contains("--max-context"), "{compile}");
    assert!(help(PROGRAM.into(), &["--help"]).contains("--kv-memory"));
}

#[test]
fn the_kv_cache_takes_what_is_there() {
    let fake = FakeCuda::new("free 600000000");
    let run = generate(&fake, 4);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let calls = fake.calls();
    let asked = calls.iter().find(|call| call.name == "cuMemAlloc_v2").and_then(|call| call.get("bytes")?.parse::<u64>().ok());
    assert!(asked.is_some_and(|bytes| bytes > 40_000_000 && bytes < 600_000_000 - (512 << 20)), "{asked:?}");
}

/// The bundle with its kernel section rewritten and every hash of the container put right.
fn with_kernels(edit: impl FnOnce(&mut Vec<(ArtifactEntry, Vec<u8>)>)) -> Vec<u8> {
    let mut bytes = bundle();
    let section = section(&bytes, SectionKind::KERN);
    let index_end = 8 + u64::from_le_bytes(bytes[section.start..section.start + 8].try_into().expect("eight bytes")) as usize;
    let index: KernelIndex = msgpack::decode(&bytes[section.start + 8..section.start + index_end]).expect("the index decodes");
    let code = |entry: &ArtifactEntry| {
        let start = section.start + entry.offset_bytes as usize;
        bytes[start..start + entry.size_bytes as usize].to_vec()
    };
    let mut artifacts: Vec<_> = index.artifacts.iter().map(|entry| (entry.clone(), code(entry))).collect();
    edit(&mut artifacts);
    replace(&mut bytes, SectionKind::KERN, &kernel_section(&artifacts));
    bytes
}

fn kernel_section(artifacts: &[(ArtifactEntry, Vec<u8>)]) -> Vec<u8> {
    let mut entries: Vec<ArtifactEntry> = artifacts.iter().map(|(entry, _)| entry.clone()).collect();
    // Offsets change the length of the index, which changes offsets: soon neither does.
    let mut index = Vec::new();
    for _ in 0..4 {
        index = msgpack::encode(&KernelIndex { artifacts: entries.clone() }).expect("the index encodes");
        let mut end = 8 + index.len() as u64;
        for (entry, (_, code)) in entries.iter_mut().zip(artifacts) {
            entry.offset_bytes = end.next_multiple_of(256);
            end = entry.offset_bytes + code.len() as u64;
        }
    }
    let mut section = [&(index.len() as u64).to_le_bytes()[..], &index].concat();
    for (entry, (_, code)) in entries.iter().zip(artifacts) {
        section.resize(entry.offset_bytes as usize, 0);
        section.extend(code);
    }
    section
}

fn bundle() -> Vec<u8> {
    std::fs::read(tiny_sm90_bundle()).expect("the bundle reads")
}

fn section(bytes: &[u8], kind: SectionKind) -> std::ops::Range<usize> {
    let at = entry(bytes, kind);
    let start = u64_at(bytes, at + OFFSET);
    start..start + u64_at(bytes, at + LENGTH)
}

/// Runs a crafted bundle; whatever its exit code, nothing is launched and the words are said.
fn refuses_bundle(bytes: &[u8], code: std::ops::Range<i32>, words: &[&str]) -> FakeCuda {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("crafted.oxb");
    std::fs::write(&path, bytes).expect("writable");
    let fake = FakeCuda::new("");
    let run = generate_on(&fake, &path, 4);
    let found = run.code.unwrap_or_default();
    assert!(code.contains(&found), "exit code {found}: {}", run.err);
    run.failed(found, words);
    assert_no_launch(&fake);
    fake
}

#[test]
fn a_bundle_whose_kernels_are_not_what_was_sealed_is_refused() {
    let refused = |bytes: &[u8], words: &[&str]| {
        let fake = refuses_bundle(bytes, 20..100, words);
        assert!(fake.calls().is_empty(), "the driver is not even called");
    };
    // One byte, and nothing else.
    let mut bytes = bundle();
    let kernels = section(&bytes, SectionKind::KERN);
    bytes[kernels.end - 100] ^= 1;
    refused(&bytes, &["section KERN is damaged"]);
    // One byte, and the container's hashes put right.
    let changed = |artifacts: &mut Vec<(ArtifactEntry, Vec<u8>)>| {
        let middle = artifacts[1].1.len() / 2;
        artifacts[1].1[middle] ^= 1;
    };
    refused(&with_kernels(changed), &["kernel artifact a1", "SHA-256"]);
    // And the index's hash as well: the manifest still knows.
    let rehashed = |artifacts: &mut Vec<(ArtifactEntry, Vec<u8>)>| {
        changed(artifacts);
        artifacts[1].0.sha256 = Digest::of(&[&artifacts[1].1]);
    };
    refused(&with_kernels(rehashed), &["cubin ", "SHA-256 is "]);
    let other_architecture = |artifacts: &mut Vec<(ArtifactEntry, Vec<u8>)>| {
        let (entry, code) = &mut artifacts[2];
        let byte = if code[8] >= 8 { 49 } else { 48 };
        code[byte] = 100;
        entry.sha256 = Digest::of(&[code]);
    };
    refused(&with_kernels(other_architecture), &["is for sm_100, allowed is sm_90a"]);
}

#[test]
fn a_bundle_without_one_of_its_kernels_is_refused() {
    let leaves = |artifacts: &[(ArtifactEntry, Vec<u8>)]| kernel_section(artifacts).len().div_ceil(64 << 10);
    let removed = with_kernels(|artifacts| {
        // One whose absence leaves as many leaves, so that the rest of the file stays where it is.
        let without = |index: usize| [&artifacts[..index], &artifacts[index + 1..]].concat();
        let index = (0..artifacts.len()).find(|&index| leaves(&without(index)) == leaves(artifacts)).expect("there is a small one");
        artifacts.remove(index);
    });
    let fake = refuses_bundle(&removed, 20..100, &["code object a", "the bundle has 17"]);
    assert!(fake.calls().is_empty(), "the driver is not even called");
}

#[test]
fn a_damaged_chunk_of_weights_is_refused_by_its_section_and_sends_nothing_of_itself() {
    for chunk in [0, 1] {
        let mut bytes = bundle();
        let weights = section(&bytes, SectionKind::WDAT);
        bytes[weights.start + chunk * (4 << 20) + 77] ^= 1;
        let fake = refuses_bundle(&bytes, 4..5, &["section WDAT is damaged", &format!("chunk {chunk}")]);
        let calls = fake.calls();
        let chunks = weights.len().div_ceil(4 << 20);
        assert!(count(&calls, "cuMemcpyHtoDAsync_v2") < chunks, "the damaged chunk was sent");
        assert_freed(&calls);
    }
}

/// The driver's kernels compute nothing, so that the golden vectors cannot come out.
#[test]
fn a_device_that_draws_other_tokens_is_not_served_from_after_a_self_test() {
    let fake = FakeCuda::new("");
    run(&fake, &tiny_sm90_bundle(), &["serve", "--port", "0", "--self-test"]).failed(6, &["golden"]);
}
