//! `keygen`, `sign`, and the check of signatures for `verify --key` and `serve --require-key`.
//!
//! A signature goes into `BUNDLE.sig`, or with `--embed` into the trailer behind the sealed range. The sealed bytes
//! are never touched, so a running server is not disturbed.

use super::args::{KeygenArgs, SignArgs};
use crate::cli::error::CliError;
use crate::cli::output;
use crate::cli::paths::refuse_overwriting;
use crate::model::LoadOptions;
use crate::signing::{PrivateKey, PublicKey, check, collect};
use oxide_bundle::Bundle;
use oxide_bundle::container::layout::TRAILER_MAX;
use oxide_bundle::signature::{SignatureError, Signatures};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Largest key file read.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// Writes a new key pair: the private key to the path given, the public one beside it.
pub(super) fn keygen(args: KeygenArgs, load: &LoadOptions) -> Result<(), CliError> {
    let mut seed = [0; 32];
    let random = Path::new("/dev/urandom");
    File::open(random).and_then(|mut file| file.read_exact(&mut seed)).map_err(|error| input(random, error))?;
    let key = PrivateKey::from_seed(&seed);
    let public_path = beside(&load.path, "pub");
    write_new(&load.path, &key.to_pem(), 0o600)?;
    write_new(&public_path, &key.public().to_pem(), 0o644)?;
    let value = json!({ "key": key.public().to_string(), "private": load.path, "public": public_path });
    output::report(args.json, &value, || {
        format!("key       {}\nprivate   {}\npublic    {}\n", key.public(), load.path.display(), public_path.display())
    })
}

/// Signs a bundle, all of whose bytes are checked first.
pub(super) fn run(args: &SignArgs, load: &LoadOptions) -> Result<(), CliError> {
    let detached = args.output.clone().unwrap_or_else(|| beside(&load.path, "sig"));
    if !args.embed {
        refuse_overwriting(&detached, [load.path.as_path(), &args.key])?;
    }
    let key = PrivateKey::from_pem(&read_text(&args.key)?).map_err(|error| input(&args.key, error))?;
    let bundle = super::open_whole(load)?;
    let path = if args.embed { load.path.clone() } else { detached };
    let older = if args.embed { bundle.trailer().map(<[u8]>::to_vec) } else { read_signatures(&path)? };
    let older = older.map(|bytes| Signatures::decode(&bytes)).transpose().map_err(|error| input(&path, error))?;
    let mut set = older.unwrap_or_default();
    set.put(key.sign(bundle.superblock()));
    let written = if args.embed { embed(&path, &bundle, &set) } else { detach(&path, &set) };
    written.map_err(|error| input(&path, error))?;
    let value = json!({
        "seal": bundle.seal().to_string(),
        "key": key.public().to_string(),
        "signatures": set.signatures.len(),
        "embedded": args.embed,
        "output": path,
    });
    output::report(args.json, &value, || {
        format!(
            "seal      {}\nkey       {}\nsigned    {} ({} signatures)\n",
            bundle.seal(),
            key.public(),
            path.display(),
            set.signatures.len()
        )
    })
}

/// Public keys of PEM files.
pub(in crate::cli) fn public_keys(paths: &[PathBuf]) -> Result<Vec<PublicKey>, CliError> {
    paths.iter().map(|path| PublicKey::from_pem(&read_text(path)?).map_err(|error| input(path, error))).collect()
}

/// The trusted key that signed a bundle, in its trailer or in a file: the one given, or `BUNDLE.sig` if it is there.
pub(in crate::cli) fn signer(bundle: &Bundle, path: &Path, signature: Option<&Path>, trusted: &[PublicKey]) -> Result<PublicKey, CliError> {
    let detached = match signature {
        Some(path) => Some(read_signatures(path)?.ok_or_else(|| input(path, "there is no such file"))?),
        None => read_signatures(&beside(path, "sig"))?,
    };
    let file = signature.map_or_else(|| beside(path, "sig"), Path::to_owned);
    let unusable = |error: SignatureError| CliError::Untrusted(format!("{}: {error}", file.display()));
    detached.as_deref().map(Signatures::decode).transpose().map_err(unusable)?;
    let untrusted = |error: &dyn std::fmt::Display| CliError::Untrusted(format!("bundle {}: {error}", path.display()));
    let signatures = collect(bundle.trailer(), detached.as_deref()).map_err(|error| untrusted(&error))?;
    check(bundle.superblock(), &signatures, trusted).cloned().map_err(|error| untrusted(&error))
}

/// Refuses a bundle that no trusted key signed, before any of it is run; what is loaded then must have the seal that was checked.
pub(in crate::cli) fn require_signer(load: LoadOptions, trusted: &[PublicKey]) -> Result<LoadOptions, CliError> {
    let bundle = super::open(&load)?;
    signer(&bundle, &load.path, None, trusted)?;
    Ok(LoadOptions { expect: Some(bundle.seal()), ..load })
}

fn embed(path: &Path, bundle: &Bundle, set: &Signatures) -> std::io::Result<()> {
    let trailer = set.trailer().map_err(std::io::Error::other)?;
    let file = OpenOptions::new().write(true).open(path)?;
    let sealed_bytes = bundle.superblock().sealed_bytes;
    file.write_all_at(&trailer, sealed_bytes)?;
    file.set_len(sealed_bytes + trailer.len() as u64)?;
    file.sync_all()
}

fn detach(path: &Path, set: &Signatures) -> std::io::Result<()> {
    let bytes = set.encode().map_err(std::io::Error::other)?;
    let partial = beside(path, "partial");
    let mut file = File::create(&partial)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    std::fs::rename(&partial, path)
}

/// Bytes of `BUNDLE.sig` if it is there; they are a set of signatures, whoever made them.
pub(super) fn detached_signatures(bundle: &Path) -> Result<Option<Vec<u8>>, CliError> {
    let path = beside(bundle, "sig");
    let bytes = read_signatures(&path)?;
    bytes.as_deref().map(Signatures::decode).transpose().map_err(|error| input(&path, error))?;
    Ok(bytes)
}

/// Bytes of a file of signatures, or `None` if there is no file.
fn read_signatures(path: &Path) -> Result<Option<Vec<u8>>, CliError> {
    match File::open(path) {
        Ok(file) => {
            let mut bytes = Vec::new();
            file.take(TRAILER_MAX).read_to_end(&mut bytes).map_err(|error| input(path, error))?;
            Ok(Some(bytes))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(input(path, error)),
    }
}

fn read_text(path: &Path) -> Result<String, CliError> {
    String::from_utf8(read_bounded(path, KEY_BYTES_MAX)?).map_err(|error| input(path, error))
}

/// The first `bytes_max` bytes of a small file.
pub(in crate::cli) fn read_bounded(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(bytes_max).read_to_end(&mut bytes));
    read.map_err(|error| input(path, error))?;
    Ok(bytes)
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), CliError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| input(path, error))
}

/// `PATH.EXTENSION`.
fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

fn input(path: &Path, reason: impl std::fmt::Display) -> CliError {
    CliError::Input { path: path.display().to_string(), reason: reason.to_string() }
}
