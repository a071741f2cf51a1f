//! Paths that name the same file. Opens none.

use super::error::CliError;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Refuses to write over an input, through whatever links or spelling; also where the partial file on the way would.
///
/// # Errors
/// [`CliError::Usage`] names both.
pub(super) fn refuse_overwriting<'a>(output: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<(), CliError> {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let mut partial = output.as_os_str().to_owned();
    partial.push(".partial");
    let written =
        [output.as_os_str(), &partial, output.with_extension("partial").as_os_str()].map(|name: &OsStr| identity(Path::new(name)));
    let is_written = |input: &&Path| identity(input).is_some_and(|found| written.contains(&Some(found)));
    match inputs.into_iter().find(is_written) {
        Some(input) => {
            let (output, input) = (output.display(), input.display());
            Err(CliError::Usage(format!("writing {output} would replace the input {input}: give another path")))
        }
        None => Ok(()),
    }
}
