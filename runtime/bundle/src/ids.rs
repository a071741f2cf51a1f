//! Index newtypes of the plan. They print as they are written in text dumps (`b3`, `k1`, `e0`).

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident => $prefix:literal),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as a table index.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    )*};
}

ids! {
    /// A buffer of the arena.
    BufferId => "b",
    /// A kernel of the plan's kernel table.
    KernelId => "k",
    /// An entry: the steps of one batch class.
    EntryId => "e",
    /// A step inside one entry.
    StepId => "s",
    /// A tensor of the weight section.
    WeightId => "w",
    /// A code object (cubin) of the kernel section.
    ArtifactId => "a",
}
