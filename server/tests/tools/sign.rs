use crate::support::{folder, run_on, short_bundle, text};
use oxide_testkit::{ServerProcess, tiny_bundle};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with a copy of the bundle and key pairs `a` and `b`.
struct Workshop {
    folder: tempfile::TempDir,
}

impl Workshop {
    fn new() -> Self {
        let folder = folder();
        fs::copy(tiny_bundle(), folder.path().join("m.oxb")).expect("copied");
        let workshop = Self { folder };
        for name in ["a", "b"] {
            run_on(&workshop.path(name), &["keygen"]).succeeded();
        }
        workshop
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn bundle(&self) -> PathBuf {
        self.path("m.oxb")
    }

    fn sign(&self, key: &str, more: &[&str]) {
        let key = self.path(key);
        let args = [&["sign", "--key", text(&key)], more].concat();
        run_on(&self.bundle(), &args).succeeded();
    }

    fn verify(&self, key: &str) -> crate::support::Run {
        run_on(&self.bundle(), &["verify", "--key", text(&self.path(key))])
    }
}

#[test]
fn a_detached_signature_verifies_with_its_key_alone() {
    let workshop = Workshop::new();
    workshop.verify("a.pub").refused(12, &["signed by nobody"]);
    workshop.sign("a", &[]);
    assert!(workshop.path("m.oxb.sig").exists());
    assert!(workshop.verify("a.pub").succeeded().out.contains("signed    by "));
    workshop.verify("b.pub").refused(12, &["no signature by a trusted key"]);
}

#[test]
fn an_embedded_signature_leaves_the_sealed_bytes_alone() {
    let workshop = Workshop::new();
    let before = fs::read(workshop.bundle()).expect("readable");
    workshop.sign("a", &["--embed"]);
    workshop.sign("b", &["--embed"]);
    workshop.sign("a", &["--embed"]);
    let after = fs::read(workshop.bundle()).expect("readable");
    assert!(after.starts_with(&before) && after.len() > before.len());
    workshop.verify("a.pub").succeeded();
    workshop.verify("b.pub").succeeded();
    let check = run_on(&workshop.bundle(), &["check", "--json"]).json();
    assert!(check["file_bytes"].as_u64() > check["sealed_bytes"].as_u64());
    run_on(&workshop.bundle(), &["diff", text(&tiny_bundle())]).succeeded();
}

#[test]
fn a_signature_of_another_bundle_is_refused() {
    let workshop = Workshop::new();
    workshop.sign("a", &[]);
    fs::copy(short_bundle(), workshop.bundle()).expect("copied");
    workshop.verify("a.pub").refused(12, &["not of this bundle"]);
    fs::write(workshop.path("m.oxb.sig"), b"garbage").expect("written");
    workshop.verify("a.pub").refused(12, &["m.oxb.sig: not a set of signatures"]);
}

#[test]
fn serve_requires_a_signer_before_it_runs_anything() {
    let workshop = Workshop::new();
    workshop.sign("a", &[]);
    let (a, b) = (workshop.path("a.pub"), workshop.path("b.pub"));
    let server =
        ServerProcess::start(env!("CARGO_BIN_EXE_oxide-run"), &workshop.bundle(), &["--require-key", text(&b), "--require-key", text(&a)]);
    drop(server);
    let run = run_on(&workshop.bundle(), &["serve", "--port", "0", "--require-key", text(&b)]);
    assert_eq!(run.code, Some(12), "{}", run.err);
}

#[test]
fn keys_are_private_never_overwritten_and_openssl_s() {
    use std::os::unix::fs::PermissionsExt;
    let workshop = Workshop::new();
    let mode = workshop.path("a").metadata().expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    run_on(&workshop.path("a"), &["keygen"]).refused(8, &["exists"]);
    run_on(&workshop.bundle(), &["sign", "--key", text(&workshop.path("a.pub"))]).refused(8, &["PRIVATE KEY"]);
    if let Ok(output) = Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(workshop.path("a")).output() {
        let ours = fs::read(workshop.path("a.pub")).expect("readable");
        assert_eq!((output.status.success(), output.stdout), (true, ours));
    }
}

#[test]
fn a_damaged_bundle_is_not_signed() {
    let workshop = Workshop::new();
    let mut bytes = fs::read(workshop.bundle()).expect("readable");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(workshop.bundle(), bytes).expect("written");
    run_on(&workshop.bundle(), &["sign", "--key", text(&workshop.path("a"))]).refused(45, &["WDAT"]);
    assert!(!Path::exists(&workshop.path("m.oxb.sig")));
}
