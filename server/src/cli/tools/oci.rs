//! `oci-layout`: a bundle as an OCI image layout on disk, which `oras`, `skopeo`, `crane` and their kin push as it is.
//!
//! ```text
//! DIR/oci-layout                 version of the layout
//! DIR/index.json                 one manifest, tagged
//! DIR/blobs/sha256/…             manifest, config, the bundle as one layer, its signatures as another
//! ```
//!
//! The artifact is not a container image: the layer is the `.oxb` file itself, uncompressed. Equal bundles give equal
//! layouts: nothing holds a clock or a path.

use super::args::OciArgs;
use super::check;
use super::sign::detached_signatures;
use crate::cli::error::CliError;
use crate::cli::output;
use crate::model::LoadOptions;
use oxide_bundle::{Bundle, Digest};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

/// Type of the artifact.
const ARTIFACT: &str = "application/vnd.oxide.bundle.v1";
/// Type of the config: what `check --json` prints.
const CONFIG: &str = "application/vnd.oxide.bundle.config.v1+json";
/// Type of the layer that is the bundle.
const LAYER: &str = "application/vnd.oxide.bundle.layer.v1";
/// Type of the layer with detached signatures.
const SIGNATURES: &str = "application/vnd.oxide.bundle.signatures.v1";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Longest tag.
const TAG_BYTES_MAX: usize = 128;

/// A blob that was written.
struct Blob {
    sha256: Digest,
    size: u64,
}

pub(super) fn run(args: &OciArgs, load: &LoadOptions) -> Result<(), CliError> {
    args.tag.as_deref().map_or(Ok(()), check_tag)?;
    let bundle = super::open_whole(load)?;
    let signatures = detached_signatures(&load.path)?;
    let failed = |error: io::Error| CliError::Input { path: args.folder.display().to_string(), reason: error.to_string() };
    let manifest = write(&args.folder, args.tag.as_deref(), &bundle, load, signatures.as_deref()).map_err(failed)?;
    let digest = format!("sha256:{}", manifest.sha256);
    let value =
        json!({ "seal": bundle.seal().to_string(), "output": args.folder, "manifest": digest, "tag": tag(args.tag.as_deref(), &bundle) });
    output::report(args.json, &value, || {
        format!("wrote     {}\nmanifest  {digest}\ntag       {}\n", args.folder.display(), tag(args.tag.as_deref(), &bundle))
    })
}

fn tag(wanted: Option<&str>, bundle: &Bundle) -> String {
    wanted.map_or_else(|| bundle.seal().short(), str::to_owned)
}

/// Refuses what no registry takes: a tag is `[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}` in the OCI distribution specification.
fn check_tag(tag: &str) -> Result<(), CliError> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let begins = tag.bytes().next().is_some_and(word);
    if begins && tag.len() <= TAG_BYTES_MAX && tag.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-')) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "--tag `{tag}` is no tag of OCI: allowed are letters, digits, `_`, `.` and `-`, at most {TAG_BYTES_MAX}, the first no `.` or `-`"
    )))
}

fn write(folder: &Path, wanted_tag: Option<&str>, bundle: &Bundle, load: &LoadOptions, signatures: Option<&[u8]>) -> io::Result<Blob> {
    let blobs = folder.join("blobs/sha256");
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the folder is not empty: give a new one"));
    }
    fs::create_dir_all(&blobs)?;
    let file_bytes = (**bundle.bytes()).as_ref().len() as u64;
    let config = blob(&blobs, &mut check::to_json(bundle.superblock(), Some(file_bytes)).to_string().as_bytes())?;
    let manifest_of = bundle.manifest();
    let title = format!("{}-{}.oxb", manifest_of.name, manifest_of.target);
    let mut layers = vec![descriptor(LAYER, &blob(&blobs, &mut File::open(&load.path)?)?, Some(&title))];
    if let Some(mut bytes) = signatures {
        layers.push(descriptor(SIGNATURES, &blob(&blobs, &mut bytes)?, Some(&format!("{title}.sig"))));
    }
    let annotations = json!({
        "org.opencontainers.image.title": manifest_of.name,
        "dev.oxide.bundle.seal": bundle.seal().to_string(),
        "dev.oxide.bundle.target": manifest_of.target.to_string(),
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": ARTIFACT,
        "config": descriptor(CONFIG, &config, None),
        "layers": layers,
        "annotations": annotations,
    });
    let manifest = blob(&blobs, &mut manifest.to_string().as_bytes())?;
    let mut entry = descriptor(MANIFEST, &manifest, None);
    entry["artifactType"] = json!(ARTIFACT);
    entry["annotations"] = json!({ "org.opencontainers.image.ref.name": tag(wanted_tag, bundle) });
    fs::write(folder.join("index.json"), json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] }).to_string())?;
    fs::write(folder.join("oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
    Ok(manifest)
}

fn descriptor(media_type: &str, blob: &Blob, title: Option<&str>) -> Value {
    let mut value = json!({ "mediaType": media_type, "digest": format!("sha256:{}", blob.sha256), "size": blob.size });
    if let Some(title) = title {
        value["annotations"] = json!({ "org.opencontainers.image.title": title });
    }
    value
}

/// Copies a stream into the folder under its digest.
fn blob(folder: &Path, source: &mut impl Read) -> io::Result<Blob> {
    let partial = folder.join("partial");
    let mut file = File::create(&partial)?;
    let (mut hash, mut size, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let count = source.read(&mut buffer)?;
        let Some(part) = buffer.get(..count).filter(|part| !part.is_empty()) else { break };
        hash.update(part);
        file.write_all(part)?;
        size += count as u64;
    }
    let sha256 = Digest(hash.finalize().into());
    fs::rename(&partial, folder.join(sha256.to_string()))?;
    Ok(Blob { sha256, size })
}
