//! Mutations of JSON values.

use crate::fuzz::Random;
use serde_json::{Map, Number, Value};

/// Most mutations of one value.
const MUTATIONS_MAX: usize = 4;
/// Numbers that checks tend to get wrong, as they are written.
const NUMBERS: [&str; 14] = [
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "0.5",
    "1e-320",
    "1e308",
    "-1e308",
    "255",
    "4294967296",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
];
/// Texts that checks tend to get wrong.
const TEXTS: [&str; 12] = [
    "",
    " ",
    "a",
    "null",
    "\0",
    "\u{FEFF}",
    "\u{202E}\u{1F469}\u{200D}\u{1F4BB}",
    "<|im_end|>",
    "{{ messages }}",
    "e\u{301}\r\n\t\"\\",
    "-1",
    "(a|b)*",
];

/// A value of the corpus, a few times changed.
pub(crate) fn mutated_json(corpus: &[Value], seed: u64) -> Value {
    let mut random = Random::new(seed);
    let mut value = pick(corpus, &mut random);
    for _ in 0..=random.below(MUTATIONS_MAX) {
        mutate(&mut value, corpus, &mut random);
    }
    value
}

fn pick(corpus: &[Value], random: &mut Random) -> Value {
    corpus.get(random.below(corpus.len())).cloned().unwrap_or_default()
}

/// Goes down a random path and changes what it finds there.
fn mutate(value: &mut Value, corpus: &[Value], random: &mut Random) {
    let here = random.below(4) == 0;
    match value {
        Value::Object(map) if !here && !map.is_empty() => {
            let index = random.below(map.len());
            if let Some((_, member)) = map.iter_mut().nth(index) {
                mutate(member, corpus, random);
            }
        }
        Value::Array(items) if !here && !items.is_empty() => {
            let index = random.below(items.len());
            mutate(&mut items[index], corpus, random);
        }
        Value::Object(map) => mutate_object(map, corpus, random),
        Value::Array(items) => mutate_array(items, corpus, random),
        leaf => *leaf = fresh(leaf.clone(), corpus, random),
    }
}

fn mutate_object(map: &mut Map<String, Value>, corpus: &[Value], random: &mut Random) {
    let name = map.keys().nth(random.below(map.len())).cloned();
    match (random.below(4), name) {
        (0, Some(name)) => drop(map.remove(&name)),
        (1, Some(name)) => {
            let member = map.remove(&name).unwrap_or_default();
            map.insert(format!("{name}s"), member);
        }
        // A member of another value: the fields of one kind of input meet those of another.
        (2, _) => {
            if let Value::Object(other) = pick(corpus, random) {
                map.extend(other.into_iter().nth(random.below(12)));
            }
        }
        (_, Some(name)) => {
            let member = map.get(&name).cloned().unwrap_or_default();
            map.insert(name, fresh(member, corpus, random));
        }
        (_, None) => drop(map.insert("a".to_owned(), fresh(Value::Null, corpus, random))),
    }
}

fn mutate_array(items: &mut Vec<Value>, corpus: &[Value], random: &mut Random) {
    let at = random.below(items.len() + 1);
    match random.below(4) {
        0 => items.truncate(at),
        1 => {
            let times = random.below(80);
            let item = items.get(at).cloned().unwrap_or_default();
            items.extend(std::iter::repeat_n(item, times));
        }
        2 => items.insert(at, fresh(Value::Null, corpus, random)),
        _ => items.reverse(),
    }
}

/// A value in the place of another, often of another type.
fn fresh(old: Value, corpus: &[Value], random: &mut Random) -> Value {
    match random.below(10) {
        0 => Value::Null,
        1 => Value::Bool(random.below(2) == 0),
        2 | 3 => NUMBERS[random.below(NUMBERS.len())].parse::<Number>().map_or(Value::Null, Value::Number),
        4 => TEXTS[random.below(TEXTS.len())].into(),
        5 => TEXTS[random.below(TEXTS.len())].repeat(random.below(2000)).into(),
        6 => Value::Array(vec![old; random.below(5)]),
        7 => Value::Object(Map::from_iter([("a".to_owned(), old)])),
        8 => (0..random.below(70)).fold(old, |inner, _| Value::Array(vec![inner])),
        _ => pick(corpus, random),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::HashSet;

    #[test]
    fn a_seed_gives_one_value_and_seeds_give_many() {
        let corpus = [json!({"a": 1, "b": [true, {"c": "text"}]}), json!([])];
        let values: HashSet<String> = (0..200).map(|seed| mutated_json(&corpus, seed).to_string()).collect();
        assert!(values.len() > 100, "{}", values.len());
        assert!((0..200).all(|seed| mutated_json(&corpus, seed) == mutated_json(&corpus, seed)));
    }
}
