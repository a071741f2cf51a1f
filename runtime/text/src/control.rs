//! Control tokens: which ids only the template (or a trusted prompt) may produce, and where their texts occur.
//!
//! A token added beside the learned vocabulary is *control* if it is marked special or looks like
//! markup (`<think>`, `[INST]`). Other added tokens (runs of spaces, say) are ordinary text: they are
//! matched everywhere, as their tokenizer wants.

use std::ops::Range;

/// An added token as `tokenizer.json` declares it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct AddedToken {
    /// Id.
    pub id: u32,
    /// Text.
    pub content: String,
    /// Matches whole words only.
    #[serde(default)]
    pub single_word: bool,
    /// Swallows whitespace before it.
    #[serde(default)]
    pub lstrip: bool,
    /// Swallows whitespace after it.
    #[serde(default)]
    pub rstrip: bool,
    /// Hidden when special tokens are skipped.
    #[serde(default)]
    pub special: bool,
}

impl AddedToken {
    /// Whether message text may never become this token.
    pub fn is_control(&self) -> bool {
        self.special || self.content.starts_with(['<', '['])
    }
}

/// The added tokens of a tokenizer, searchable by text.
#[derive(Clone, Debug, Default)]
pub struct ControlTokens {
    /// Longest first, so that the first match at a place is the longest.
    tokens: Vec<AddedToken>,
    /// First bytes of their texts.
    starts: Vec<u8>,
}

/// A token found in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// Its id.
    pub id: u32,
    /// Bytes it takes, swallowed whitespace included.
    pub range: Range<usize>,
}

impl ControlTokens {
    /// Collects tokens; empty texts are dropped.
    pub fn new(tokens: impl IntoIterator<Item = AddedToken>) -> Self {
        let mut tokens: Vec<_> = tokens.into_iter().filter(|t| !t.content.is_empty()).collect();
        tokens.sort_by(|a, b| b.content.len().cmp(&a.content.len()).then(a.id.cmp(&b.id)));
        let mut starts: Vec<u8> = tokens.iter().filter_map(|t| t.content.bytes().next()).collect();
        starts.sort_unstable();
        starts.dedup();
        Self { tokens, starts }
    }

    /// The tokens, longest text first.
    pub fn iter(&self) -> impl Iterator<Item = &AddedToken> {
        self.tokens.iter()
    }

    /// The token with exactly this text.
    pub fn by_text(&self, text: &str) -> Option<&AddedToken> {
        self.tokens.iter().find(|t| t.content == text)
    }

    /// Leftmost, longest, non-overlapping matches.
    pub fn find(&self, text: &str) -> Vec<Match> {
        let mut found: Vec<Match> = Vec::new();
        let mut at = 0;
        while let Some(offset) = text.as_bytes()[at..].iter().position(|b| self.starts.binary_search(b).is_ok()) {
            let start = at + offset;
            let floor = found.last().map_or(0, |m| m.range.end);
            match self.match_at(text, start) {
                Some(token) => {
                    let range = widen(text, token, start, floor);
                    at = range.end;
                    found.push(Match { id: token.id, range });
                }
                None => at = start + 1,
            }
        }
        found
    }

    fn match_at(&self, text: &str, start: usize) -> Option<&AddedToken> {
        let rest = text.get(start..)?;
        self.tokens.iter().find(|t| rest.starts_with(&t.content) && (!t.single_word || is_whole_word(text, start, t.content.len())))
    }
}

/// The range of a token, with the whitespace that it swallows.
fn widen(text: &str, token: &AddedToken, start: usize, floor: usize) -> Range<usize> {
    let end = start + token.content.len();
    let left = if token.lstrip { floor + text[floor..start].trim_end().len() } else { start };
    let right = if token.rstrip { text.len() - text[end..].trim_start().len() } else { end };
    left..right
}

fn is_whole_word(text: &str, start: usize, len: usize) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let before = text[..start].chars().next_back().is_some_and(is_word);
    let after = text[start + len..].chars().next().is_some_and(is_word);
    !before && !after
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, content: &str) -> AddedToken {
        AddedToken { id, content: content.into(), single_word: false, lstrip: false, rstrip: false, special: true }
    }

    #[test]
    fn the_longest_token_at_the_leftmost_place_wins() {
        let set = ControlTokens::new([token(1, "<a>"), token(2, "<a>b"), token(3, "b<")]);
        let ids: Vec<_> = set.find("x<a>b<a>é<a").into_iter().map(|m| (m.id, m.range)).collect();
        assert_eq!(ids, [(2, 1..5), (1, 5..8)]);
    }

    #[test]
    fn whitespace_is_swallowed_only_where_declared() {
        let strip = AddedToken { lstrip: true, rstrip: true, ..token(1, "<m>") };
        let set = ControlTokens::new([strip, token(2, "<n>")]);
        let ranges: Vec<_> = set.find("a  <m> <n> b").into_iter().map(|m| m.range).collect();
        assert_eq!(ranges, [1..7, 7..10]);
    }
}
