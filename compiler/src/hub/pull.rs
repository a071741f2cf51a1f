//! Downloads a checkpoint into the cache: resumable, checked, atomic a file.

use super::client::{Client, Contents, FileInfo};
use super::{Cache, HubError};
use crate::profile::Profile;
use serde::Serialize;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Files taken from a repository if it has them.
const WANTED: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "LICENSE",
    "NOTICE",
];
/// Files that a repository must have.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// What was pulled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PullReport {
    /// Repository.
    pub repository: String,
    /// Commit.
    pub commit: String,
    /// The checkpoint's folder, for `--model`.
    #[serde(serialize_with = "crate::paths::lossy")]
    pub snapshot: PathBuf,
    /// Files by name, with their bytes.
    pub files: Vec<(String, u64)>,
    /// Bytes that came over the network.
    pub downloaded_bytes: u64,
}

/// Told of each file: name, bytes already there, bytes in all; then of bytes as they come.
pub trait PullProgress {
    /// A file starts.
    fn file(&mut self, name: &str, have: u64, total: u64);
    /// So many bytes more.
    fn advance(&mut self, bytes: u64);
}

impl PullProgress for () {
    fn file(&mut self, _: &str, _: u64, _: u64) {}
    fn advance(&mut self, _: u64) {}
}

/// Downloads what is not there yet of a profile's checkpoint.
///
/// # Errors
/// If the hub refuses, the connection breaks, contents do not hash right, or the disk is full. What was
/// downloaded stays and the next call goes on from there.
pub fn pull(profile: &Profile, cache: &Cache, client: &Client, progress: &mut dyn PullProgress) -> Result<PullReport, HubError> {
    let (repository, revision) = (&profile.source.repository, &profile.source.revision);
    let found = client.revision(repository, revision)?;
    let names = wanted(found.siblings.into_iter().map(|sibling| sibling.rfilename));
    if let Some(file) = NEEDED.iter().find(|needed| !names.iter().any(|name| name == *needed)) {
        return Err(HubError::NoFile { repository: repository.clone(), revision: revision.clone(), file: (*file).to_owned() });
    }
    let folder = cache.repository(repository);
    let snapshot = folder.join("snapshots").join(&found.sha);
    let mut download = Download { client, repository, commit: &found.sha, folder: &folder, progress, downloaded: 0 };
    let mut files = Vec::new();
    for name in names {
        let bytes = download.file(&name, &snapshot)?;
        files.push((name, bytes));
    }
    let downloaded_bytes = download.downloaded;
    if *revision != found.sha {
        write_file(&folder.join("refs").join(revision), found.sha.as_bytes())?;
    }
    Ok(PullReport { repository: repository.clone(), commit: found.sha, snapshot, files, downloaded_bytes })
}

/// Known files and weights at the top of the repository.
fn wanted(names: impl Iterator<Item = String>) -> Vec<String> {
    let is_wanted = |name: &String| WANTED.contains(&name.as_str()) || (name.starts_with("model") && name.ends_with(".safetensors"));
    let mut found: Vec<String> = names.filter(|name| !name.contains('/') && is_wanted(name)).collect();
    found.sort();
    found
}

struct Download<'a> {
    client: &'a Client,
    repository: &'a str,
    commit: &'a str,
    folder: &'a Path,
    progress: &'a mut dyn PullProgress,
    downloaded: u64,
}

impl Download<'_> {
    fn file(&mut self, name: &str, snapshot: &Path) -> Result<u64, HubError> {
        let info = self.client.file_info(self.repository, self.commit, name)?;
        let blobs = self.folder.join("blobs");
        let blob = blobs.join(&info.etag);
        let complete = fs::metadata(&blob).is_ok_and(|found| found.len() == info.bytes);
        if complete {
            self.progress.file(name, info.bytes, info.bytes);
        } else {
            create_folder(&blobs)?;
            let incomplete = blobs.join(format!("{}.incomplete", info.etag));
            self.fetch(name, &info, &incomplete)?;
            check(name, &info, &incomplete)?;
            fs::rename(&incomplete, &blob).map_err(|source| HubError::Cache { path: blob.clone(), source })?;
        }
        link(&Path::new("../../blobs").join(&info.etag), &snapshot.join(name))?;
        Ok(info.bytes)
    }

    /// Appends what is missing to the incomplete file.
    fn fetch(&mut self, name: &str, info: &FileInfo, path: &Path) -> Result<(), HubError> {
        let error = |source| HubError::Cache { path: path.to_owned(), source };
        let have = fs::metadata(path).map_or(0, |found| found.len());
        let have = if have > info.bytes { 0 } else { have };
        if have == info.bytes && have > 0 {
            return Ok(());
        }
        let Contents { start, mut reader } = self.client.contents(self.repository, self.commit, name, have)?;
        let mut file = File::options().create(true).append(true).open(path).map_err(error)?;
        if start == 0 && have > 0 {
            file.set_len(0).map_err(error)?;
        }
        self.progress.file(name, start, info.bytes);
        let mut written = start;
        let mut buffer = vec![0; 1 << 18];
        while written < info.bytes {
            let count = reader.read(&mut buffer).map_err(|error| self.broken(name, &error.to_string()))?;
            if count == 0 {
                return Err(self.broken(name, &format!("the connection ended after {written} of {} bytes", info.bytes)));
            }
            file.write_all(&buffer[..count]).map_err(|source| write_error(path, written, info.bytes, source))?;
            written += count as u64;
            self.downloaded += count as u64;
            self.progress.advance(count as u64);
        }
        file.sync_all().map_err(|source| write_error(path, written, info.bytes, source))
    }

    fn broken(&self, name: &str, problem: &str) -> HubError {
        HubError::Network { url: format!("{}/{name}", self.repository), problem: problem.to_owned() }
    }
}

fn write_error(path: &Path, written: u64, needed: u64, source: io::Error) -> HubError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => HubError::DiskFull { path: path.to_owned(), written, needed },
        _ => HubError::Cache { path: path.to_owned(), source },
    }
}

/// Compares contents with the hub's hash; removes them if they differ.
fn check(name: &str, info: &FileInfo, path: &Path) -> Result<(), HubError> {
    let error = |source| HubError::Cache { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(error)?;
    let found = match info.etag.len() {
        64 => hash(Sha256::new(), &mut file),
        40 => {
            let mut git = Sha1::new();
            git.update(format!("blob {}\0", info.bytes));
            hash(git, &mut file)
        }
        _ => return Ok(()),
    };
    let found = found.map_err(error)?;
    if found.eq_ignore_ascii_case(&info.etag) {
        return Ok(());
    }
    fs::remove_file(path).map_err(error)?;
    Err(HubError::Checksum { file: name.to_owned(), found, expected: info.etag.clone() })
}

fn hash<D: sha2::Digest>(mut digest: D, file: &mut File) -> io::Result<String> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => digest.update(&buffer[..count]),
        }
    }
}

fn create_folder(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|source| HubError::Cache { path: path.to_owned(), source })
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    path.parent().map_or(Ok(()), create_folder)?;
    fs::write(path, bytes).map_err(|source| HubError::Cache { path: path.to_owned(), source })
}

fn link(target: &Path, path: &Path) -> Result<(), HubError> {
    path.parent().map_or(Ok(()), create_folder)?;
    let error = |source| HubError::Cache { path: path.to_owned(), source };
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source)),
        _ => {}
    }
    std::os::unix::fs::symlink(target, path).map_err(error)
}
