//! One flipped byte anywhere, a cut anywhere: refused, and the message names the place.

mod fixture;

use fixture::*;
use oxide_bundle::BundleError;
use oxide_bundle::container::{SectionKind, verify_stream};
use std::io::Cursor;

fn flipped(bytes: &[u8], at: usize) -> BundleError {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 0x10;
    refusal(bytes)
}

#[test]
fn a_flipped_byte_in_any_section_is_refused_with_its_name() {
    let bytes = sealed();
    for kind in SectionKind::ALL {
        let section = section(&bytes, kind);
        let (start, end) = (section.offset as usize, section.end() as usize);
        for at in [start, start + (end - start) / 3, start + (end - start) / 2, end - 1] {
            let error = flipped(&bytes, at);
            assert!(error.to_string().contains(&format!("section {kind}")), "{kind} byte {at}: {error}");
        }
    }
}

#[test]
fn a_damaged_weight_names_its_chunk() {
    let bytes = sealed();
    let start = section(&bytes, SectionKind::WDAT).offset as usize;
    let error = flipped(&bytes, start + (4 << 20) + 17);
    assert_eq!(error.kind(), "hash_mismatch");
    assert!(error.to_string().contains("section WDAT is damaged in chunk 1"), "{error}");
}

#[test]
fn the_stream_verifier_finds_what_the_reader_finds() {
    let sound = sealed();
    for kind in SectionKind::ALL {
        let mut bytes = sound.clone();
        bytes[section(&sound, kind).offset as usize] ^= 1;
        let error = verify_stream(&mut Cursor::new(&bytes)).expect_err("the damage is found");
        assert_eq!(error.to_string(), refusal(bytes).to_string());
    }
}

#[test]
fn a_flipped_byte_in_any_header_field_is_refused() {
    let bytes = sealed();
    for at in 0..8 {
        assert!(matches!(flipped(&bytes, at).kind(), "not_a_bundle" | "text_mode_damage"), "byte {at}");
    }
    for at in 8..10 {
        assert!(matches!(flipped(&bytes, at).kind(), "newer_major" | "older_major"), "byte {at}");
    }
    for at in (10..4096).filter(|at| *at < 320 || at % 61 == 0 || *at >= 4064) {
        let error = flipped(&bytes, at);
        assert_eq!(error.kind(), "header_hash", "byte {at}");
        assert!(error.to_string().contains("section HEAD (superblock)"), "{error}");
    }
}

#[test]
fn a_flipped_byte_in_the_table_is_refused() {
    let bytes = sealed();
    for at in 4096..4096 + 11 * 128 {
        let error = flipped(&bytes, at);
        assert_eq!(error.kind(), "table_hash", "byte {at}");
        assert!(error.to_string().contains("section table"), "{error}");
    }
}

#[test]
fn a_flipped_byte_in_any_gap_is_refused() {
    let bytes = sealed();
    let mut end = 4096 + 11 * 128;
    for kind in SectionKind::ALL {
        let section = section(&bytes, kind);
        for at in [end, (end + section.offset as usize) / 2, section.offset as usize - 1] {
            let error = flipped(&bytes, at);
            assert_eq!(error.kind(), "gap", "byte {at} before {kind}");
            assert!(error.to_string().contains(&format!("section {kind}")), "{error}");
        }
        end = section.end() as usize;
    }
}

#[test]
fn a_cut_at_any_boundary_is_refused() {
    let bytes = sealed();
    let sections = SectionKind::ALL.map(|kind| section(&bytes, kind));
    let edges = sections.iter().flat_map(|section| [section.offset as usize, section.end() as usize]);
    let edges = edges.chain([8, 9, 4096, 4096 + 128, 4096 + 11 * 128, bytes.len()]);
    for at in edges.flat_map(|edge| [edge - 1, edge, edge + 1]).filter(|at| *at < bytes.len()) {
        let error = refusal(bytes[..at].to_vec());
        assert_eq!(error.kind(), "truncated", "cut at {at}: {error}");
        assert!(error.to_string().contains(&at.to_string()), "{error}");
    }
    for at in 1..8 {
        assert_eq!(refusal(bytes[..at].to_vec()).kind(), "truncated", "cut at {at}");
    }
    assert_eq!(refusal(Vec::new()).kind(), "empty");
}

#[test]
fn text_mode_transfers_are_recognised() {
    let bytes = sealed();
    let crlf_to_lf = replaced(&bytes, b"\r\n", b"\n");
    let lf_to_crlf = replaced(&bytes, b"\n", b"\r\n");
    let seven_bits: Vec<u8> = bytes.iter().map(|byte| byte & 0x7f).collect();
    let utf8: Vec<u8> = String::from_utf8_lossy(&bytes).into_owned().into_bytes();
    let latin1: Vec<u8> = bytes[..4096].iter().map(|byte| char::from(*byte)).collect::<String>().into_bytes();
    for (how, bytes) in
        [("CR LF became LF", crlf_to_lf), ("LF became CR LF", lf_to_crlf), ("eighth bit", seven_bits), ("UTF-8", utf8), ("Latin-1", latin1)]
    {
        let error = refusal(bytes);
        assert_eq!(error.kind(), "text_mode_damage");
        assert!(error.to_string().contains(how), "{how}: {error}");
    }
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at..].starts_with(from) {
            out.extend(to);
            at += from.len();
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    out
}
