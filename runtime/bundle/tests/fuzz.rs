//! Parsers of the bundle under mutated input. `OXIDE_FUZZ_SECONDS` sets the time of each.

mod fixture;

use fixture::*;
use oxide_bundle::container::SectionKind;
use oxide_bundle::{Bundle, container::Bytes, cubin, fuzz};
use oxide_testkit::fuzz as run;
use std::sync::Arc;

fn bytes_of(sealed: &[u8], kind: SectionKind) -> Vec<u8> {
    let section = section(sealed, kind);
    sealed[section.offset as usize..section.end() as usize].to_vec()
}

#[test]
fn superblocks_of_any_bytes_return() {
    run("superblock", &[sealed()[..4096].to_vec()], fuzz::fuzz_superblock);
}

#[test]
fn section_tables_of_any_bytes_return() {
    let sealed = sealed();
    let superblock = Bundle::parse(Arc::new(sealed.clone()) as Bytes).unwrap().superblock().clone();
    run("table", &[sealed[4096..4096 + 11 * 128].to_vec()], |data| fuzz::fuzz_table(&superblock, data));
}

#[test]
fn sections_of_any_bytes_return() {
    let sealed = sealed();
    let kinds = [SectionKind::MANI, SectionKind::GOLD, SectionKind::TMPL, SectionKind::PROV, SectionKind::WIDX];
    let corpus: Vec<_> = kinds.into_iter().map(|kind| bytes_of(&sealed, kind)).collect();
    run("sections", &corpus, fuzz::fuzz_manifest);
}

#[test]
fn plans_of_any_bytes_return() {
    let sealed = sealed();
    let manifest = Bundle::parse(Arc::new(sealed.clone()) as Bytes).unwrap().manifest().clone();
    run("plan", &[bytes_of(&sealed, SectionKind::PLAN)], |data| fuzz::fuzz_plan(&manifest, data));
}

#[test]
fn bundles_of_any_bytes_return() {
    run("bundle", &[sealed()], fuzz::fuzz_bundle);
}

#[test]
fn cubins_of_any_bytes_return() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90");
    let cubins = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut cubins: Vec<_> = cubins.filter(|path| path.extension().is_some_and(|extension| extension == "cubin")).collect();
    cubins.sort();
    let corpus: Vec<_> = cubins.iter().take(8).map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!corpus.is_empty());
    run("cubin", &corpus, |data| drop(cubin::inspect(data)));
}
