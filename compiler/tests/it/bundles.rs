//! Sealed bundles: same bytes from same inputs, weights where the plan says, proof by reference ids.

use crate::support::{Model, compile, request, small};
use half::bf16;
use oxide_bundle::Bundle;
use oxide_bundle::manifest::{GoldenStatus, Target};
use oxide_bundle::plan::{RowOrder, WeightDecl, WeightLayout};
use oxide_compile::checkpoint::CheckpointError;
use oxide_compile::golden::GoldenError;
use oxide_compile::hub::Cache;
use oxide_compile::profile::{Llama3Scaling, Numerics, Profile};
use oxide_compile::weights::RopeTable;
use oxide_compile::{CompileError, Request};
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn tiny(output: &Path) -> Request {
    Request {
        profile: Profile::load("oxide-tiny").expect("shipped"),
        target: Target::Cpu,
        model: None,
        output: output.to_owned(),
        context_max: None,
        seqs_max: None,
        golden: GoldenStatus::Proven,
        artifacts: Some("nowhere".into()),
        cache: Cache::at("nowhere"),
    }
}

fn open(path: &Path) -> Bundle {
    Bundle::parse(Arc::new(fs::read(path).expect("readable"))).expect("valid")
}

#[test]
fn the_shipped_model_compiles_from_itself_and_agrees_with_its_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tiny.oxb");
    let report = compile(&tiny(&path)).expect("compiles");
    assert_eq!((report.golden, report.golden_reference, report.golden_prompts), (GoldenStatus::Proven, true, 12));
    let bundle = open(&path);
    assert_eq!(bundle.seal().to_string(), report.seal);
    let golden = bundle.golden();
    assert!(golden.greedy.iter().all(|vector| vector.binding as usize == vector.ids.len()));
    assert!(golden.greedy.iter().map(|vector| vector.ids.len()).sum::<usize>() > 300);
    assert!(golden.template.len() > 10 && golden.tokenizer.len() > 10);
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1, "only the bundle is left");
}

#[test]
fn folders_and_thread_counts_do_not_change_a_byte() {
    let (a, b) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (model_a, model_b) = (a.path().join("one"), b.path().join("another/place"));
    for folder in [&model_a, &model_b] {
        Model::of(&small()).write(folder);
    }
    let make = |model: &Path, output: &Path, threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let wanted = Request { golden: GoldenStatus::Proven, ..request(small(), model, output) };
        pool.install(|| compile(&wanted)).expect("compiles");
        fs::read(output).expect("readable")
    };
    let first = make(&model_a, &a.path().join("x.oxb"), 1);
    let second = make(&model_b, &b.path().join("y.oxb"), 3);
    assert!(first == second, "two compiles of one input differ");
}

#[test]
fn limits_are_cut_and_their_origin_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    Model::of(&small()).write(folder.path());
    let output = folder.path().join("out.oxb");
    let cut = Request { context_max: Some(64), seqs_max: Some(3), ..request(small(), folder.path(), &output) };
    let limits = compile(&cut).expect("compiles").limits;
    assert_eq!((limits.context_max, limits.context_origin.as_str()), (64, "--max-context"));
    assert_eq!((limits.seqs_max, limits.seqs_origin.as_str()), (3, "--max-seqs"));
    for (context_max, seqs_max) in [(Some(0), None), (Some(97), None), (None, Some(5))] {
        let beyond = Request { context_max, seqs_max, ..request(small(), folder.path(), &output) };
        assert_eq!(compile(&beyond).expect_err("refused").exit_code(), 5);
    }
}

#[test]
fn a_context_shorter_than_the_reference_prompts_is_still_proven() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("out.oxb");
    for (context_max, reference) in [(16, false), (64, true), (300, true)] {
        let report = compile(&Request { context_max: Some(context_max), ..tiny(&output) }).expect("compiles");
        assert_eq!(report.golden_reference, reference, "context {context_max}");
        let golden = open(&output).golden().greedy.clone();
        assert!(golden.iter().any(|vector| !vector.ids.is_empty()), "context {context_max}");
        assert!(golden.iter().all(|vector| vector.prompt.len() + vector.ids.len() <= context_max as usize));
    }
}

