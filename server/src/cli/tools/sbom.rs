//! `sbom` and `licences`: what a bundle is made of and under which terms, for people and for scanners.

use super::args::JsonArgs;
use crate::cli::error::CliError;
use crate::cli::output;
use crate::model::LoadOptions;
use oxide_bundle::{Bundle, Digest};
use serde_json::{Value, json};

/// Prints the licence section.
pub(super) fn licences(args: JsonArgs, load: &LoadOptions) -> Result<(), CliError> {
    let bundle = super::open(load)?;
    let text = bundle.licences();
    output::report(args.json, &json!({ "seal": bundle.seal().to_string(), "weights": licence(text), "text": text }), || text.to_owned())
}

/// Prints a CycloneDX document.
pub(super) fn sbom(load: &LoadOptions) -> Result<(), CliError> {
    output::json(&document(&super::open(load)?))
}

/// The licence that the first line of the section names.
pub(in crate::cli) fn licence(text: &str) -> Option<&str> {
    let line = text.lines().next()?;
    line.split_once(": ")?.1.split_once(", from ").map(|(name, _)| name)
}

/// A component's terms; an expression covers single names too.
fn terms(text: &str) -> Value {
    licence(text).map_or_else(|| json!([]), |name| json!([{ "license": { "name": name } }]))
}

fn document(bundle: &Bundle) -> Value {
    let manifest = bundle.manifest();
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": format!("urn:uuid:{}", uuid(bundle.seal().0)),
        "version": 1,
        "metadata": {
            "tools": { "components": [{ "type": "application", "name": "oxide-compile", "version": bundle.provenance().compiler }] },
            "component": {
                "type": "machine-learning-model",
                "bom-ref": bundle.seal().to_string(),
                "name": manifest.name,
                "version": bundle.seal().to_string(),
                "licenses": terms(bundle.licences()),
                "properties": [
                    { "name": "oxide:target", "value": manifest.target.to_string() },
                    { "name": "oxide:profile", "value": manifest.profile },
                    { "name": "oxide:parameters", "value": manifest.model.parameters.to_string() },
                ],
            },
        },
        "components": inputs(bundle).chain(parts(bundle)).chain(kernels(bundle)).collect::<Value>(),
    })
}

/// Files of the checkpoint that it was compiled from.
fn inputs(bundle: &Bundle) -> impl Iterator<Item = Value> {
    let files = bundle.provenance().inputs.iter();
    files.map(|(name, sha256)| component("data", &format!("input:{name}"), name, sha256, terms(bundle.licences())))
}

/// Parts that people audit on their own.
fn parts(bundle: &Bundle) -> impl Iterator<Item = Value> {
    let template = bundle.template().chat_template.as_deref().unwrap_or_default();
    let parts = [("tokenizer.json", bundle.tokenizer_json()), ("chat_template", template.as_bytes())];
    let digest = |bytes: &[u8]| Digest::of(&[bytes]).to_string();
    parts.into_iter().map(move |(name, bytes)| component("data", &format!("part:{name}"), name, &digest(bytes), terms(bundle.licences())))
}

/// Code objects, with the toolchain that made them.
fn kernels(bundle: &Bundle) -> impl Iterator<Item = Value> {
    bundle.artifacts().iter().map(|artifact| {
        let manifest = &artifact.manifest;
        let sha256 = artifact.sha256.to_string();
        let mut value = component("file", &format!("kernel:{sha256}"), &manifest.name, &sha256, json!([{ "license": { "id": "MIT" } }]));
        let toolchain = manifest.toolchain.iter().map(|(name, value)| json!({ "name": format!("oxide:toolchain:{name}"), "value": value }));
        let source = json!({ "name": "oxide:source_sha256", "value": manifest.source_sha256 });
        value["properties"] = toolchain.chain([source]).collect();
        value
    })
}

fn component(kind: &str, reference: &str, name: &str, sha256: &str, licences: Value) -> Value {
    json!({ "type": kind, "bom-ref": reference, "name": name, "hashes": [{ "alg": "SHA-256", "content": sha256 }], "licenses": licences })
}

/// A UUID of version 8 (RFC 9562) from a digest: equal bundles have equal documents.
fn uuid(digest: Digest) -> String {
    let mut bytes = digest.0;
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = Digest(bytes).to_string();
    let cuts = [0..8, 8..12, 12..16, 16..20, 20..32];
    cuts.map(|cut| hex.get(cut).unwrap_or_default().to_owned()).join("-")
}
