//! Whatever is drawn from a schema's masks is JSON that an independent validator accepts, if it ends by itself.

use crate::sampler::{Outcome, Taste, compile, draw};
use crate::schemas::schemas;
use oxide_run::grammar::ConstraintKind;
use serde_json::Value;

fn check(name: &str, schema: &Value, text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {text:?} is not JSON: {error}\n{schema}"));
    let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a valid schema");
    if let Err(error) = validator.validate(&value) {
        panic!("{name}: {text} is refused: {error}\n{schema}");
    }
    assert_eq!(text.trim_end(), text, "{name}: nothing follows the end");
    let longest = text.split(|char: char| !char.is_ascii_whitespace()).map(str::len).max().unwrap_or(0);
    assert!(longest <= 64, "{name}: a run of {longest} whitespace characters");
}

#[test]
fn two_hundred_schemas_are_followed_with_ample_and_with_scant_budgets() {
    let all = schemas();
    assert_eq!(all.len(), 200);
    for (name, schema) in &all {
        let compiled = compile(ConstraintKind::Schema(schema.clone())).unwrap_or_else(|error| panic!("{name}: {error}"));
        let shortest = u32::try_from(compiled.shortest().unwrap_or_else(|| panic!("{name}: no witness"))).expect("small");
        for seed in 0..4 {
            for budget in [shortest, shortest + 1, shortest + 5, shortest + 20, shortest + 100] {
                let taste = [Taste::Even, Taste::Long, Taste::Endless][(seed % 3) as usize];
                match draw(&compiled, budget, seed * 1000 + u64::from(budget), taste) {
                    Outcome::Complete(text) => check(name, schema, &text),
                    Outcome::Cut(text) => panic!("{name}: {taste:?}: not closed within {budget} (shortest {shortest}): {text}\n{schema}"),
                }
            }
        }
    }
}
