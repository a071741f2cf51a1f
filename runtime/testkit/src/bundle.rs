//! The shipped model's bundle.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The repository's root.
///
/// # Panics
/// If it is gone.
pub fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository root exists")
}

/// The folder that the running test was built into: `target/debug` or `target/release`.
fn build_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.ancestors().find(|folder| folder.join("deps").is_dir());
    folder.expect("tests run from their build folder").to_owned()
}

/// Builds a program of ours in the profile of the running test, and returns its path.
///
/// # Panics
/// If it does not build.
pub fn binary(package: &str) -> PathBuf {
    // With the features of the whole workspace, as `cargo build` has built it already: alone, most crates would be built anew.
    build(&["--workspace", "--bin", package]).join(package)
}

/// Builds the fake CUDA driver, and returns its path.
///
/// # Panics
/// If it does not build.
pub(crate) fn fake_cuda() -> PathBuf {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    // With the whole workspace's features, as `cargo test --workspace` has built it already.
    LIBRARY.get_or_init(|| build(&["--workspace", "--example", "fake_cuda"]).join("examples/libfake_cuda.so")).clone()
}

/// Builds something of ours in the profile of the running test, and returns the build folder.
fn build(what: &[&str]) -> PathBuf {
    let folder = build_folder();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet"]).args(what).current_dir(repo());
    // What cargo says of the package under test is none of this build's: build scripts that read it would run again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            cargo.env_remove(name);
        }
    }
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success(), "{what:?} does not build");
    folder
}

/// The bundle of `oxide-tiny` for the cpu target, compiled by this build's `oxide-compile`.
///
/// # Panics
/// If it does not compile.
pub fn tiny_bundle() -> PathBuf {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| compile_tiny("cpu", "oxide-tiny.oxb")).clone()
}

/// The bundle of `oxide-tiny` for the sm90 target.
///
/// # Panics
/// If it does not compile.
pub fn tiny_sm90_bundle() -> PathBuf {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| compile_tiny("sm90", "oxide-tiny-sm90.oxb")).clone()
}

fn compile_tiny(target: &str, name: &str) -> PathBuf {
    let compiler = binary("oxide-compile");
    let bundle = build_folder().join(name);
    if is_newer(&bundle, &compiler) {
        return bundle;
    }
    // Other tests may do the same now: everyone writes a file of their own and renames it into place.
    let own = bundle.with_extension(format!("{}.oxb", std::process::id()));
    let output = Command::new(compiler).args(["oxide-tiny", "--target", target, "-o"]).arg(&own).current_dir(repo()).output();
    let output = output.expect("the compiler runs");
    assert!(output.status.success(), "oxide-tiny does not compile: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &bundle).expect("the bundle can be renamed");
    bundle
}

fn is_newer(file: &Path, than: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    modified(file).is_some_and(|time| Some(time) > modified(than))
}
