//! API keys: which are accepted, and whose a request is.
//!
//! Keys are compared by the SHA-256 of what was sent with the SHA-256 of every accepted key, without an
//! early exit, so that timing says nothing about a key's characters.

use crate::openai::error::ApiError;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

/// Digests of the accepted keys. Empty: everybody is let in.
#[derive(Debug, Default)]
pub(crate) struct ApiKeys(Vec<[u8; 32]>);

/// Whose request it is: 0 without authentication, else one more than the key's place in the list.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner(pub(crate) u64);

impl ApiKeys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|key| digest(key.as_bytes())).collect())
    }

    /// Number of owners that exist.
    pub(crate) fn owners(&self) -> usize {
        self.0.len() + 1
    }

    /// Finds whose request it is.
    ///
    /// # Errors
    /// 401 if a key is required and none of the accepted ones was sent.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Owner, ApiError> {
        if self.0.is_empty() {
            return Ok(Owner(0));
        }
        let Some(sent) = headers.get(AUTHORIZATION).map(|value| value.as_bytes()).and_then(bearer) else {
            return Err(ApiError::unauthorized("no API key was sent; send it as `Authorization: Bearer KEY`"));
        };
        let sent = digest(sent);
        let place = self.0.iter().enumerate().fold(0_usize, |found, (index, key)| found | ((index + 1) * usize::from(equal(key, &sent))));
        if place == 0 {
            Err(ApiError::unauthorized("the API key is not accepted by this server"))
        } else {
            Ok(Owner(place.min(self.0.len()) as u64))
        }
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

/// The key of a `Bearer` header; the scheme's case does not matter.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(6)?;
    let key = rest.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer") && rest.starts_with(b" ") && !key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(keys: &[&str], header: Option<&str>) -> Result<u64, ApiError> {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut headers = HeaderMap::new();
        if let Some(value) = header {
            headers.insert(AUTHORIZATION, value.parse().expect("header"));
        }
        ApiKeys::new(&keys).check(&headers).map(|owner| owner.0)
    }

    #[test]
    fn any_accepted_key_opens_and_names_its_owner() {
        assert_eq!(check(&[], None), Ok(0));
        assert_eq!(check(&["a", "b"], Some("Bearer a")), Ok(1));
        assert_eq!(check(&["a", "b"], Some("bEARER  b ")), Ok(2));
        assert_eq!(check(&["a", "a"], Some("Bearer a")).map(|owner| owner > 0), Ok(true));
    }

    #[test]
    fn everything_else_is_refused_as_invalid_api_key() {
        for header in [None, Some("Bearer c"), Some("Basic a"), Some("Bearer"), Some("Bearer "), Some("Bearera"), Some("")] {
            let error = check(&["a", "b"], header).expect_err("no key");
            assert_eq!((error.status, error.code), (401, Some("invalid_api_key")), "{header:?}");
        }
    }
}
