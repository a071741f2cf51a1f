use crate::support::{Run, folder, run, run_on, text};
use oxide_testkit::tiny_bundle;
use std::fs;
use std::path::{Path, PathBuf};

fn ghost(folder: &Path) -> PathBuf {
    let path = folder.join("ghost.oxb");
    run(&["ghost", "-o", text(&path)]).succeeded();
    path
}

fn generate(bundle: &Path) -> Run {
    run_on(bundle, &["generate", "--prompt-ids", "1,2,3", "-n", "16", "--temperature", "0", "--ignore-eos", "--json"]).succeeded()
}

#[test]
fn a_ghost_leaves_the_weights_out_and_runs_like_its_original() {
    let folder = folder();
    let path = ghost(folder.path());
    let (check, original) = (run_on(&path, &["check", "--json"]).json(), run(&["check", "--json"]).json());
    assert_eq!(check["generated"], true);
    assert_eq!(check["file_bytes"].as_u64(), path.metadata().ok().map(|file| file.len()));
    let stored = check["file_bytes"].as_u64().expect("a size");
    assert_eq!(stored + check["weight_bytes"].as_u64().expect("a size"), check["sealed_bytes"].as_u64().expect("a size"));
    for same in ["limits", "device_bytes", "weight_bytes", "plan_root", "kernels_root", "needs"] {
        assert_eq!(check[same], original[same], "{same}");
    }
    let ids = generate(&path).json()["token_ids"].clone();
    assert_eq!(ids.as_array().map(Vec::len), Some(16));
    assert_eq!(ids, generate(&path).json()["token_ids"], "the weights are the same at every load");
}

#[test]
fn the_seal_of_a_ghost_covers_the_generated_weights() {
    let folder = folder();
    let path = ghost(folder.path());
    assert!(run_on(&path, &["verify"]).succeeded().out.contains("hashes    ok"));
    run_on(&path, &["verify", "--full"]).succeeded();
    let again = folder.path().join("again.oxb");
    run_on(&tiny_bundle(), &["ghost", "-o", text(&again)]).succeeded();
    assert!(fs::read(&path).expect("readable") == fs::read(&again).expect("readable"), "equal bundles have equal ghosts");
}

#[test]
fn a_ghost_differs_from_its_original_in_weights_and_not_in_plan() {
    let folder = folder();
    let run = run(&["diff", text(&ghost(folder.path())), "--json"]);
    let differences = run.json()["differences"].clone();
    let count = |aspect: &str| differences[aspect].as_array().map(Vec::len);
    assert_eq!((run.code, count("plan"), count("kernels"), count("ledger")), (Some(1), Some(0), Some(0), Some(0)));
    assert_eq!(count("tensors"), crate::support::run(&["inspect", "--json"]).json()["tensors"].as_u64().map(|count| count as usize));
}

#[test]
fn no_tool_writes_over_what_it_reads() {
    let folder = folder();
    let (path, key) = (folder.path().join("m.oxb"), folder.path().join("key"));
    fs::copy(tiny_bundle(), &path).expect("copied");
    run_on(&key, &["keygen"]).succeeded();
    std::os::unix::fs::symlink(&path, folder.path().join("link.oxb")).expect("linked");
    fs::hard_link(&path, folder.path().join("hard.oxb")).expect("linked");
    let spelled = format!("{}/./m.oxb", text(folder.path()));
    for output in [text(&path), &spelled, text(&folder.path().join("link.oxb")), text(&folder.path().join("hard.oxb"))] {
        let tools: [&[&str]; 4] = [&["ghost"], &["explain"], &["sign", "--key", text(&key)], &["serve", "--port", "0"]];
        for tool in tools {
            let option = if tool[0] == "serve" { "--port-file" } else { "-o" };
            run_on(&path, &[tool, &[option, output]].concat()).refused(2, &["would replace the input", output]);
        }
    }
    run_on(&path, &["sign", "--key", text(&key), "-o", text(&key)]).refused(2, &["would replace the input"]);
    let partial = folder.path().join("a.oxb.partial");
    fs::rename(&path, &partial).expect("renamed");
    run_on(&partial, &["ghost", "-o", text(&folder.path().join("a.oxb"))]).refused(2, &["would replace the input"]);
    assert!(fs::read(&partial).expect("readable") == fs::read(tiny_bundle()).expect("readable"));
}

#[test]
fn a_ghost_cut_or_changed_is_refused() {
    let folder = folder();
    let path = ghost(folder.path());
    let bytes = fs::read(&path).expect("readable");
    fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
    run_on(&path, &["inspect"]).refused(26, &["truncated"]);
    let mut changed = bytes.clone();
    let last = changed.iter().rposition(|byte| *byte != 0).expect("there is text");
    changed[last] ^= 1;
    fs::write(&path, &changed).expect("written");
    run_on(&path, &["generate", "hi"]).refused(45, &["LICE"]);
}
