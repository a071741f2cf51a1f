//! Entry points for fuzzing: each takes any bytes and must return. Hashes are put right first, so that
//! inputs reach the checks behind them.
#![doc(hidden)]

use crate::container::layout::{SUPERBLOCK_BYTES, TABLE_ENTRY_BYTES};
use crate::container::{Bundle, Bytes, SectionKind, Superblock, superblock, table};
use crate::digest::Digest;
use crate::manifest::{Golden, Manifest, Provenance, TemplateSection};
use crate::msgpack;
use crate::plan::{Plan, RawPlan};
use crate::section::{KernelIndex, TensorIndex};
use std::sync::Arc;

/// Superblock: the bytes as they are, and with their two hashes put right.
pub fn fuzz_superblock(data: &[u8]) {
    let mut block = [0; SUPERBLOCK_BYTES];
    block.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
    let _ = Superblock::parse(&block);
    superblock::rehash(&mut block);
    if let Ok(superblock) = Superblock::parse(&block) {
        assert_eq!(superblock.encode(), block, "a superblock that is accepted encodes back to its bytes");
    }
}

/// Section table, under a superblock that fits it.
pub fn fuzz_table(superblock: &Superblock, data: &[u8]) {
    let mut superblock = superblock.clone();
    superblock.table_hash = Digest::of(&[data]);
    superblock.table_count = (data.len() / TABLE_ENTRY_BYTES) as u32;
    if let Ok(sections) = table::parse(data, &superblock) {
        assert!(data.starts_with(&table::encode(&sections)), "a table that is accepted encodes back to its bytes");
    }
}

/// Canonical msgpack of every section's type.
pub fn fuzz_manifest(data: &[u8]) {
    fn check<T: serde::Serialize + serde::de::DeserializeOwned + Send>(data: &[u8]) {
        if let Ok(value) = msgpack::decode::<T>(data) {
            assert_eq!(msgpack::encode(&value).as_deref(), Ok(data), "a section that is accepted encodes back to its bytes");
        }
    }
    check::<Manifest>(data);
    check::<Golden>(data);
    check::<TemplateSection>(data);
    check::<Provenance>(data);
    check::<TensorIndex>(data);
    check::<KernelIndex>(data);
}

/// Plan: decoded, verified, printed.
pub fn fuzz_plan(manifest: &Manifest, data: &[u8]) {
    let Ok(raw) = msgpack::decode::<RawPlan>(data) else { return };
    fuzz_raw_plan(manifest, raw);
}

/// A decoded plan: verified, printed.
pub fn fuzz_raw_plan(manifest: &Manifest, raw: RawPlan) {
    let text = crate::dump::PlanText(&raw).to_string();
    assert!(text.starts_with("plan v"), "a plan prints");
    if let Err(errors) = Plan::verify(raw, manifest) {
        assert!(!errors.to_string().is_empty(), "errors print");
    }
}

/// A whole file.
pub fn fuzz_bundle(data: &[u8]) {
    if let Ok(bundle) = Bundle::parse(Arc::new(data.to_vec()) as Bytes) {
        let _ = bundle.verify_weights();
        let known = bundle.sections().iter().filter(|section| SectionKind::ALL.contains(&section.kind)).count();
        assert_eq!(known, SectionKind::ALL.len(), "an accepted bundle has every section");
    }
}
