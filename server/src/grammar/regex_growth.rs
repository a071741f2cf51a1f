//! How many bytes a text that began to match a regular expression may still need.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};
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
    /// Characters of every match at least.
    pub(super) characters: u64,
    /// Still needed from anywhere inside a match.
    pub(super) remaining: u64,
}

/// How the matched text is written.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// As it is.
    Plain,
    /// Inside a JSON string.
    Json,
}

/// Reads a regular expression.
///
/// # Errors
/// What is wrong with it.
pub(super) fn regex_growth(pattern: &str, spelling: Spelling) -> Result<RegexGrowth, String> {
    if pattern.len() > REGEX_BYTES_MAX {
        return Err(format!("is a regular expression of {} bytes, at most {REGEX_BYTES_MAX} are allowed", pattern.len()));
    }
    let parser: Parser = ParserBuilder::new().nest_limit(NEST_MAX).build();
    let hir = { parser }.parse(pattern).map_err(|error| format!("is not a regular expression: {}", one_line(&error.to_string())))?;
    let reader = Reader { spelling };
    Ok(RegexGrowth { shortest: reader.shortest(&hir), characters: characters(&hir), remaining: reader.remaining(&hir) })
}

/// Longest shortest match that is written out, in bytes.
const TEXT_BYTES_MAX: usize = 4_096;

/// A shortest match; `None` if there is none, or none so short that it is written out.
pub(super) fn shortest_text(pattern: &str) -> Option<String> {
    let parser: Parser = ParserBuilder::new().nest_limit(NEST_MAX).build();
    let hir = { parser }.parse(pattern).ok()?;
    shortest_match(&hir)
}

fn shortest_match(hir: &Hir) -> Option<String> {
    let text = match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => String::new(),
        HirKind::Literal(literal) => String::from_utf8(literal.0.to_vec()).ok()?,
        HirKind::Class(Class::Unicode(class)) => plainest(class)?.to_string(),
        HirKind::Class(Class::Bytes(_)) => return None,
        HirKind::Repetition(repetition) if repetition.min == 0 => String::new(),
        HirKind::Repetition(repetition) => {
            let once = shortest_match(&repetition.sub)?;
            let count = repetition.min as usize;
            if once.len().saturating_mul(count) > TEXT_BYTES_MAX {
                return None;
            }
            once.repeat(count)
        }
        HirKind::Capture(capture) => shortest_match(&capture.sub)?,
        HirKind::Concat(parts) => parts.iter().map(shortest_match).collect::<Option<String>>()?,
        HirKind::Alternation(parts) => parts.iter().filter_map(shortest_match).min_by_key(String::len)?,
    };
    (text.len() <= TEXT_BYTES_MAX).then_some(text)
}

/// The character of a class that JSON and tokenizers write most briefly.
fn plainest(class: &ClassUnicode) -> Option<char> {
    let cost = |char: &char| match char {
        'a'..='z' | 'A'..='Z' | '0'..='9' => 0,
        '"' | '\\' => 3,
        ' '..='~' => 1,
        char if *char < ' ' => 6,
        char => 3 + char.len_utf8(),
    };
    let anchors = [('a', 'z'), ('A', 'Z'), ('0', '9'), (' ', '~'), ('\0', char::MAX)];
    let first = |range: &ClassUnicodeRange| {
        anchors.map(|(low, high)| (range.start().max(low) <= range.end().min(high)).then(|| range.start().max(low)))
    };
    let next = |range: &ClassUnicodeRange| char::from_u32(range.start() as u32 + 1).filter(|char| *char <= range.end());
    class.ranges().iter().flat_map(|range| first(range).into_iter().flatten().chain(next(range))).min_by_key(cost)
}

