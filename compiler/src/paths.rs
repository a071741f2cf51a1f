//! Paths in reports, and paths that name the same file. Opens none.

use crate::compile::CompileError;
use serde::Serializer;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// What is written beside the output on the way.
const BESIDE: [&str; 3] = ["", ".partial", ".golden.partial"];

/// Refuses an output that is one of the inputs, through whatever links or spelling, or whose partial file would be.
///
/// # Errors
/// [`CompileError::Overwrites`] names both.
pub(crate) fn refuse_overwriting(output: &Path, inputs: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<(), CompileError> {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let written = BESIDE.map(|suffix| {
        let mut name = output.as_os_str().to_owned();
        name.push(suffix);
        identity(&PathBuf::from(name))
    });
    let is_written = |input: &Path| identity(input).is_some_and(|found| written.contains(&Some(found)));
    match inputs.into_iter().find(|input| is_written(input.as_ref())) {
        Some(input) => Err(CompileError::Overwrites { output: output.to_owned(), input: input.as_ref().to_owned() }),
        None => Ok(()),
    }
}

/// Serializes a path as text; bytes that are no UTF-8 become U+FFFD, where serde's own way is an error.
pub(crate) fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}
