//! What is sealed is what is read, whatever the order of events, and to the byte.

mod fixture;

use fixture::*;
use oxide_bundle::container::{Bytes, SectionKind, check_header, verify_stream};
use oxide_bundle::ids::WeightId;
use oxide_bundle::manifest::GoldenStatus;
use oxide_bundle::{Bundle, BundleWriter, Mode};
use std::io::Cursor;
use std::sync::Arc;

#[test]
fn everything_sealed_is_read_back() {
    let bundle = open(sealed()).expect("the bundle is sound");
    let contents = contents();
    assert_eq!(*bundle.manifest(), contents.manifest);
    assert_eq!(*bundle.plan().raw(), contents.plan);
    assert_eq!(*bundle.golden(), contents.golden);
    assert_eq!(*bundle.template(), contents.template);
    assert_eq!(*bundle.provenance(), contents.provenance);
    assert_eq!(bundle.licences(), contents.licences);
    assert_eq!(bundle.tokenizer_json(), contents.tokenizer_json);
    assert!(bundle.artifacts().is_empty());
    assert_eq!(bundle.trailer(), None);
    for (id, weight) in (0..).zip(&contents.plan.weights) {
        let start = weight.offset_bytes as usize;
        assert_eq!(bundle.weights()[start..start + weight.size_bytes as usize], weight_bytes(id, weight.size_bytes), "{}", weight.name);
    }
    bundle.verify(Mode::Full).expect("tensor digests hold");
    assert!(bundle.weight_chunk_count() > 1);
}

#[test]
fn sections_are_aligned_and_weights_are_last() {
    let bundle = open(sealed()).expect("the bundle is sound");
    let kinds: Vec<SectionKind> = bundle.sections().iter().map(|section| section.kind).collect();
    assert_eq!(kinds, SectionKind::ALL);
    assert!(bundle.sections().iter().all(|section| section.offset % 65_536 == 0));
    assert_eq!(bundle.weights_range().start % (2 << 20), 0);
}

#[test]
fn two_writes_give_the_same_bytes_in_any_parts_and_threads() {
    let first = sealed();
    for (part, threads) in [(usize::MAX, 1), (100_000, 3), (1 << 20, 2)] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
        let bytes = pool.install(|| {
            let mut writer = BundleWriter::new(Cursor::new(Vec::new()), contents()).expect("the contents are sound");
            write_weights(&mut writer, &plan(), part);
            writer.seal().expect("the bundle seals");
            writer.into_file().into_inner()
        });
        assert!(bytes == first, "parts of {part}, {threads} threads");
    }
}

#[test]
fn golden_vectors_sealed_late_give_the_bytes_of_those_sealed_early() {
    let (mut proven, vectors) = (manifest(), golden(100));
    proven.golden = GoldenStatus::Proven;
    let mut early_contents = contents();
    (early_contents.manifest, early_contents.golden) = (proven.clone(), vectors.clone());
    let mut early = filled_writer(early_contents);
    let report = early.seal().expect("the bundle seals");
    let mut late = filled_writer(contents());
    let unproven = late.seal().expect("the bundle seals");
    late.set_golden(proven, vectors);
    assert_eq!(late.seal().expect("the bundle seals again"), report);
    assert_ne!(unproven.seal, report.seal);
    assert!(late.into_file() == early.into_file());
}

#[test]
fn golden_vectors_beyond_their_room_are_refused() {
    let mut crowded = contents();
    crowded.tokenizer_json = vec![b'x'; 1_000_000];
    let mut writer = filled_writer(crowded);
    writer.seal().expect("few vectors fit");
    writer.set_golden(manifest(), golden(2500));
    assert_eq!(writer.seal().expect_err("there is no room").kind(), "metadata_room");
}

#[test]
fn the_seal_shows_in_the_first_4_kib_alone() {
    let bytes = sealed();
    let superblock = check_header(bytes.first_chunk().expect("a bundle has 4 KiB")).expect("the header is sound");
    assert_eq!(superblock.seal(), open(bytes.clone()).expect("the bundle is sound").seal());
    assert_eq!(superblock.seal(), superblock.seal().to_string().parse().expect("a printed seal parses"));
    assert_eq!(superblock.limits.context_max, 100);
    assert_eq!(superblock.sealed_bytes, bytes.len() as u64);
    assert_eq!(verify_stream(&mut Cursor::new(&bytes)).expect("the stream verifies"), superblock.seal());
}

#[test]
fn any_content_changes_the_seal() {
    let seal = |contents| filled_writer(contents).seal().expect("the bundle seals").seal;
    let mut other = contents();
    other.licences.push('\n');
    assert_ne!(seal(other), seal(contents()));
}

#[test]
fn weights_out_of_order_or_of_the_wrong_size_are_refused() {
    let new = || BundleWriter::new(Cursor::new(Vec::new()), contents()).expect("the contents are sound");
    let size = plan().weights[0].size_bytes;
    let kind = |result: Result<(), oxide_bundle::BundleError>| result.expect_err("the part is refused").kind();
    assert_eq!(kind(new().write_weight(WeightId(1), &[0; 32])), "weight_stream");
    assert_eq!(kind(new().write_weight(WeightId(99), &[0; 32])), "weight_stream");
    assert_eq!(kind(new().write_weight(WeightId(0), &vec![0; size as usize + 1])), "weight_stream");
    let mut short = new();
    short.write_weight(WeightId(0), &[1]).expect("a part is fine");
    let error = short.seal().expect_err("weights are missing");
    assert!(error.to_string().contains("embed: 1 of 2048 bytes"), "{error}");
}

#[test]
fn a_signature_trailer_is_tolerated_and_outside_the_seal() {
    let sealed = sealed();
    let mut bytes = sealed.clone();
    bytes.extend(b"OXBTRAIL");
    bytes.extend(5_u64.to_le_bytes());
    bytes.extend(b"hello");
    let bundle = Bundle::parse(Arc::new(bytes.clone()) as Bytes).expect("the trailer is well formed");
    assert_eq!(bundle.trailer(), Some(b"hello".as_slice()));
    assert_eq!(bundle.seal(), open(sealed).expect("the bundle is sound").seal());
    assert_eq!(verify_stream(&mut Cursor::new(&bytes)).expect("the stream verifies"), bundle.seal());
    bytes.push(0);
    assert_eq!(refusal(bytes).kind(), "trailing_bytes");
}
