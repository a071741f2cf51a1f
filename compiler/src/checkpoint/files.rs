//! Files of a checkpoint: a folder on disk, or bytes inside the compiler.

use super::CheckpointError;
use crate::profile::EmbeddedFile;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Where a checkpoint's files are.
#[derive(Clone, Debug)]
pub enum Files {
    /// A folder.
    Folder(PathBuf),
    /// Inside the binary.
    Embedded(&'static [EmbeddedFile]),
}

/// An open file, read by position.
#[derive(Debug)]
pub enum Blob {
    /// On disk, with its length when opened.
    File(File, u64),
    /// Inside the binary.
    Static(&'static [u8]),
}

impl Files {
    /// The checkpoint's place in messages.
    pub fn place(&self) -> String {
        match self {
            Self::Folder(path) => path.display().to_string(),
            Self::Embedded(_) => "(embedded)".to_owned(),
        }
    }

    /// A file's place in messages.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Self::Folder(path) => path.join(name),
            Self::Embedded(_) => PathBuf::from("(embedded)").join(name),
        }
    }

    /// Opens a file; `None` if it does not exist.
    ///
    /// # Errors
    /// If it exists and cannot be opened.
    pub fn open(&self, name: &str) -> Result<Option<Blob>, CheckpointError> {
        match self {
            Self::Embedded(files) => Ok(files.iter().find(|file| file.name == name).map(|file| Blob::Static(file.bytes))),
            Self::Folder(folder) => {
                let path = folder.join(name);
                let opened = File::open(&path).and_then(|file| Ok(Blob::File(file.try_clone()?, file.metadata()?.len())));
                match opened {
                    Ok(blob) => Ok(Some(blob)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(CheckpointError::Read { path, source }),
                }
            }
        }
    }

    /// Every file that can be named: none of an embedded model, and none of a folder that cannot be read.
    pub fn paths(&self) -> Vec<PathBuf> {
        match self {
            Self::Folder(folder) => std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect(),
            Self::Embedded(_) => Vec::new(),
        }
    }

    /// Reads a whole file of at most `bytes_max`; `None` if it does not exist.
    ///
    /// # Errors
    /// If it cannot be read or is larger.
    pub fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(blob) = self.open(name)? else { return Ok(None) };
        let error = |source| CheckpointError::Read { path: self.path(name), source };
        if blob.bytes() > bytes_max {
            return Err(error(io::Error::other(format!("is {} bytes, allowed {bytes_max}", blob.bytes()))));
        }
        let mut bytes = vec![0; blob.bytes() as usize];
        blob.read_at(&mut bytes, 0).map_err(error)?;
        Ok(Some(bytes))
    }

    /// [`Files::read`] of a file that must exist.
    ///
    /// # Errors
    /// If it does not exist, cannot be read or is larger.
    pub fn require(&self, name: &str, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
        let found = self.read(name, bytes_max)?;
        found.ok_or_else(|| CheckpointError::MissingFile { place: self.place(), file: name.to_owned() })
    }
}

impl Blob {
    /// Length.
    pub const fn bytes(&self) -> u64 {
        match self {
            Self::File(_, bytes) => *bytes,
            Self::Static(bytes) => bytes.len() as u64,
        }
    }

    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    /// If the file ends before, or reading fails.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::File(file, _) => file.read_exact_at(buffer, offset),
            Self::Static(bytes) => {
                let start = usize::try_from(offset).ok();
                let found = start.and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
                buffer.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}
