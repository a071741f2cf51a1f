//! `check`: what a bundle is and needs, from its first 4 KiB. Reads no more, so a pipe or an HTTP range will do.

use super::args::JsonArgs;
use crate::cli::error::CliError;
use crate::cli::{output, size};
use crate::model::{LoadError, LoadOptions};
use oxide_bundle::container::check_header;
use oxide_bundle::container::layout::{FEATURE_GENERATED, MAJOR, SUPERBLOCK_BYTES};
use oxide_bundle::container::superblock::check_magic;
use oxide_bundle::manifest::Target;
use oxide_bundle::{BundleError, Superblock};
use oxide_runtime::open::OpenError;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The start of a bundle, and its length where that is known.
struct Start {
    bytes: Vec<u8>,
    file_bytes: Option<u64>,
}

pub(super) fn run(args: JsonArgs, load: &LoadOptions) -> Result<(), CliError> {
    let path = load.path.as_path();
    let start = read_start(path).map_err(|source| LoadError::from(OpenError::File { path: path.to_owned(), source }))?;
    let checked = check(&start).and_then(|superblock| expect(superblock, load));
    let superblock = checked.map_err(|source| LoadError::from(OpenError::Refused { path: path.to_owned(), source }))?;
    output::report(args.json, &to_json(&superblock, start.file_bytes), || people(&superblock, start.file_bytes))
}

fn read_start(path: &Path) -> io::Result<Start> {
    let mut bytes = Vec::with_capacity(SUPERBLOCK_BYTES);
    let limit = SUPERBLOCK_BYTES as u64;
    if path == Path::new("-") {
        io::stdin().lock().take(limit).read_to_end(&mut bytes)?;
        return Ok(Start { bytes, file_bytes: None });
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Start { bytes, file_bytes: metadata.is_file().then_some(metadata.len()) })
}

fn check(start: &Start) -> Result<Superblock, BundleError> {
    check_magic(&start.bytes)?;
    let truncated = |found_bytes, sealed_bytes| BundleError::Truncated { found_bytes, sealed_bytes };
    let short = || truncated(start.bytes.len() as u64, SUPERBLOCK_BYTES as u64);
    let superblock = check_header(start.bytes.first_chunk().ok_or_else(short)?)?;
    match start.file_bytes {
        Some(found) if found < superblock.sealed_bytes && !is_generated(&superblock) => Err(truncated(found, superblock.sealed_bytes)),
        _ => Ok(superblock),
    }
}

fn expect(superblock: Superblock, load: &LoadOptions) -> Result<Superblock, BundleError> {
    match load.expect {
        Some(expected) if expected != superblock.seal() => Err(BundleError::UnexpectedSeal { found: superblock.seal(), expected }),
        _ => Ok(superblock),
    }
}

/// What `check --json` prints.
pub(super) fn to_json(superblock: &Superblock, file_bytes: Option<u64>) -> Value {
    let Superblock { minor, sealed_bytes, plan_version, abi_min, abi_max, target, limits, table_count, .. } = superblock;
    json!({
        "format": format!("{MAJOR}.{minor}"),
        "plan_version": plan_version,
        "runtime_abi": [abi_min, abi_max],
        "seal": superblock.seal().to_string(),
        "weights_root": superblock.weights_root.to_string(),
        "plan_root": superblock.plan_root.to_string(),
        "kernels_root": superblock.kernels_root.to_string(),
        "features": {
            "incompatible": superblock.features_incompatible,
            "read_only": superblock.features_read_only,
            "compatible": superblock.features_compatible,
        },
        "target": target.target.to_string(),
        "driver_min": target.driver_min,
        "device_bytes": target.device_bytes,
        "needs": needs(superblock),
        "limits": {
            "context_max": limits.context_max,
            "seqs_max": limits.seqs_max,
            "classes": limits.class_count,
            "page_tokens": limits.page_tokens,
            "kv_bytes_per_token": limits.kv_bytes_per_token,
        },
        "generated": is_generated(superblock),
        "weight_bytes": limits.weight_bytes,
        "workspace_bytes": limits.workspace_bytes,
        "sections": table_count,
        "sealed_bytes": sealed_bytes,
        "file_bytes": file_bytes,
    })
}

/// Whether the weights are generated when the bundle is loaded, so that its file may end before them.
fn is_generated(superblock: &Superblock) -> bool {
    superblock.features_incompatible & FEATURE_GENERATED != 0
}

/// The machine that the bundle needs, in words.
fn needs(superblock: &Superblock) -> String {
    let target = &superblock.target;
    let memory = size::human(target.device_bytes);
    match target.target {
        Target::Cpu => format!("an x86-64 Linux machine with {memory} of free memory"),
        Target::Sm90 => {
            let driver = target.driver_min;
            format!(
                "an NVIDIA Hopper GPU (compute capability 9.0) with {memory} of free memory and a driver of CUDA {}.{} or newer",
                driver / 1000,
                driver % 1000 / 10
            )
        }
    }
}

fn people(superblock: &Superblock, file_bytes: Option<u64>) -> String {
    let Superblock { minor, plan_version, abi_min, abi_max, target, limits, .. } = superblock;
    let sealed = superblock.sealed_bytes;
    let length = match file_bytes {
        Some(found) if found < sealed => format!("{sealed} B sealed, {found} B stored, weights generated"),
        Some(found) if found > sealed => format!("{sealed} B sealed, {} B of trailer", found - sealed),
        Some(_) => format!("{sealed} B sealed, all there"),
        None => format!("{sealed} B sealed"),
    };
    let lines = [
        ("seal", superblock.seal().to_string()),
        ("weights", superblock.weights_root.to_string()),
        ("plan", superblock.plan_root.to_string()),
        ("kernels", superblock.kernels_root.to_string()),
        ("format", format!("{MAJOR}.{minor}, plan version {plan_version}, runtime ABI {abi_min} to {abi_max}")),
        ("target", target.target.to_string()),
        ("needs", needs(superblock)),
        ("context", format!("{} tokens", limits.context_max)),
        ("sequences", limits.seqs_max.to_string()),
        ("classes", limits.class_count.to_string()),
        ("kv cache", format!("{} B a token, {} tokens a page", limits.kv_bytes_per_token, limits.page_tokens)),
        ("memory", format!("weights {}, workspace {}", size::human(limits.weight_bytes), size::human(limits.workspace_bytes))),
        ("file", length),
        ("checked", "the first 4096 bytes; `verify` checks all".to_owned()),
    ];
    lines.into_iter().map(|(name, text)| format!("{name:<12}{text}\n")).collect()
}
