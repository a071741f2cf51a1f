//! Paths in reports. Opens none.

use serde::Serializer;
use std::path::Path;

/// Serializes a path as text; bytes that are no UTF-8 become U+FFFD, where serde's own way is an error.
pub(crate) fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}
