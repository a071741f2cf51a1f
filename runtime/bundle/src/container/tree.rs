//! SHA-256 Merkle trees as in RFC 6962 §2.1: leaf prefix 00, node prefix 01.
