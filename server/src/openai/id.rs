//! Random identifiers. Not secrets: they only have to differ.

use std::fmt::Write;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number from the keys that the standard library draws for its hash maps, which never repeat.
pub fn random_u64() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// `prefix` and 32 hexadecimal digits.
pub fn random_id(prefix: &str) -> String {
    let mut id = String::with_capacity(prefix.len() + 32);
    write!(id, "{prefix}{:016x}{:016x}", random_u64(), random_u64()).expect("writing to a string cannot fail");
    id
}
