//! Embeds `artifacts/sm90`, so that the compiler needs no folder beside it.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../artifacts/sm90");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut names: Vec<String> = fs::read_dir(&folder)
        .map(|entries| entries.filter_map(|entry| entry.ok()?.path().file_stem()?.to_str().map(str::to_owned)).collect())
        .unwrap_or_default();
    names.sort();
    names.dedup();
    names.retain(|name| folder.join(name).with_extension("json").exists());
    let mut text = String::from("[\n");
    for name in names {
        let path = folder.join(name);
        let (json, cubin) = (path.with_extension("json"), path.with_extension("cubin"));
        let _ = writeln!(text, "(include_bytes!({json:?}), include_bytes!({cubin:?})),");
    }
    text += "]\n";
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets it")).join("artifacts.rs");
    fs::write(out, text).expect("the build folder is writable");
}
