//! Ed25519 keys in PEM, byte for byte as `openssl genpkey -algorithm ed25519` writes them (RFC 8410).
//!
//! Both DER forms have a fixed prefix before the 32 bytes of the key, so no general parser is needed.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Which key a PEM text holds.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// PKCS #8.
    Private,
    /// SubjectPublicKeyInfo.
    Public,
}

/// A text without the wanted key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    /// No PEM block of the wanted kind.
    #[error("no `-----BEGIN {0}-----` block: make keys with `oxide-run FILE keygen` or `openssl genpkey -algorithm ed25519`")]
    NoBlock(&'static str),
    /// A block with something else in it.
    #[error("not an Ed25519 key")]
    NotAKey,
}

impl Kind {
    const fn label(self) -> &'static str {
        match self {
            Self::Private => "PRIVATE KEY",
            Self::Public => "PUBLIC KEY",
        }
    }

    /// Everything before the key's own bytes.
    const fn prefix(self) -> &'static [u8] {
        match self {
            Self::Private => &[0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20],
            Self::Public => &[0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0],
        }
    }
}

/// The key as PEM.
pub fn encode(kind: Kind, key: &[u8; 32]) -> String {
    let body = base64(&[kind.prefix(), key].concat());
    let label = kind.label();
    format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
}

/// The key in a PEM text.
///
/// # Errors
/// If there is none of the kind.
pub fn decode(kind: Kind, text: &str) -> Result<[u8; 32], PemError> {
    let label = kind.label();
    let body =
        text.split_once(&format!("-----BEGIN {label}-----")).and_then(|(_, rest)| rest.split_once(&format!("-----END {label}-----")));
    let (body, _) = body.ok_or(PemError::NoBlock(label))?;
    let der = unbase64(body).ok_or(PemError::NotAKey)?;
    let key = der.strip_prefix(kind.prefix()).ok_or(PemError::NotAKey)?;
    key.try_into().map_err(|_| PemError::NotAKey)
}

fn base64(bytes: &[u8]) -> String {
    let symbols = |group: &[u8]| {
        let word = (0..3).fold(0_u32, |word, index| word << 8 | u32::from(group.get(index).copied().unwrap_or(0)));
        let kept = group.len() + 1;
        (0..4).map(move |index| if index < kept { char::from(ALPHABET[(word >> (18 - 6 * index)) as usize & 63]) } else { '=' })
    };
    bytes.chunks(3).flat_map(symbols).collect()
}

/// `None` if there is a foreign character or a symbol too many.
fn unbase64(text: &str) -> Option<Vec<u8>> {
    let symbols: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let padding = symbols.iter().rev().take_while(|byte| **byte == b'=').count();
    let symbols = symbols.get(..symbols.len() - padding)?;
    let mut bytes = Vec::new();
    for group in symbols.chunks(4) {
        let digits = group.iter().map(|byte| ALPHABET.iter().position(|symbol| symbol == byte)).collect::<Option<Vec<_>>>()?;
        let word = (0..4).fold(0_u32, |word, index| word << 6 | digits.get(index).copied().unwrap_or(0) as u32);
        bytes.extend(word.to_be_bytes().into_iter().skip(1).take((digits.len() * 6) / 8));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key pair of RFC 8410, section 10.
    const PRIVATE: &str =
        "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    const PUBLIC: &str =
        "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";

    #[test]
    fn the_rfc_s_keys_are_read_and_written_alike() {
        let private = crate::signing::PrivateKey::from_pem(PRIVATE).expect("a key");
        assert_eq!(private.to_pem(), PRIVATE);
        assert_eq!(private.public().to_pem(), PUBLIC);
        assert_eq!(crate::signing::PublicKey::from_pem(PUBLIC).expect("a key"), private.public());
    }

    #[test]
    fn other_texts_are_refused() {
        assert_eq!(decode(Kind::Private, PUBLIC), Err(PemError::NoBlock("PRIVATE KEY")));
        assert_eq!(decode(Kind::Public, &PUBLIC.replace("AyEA", "AyEB")), Err(PemError::NotAKey));
        assert_eq!(decode(Kind::Public, &PUBLIC.replace("MCow", "MC*w")), Err(PemError::NotAKey));
        assert_eq!(decode(Kind::Public, &PUBLIC.replace("ZuE=", "")), Err(PemError::NotAKey));
    }
}
