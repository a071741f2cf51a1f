//! Every error kind has a crafted file, an own message and an own exit code.

mod fixture;

use fixture::forge::{FLAGS, KIND, LEAF_COUNT, LENGTH, OFFSET, entry, put, rehash_all, rehash_header, rehash_table, replace, u64_at};
use fixture::*;
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::container::SectionKind;
use oxide_bundle::section::{ArtifactEntry, KernelIndex, TensorEntry, TensorIndex};
use oxide_bundle::{Digest, msgpack};
use std::collections::BTreeSet;

/// Kind, part of the message, and how a sound bundle becomes the crafted one.
type Case = (&'static str, &'static str, fn(&mut Vec<u8>));

fn header(bytes: &mut [u8], at: usize, value: &[u8]) {
    put(bytes, at, value);
    rehash_header(bytes);
}

fn table(bytes: &mut [u8], kind: SectionKind, field: usize, value: &[u8]) {
    let at = entry(bytes, kind) + field;
    put(bytes, at, value);
    rehash_table(bytes);
}

/// Seals a real code object into the cpu bundle after `edit`.
fn kernels(bytes: &mut [u8], edit: fn(&mut Vec<u8>, &mut ArtifactEntry)) {
    let (mut code, manifest) = smallest_cubin();
    // The index is shorter than this, and its length does not depend on the value.
    let offset_bytes = 8192;
    let mut entry = ArtifactEntry { sha256: Digest::of(&[&code]), offset_bytes, size_bytes: code.len() as u64, manifest };
    let encode = |entry: &ArtifactEntry| msgpack::encode(&KernelIndex { artifacts: vec![entry.clone()] }).expect("an index encodes");
    entry.offset_bytes = (8 + encode(&entry).len() as u64).next_multiple_of(256);
    let start = entry.offset_bytes as usize;
    edit(&mut code, &mut entry);
    let index = encode(&entry);
    let mut section = (index.len() as u64).to_le_bytes().to_vec();
    section.extend(index);
    section.resize(start, 0);
    section.extend(code);
    replace(bytes, SectionKind::KERN, &section);
}

fn smallest_cubin() -> (Vec<u8>, ArtifactManifest) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../artifacts/sm90");
    let files = std::fs::read_dir(folder).expect("the artifacts are in the repository");
    let paths = files.map(|file| file.expect("the folder lists").path());
    let cubins = paths.filter(|path| path.extension().is_some_and(|extension| extension == "cubin"));
    let sizes = cubins.map(|path| (path.metadata().expect("the file is there").len(), path));
    let (_, path) = sizes.min().expect("there are cubins");
    let manifest = std::fs::read(path.with_extension("json")).expect("a cubin has a manifest");
    (std::fs::read(path).expect("the cubin reads"), serde_json::from_slice(&manifest).expect("the manifest decodes"))
}

