//! How many bytes a text that began to match a regular expression may still need.

use regex_syntax::hir::{Hir, HirKind};
use regex_syntax::{Parser, ParserBuilder};

/// Longest regular expression, in bytes.
pub(super) const REGEX_BYTES_MAX: usize = 16_384;
/// Deepest nesting of groups.
const NEST_MAX: u32 = 64;

/// Bounds of a regular expression, in bytes of matched text.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct RegexGrowth {
    /// Of a shortest match.
    pub(super) shortest: u64,
    /// Still needed from anywhere inside a match.
    pub(super) remaining: u64,
}

/// Reads a regular expression.
///
/// # Errors
/// What is wrong with it.
pub(super) fn regex_growth(pattern: &str) -> Result<RegexGrowth, String> {
    if pattern.len() > REGEX_BYTES_MAX {
        return Err(format!("is a regular expression of {} bytes, at most {REGEX_BYTES_MAX} are allowed", pattern.len()));
    }
    let parser: Parser = ParserBuilder::new().nest_limit(NEST_MAX).build();
    let hir = { parser }.parse(pattern).map_err(|error| format!("is not a regular expression: {}", one_line(&error.to_string())))?;
    Ok(RegexGrowth { shortest: shortest(&hir), remaining: remaining(&hir) })
}

/// The last line of a message that draws its place first.
fn one_line(message: &str) -> String {
    message.lines().last().unwrap_or(message).trim_start_matches("error: ").to_owned()
}

fn shortest(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Class(_) => hir.properties().minimum_len().unwrap_or(1) as u64,
        HirKind::Repetition(repetition) => u64::from(repetition.min).saturating_mul(shortest(&repetition.sub)),
        HirKind::Capture(capture) => shortest(&capture.sub),
        HirKind::Concat(parts) => parts.iter().map(shortest).fold(0, u64::saturating_add),
        HirKind::Alternation(parts) => parts.iter().map(shortest).min().unwrap_or(0),
    }
}

/// The worst over all places inside: each live state of a matcher is at least one such place.
fn remaining(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Literal(literal) => literal.0.len() as u64,
        HirKind::Class(_) => 4,
        HirKind::Repetition(repetition) => {
            let further = u64::from(repetition.min.saturating_sub(1)).saturating_mul(shortest(&repetition.sub));
            remaining(&repetition.sub).saturating_add(further)
        }
        HirKind::Capture(capture) => remaining(&capture.sub),
        HirKind::Concat(parts) => {
            let mut rest = 0_u64;
            let mut worst = 0_u64;
            for part in parts.iter().rev() {
                worst = worst.max(remaining(part).saturating_add(rest));
                rest = rest.saturating_add(shortest(part));
            }
            worst
        }
        HirKind::Alternation(parts) => parts.iter().map(remaining).max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_match_is_bounded_from_anywhere_inside() {
        let bounds = |pattern: &str| regex_growth(pattern).map(|growth| (growth.shortest, growth.remaining));
        assert_eq!(bounds("abc"), Ok((3, 3)));
        assert_eq!(bounds("(a|b{500})c"), Ok((2, 504)));
        assert_eq!(bounds("(?-u:x)*y"), Ok((1, 2)));
        assert!(bounds("(").expect_err("open").contains("not a regular expression"));
        assert!(bounds(&"(".repeat(60_000)).is_err());
        assert!(bounds(&format!("{}{}", "(".repeat(100), ")".repeat(100))).is_err());
    }
}