/// Characters of every match at least.
fn characters(hir: &Hir) -> u64 {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => 0,
        HirKind::Literal(literal) => String::from_utf8_lossy(&literal.0).chars().count() as u64,
        HirKind::Class(_) => 1,
        HirKind::Repetition(repetition) => u64::from(repetition.min).saturating_mul(characters(&repetition.sub)),
        HirKind::Capture(capture) => characters(&capture.sub),
        HirKind::Concat(parts) => parts.iter().map(characters).fold(0, u64::saturating_add),
        HirKind::Alternation(parts) => parts.iter().map(characters).min().unwrap_or(0),
    }
}

/// The last line of a message that draws its place first.
fn one_line(message: &str) -> String {
    message.lines().last().unwrap_or(message).trim_start_matches("error: ").to_owned()
}

struct Reader {
    spelling: Spelling,
}

impl Reader {
    fn literal(&self, bytes: &[u8]) -> u64 {
        bytes.iter().map(|byte| self.byte(*byte)).fold(0, u64::saturating_add)
    }

    fn byte(&self, byte: u8) -> u64 {
        match (self.spelling, byte) {
            (Spelling::Json, 0..0x20) => 6,
            (Spelling::Json, b'"' | b'\\') => 2,
            _ => 1,
        }
    }

    /// The cheapest character of a class.
    fn class(&self, hir: &Hir) -> u64 {
        let HirKind::Class(Class::Unicode(class)) = hir.kind() else { return 6 };
        let plain = class
            .ranges()
            .iter()
            .any(|range| range.end() > ' ' && (range.start()..=range.end()).any(|char| char >= ' ' && !matches!(char, '"' | '\\')));
        match self.spelling {
            Spelling::Json if !plain => 6,
            _ => hir.properties().minimum_len().unwrap_or(1).max(1) as u64,
        }
    }

    fn shortest(&self, hir: &Hir) -> u64 {
        match hir.kind() {
            HirKind::Empty | HirKind::Look(_) => 0,
            HirKind::Literal(literal) => self.literal(&literal.0),
            HirKind::Class(_) => self.class(hir),
            HirKind::Repetition(repetition) => u64::from(repetition.min).saturating_mul(self.shortest(&repetition.sub)),
            HirKind::Capture(capture) => self.shortest(&capture.sub),
            HirKind::Concat(parts) => parts.iter().map(|part| self.shortest(part)).fold(0, u64::saturating_add),
            HirKind::Alternation(parts) => parts.iter().map(|part| self.shortest(part)).min().unwrap_or(0),
        }
    }

    /// The worst over all places inside: each live state of a matcher is at least one such place.
    fn remaining(&self, hir: &Hir) -> u64 {
        match hir.kind() {
            HirKind::Empty | HirKind::Look(_) => 0,
            HirKind::Literal(literal) => self.literal(&literal.0),
            HirKind::Class(_) => self.class(hir).max(4),
            HirKind::Repetition(repetition) => {
                let further = u64::from(repetition.min.saturating_sub(1)).saturating_mul(self.shortest(&repetition.sub));
                self.remaining(&repetition.sub).saturating_add(further)
            }
            HirKind::Capture(capture) => self.remaining(&capture.sub),
            HirKind::Concat(parts) => {
                let (mut rest, mut worst) = (0_u64, 0_u64);
                for part in parts.iter().rev() {
                    worst = worst.max(self.remaining(part).saturating_add(rest));
                    rest = rest.saturating_add(self.shortest(part));
                }
                worst
            }
            HirKind::Alternation(parts) => parts.iter().map(|part| self.remaining(part)).max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_match_is_bounded_from_anywhere_inside() {
        let bounds = |pattern: &str| regex_growth(pattern, Spelling::Plain).map(|growth| (growth.shortest, growth.remaining));
        assert_eq!(bounds("abc"), Ok((3, 3)));
        assert_eq!(bounds("(a|b{500})c"), Ok((2, 501)));
        assert_eq!(bounds("x*y"), Ok((1, 2)));
        assert!(bounds("(").expect_err("open").contains("not a regular expression"));
        assert!(bounds(&"(".repeat(60_000)).is_err());
        assert!(bounds(&format!("{}{}", "(".repeat(100), ")".repeat(100))).is_err());
    }
}
