//! `diff`: how two bundles differ, by what a bundle is made of. Works on digests and verified metadata; weights are
//! compared by the digests of their tensors and never read.

use super::args::DiffArgs;
use super::names;
use super::text_diff::{self, Hunk};
use crate::cli::error::CliError;
use crate::cli::output;
use crate::model::LoadOptions;
use oxide_bundle::ids::KernelId;
use oxide_bundle::plan::EntryDecl;
use oxide_bundle::section::TensorEntry;
use oxide_bundle::{Bundle, Digest};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Differences in one aspect.
struct Aspect {
    name: &'static str,
    changes: Vec<Change>,
}

/// One difference.
struct Change {
    what: String,
    left: Value,
    right: Value,
    /// Lines in which texts differ.
    hunk: Option<Hunk>,
}

pub(super) fn run(args: &DiffArgs, load: &LoadOptions) -> Result<(), CliError> {
    let (left, right) = (super::open(load)?, super::open_other(&args.other, load)?);
    let aspects = compare(&left, &right);
    let equal = left.seal() == right.seal();
    output::report(args.json, &to_json(&aspects, equal), || people(&aspects, &left, equal))?;
    if equal { Ok(()) } else { Err(CliError::Differs) }
}

fn compare(left: &Bundle, right: &Bundle) -> Vec<Aspect> {
    let sides = |of: &dyn Fn(&Bundle) -> Value| fields(&of(left), &of(right));
    let manifest = |part: &'static str| move |bundle: &Bundle| to_value(bundle.manifest())[part].take();
    let aspect = |name, changes| Aspect { name, changes };
    vec![
        aspect("identity", sides(&identity)),
        aspect("model", sides(&|bundle| model(bundle))),
        aspect("limits", sides(&manifest("limits"))),
        aspect("ledger", sides(&manifest("ledger"))),
        aspect("plan", plan(left, right)),
        aspect("kernels", kernels(left, right)),
        aspect("tensors", tensors(left, right)),
        aspect("template", template(left, right)),
        aspect("tokenizer", tokenizer(left, right)),
        aspect("generation", sides(&generation)),
        aspect("golden", sides(&|bundle| golden(bundle))),
        aspect("provenance", sides(&provenance)),
        aspect("licences", texts("text", left.licences(), right.licences())),
    ]
}

fn to_value(part: &impl Serialize) -> Value {
    // Metadata hold only strings, numbers and lists.
    serde_json::to_value(part).unwrap_or_default()
}

fn identity(bundle: &Bundle) -> Value {
    let superblock = bundle.superblock();
    json!({
        "seal": superblock.seal().to_string(),
        "weights_root": superblock.weights_root.to_string(),
        "plan_root": superblock.plan_root.to_string(),
        "kernels_root": superblock.kernels_root.to_string(),
        "driver_min": superblock.target.driver_min,
        "runtime_abi": format!("{} to {}", superblock.abi_min, superblock.abi_max),
    })
}

fn model(bundle: &Bundle) -> Value {
    let manifest = bundle.manifest();
    let mut value = to_value(&manifest.model);
    value["rope_theta"] = json!(manifest.model.rope_theta.get());
    let more = json!({ "name": manifest.name, "profile": manifest.profile, "target": manifest.target, "tokens": manifest.tokens });
    merge(more, value)
}

fn merge(left: Value, right: Value) -> Value {
    let (Value::Object(mut left), Value::Object(right)) = (left, right) else { return Value::Null };
    left.extend(right);
    Value::Object(left)
}

fn generation(bundle: &Bundle) -> Value {
    let defaults = &bundle.manifest().generation;
    json!({
        "temperature": defaults.temperature.get(),
        "top_p": defaults.top_p.get(),
        "top_k": defaults.top_k,
        "min_p": defaults.min_p.get(),
        "repetition_penalty": defaults.repetition_penalty.get(),
    })
}

fn golden(bundle: &Bundle) -> Value {
    let golden = bundle.golden();
    let digest = |part: Value| Digest::of(&[part.to_string().as_bytes()]).short();
    json!({
        "status": bundle.manifest().golden,
        "greedy": format!("{} ({})", golden.greedy.len(), digest(to_value(&golden.greedy))),
        "tokenizer": format!("{} ({})", golden.tokenizer.len(), digest(to_value(&golden.tokenizer))),
        "template": format!("{} ({})", golden.template.len(), digest(to_value(&golden.template))),
    })
}

