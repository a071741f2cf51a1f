//! Ghosts: the file leaves out weights that follow from the plan; filled in, it is a bundle like any other.

mod fixture;

use fixture::*;
use oxide_bundle::container::{Ghost, fill_in, ghost, seal_ghost};
use oxide_bundle::dtype::DType;
use oxide_bundle::{BundleError, Mode};

fn stored() -> Vec<u8> {
    seal_ghost(contents()).expect("it seals").0
}

fn whole(stored: &[u8]) -> Vec<u8> {
    let found = ghost(stored).expect("a ghost");
    let mut whole = vec![0; found.sealed_bytes as usize];
    fill_in(stored, &mut whole).expect("its metadata are sound");
    whole
}

#[test]
fn filled_in_it_is_a_whole_bundle_to_the_last_digest() {
    let (stored, report) = seal_ghost(contents()).expect("it seals");
    assert_eq!(ghost(&stored), Some(Ghost { stored_bytes: stored.len() as u64, sealed_bytes: report.sealed_bytes }));
    let bundle = open(whole(&stored)).expect("sound");
    bundle.verify(Mode::Full).expect("every chunk and tensor holds");
    assert_eq!((bundle.seal(), bundle.weights_range().start), (report.seal, stored.len()));
    assert_eq!(*bundle.plan().raw(), contents().plan);
}

#[test]
fn only_a_file_that_ends_at_its_weights_is_a_ghost() {
    let stored = stored();
    let whole = whole(&stored);
    for other in [&whole[..], &sealed(), &stored[..stored.len() - 1], &whole[..stored.len() + 1], &stored[..4096], b"", b"text"] {
        assert_eq!(ghost(other), None, "{} bytes", other.len());
    }
    assert!(matches!(open(stored), Err(BundleError::Truncated { .. })), "nobody takes it for whole");
}

#[test]
fn every_element_is_finite_and_small_and_gaps_are_zero() {
    let bundle = open(whole(&stored())).expect("sound");
    let mut end = 0;
    for weight in bundle.plan().weights() {
        let (start, stop) = (weight.offset_bytes as usize, (weight.offset_bytes + weight.size_bytes) as usize);
        assert!(bundle.weights()[end..start].iter().all(|byte| *byte == 0));
        let bytes = &bundle.weights()[start..stop];
        let upper = |element: &[u8]| f32::from_bits(u32::from_le_bytes([0, 0, element[0], element[1]]));
        let values: Vec<f32> = match weight.dtype {
            DType::Bf16 => bytes.chunks_exact(2).map(upper).collect(),
            _ => bytes.chunks_exact(4).map(|element| f32::from_le_bytes(element.try_into().expect("four bytes"))).collect(),
        };
        assert!(values.iter().all(|value| value.is_finite() && *value != 0.0 && value.abs() < 1.0), "{}", weight.name);
        assert!(values.iter().any(|value| *value != values[0]), "{} is not one number", weight.name);
        end = stop;
    }
}

/// The rule is part of the format: other weights under the same bit would make old ghosts unreadable.
#[test]
fn the_rule_stays() {
    let bundle = open(whole(&stored())).expect("sound");
    let first = &bundle.plan().weights()[0];
    assert_eq!((first.dtype, first.shape.len()), (DType::Bf16, 2));
    let k = first.shape[1];
    let below = (u64::from(k) * 4).ilog2().div_ceil(2) + 1;
    let word = |n: u64| {
        let z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    for index in [0, 1, first.size_bytes / 8 - 1] {
        let bytes = word((1 << 40) + index).to_le_bytes();
        let element = u16::from_le_bytes([bytes[0], bytes[1]]) & 0x807f | ((127 - below as u16) << 7);
        assert_eq!(bundle.weights()[8 * index as usize..][..2], element.to_le_bytes());
    }
}