/// Element `(row, column)` of a weight in the file, by the layout's definition.
fn stored(bytes: &[u8], decl: &WeightDecl, row: usize, column: usize) -> bf16 {
    let columns = decl.shape.get(1).map_or(1, |&k| k as usize);
    let element = match decl.layout {
        WeightLayout::RowMajor => row * columns + column,
        WeightLayout::Panel16 => ((row / 16 * (columns / 2) + column / 2) * 16 + row % 16) * 2 + column % 2,
        WeightLayout::PanelK64 => (column / 64 * decl.shape[0] as usize + row) * 64 + column % 64,
    };
    let at = decl.offset_bytes as usize + 2 * element;
    bf16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Row of the sources that a weight's row comes from.
fn origin(decl: &WeightDecl, heights: &[usize], row: usize) -> (usize, usize) {
    match decl.rows {
        RowOrder::Interleave(group) => {
            let group = group as usize;
            (row / group % 2, row / (2 * group) * group + row % group)
        }
        RowOrder::Concat | RowOrder::RotaryPairs => {
            let mut first = row;
            let source = heights.iter().position(|&height| {
                let inside = first < height;
                first -= if inside { 0 } else { height };
                inside
            });
            (source.expect("inside"), first)
        }
    }
}

#[test]
fn every_weight_is_where_and_how_the_plan_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = Model::of(&small());
    model.write(folder.path());
    let output = folder.path().join("out.oxb");
    compile(&request(small(), folder.path(), &output)).expect("compiles");
    let bundle = open(&output);
    let bytes = bundle.weights();
    let mut checked = 0;
    for decl in bundle.plan().weights().iter().filter(|decl| !decl.sources.is_empty()) {
        let sources: Vec<_> = decl.sources.iter().map(|name| &model.tensors[name]).collect();
        let heights: Vec<usize> = sources.iter().map(|(shape, _)| shape[0]).collect();
        let columns = decl.shape.get(1).map_or(1, |&k| k as usize);
        for row in 0..decl.shape[0] as usize {
            let (source, source_row) = origin(decl, &heights, row);
            for column in 0..columns {
                let expected = sources[source].1[source_row * columns + column];
                assert_eq!(stored(bytes, decl, row, column).to_f32(), expected, "{} [{row}, {column}]", decl.name);
            }
        }
        checked += 1;
    }
    assert_eq!(checked, 3 + 2 * 7, "embedding, norm, head and seven a layer");
}

#[test]
fn the_rotary_table_holds_cosine_and_sine_of_every_position() {
    let folder = tempfile::tempdir().expect("a folder");
    Model::of(&small()).write(folder.path());
    let output = folder.path().join("out.oxb");
    compile(&request(small(), folder.path(), &output)).expect("compiles");
    let bundle = open(&output);
    let bytes = bundle.weights();
    let decl = bundle.plan().weights().iter().find(|decl| decl.sources.is_empty()).expect("a table");
    assert_eq!(decl.shape, [96, 8, 2]);
    for position in [0_u32, 1, 95] {
        for pair in 0..8_u32 {
            let angle = f64::from(position) * 10000_f64.powf(-f64::from(pair) / 8.0);
            for (part, expected) in [angle.cos(), angle.sin()].into_iter().enumerate() {
                let at = decl.offset_bytes as usize + ((position * 8 + pair) * 2) as usize * 4 + part * 4;
                let found = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
                assert!((f64::from(found) - expected).abs() < 1e-5, "position {position}, pair {pair}");
            }
        }
    }
}

#[test]
fn llama3_scaling_slows_long_wavelengths_keeps_short_ones_and_blends_between() {
    let scaling = Llama3Scaling { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    let plain = Numerics { norm_eps: 1e-5, rope_theta: 500_000.0, rope_scaling: None };
    let scaled = RopeTable::new(&Numerics { rope_scaling: Some(scaling), ..plain }, 64).frequencies;
    let plain = RopeTable::new(&plain, 64).frequencies;
    for (pair, (&plain, &scaled)) in plain.iter().zip(&scaled).enumerate() {
        let wavelength = std::f32::consts::TAU / plain;
        match wavelength {
            short if short < 2048.0 => assert_eq!(scaled, plain, "pair {pair}"),
            long if long > 8192.0 => assert_eq!(scaled, plain / 32.0, "pair {pair}"),
            _ => {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                let expected = plain * (smooth + (1.0 - smooth) / 32.0);
                assert!((scaled / expected - 1.0).abs() < 1e-5, "pair {pair}: {scaled} instead of {expected}");
            }
        }
    }
    assert!(plain.iter().any(|f| std::f32::consts::TAU / f > 8192.0));
}

#[test]
fn weights_that_are_not_numbers_fail_the_golden_step_and_leave_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = Model::of(&small());
    model.tensors.get_mut("model.norm.weight").expect("there").1[3] = f32::NAN;
    model.write(folder.path());
    let output = folder.path().join("out.oxb");
    let wanted = Request { golden: GoldenStatus::Proven, ..request(small(), folder.path(), &output) };
    let error = compile(&wanted).expect_err("refused");
    assert!(matches!(error, CompileError::Golden(GoldenError::NotANumber { position: 0, .. })), "{error}");
    assert!(!output.exists() && !folder.path().join("out.oxb.partial").exists());
}

#[test]
fn a_checkpoint_that_is_not_the_reference_fails_the_golden_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let wanted = tiny(&folder.path().join("out.oxb"));
    let mut model = Model::of(&wanted.profile);
    model.config.insert("sliding_window".to_owned(), 2048.into());
    model.write(folder.path());
    let error = compile(&Request { model: Some(folder.path().to_owned()), ..wanted }).expect_err("refused");
    assert!(matches!(error, CompileError::Golden(GoldenError::Differs { .. })), "{error}");
    assert_eq!(error.exit_code(), 31);
}

#[test]
fn a_checkpoint_that_is_nowhere_names_the_pull_command() {
    let folder = tempfile::tempdir().expect("a folder");
    let wanted = Request { model: None, ..request(small(), folder.path(), &folder.path().join("out.oxb")) };
    let error = compile(&wanted).expect_err("refused");
    assert_eq!(error.exit_code(), 10);
    assert!(error.to_string().contains("oxide-compile pull small"), "{error}");
    let empty = Request { model: Some(folder.path().to_owned()), ..wanted };
    assert!(matches!(compile(&empty), Err(CompileError::Checkpoint(CheckpointError::MissingFile { .. }))));
}
