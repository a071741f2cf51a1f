//! Signatures of a bundle: what is signed, and how signatures are stored. Knows no cryptography and no keys' files.
//!
//! A signature is Ed25519 (RFC 8032) over [`message`]. A set of them is canonical msgpack, either the payload of the
//! signature trailer or a file of its own (`BUNDLE.sig`). The seal covers neither: anybody may add or remove
//! signatures, and only one by a key that the reader trusts means anything.

use crate::container::Superblock;
use crate::container::layout::{TRAILER_MAGIC, TRAILER_MAX};
use crate::digest::Digest;
use crate::msgpack::{self, MsgpackError};
use serde::{Deserialize, Serialize};

/// First bytes of every signed message, so that a signature means nothing elsewhere.
pub const MESSAGE_DOMAIN: &[u8] = b"oxb signature v1\0";
/// Most signatures of a set; it fits the trailer.
pub const SIGNATURES_MAX: usize = 256;

/// Signatures of one bundle, by rising key, one a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signatures {
    /// The signatures.
    pub signatures: Vec<Signature>,
}

/// One signature.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Signature {
    /// Public key, 32 bytes.
    pub key: Digest,
    /// First half of the signature: the point.
    pub r: Digest,
    /// Second half: the scalar.
    pub s: Digest,
}

/// Bytes that are no set of signatures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// Not the encoding.
    #[error("not a set of signatures: {0}")]
    Encoding(#[from] MsgpackError),
    /// Too many, out of order, or two of one key.
    #[error("{0} signatures: allowed are {SIGNATURES_MAX} at most, by rising key and one a key")]
    Order(usize),
}

/// What is signed: the content root (which covers every sealed byte), and the roots of weights, plan and kernels, so
/// that a verifier that holds only one part can check it.
pub fn message(superblock: &Superblock) -> Vec<u8> {
    let Superblock { content_root, weights_root, plan_root, kernels_root, .. } = superblock;
    let roots = [content_root, weights_root, plan_root, kernels_root];
    MESSAGE_DOMAIN.iter().copied().chain(roots.into_iter().flat_map(|root| root.0)).collect()
}

impl Signatures {
    /// Decodes a set.
    ///
    /// # Errors
    /// If the bytes are no canonical set.
    pub fn decode(bytes: &[u8]) -> Result<Self, SignatureError> {
        let set: Self = msgpack::decode(bytes)?;
        let sorted = set.signatures.is_sorted_by(|a, b| a.key < b.key);
        match sorted && set.signatures.len() <= SIGNATURES_MAX {
            true => Ok(set),
            false => Err(SignatureError::Order(set.signatures.len())),
        }
    }

    /// Encodes the set.
    ///
    /// # Errors
    /// If there are too many.
    pub fn encode(&self) -> Result<Vec<u8>, SignatureError> {
        match self.signatures.len() {
            count if count > SIGNATURES_MAX => Err(SignatureError::Order(count)),
            _ => Ok(msgpack::encode(self)?),
        }
    }

    /// Adds a signature; it replaces an older one of its key.
    pub fn put(&mut self, signature: Signature) {
        self.signatures.retain(|found| found.key != signature.key);
        self.signatures.push(signature);
        self.signatures.sort_by_key(|found| found.key);
    }

    /// The trailer that holds the set: magic, length, payload.
    ///
    /// # Errors
    /// If there are too many.
    pub fn trailer(&self) -> Result<Vec<u8>, SignatureError> {
        let payload = self.encode()?;
        let bytes = [&TRAILER_MAGIC[..], &(payload.len() as u64).to_le_bytes(), &payload].concat();
        match bytes.len() as u64 <= TRAILER_MAX {
            true => Ok(bytes),
            false => Err(SignatureError::Order(self.signatures.len())),
        }
    }
}
