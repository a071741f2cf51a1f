//! Whatever is drawn from a schema's masks is JSON that an independent validator accepts, if it ends by itself.

use crate::sampler::{Outcome, Taste, compile, draw};
use crate::schemas::schemas;
use oxide_run::grammar::ConstraintKind;
use serde_json::Value;

/// What is wrong with a complete output, if anything is.
fn fault(schema: &Value, text: &str) -> Option<String> {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => return Some(format!("{text:?} is not JSON: {error}")),
    };
    let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a valid schema");
    if let Err(error) = validator.validate(&value) {
        return Some(format!("{text} is refused: {error}"));
    }
    let longest = text.split(|char: char| !char.is_ascii_whitespace()).map(str::len).max().unwrap_or(0);
    let padded = text.trim_end() != text || longest > 64;
    padded.then(|| format!("{text:?} has too much whitespace"))
}

fn faults(name: &str, schema: &Value) -> Vec<String> {
    let compiled = match compile(ConstraintKind::Schema(schema.clone())) {
        Ok(compiled) => compiled,
        Err(error) => return vec![format!("{name}: {error}")],
    };
    let Some(shortest) = compiled.shortest().and_then(|shortest| u32::try_from(shortest).ok()) else {
        return vec![format!("{name}: no shortest output is known: {schema}")];
    };
    let mut found = Vec::new();
    for seed in 0..4 {
        for budget in [0, 1, 5, 20, 100].map(|more| shortest + more) {
            let taste = [Taste::Even, Taste::Long, Taste::Endless][(seed % 3) as usize];
            let fault = match draw(&compiled, budget, seed * 1000 + u64::from(budget), taste) {
                Outcome::Complete(text) => fault(schema, &text),
                Outcome::Cut(text) => Some(format!("not closed within {budget} (shortest {shortest}): {text}")),
            };
            found.extend(fault.map(|fault| format!("{name} ({taste:?}, seed {seed}): {fault}: {schema}")));
        }
    }
    found
}

#[test]
fn two_hundred_schemas_are_followed_with_ample_and_with_scant_budgets() {
    let all = schemas();
    assert_eq!(all.len(), 200);
    let found: Vec<String> = all.iter().flat_map(|(name, schema)| faults(name, schema)).collect();
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n"));
}