const CASES: &[Case] = &[
    ("empty", "the file is empty", |bytes| bytes.clear()),
    ("not_a_bundle", "starts with 25 50 44 46", |bytes| put(bytes, 0, b"%PDF-1.7")),
    ("text_mode_damage", "copy it again in binary mode", |bytes| {
        bytes.remove(4);
    }),
    ("unsealed", "interrupted build", |bytes| put(bytes, 0, &[0; 8])),
    ("newer_major", "format version 2, this build reads version 1", |bytes| header(bytes, 8, &[2, 0])),
    ("older_major", "format version 0", |bytes| header(bytes, 8, &[0, 0])),
    ("truncated", "truncated: 5000 bytes of", |bytes| bytes.truncate(5000)),
    ("trailing_bytes", "3 bytes after", |bytes| bytes.extend([0; 3])),
    ("header_hash", "HEAD (superblock) is damaged", |bytes| put(bytes, 100, &[1])),
    ("content_root", "content root", |bytes| {
        put(bytes, 176, &[7; 32]);
        let hash = Digest::of(&[&bytes[..4064]]);
        put(bytes, 4064, &hash.0);
    }),
    ("header_field", "`reserved` is 1, allowed is 0 (at byte 2000)", |bytes| header(bytes, 2000, &[1])),
    ("header_field", "`target` is 3", |bytes| header(bytes, 64, &[3])),
    ("header_field", "`table offset` is 0, allowed is 4096", |bytes| header(bytes, 128, &[0; 8])),
    ("header_field", "`table count` is 65, allowed is 11 to 64", |bytes| header(bytes, 136, &[65])),
    ("header_field", "`header length` is 0, allowed is 4096", |bytes| header(bytes, 12, &[0; 4])),
    ("header_field", "`KV page tokens` is 0", |bytes| header(bytes, 100, &[0; 4])),
    ("header_field", "`sealed length`", |bytes| {
        bytes.push(0);
        let sealed = (bytes.len() as u64).to_le_bytes();
        header(bytes, 16, &sealed);
    }),
    ("unknown_feature", "feature bits 0x4", |bytes| header(bytes, 24, &[4])),
    ("plan_version", "plan has version 9, this build reads version 1", |bytes| header(bytes, 48, &[9])),
    ("runtime_abi", "needs runtime ABI 5 to 6, this oxide-run has ABI 1: rebuild it with `oxide-compile", |bytes| {
        header(bytes, 52, &[5, 0, 0, 0, 6, 0, 0, 0]);
    }),
    ("table_hash", "section table is damaged", |bytes| put(bytes, 4100, &[9])),
    ("table_field", "entry 1 (MANI): `flags` is 2", |bytes| table(bytes, SectionKind::MANI, FLAGS, &[3])),
    ("table_field", "(WDAT): `leaf count` is 9, allowed is 2", |bytes| table(bytes, SectionKind::WDAT, LEAF_COUNT, &[9])),
    ("section_out_of_bounds", "section WDAT spans", |bytes| {
        table(bytes, SectionKind::WDAT, LENGTH, &(64_u64 << 20).to_le_bytes());
    }),
    ("section_out_of_bounds", "section HASH spans bytes 0..", |bytes| table(bytes, SectionKind::HASH, OFFSET, &[0; 8])),
    ("section_out_of_bounds", "section WDAT spans bytes 18446744073707454464..", |bytes| {
        table(bytes, SectionKind::WDAT, OFFSET, &(u64::MAX - (2 << 20) + 1).to_le_bytes());
    }),
    ("section_overlap", "section PLAN starts at byte 131072, before section MANI ends", |bytes| {
        table(bytes, SectionKind::PLAN, OFFSET, &(2_u64 << 16).to_le_bytes());
    }),
    ("section_misaligned", "not a multiple of 65536", |bytes| table(bytes, SectionKind::PLAN, OFFSET, &(196_609_u64).to_le_bytes())),
    ("section_misaligned", "not a multiple of 2097152", |bytes| {
        let offset = u64_at(bytes, entry(bytes, SectionKind::WDAT) + OFFSET) as u64 - 65_536;
        table(bytes, SectionKind::WDAT, OFFSET, &offset.to_le_bytes());
    }),
    ("section_duplicate", "section MANI occurs twice", |bytes| table(bytes, SectionKind::PLAN, KIND, b"MANI")),
    ("section_missing", "section LICE is missing", |bytes| {
        table(bytes, SectionKind::LICE, FLAGS, &[0]);
        table(bytes, SectionKind::LICE, KIND, b"XTRA");
    }),
    ("section_unknown", "section XTRA is required and unknown", |bytes| table(bytes, SectionKind::LICE, KIND, b"XTRA")),
    ("weights_not_last", "follows the weights", |bytes| {
        table(bytes, SectionKind::LICE, KIND, b"TEMP");
        table(bytes, SectionKind::WDAT, KIND, b"LICE");
        let at = entry(bytes, SectionKind(*b"TEMP"));
        put(bytes, at, b"WDAT");
        let offset = (2_u64 << 20).to_le_bytes();
        put(bytes, at + OFFSET, &offset);
        put(bytes, at + 24, &(4_u32 << 20).to_le_bytes());
        let lice = entry(bytes, SectionKind::LICE);
        put(bytes, lice + 24, &(64_u32 << 10).to_le_bytes());
        rehash_table(bytes);
    }),
    ("section_size", "section MANI has 0 bytes", |bytes| table(bytes, SectionKind::MANI, LENGTH, &[0; 8])),
    ("gap", "the gap before section MANI", |bytes| {
        let at = u64_at(bytes, entry(bytes, SectionKind::MANI) + OFFSET) - 1;
        bytes[at] = 1;
    }),
    ("hash_mismatch", "section TOKN is damaged in chunk 1", |bytes| {
        let at = u64_at(bytes, entry(bytes, SectionKind::TOKN) + OFFSET) + 65_536;
        bytes[at] ^= 1;
    }),
    ("root_mismatch", "section HASH is damaged", |bytes| {
        let at = u64_at(bytes, entry(bytes, SectionKind::HASH) + OFFSET);
        bytes[at] ^= 1;
    }),
    ("not_canonical", "section GOLD is not canonical msgpack at byte 4: map keys", |bytes| {
        replace(bytes, SectionKind::GOLD, b"\x82\xa1b\x01\xa1a\x02");
    }),
    ("not_canonical", "integer not in shortest form", |bytes| replace(bytes, SectionKind::MANI, b"\xcc\x05")),
    ("not_canonical", "float", |bytes| replace(bytes, SectionKind::PROV, b"\xcb\0\0\0\0\0\0\0\0")),
    ("undecodable", "section TMPL does not decode", |bytes| replace(bytes, SectionKind::TMPL, b"\x80")),
    ("undecodable", "unknown field `color`", |bytes| {
        let mut golden = msgpack::encode(&golden(0)).expect("golden vectors encode");
        golden[0] = 0x84;
        golden.splice(1..1, *b"\xa5color\xc0");
        replace(bytes, SectionKind::GOLD, &golden);
    }),
    ("not_utf8", "section LICE is not UTF-8 at byte 2", |bytes| replace(bytes, SectionKind::LICE, b"ab\xff")),
    ("disagreement", "tensor \"embed\"", |bytes| {
        let mut tensors: Vec<_> = plan().weights.iter().map(|weight| TensorEntry::of(weight, Digest::default())).collect();
        tensors[0].offset_bytes = 256;
        let index = msgpack::encode(&TensorIndex { tensors }).expect("an index encodes");
        replace(bytes, SectionKind::WIDX, &index);
    }),
    ("disagreement", "limits block", |bytes| header(bytes, 88, &[99])),
    ("disagreement", "target block", |bytes| header(bytes, 64, &[2, 0, 0, 0, 90, 0, 0, 0, b'a'])),
    ("artifact", "kernel artifact a0", |bytes| kernels(bytes, |_, entry| entry.sha256 = Digest::of(&[b"other"]))),
    ("artifact", "offset is 512, allowed is", |bytes| kernels(bytes, |_, entry| entry.offset_bytes = 512)),
    ("cubin", "register count", |bytes| kernels(bytes, |_, entry| entry.manifest.registers += 1)),
    ("cubin", "not a cubin", |bytes| {
        kernels(bytes, |code, entry| {
            code[0] = 0;
            entry.sha256 = Digest::of(&[code]);
        });
    }),
    ("cubin_arch", "is for sm_100, allowed is sm_90a", |bytes| {
        kernels(bytes, |code, entry| {
            let byte = if code[8] >= 8 { 49 } else { 48 };
            code[byte] = 100;
            entry.sha256 = Digest::of(&[code]);
        });
    }),
    ("disagreement", "number of code objects of target cpu", |bytes| kernels(bytes, |_, _| {})),
    ("plan_version", "plan has version 0", |bytes| header(bytes, 48, &[0])),
    ("plan_missing_weight", "Weight is w77, the plan has 6", |bytes| {
        let mut plan = plan();
        let oxide_bundle::plan::Step::Launch { operands, .. } = &mut plan.entries[0].steps[0] else { panic!("the first step launches") };
        operands[0].value = oxide_bundle::plan::Value::Weight(oxide_bundle::ids::WeightId(77));
        let plan = msgpack::encode(&plan).expect("a plan encodes");
        replace(bytes, SectionKind::PLAN, &plan);
    }),
];

