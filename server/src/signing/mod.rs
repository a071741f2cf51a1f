//! Who vouches for a bundle: Ed25519 keys, signing, and checking against the keys that an operator trusts.
//!
//! Owns keys and the decision. What is signed and how signatures are stored is [`oxide_bundle::signature`]'s; key
//! files are PEM as OpenSSL writes them ([`pem`]).
//!
//! **Invariant:** a key taken from a bundle or from a signature file is never trusted; it only says which of the
//! caller's keys to check with.

pub mod pem;

use ed25519_dalek::{Signer, SigningKey, VerifyingKey};
use oxide_bundle::Digest;
use oxide_bundle::container::Superblock;
use oxide_bundle::signature::{Signature, SignatureError, Signatures, message};
use pem::PemError;

/// A private key. Not printed by anything.
pub struct PrivateKey(SigningKey);

/// A public key. Prints as 64 hex digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

/// Why nobody who is trusted vouches for a bundle.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// No signature by a trusted key.
    #[error(
        "no signature by a trusted key: it is signed by {found}, trusted are {trusted}; sign it with `oxide-run BUNDLE sign --key FILE`"
    )]
    Untrusted {
        /// Keys that signed it.
        found: String,
        /// Keys that the caller trusts.
        trusted: String,
    },
    /// A signature by a trusted key that does not fit the bundle.
    #[error("the signature by key {key} is not of this bundle: the bundle was changed or the signature belongs to another")]
    Invalid {
        /// The key.
        key: String,
    },
    /// What should be signatures is something else.
    #[error(transparent)]
    Signatures(#[from] SignatureError),
}

impl PrivateKey {
    /// A key from 32 random bytes.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        Self(SigningKey::from_bytes(seed))
    }

    /// Reads a PEM file's text.
    ///
    /// # Errors
    /// If it holds no Ed25519 private key.
    pub fn from_pem(text: &str) -> Result<Self, PemError> {
        pem::decode(pem::Kind::Private, text).map(|seed| Self::from_seed(&seed))
    }

    /// The key as PEM.
    pub fn to_pem(&self) -> String {
        pem::encode(pem::Kind::Private, self.0.as_bytes())
    }

    /// Its public half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    /// Signs a bundle's roots.
    pub fn sign(&self, superblock: &Superblock) -> Signature {
        let signature = self.0.sign(&message(superblock));
        Signature { key: self.public().bytes(), r: Digest(*signature.r_bytes()), s: Digest(*signature.s_bytes()) }
    }
}

impl PublicKey {
    /// Reads a PEM file's text.
    ///
    /// # Errors
    /// If it holds no Ed25519 public key.
    pub fn from_pem(text: &str) -> Result<Self, PemError> {
        let bytes = pem::decode(pem::Kind::Public, text)?;
        VerifyingKey::from_bytes(&bytes).ok().filter(|key| !key.is_weak()).map(Self).ok_or(PemError::NotAKey)
    }

    /// The key as PEM.
    pub fn to_pem(&self) -> String {
        pem::encode(pem::Kind::Public, self.0.as_bytes())
    }

    fn bytes(&self) -> Digest {
        Digest(self.0.to_bytes())
    }
}

impl std::fmt::Display for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&self.bytes(), f)
    }
}

/// The first trusted key that signed the bundle.
///
/// # Errors
/// If none did, or a signature in the name of one is not of this bundle.
pub fn check<'a>(superblock: &Superblock, signatures: &[Signature], trusted: &'a [PublicKey]) -> Result<&'a PublicKey, TrustError> {
    let mut invalid = None;
    for key in trusted {
        for signature in signatures.iter().filter(|signature| signature.key == key.bytes()) {
            if verifies(superblock, signature, key) {
                return Ok(key);
            }
            invalid = Some(key.to_string());
        }
    }
    let list = |keys: Vec<String>| if keys.is_empty() { "nobody".to_owned() } else { keys.join(", ") };
    Err(match invalid {
        Some(key) => TrustError::Invalid { key },
        None => TrustError::Untrusted {
            found: list(signatures.iter().map(|signature| signature.key.to_string()).collect()),
            trusted: list(trusted.iter().map(PublicKey::to_string).collect()),
        },
    })
}

/// Signatures of a trailer and of a file beside the bundle, each where there is one.
///
/// # Errors
/// If one is no set of signatures.
pub fn collect(trailer: Option<&[u8]>, detached: Option<&[u8]>) -> Result<Vec<Signature>, TrustError> {
    let sets = [trailer, detached].into_iter().flatten().map(Signatures::decode).collect::<Result<Vec<_>, _>>()?;
    Ok(sets.into_iter().flat_map(|set| set.signatures).collect())
}

fn verifies(superblock: &Superblock, signature: &Signature, key: &PublicKey) -> bool {
    let signed = ed25519_dalek::Signature::from_components(signature.r.0, signature.s.0);
    key.0.verify_strict(&message(superblock), &signed).is_ok()
}
