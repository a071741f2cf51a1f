//! Opening a bundle file: what is checked when, and what each failure says.

#[path = "../bundle/tests/fixture/mod.rs"]
mod fixture;

use fixture::sealed;
use oxide_bundle::container::SectionKind;
use oxide_bundle::{Mode, Seal};
use oxide_runtime::mapping::{Access, Mapping};
use oxide_runtime::open::{OpenError, OpenOptions, OpenedBundle, open_bundle};
use std::path::{Path, PathBuf};

fn written(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("model.oxb");
    std::fs::write(&path, bytes).expect("the file is written");
    path
}

fn open(bytes: &[u8], options: OpenOptions) -> Result<OpenedBundle, OpenError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    open_bundle(&written(folder.path(), bytes), options)
}

fn refusal(bytes: &[u8], options: OpenOptions) -> OpenError {
    match open(bytes, options) {
        Ok(_) => panic!("the bundle was accepted"),
        Err(error) => error,
    }
}

#[test]
fn map_and_copy_give_the_same_bundle() {
    let bytes = sealed();
    for access in [Access::Map, Access::Copy] {
        let opened = open(&bytes, OpenOptions { access, ..OpenOptions::default() }).expect("the bundle is sound");
        assert_eq!((*opened.bundle.bytes()).as_ref().as_ref(), bytes.as_slice());
        assert_eq!(opened.weights.bytes(), opened.bundle.weights());
        assert_eq!(opened.weights.bytes().as_ptr().align_offset(4096), 0, "tensors are aligned in memory");
    }
}

#[test]
fn weights_outlive_the_bundle() {
    let opened = open(&sealed(), OpenOptions::default()).expect("the bundle is sound");
    let (weights, copy) = (opened.weights.clone(), opened.bundle.weights().to_vec());
    drop(opened);
    assert_eq!(weights.bytes(), copy);
}

#[test]
fn each_mode_checks_as_much_as_it_says() {
    let mut bytes = sealed();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let with = |mode| OpenOptions { mode, ..OpenOptions::default() };
    assert!(open(&bytes, with(Mode::Metadata)).is_ok(), "metadata mode leaves the weights alone");
    for mode in [Mode::Copy, Mode::Full] {
        let error = refusal(&bytes, with(mode));
        assert_eq!((error.kind(), error.exit_code()), ("hash_mismatch", 45));
        assert!(error.to_string().contains("section WDAT is damaged in chunk 1"), "{error}");
    }
}

#[test]
fn a_tensor_digest_that_lies_is_found_by_full_only() {
    let mut bytes = sealed();
    let at = fixture::forge::u64_at(&bytes, fixture::forge::entry(&bytes, SectionKind::WIDX) + fixture::forge::OFFSET);
    let root = bytes[at..].windows(6).position(|window| window == b"\xa4root\xc4").expect("a tensor has a root");
    bytes[at + root + 8] ^= 1;
    fixture::forge::rehash_all(&mut bytes);
    assert!(open(&bytes, OpenOptions::default()).is_ok());
    let error = refusal(&bytes, OpenOptions { mode: Mode::Full, ..OpenOptions::default() });
    assert!(error.to_string().contains("digest of tensor \"embed\""), "{error}");
}

#[test]
fn the_expected_seal_is_demanded() {
    let bytes = sealed();
    let seal = open(&bytes, OpenOptions::default()).expect("the bundle is sound").bundle.seal();
    let expecting = |seal| OpenOptions { expect: Some(seal), ..OpenOptions::default() };
    assert!(open(&bytes, expecting(seal)).is_ok());
    let other: Seal = "00".repeat(32).parse().expect("64 digits are a seal");
    let error = refusal(&bytes, expecting(other));
    assert_eq!(error.kind(), "unexpected_seal");
    assert!(error.to_string().contains(&seal.to_string()) && error.to_string().contains(&other.to_string()), "{error}");
    assert!("xyz".parse::<Seal>().is_err());
}

#[test]
fn files_that_are_no_bundle_are_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("absent.oxb");
    for (path, kind, code) in [(missing.as_path(), "file_not_found", 18), (folder.path(), "file", 19)] {
        let error = open_bundle(path, OpenOptions::default()).err().expect("there is no bundle");
        assert_eq!((error.kind(), error.exit_code()), (kind, code));
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    assert_eq!(refusal(b"", OpenOptions::default()).kind(), "empty");
    assert_eq!(refusal(b"plain text, and more of it", OpenOptions::default()).kind(), "not_a_bundle");
    assert_eq!(refusal(&sealed()[..100_000], OpenOptions::default()).kind(), "truncated");
}

#[test]
fn a_file_cut_while_it_is_mapped_is_an_error_of_populate() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = written(folder.path(), &vec![7; 1 << 20]);
    let mapping = Mapping::open(&path, Access::Map).expect("the file maps");
    mapping.populate(0..1 << 20).expect("the file is whole");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file opens");
    file.set_len(4096).expect("the file is cut");
    assert!(mapping.populate(0..1 << 20).is_err());
    mapping.populate(0..4096).expect("the rest is there");
}

#[test]
fn a_file_renamed_over_leaves_an_old_mapping_whole() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = written(folder.path(), &sealed());
    let opened = open_bundle(&path, OpenOptions::default()).expect("the bundle is sound");
    let partial = folder.path().join("model.oxb.partial");
    std::fs::write(&partial, b"short").expect("the file is written");
    std::fs::rename(&partial, &path).expect("the file is renamed");
    opened.bundle.verify(Mode::Full).expect("the old bytes are still there");
}

#[test]
fn a_pipe_is_refused_without_waiting_for_its_writer() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("pipe.oxb");
    let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
    assert!(made.success());
    for access in [Access::Map, Access::Copy] {
        let error = Mapping::open(&path, access).expect_err("a pipe is no bundle");
        assert_eq!(error.to_string(), "not a regular file");
    }
}
