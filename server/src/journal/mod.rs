//! The request journal: what was asked of the engine and what it drew, one JSON object a line.
//!
//! Owns the format ([`Entry`]), and writing it beside the requests ([`Journal`]). Knows token ids and
//! engine parameters and constraints, no text and no HTTP. `oxide-run BUNDLE replay` reads it back.
//!
//! ```text
//! generation ─▶ Recording ──drop──▶ bounded channel ─▶ writer thread ─▶ journal-TIME-NUMBER.jsonl
//!                                        │ full                            │ too large: the next file
//!                                        ▼                                 │ too many: the oldest goes
//!                                  counted, dropped                        ▼
//! ```
//!
//! **Invariant:** no request waits for the disk, whatever the disk does.

mod entry;
mod writer;

pub use entry::{ChoiceEntry, Entry, Finish, SamplingEntry, VERSION};
pub use writer::{Journal, JournalCounts, JournalOptions, Recording, journal_files};
