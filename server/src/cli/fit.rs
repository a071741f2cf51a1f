//! `fit`: exact memory arithmetic of a bundle at a memory size. Needs no device.

use super::args::FitArgs;
use super::error::CliError;
use super::{output, size};
use crate::model::{LoadError, LoadOptions, kv_pages, page_bytes};
use oxide_bundle::Mode;
use oxide_bundle::manifest::Manifest;
use oxide_runtime::open::{OpenOptions, open_bundle};
use serde_json::{Value, json};

/// What fits.
struct Fit {
    memory_bytes: u64,
    fixed: [(&'static str, u64, &'static str); 4],
    page_bytes: u64,
    page_tokens: u32,
    kv_pages: u64,
    /// Bytes that `--kv-memory` gives the KV cache; all that is left if `None`.
    kv_given: Option<u64>,
    context: u32,
    seqs_max: u32,
    /// Sequences of `context` tokens at once.
    seqs: u64,
}

pub(super) fn run(args: &FitArgs, load: &LoadOptions) -> Result<(), CliError> {
    let options = OpenOptions { access: load.access, mode: Mode::Metadata, expect: load.expect };
    let opened = open_bundle(&load.path, options).map_err(LoadError::from)?;
    let fit = compute(opened.bundle.manifest(), args, load.kv_bytes)?;
    output::report(args.json, &fit.to_json(), || fit.describe())?;
    match fit.seqs {
        0 => Err(CliError::NoFit(fit.refusal())),
        _ => Ok(()),
    }
}

fn compute(manifest: &Manifest, args: &FitArgs, kv_given: Option<u64>) -> Result<Fit, CliError> {
    let (ledger, limits) = (&manifest.ledger, &manifest.limits);
    let context = args.context.unwrap_or(limits.context_max);
    if !(1..=limits.context_max).contains(&context) {
        return Err(CliError::Request(format!(
            "--context is {context}, allowed are 1 to {} (from {}): compile with a larger --max-context",
            limits.context_max, limits.context_origin
        )));
    }
    let fixed = [
        ("weights", ledger.weight_bytes, "a smaller model"),
        ("arena", ledger.arena_bytes, "a smaller --max-seqs or step at compile time"),
        ("inputs", ledger.input_bytes, "a smaller --max-seqs or --max-context at compile time"),
        ("outputs", ledger.output_bytes, "a smaller --max-seqs at compile time"),
    ];
    let left = args.memory.saturating_sub(fixed.iter().map(|(_, bytes, _)| bytes).sum());
    let page_bytes = page_bytes(manifest).max(1);
    let kv_pages = match kv_given {
        Some(_) => u64::from(kv_pages(manifest, kv_given)?),
        None => left / page_bytes,
    };
    let has_room = kv_pages.saturating_mul(page_bytes) <= left;
    let pages_per_seq = u64::from(context.div_ceil(limits.page_tokens.max(1)));
    let seqs = if has_room { (kv_pages / pages_per_seq).min(u64::from(limits.seqs_max)) } else { 0 };
    let (page_tokens, seqs_max) = (limits.page_tokens, limits.seqs_max);
    Ok(Fit { memory_bytes: args.memory, fixed, page_bytes, page_tokens, kv_pages, kv_given, context, seqs_max, seqs })
}

impl Fit {
    fn fixed_bytes(&self) -> u64 {
        self.fixed.iter().map(|(_, bytes, _)| bytes).sum()
    }

    fn kv_bytes(&self) -> u64 {
        self.kv_pages * self.page_bytes
    }

    fn to_json(&self) -> Value {
        let part = |name: &str| self.fixed.iter().find(|(n, _, _)| *n == name).map(|(_, bytes, _)| *bytes);
        json!({
            "fits": self.seqs > 0,
            "memory_bytes": self.memory_bytes,
            "weight_bytes": part("weights"),
            "arena_bytes": part("arena"),
            "input_bytes": part("inputs"),
            "output_bytes": part("outputs"),
            "fixed_bytes": self.fixed_bytes(),
            "kv_page_bytes": self.page_bytes,
            "kv_page_tokens": self.page_tokens,
            "kv_pages": self.kv_pages,
            "kv_bytes": self.kv_bytes(),
            "kv_tokens": self.kv_pages * u64::from(self.page_tokens),
            "context": self.context,
            "seqs_at_context": self.seqs,
            "seqs_max": self.seqs_max,
            "unused_bytes": self.memory_bytes.saturating_sub(self.fixed_bytes() + self.kv_bytes()),
        })
    }

    fn describe(&self) -> String {
        let row = |name: &str, bytes: u64| format!("{name:<10}{bytes:>16} B  {:>12}\n", size::human(bytes));
        let mut out = row("memory", self.memory_bytes);
        out.extend(self.fixed.iter().map(|(name, bytes, _)| row(name, *bytes)));
        out += &row("kv", self.kv_bytes());
        out += &format!(
            "kv pages  {} of {} tokens: {} tokens\n",
            self.kv_pages,
            self.page_tokens,
            self.kv_pages * u64::from(self.page_tokens)
        );
        out += &format!("sequences {} of {} tokens at once (the bundle allows {})\n", self.seqs, self.context, self.seqs_max);
        out += &format!("flag      --kv-memory {}\n", self.kv_bytes());
        out
    }

    /// What is wrong with `--kv-memory`, where that is what does not fit.
    fn kv_refusal(&self, one_seq: u64) -> Option<String> {
        let given = self.kv_given?;
        let (fixed, memory) = (self.fixed_bytes(), self.memory_bytes);
        let left = memory.saturating_sub(fixed);
        if self.kv_bytes() > left && left >= one_seq {
            return Some(format!(
                "does not fit: --kv-memory {given} B beside {fixed} B of weights and buffers are more than the {memory} B given; lower it to at most {left}"
            ));
        }
        (self.kv_bytes() <= left).then(|| {
            format!("does not fit: --kv-memory {given} B is less than the {one_seq} B that one sequence of {} tokens needs", self.context)
        })
    }

    fn refusal(&self) -> String {
        let one_seq = u64::from(self.context.div_ceil(self.page_tokens.max(1))) * self.page_bytes;
        if let Some(refusal) = self.kv_refusal(one_seq) {
            return refusal;
        }
        let mut consumers: Vec<_> = self.fixed.to_vec();
        consumers.push(("kv of one sequence", one_seq, "a smaller --context"));
        consumers.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
        let largest: Vec<String> = consumers.iter().take(3).map(|(name, bytes, hint)| format!("{name} {bytes} B ({hint})")).collect();
        format!(
            "does not fit: {} B are needed for one sequence of {} tokens, {} B are given; the largest consumers: {}",
            self.fixed_bytes() + one_seq,
            self.context,
            self.memory_bytes,
            largest.join(", ")
        )
    }
}