#[test]
fn each_crafted_file_is_refused_with_its_kind_and_message() {
    let sound = sealed();
    for (kind, message, craft) in CASES {
        let mut bytes = sound.clone();
        craft(&mut bytes);
        let error = refusal(bytes);
        assert_eq!(error.kind(), *kind, "{error}");
        assert!(error.to_string().contains(message), "{kind}: wanted {message:?} in: {error}");
        assert!(error.to_string().len() < 600, "{error}");
    }
}

#[test]
fn kinds_have_own_exit_codes() {
    let sound = sealed();
    let mut seen = BTreeSet::new();
    for (_, _, craft) in CASES {
        let mut bytes = sound.clone();
        craft(&mut bytes);
        let error = refusal(bytes);
        seen.insert((error.kind(), error.exit_code()));
    }
    let codes: BTreeSet<u8> = seen.iter().map(|(_, code)| *code).collect();
    let kinds: BTreeSet<&str> = seen.iter().map(|(kind, _)| *kind).collect();
    assert_eq!((codes.len(), kinds.len()), (seen.len(), seen.len()));
    assert!(codes.iter().all(|code| *code >= 20));
}

#[test]
fn an_unknown_optional_section_is_skipped_and_hashed() {
    let mut bytes = sealed();
    // A twelfth table entry, and room for its section behind the licences.
    let template = u64_at(&bytes, entry(&bytes, SectionKind::LICE) + OFFSET) as u64;
    let last = entry(&bytes, SectionKind::WDAT);
    let weights = bytes[last..last + 128].to_vec();
    let mut extra = bytes[entry(&bytes, SectionKind::LICE)..][..128].to_vec();
    put(&mut extra, KIND, b"XTRA");
    put(&mut extra, FLAGS, &[0]);
    put(&mut extra, OFFSET, &(template + 65_536).to_le_bytes());
    let first_leaf = u32::from_le_bytes(weights[32..36].try_into().expect("four bytes"));
    put(&mut extra, 32, &first_leaf.to_le_bytes());
    put(&mut bytes, last, &extra);
    put(&mut bytes, last + 128, &weights);
    put(&mut bytes, last + 128 + 32, &(first_leaf + 1).to_le_bytes());
    put(&mut bytes, 136, &[12]);
    let hash = entry(&bytes, SectionKind::HASH);
    let length = u64_at(&bytes, hash + LENGTH) as u64 + 32;
    put(&mut bytes, hash + LENGTH, &length.to_le_bytes());
    put(&mut bytes, template as usize + 65_536, b"new!");
    rehash_all(&mut bytes);
    let bundle = open(bytes.clone()).expect("an optional section is skipped");
    let section = bundle.sections().iter().find(|section| section.kind == SectionKind(*b"XTRA")).expect("it is listed");
    assert_eq!(bundle.section_bytes(section), b"new!");
    bytes[template as usize + 65_536] ^= 1;
    let error = refusal(bytes);
    assert!(error.to_string().contains("section XTRA is damaged"), "{error}");
}
