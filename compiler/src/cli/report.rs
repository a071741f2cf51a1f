//! Reports as text for people and as JSON for scripts.

use crate::catalogue::Catalogue;
use crate::compile::Report;
use crate::hub::PullReport;
use crate::profile::{Profile, builtin};
use crate::reproduce::Reproduction;
use oxide_bundle::manifest::{GoldenStatus, Ledger, Limits};
use serde::Serialize;
use serde_json::json;
use std::fmt::Write as _;

/// A byte count for people, with the exact number beside it where it is rounded.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = UNITS.into_iter().find(|(_, size)| count >= *size);
    unit.map_or_else(|| format!("{count} B"), |(name, size)| format!("{:.2} {name}", count as f64 / size as f64))
}

fn json_text(value: &impl Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("reports hold only strings and numbers");
    format!("{text}\n")
}

/// What a compile made.
pub(super) fn compiled(report: &Report, json: bool) -> String {
    if json {
        return json_text(report);
    }
    let Report { output, seal, file_bytes, metadata_bytes, profile, target, limits, ledger, kernels, entries, golden, .. } = report;
    let mut text = format!("sealed   {}\n", output.display());
    let _ = writeln!(text, "seal     {seal}");
    let _ = writeln!(text, "model    {profile} for {target}, {kernels} kernels, {entries} batch classes");
    let _ = writeln!(text, "size     {} ({} metadata, {} weights)", bytes(*file_bytes), bytes(*metadata_bytes), bytes(ledger.weight_bytes));
    let compared = if report.golden_reference { "equal to the reference's" } else { "no reference for this checkpoint" };
    let proven = format!("proven: {} prompts, {} binding ids, {compared}", report.golden_prompts, report.golden_ids);
    let _ = writeln!(text, "golden   {}", if *golden == GoldenStatus::Proven { proven } else { "unproven (--no-golden)".to_owned() });
    text + &limits_text(limits) + &ledger_text(ledger)
}

fn limits_text(limits: &Limits) -> String {
    let Limits { context_max, context_origin, seqs_max, seqs_origin, step_tokens_max, page_tokens } = limits;
    format!(
        "limits   context {context_max} tokens ({context_origin}), {seqs_max} sequences ({seqs_origin}), \
         {step_tokens_max} tokens a step, {page_tokens} tokens a page\n"
    )
}

fn ledger_text(ledger: &Ledger) -> String {
    let Ledger { weight_bytes, arena_bytes, input_bytes, output_bytes, kv_bytes_per_token, kv_pages_default, kv_bytes_default } = *ledger;
    let total = weight_bytes + arena_bytes + input_bytes + output_bytes + kv_bytes_default;
    let mut text = "memory\n".to_owned();
    for (name, count) in [
        ("weights", weight_bytes),
        ("arena", arena_bytes),
        ("step inputs", input_bytes),
        ("step outputs", output_bytes),
        ("KV cache", kv_bytes_default),
        ("total", total),
    ] {
        let _ = writeln!(text, "  {name:<13}{:>14}  {}", count, bytes(count));
    }
    let _ = writeln!(text, "  KV cache: {kv_pages_default} pages by default, {kv_bytes_per_token} bytes a token");
    text
}

/// The shipped profiles.
pub(super) fn profiles(profiles: &[Profile], json: bool) -> String {
    let embedded = |profile: &Profile| builtin(&profile.name).is_some_and(|found| !found.checkpoint.is_empty());
    let targets = |profile: &Profile| {
        let sections = [("cpu", profile.target.cpu.is_some()), ("sm90", profile.target.sm90.is_some())];
        sections.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect::<Vec<_>>()
    };
    if json {
        let row = |profile: &Profile| {
            json!({
                "name": profile.name, "family": profile.family.model_type(), "context_max": profile.context_max,
                "targets": targets(profile), "repository": profile.source.repository, "revision": profile.source.revision,
                "embedded": embedded(profile),
            })
        };
        return json_text(&profiles.iter().map(row).collect::<Vec<_>>());
    }
    let mut text = format!("{:<14} {:<7} {:>7}  {:<9}  checkpoint\n", "profile", "family", "context", "targets");
    for profile in profiles {
        let place = if embedded(profile) { "part of oxide-compile" } else { &profile.source.repository };
        let targets = targets(profile).join(" ");
        let _ = writeln!(text, "{:<14} {:<7} {:>7}  {targets:<9}  {place}", profile.name, profile.family.model_type(), profile.context_max);
    }
    text
}

/// The kernel artifacts.
pub(super) fn kernels(catalogue: &Catalogue, json: bool) -> String {
    let manifests = catalogue.kernels().iter().map(|kernel| &kernel.manifest);
    if json {
        return json_text(&manifests.collect::<Vec<_>>());
    }
    let mut text = String::new();
    for manifest in manifests {
        let digest = manifest.sha256.get(..12).unwrap_or_default();
        let _ = writeln!(text, "{digest}  {}  {}", manifest.name, manifest.contract);
    }
    if text.is_empty() { "no sm90 kernel artifacts\n".to_owned() } else { text }
}

/// What was pulled.
pub(super) fn pulled(report: &PullReport, profile: &str, json: bool) -> String {
    if json {
        return json_text(report);
    }
    let mut text = String::new();
    for (name, count) in &report.files {
        let _ = writeln!(text, "  {name}  {}", bytes(*count));
    }
    let _ = writeln!(text, "{} at {}: {} downloaded", report.repository, report.commit, bytes(report.downloaded_bytes));
    let _ = writeln!(text, "in {}", report.snapshot.display());
    let _ = writeln!(text, "next: oxide-compile {profile} --target cpu");
    text
}

/// How a bundle made again compares.
pub(super) fn reproduced(compared: &Reproduction, json: bool) -> String {
    if json {
        return json_text(compared);
    }
    let Reproduction { reproduced, trailer_bytes, seal, seal_again, compilers, first_difference: _, sections, inputs } = compared;
    if *reproduced {
        let kept = match trailer_bytes {
            0 => String::new(),
            bytes => format!("trailer  {bytes} B of signatures behind the sealed bytes, which no recipe makes\n"),
        };
        return format!("reproduced: every byte is equal\nseal     {seal}\n{kept}");
    }
    let mut text = format!("seal     {seal}\nagain    {seal_again}\n");
    let _ = writeln!(text, "differs  {}", sections.join(", "));
    if !inputs.is_empty() {
        let _ = writeln!(text, "inputs   {} are not the recipe's: pass its checkpoint with --model", inputs.join(", "));
    }
    let [made, this] = compilers;
    if made != this {
        let _ = writeln!(text, "release  {made} made it, this is {this}");
    }
    text
}