fn provenance(bundle: &Bundle) -> Value {
    let provenance = bundle.provenance();
    let profile = Digest::of(&[provenance.profile_toml.as_bytes()]).short();
    json!({ "compiler": provenance.compiler, "profile": profile, "options": provenance.options, "inputs": provenance.inputs })
}

/// Fields whose values differ, nested ones by their path.
fn fields(left: &Value, right: &Value) -> Vec<Change> {
    let (left, right) = (leaves(left), leaves(right));
    changes(&left, &right)
}

fn leaves(value: &Value) -> Vec<(String, Value)> {
    fn walk(path: &str, value: &Value, out: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                walk(&path, value, out);
            }),
            leaf => out.push((path.to_owned(), leaf.clone())),
        }
    }
    let mut out = Vec::new();
    walk("", value, &mut out);
    out
}

/// Pairs rows by name, in the left's order, then what only the right has.
fn changes(left: &[(String, Value)], right: &[(String, Value)]) -> Vec<Change> {
    let lookup: BTreeMap<&str, &Value> = right.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let known: BTreeSet<&str> = left.iter().map(|(name, _)| name.as_str()).collect();
    let paired =
        left.iter().map(|(name, value)| (name, value.clone(), lookup.get(name.as_str()).map_or(Value::Null, |found| (*found).clone())));
    let added = right.iter().filter(|(name, _)| !known.contains(name.as_str())).map(|(name, value)| (name, Value::Null, value.clone()));
    let differing = paired.chain(added).filter(|(_, left, right)| left != right);
    differing.map(|(what, left, right)| Change { what: what.clone(), left, right, hunk: None }).collect()
}

fn plan(left: &Bundle, right: &Bundle) -> Vec<Change> {
    let scalars = |bundle: &Bundle| {
        let plan = bundle.plan();
        json!({ "bounds": plan.bounds(), "kv": plan.kv(), "arena_bytes": plan.arena_bytes() })
    };
    let buffers = |bundle: &Bundle| -> Vec<(String, Value)> {
        let rows = bundle.plan().buffers().iter();
        rows.map(|buffer| (format!("buffer {}", buffer.label), json!(format!("@{} +{}", buffer.offset_bytes, buffer.size_bytes)))).collect()
    };
    let mut found = fields(&scalars(left), &scalars(right));
    found.extend(changes(&buffers(left), &buffers(right)));
    found.extend(entries(left, right));
    found
}

fn entries(left: &Bundle, right: &Bundle) -> Vec<Change> {
    let classes = left.plan().entries().iter().chain(right.plan().entries()).map(|entry| entry.class);
    let mut seen = BTreeSet::new();
    let names = classes.map(names::class).filter(|name| seen.insert(name.clone())).collect::<Vec<_>>();
    names.iter().filter_map(|name| entry(name, left, right)).collect()
}

fn entry(name: &str, left: &Bundle, right: &Bundle) -> Option<Change> {
    let steps = |bundle: &Bundle| -> Option<Vec<String>> {
        let entry: &EntryDecl = bundle.plan().entries().iter().find(|entry| names::class(entry.class) == name)?;
        Some(entry.steps.iter().map(|step| names::step(bundle, step)).collect())
    };
    let (left, right) = (steps(left), steps(right));
    if left == right {
        return None;
    }
    let count = |steps: &Option<Vec<String>>| steps.as_ref().map_or(Value::Null, |steps| json!(format!("{} steps", steps.len())));
    let hunk = match (&left, &right) {
        (Some(left), Some(right)) => text_diff::hunk(&left.join("\n"), &right.join("\n")),
        _ => None,
    };
    Some(Change { what: format!("entry {name}"), left: count(&left), right: count(&right), hunk })
}

fn kernels(left: &Bundle, right: &Bundle) -> Vec<Change> {
    let rows = |bundle: &Bundle| -> Vec<(String, Value)> {
        let rows = (0..bundle.plan().kernels().len() as u32).map(|index| names::kernel(bundle, KernelId(index)));
        rows.map(|name| (name, json!("present"))).collect()
    };
    changes(&rows(left), &rows(right))
}

fn tensors(left: &Bundle, right: &Bundle) -> Vec<Change> {
    let row = |tensor: &TensorEntry| {
        let TensorEntry { dtype, shape, layout, rows, root, .. } = tensor;
        let shape: Vec<String> = shape.iter().map(u32::to_string).collect();
        format!("{dtype}[{}] {layout:?} {rows:?} {}", shape.join(","), root.short())
    };
    let rows = |bundle: &Bundle| -> Vec<(String, Value)> {
        bundle.tensors().iter().map(|tensor| (tensor.name.clone(), json!(row(tensor)))).collect()
    };
    changes(&rows(left), &rows(right))
}

