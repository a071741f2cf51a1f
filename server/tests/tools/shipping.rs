use crate::support::{folder, golden, run, run_on, text};
use oxide_testkit::tiny_bundle;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("there")).expect("JSON")
}

/// The file that a descriptor names, its size and digest checked.
fn blob(layout: &Path, descriptor: &Value) -> Vec<u8> {
    let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:")).expect("a digest");
    let bytes = fs::read(layout.join("blobs/sha256").join(digest)).expect("the blob is there");
    assert_eq!(Some(bytes.len() as u64), descriptor["size"].as_u64());
    let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, digest);
    bytes
}

#[test]
fn the_layout_holds_the_bundle_as_one_layer_and_nothing_unnamed() {
    let folder = folder();
    let layout = folder.path().join("layout");
    run(&["oci-layout", text(&layout), "--tag", "v1"]).succeeded();
    assert_eq!(read_json(&layout.join("oci-layout"))["imageLayoutVersion"], "1.0.0");
    let index = read_json(&layout.join("index.json"));
    let entry = &index["manifests"][0];
    assert_eq!(entry["annotations"]["org.opencontainers.image.ref.name"], "v1");
    let manifest: Value = serde_json::from_slice(&blob(&layout, entry)).expect("JSON");
    assert_eq!((&manifest["schemaVersion"], &manifest["mediaType"]), (&2.into(), &entry["mediaType"]));
    assert_eq!(manifest["artifactType"], "application/vnd.oxide.bundle.v1");
    let layers = manifest["layers"].as_array().expect("a list");
    assert_eq!(layers.len(), 1);
    assert!(blob(&layout, &layers[0]) == fs::read(tiny_bundle()).expect("readable"));
    let config: Value = serde_json::from_slice(&blob(&layout, &manifest["config"])).expect("JSON");
    assert_eq!(config, run(&["check", "--json"]).json());
    assert_eq!(fs::read_dir(layout.join("blobs/sha256")).expect("a folder").count(), 3);
}

#[test]
fn signatures_travel_beside_the_bundle_and_equal_bundles_give_equal_layouts() {
    let folder = folder();
    let bundle = folder.path().join("m.oxb");
    fs::copy(tiny_bundle(), &bundle).expect("copied");
    let key = folder.path().join("key");
    run_on(&key, &["keygen"]).succeeded();
    run_on(&bundle, &["sign", "--key", text(&key)]).succeeded();
    let layouts = ["one", "two"].map(|name| folder.path().join(name));
    for layout in &layouts {
        run_on(&bundle, &["oci-layout", text(layout)]).succeeded();
    }
    let [one, two] = layouts.map(|layout| fs::read(layout.join("index.json")).expect("there"));
    assert_eq!(one, two);
    let index: Value = serde_json::from_slice(&one).expect("JSON");
    let layout = folder.path().join("one");
    let manifest: Value = serde_json::from_slice(&blob(&layout, &index["manifests"][0])).expect("JSON");
    assert_eq!(blob(&layout, &manifest["layers"][1]), fs::read(folder.path().join("m.oxb.sig")).expect("there"));
    run_on(&bundle, &["oci-layout", text(&layout)]).refused(8, &["not empty"]);
}

#[test]
fn what_is_damaged_or_cannot_be_pushed_is_not_packed() {
    let folder = folder();
    let (bundle, layout) = (folder.path().join("m.oxb"), folder.path().join("layout"));
    let bytes = fs::read(tiny_bundle()).expect("readable");
    let pack = |more: &[&str]| run_on(&bundle, &[&["oci-layout", text(&layout)], more].concat());
    let mut damaged = bytes.clone();
    let place = bytes.len() - 20;
    damaged[place] ^= 1;
    fs::write(&bundle, damaged).expect("written");
    pack(&[]).refused(45, &["WDAT"]);
    fs::write(&bundle, &bytes).expect("written");
    for tag in ["bad tag!", "", ".hidden", "-x", "a/b", "a:b", "größe", &"x".repeat(129)] {
        pack(&[&format!("--tag={tag}")]).refused(2, &["--tag", tag]);
    }
    let signatures = folder.path().join("m.oxb.sig");
    fs::create_dir(&signatures).expect("a folder");
    pack(&[]).refused(8, &["m.oxb.sig: "]);
    fs::remove_dir(&signatures).expect("removed");
    fs::write(&signatures, b"garbage").expect("written");
    pack(&[]).refused(8, &["m.oxb.sig: not a set of signatures"]);
    assert!(!layout.exists(), "nothing was begun");
    fs::remove_file(&signatures).expect("removed");
    pack(&["--tag", &format!("_v1.2-{}", "x".repeat(122))]).succeeded();
}

#[test]
fn the_bill_of_materials_names_every_input_and_its_hash() {
    let run = run(&["sbom"]).succeeded();
    let (sbom, inspect) = (run.json(), crate::support::run(&["inspect", "--json"]).json());
    assert_eq!((&sbom["bomFormat"], &sbom["specVersion"]), (&"CycloneDX".into(), &"1.6".into()));
    assert_eq!(sbom["metadata"]["component"]["version"], inspect["seal"]);
    let components = sbom["components"].as_array().expect("a list");
    let references: BTreeSet<&str> = components.iter().filter_map(|part| part["bom-ref"].as_str()).collect();
    assert_eq!(references.len(), components.len(), "every reference is unique");
    for (name, sha256) in inspect["provenance"]["inputs"].as_object().expect("a map") {
        let input = components.iter().find(|part| part["bom-ref"] == format!("input:{name}")).expect("listed");
        assert_eq!(&input["hashes"][0]["content"], sha256);
        assert_eq!(input["licenses"][0]["license"]["name"], "MIT");
    }
}

#[test]
fn licences_are_printed_in_full() {
    golden("licences.txt", &run(&["licences"]).succeeded().out);
}
