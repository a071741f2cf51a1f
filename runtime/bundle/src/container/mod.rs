//! The `.oxb` container: superblock, section table, hash trees, reader and writer.
//!
//! ```text
//! 0x0000  superblock 4 KiB      readable alone
//! 0x1000  section table         128 B an entry, sorted by offset
//!         HASH … LICE           each at a multiple of 64 KiB
//!         WDAT weights          at a multiple of 2 MiB, last
//!         signature trailer     after the sealed range, optional
//! ```
//!
//! Owns bytes, offsets and hashes. Does not own what sections mean (see [`crate::section`],
//! [`crate::manifest`], [`crate::plan`]), paths, files or maps. The format is described in
//! `docs/bundle-format.md`.
//!
//! **Invariant:** no function here panics on any bytes, allocates by an unchecked count, or recurses
//! without a bound.

mod generated;
pub mod layout;
mod metadata;
mod reader;
pub mod superblock;
pub mod table;
pub mod tree;
mod writer;

pub use generated::{Ghost, fill_in, ghost, seal_ghost};
pub use layout::SectionKind;
pub use reader::{Bundle, Bytes, Mode, Recipe, check_header, read_recipe, verify_stream};
pub use superblock::Superblock;
pub use table::Section;
pub use writer::{BundleWriter, Contents, SealReport};