fn template(left: &Bundle, right: &Bundle) -> Vec<Change> {
    let (left, right) = (left.template(), right.template());
    let rest = |template: &oxide_bundle::manifest::TemplateSection| json!({ "bos_token": template.bos_token, "eos_token": template.eos_token, "tool_dialect": template.tool_dialect });
    let mut found = fields(&rest(left), &rest(right));
    let text = |template: &Option<String>| template.clone().unwrap_or_default();
    found.extend(texts("text", &text(&left.chat_template), &text(&right.chat_template)));
    found
}

fn texts(what: &str, left: &str, right: &str) -> Vec<Change> {
    let hunk = text_diff::hunk(left, right);
    let change = |hunk: Hunk| Change {
        what: what.to_owned(),
        left: json!(Digest::of(&[left.as_bytes()]).short()),
        right: json!(Digest::of(&[right.as_bytes()]).short()),
        hunk: Some(hunk),
    };
    hunk.map(change).into_iter().collect()
}

/// Top-level parts of `tokenizer.json` that differ, by digest, and how many entries of the vocabulary do.
fn tokenizer(left: &Bundle, right: &Bundle) -> Vec<Change> {
    if left.tokenizer_json() == right.tokenizer_json() {
        return Vec::new();
    }
    let parse = |bundle: &Bundle| serde_json::from_slice::<Map<String, Value>>(bundle.tokenizer_json()).unwrap_or_default();
    let (left_map, right_map) = (parse(left), parse(right));
    let parts = |map: &Map<String, Value>| -> Vec<(String, Value)> {
        map.iter().map(|(name, part)| (name.clone(), json!(Digest::of(&[part.to_string().as_bytes()]).short()))).collect()
    };
    let mut found = changes(&parts(&left_map), &parts(&right_map));
    let vocab = |map: &Map<String, Value>| map.get("model").map(|model| leaves(&model["vocab"])).unwrap_or_default();
    let moved = changes(&vocab(&left_map), &vocab(&right_map)).len();
    if moved > 0 {
        found.push(Change { what: "vocabulary".to_owned(), left: json!(0), right: json!(format!("{moved} entries differ")), hunk: None });
    }
    let digest = |bundle: &Bundle| json!(format!("{} B {}", bundle.tokenizer_json().len(), Digest::of(&[bundle.tokenizer_json()]).short()));
    found.insert(0, Change { what: "tokenizer.json".to_owned(), left: digest(left), right: digest(right), hunk: None });
    found
}

fn to_json(aspects: &[Aspect], equal: bool) -> Value {
    let change = |change: &Change| {
        let mut value = json!({ "what": change.what, "left": change.left, "right": change.right });
        if let Some(hunk) = &change.hunk {
            value["lines"] = hunk.to_json();
        }
        value
    };
    let rows = aspects.iter().map(|aspect| (aspect.name.to_owned(), aspect.changes.iter().map(change).collect::<Value>()));
    json!({ "equal": equal, "differences": rows.collect::<Map<_, _>>() })
}

/// Changes of one aspect printed for people.
const CHANGES_SHOWN: usize = 16;

fn people(aspects: &[Aspect], left: &Bundle, equal: bool) -> String {
    if equal {
        return format!("equal: both have seal {}\n", left.seal());
    }
    let mut text = String::new();
    for Aspect { name, changes } in aspects {
        if changes.is_empty() {
            text += &format!("{name}: equal\n");
            continue;
        }
        text += &format!("{name}: {} differ\n", changes.len());
        text.extend(changes.iter().take(CHANGES_SHOWN).map(change_text));
        if changes.len() > CHANGES_SHOWN {
            text += &format!("  … {} more (--json lists all)\n", changes.len() - CHANGES_SHOWN);
        }
    }
    text
}

fn change_text(change: &Change) -> String {
    let Change { what, left, right, hunk } = change;
    let side = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let line = match (left, right) {
        (Value::Null, Value::String(right)) if right == "present" => format!("  + {what}\n"),
        (Value::String(left), Value::Null) if left == "present" => format!("  - {what}\n"),
        (Value::Null, right) => format!("  + {what}: {}\n", side(right)),
        (left, Value::Null) => format!("  - {what}: {}\n", side(left)),
        (left, right) => format!("  {what}: {} -> {}\n", side(left), side(right)),
    };
    line + &hunk.as_ref().map(Hunk::people).unwrap_or_default()
}
