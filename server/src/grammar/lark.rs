//! Whether a Lark grammar has a finite output at all.
//!
//! A rule is *finite* if one of its alternatives is made of texts, patterns and finite rules alone. Names that the
//! grammar does not define count as finite: the library refuses those that do not exist.

use std::collections::{BTreeMap, HashSet};

/// Most tokens that are read in all.
const STEPS_MAX: usize = 20_000_000;

/// What the check tells apart.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Name(&'a str),
    /// A text, a pattern or a control token.
    Atom,
    /// A bound of repetition.
    Number(bool),
    Mark(u8),
}

/// Refuses a grammar whose start has no finite output.
///
/// # Errors
/// That it has none, in words that follow its name.
pub(super) fn check_finite(text: &str) -> Result<(), String> {
    let rules = rules(&tokens(text));
    let mut finite: HashSet<&str> = HashSet::new();
    let mut steps = 0_usize;
    loop {
        let before = finite.len();
        for (name, body) in &rules {
            if finite.contains(name) {
                continue;
            }
            steps += body.len() + 1;
            if steps > STEPS_MAX {
                return Err("has too many rules that refer to one another".to_owned());
            }
            if is_finite(body, |name| finite.contains(name) || !rules.contains_key(name)) {
                finite.insert(name);
            }
        }
        if finite.len() == before {
            break;
        }
    }
    match rules.contains_key("start") && !finite.contains("start") {
        true => Err("has no finite output: every alternative of `start` refers back to itself without end".to_owned()),
        false => Ok(()),
    }
}

/// Bodies of the rules; a body runs to the next line that defines or directs something.
fn rules<'a>(tokens: &[Token<'a>]) -> BTreeMap<&'a str, Vec<Token<'a>>> {
    let mut rules: BTreeMap<&str, Vec<Token<'_>>> = BTreeMap::new();
    let mut current = None;
    for line in tokens.split(|token| *token == Token::Mark(b'\n')) {
        let colon = line.iter().position(|token| *token == Token::Mark(b':'));
        let name = line.iter().take(2).find_map(|token| if let Token::Name(name) = token { Some(*name) } else { None });
        let body = match (line.first(), colon, name) {
            (Some(Token::Mark(b'%')), _, _) => {
                current = None;
                continue;
            }
            (Some(Token::Name(_) | Token::Mark(b'!' | b'?')), Some(colon), Some(name)) => {
                current = Some(name);
                line.get(colon + 1..).unwrap_or_default()
            }
            _ => line,
        };
        if let Some(name) = current {
            rules.entry(name).or_default().extend_from_slice(body);
        }
    }
    rules
}

/// What is read of a group.
struct Group {
    /// An alternative that is finite was read.
    found: bool,
    /// The alternative under way is finite so far, but for `last`.
    so_far: bool,
    last: bool,
}

impl Group {
    fn new() -> Self {
        Self { found: false, so_far: true, last: true }
    }

    fn atom(&mut self, finite: bool) {
        self.so_far &= self.last;
        self.last = finite;
    }

    fn alternative(&mut self) {
        self.found |= self.so_far && self.last;
        (self.so_far, self.last) = (true, true);
    }
}

fn is_finite(body: &[Token<'_>], known: impl Fn(&str) -> bool) -> bool {
    let (mut outer, mut group, mut alias, mut counted) = (Vec::new(), Group::new(), false, false);
    for token in body {
        match *token {
            Token::Name(_) if std::mem::take(&mut alias) => {}
            Token::Name(name) => group.atom(known(name)),
            Token::Atom => group.atom(true),
            // The first bound of a repetition.
            Token::Number(zero) => {
                group.last |= zero && std::mem::take(&mut counted);
                counted = false;
            }
            Token::Mark(b'{' | b'~') => counted = true,
            Token::Mark(b'?' | b'*') => group.last = true,
            Token::Mark(b'>') => alias = true,
            Token::Mark(b'|') => group.alternative(),
            Token::Mark(b'(' | b'[') => outer.push(std::mem::replace(&mut group, Group::new())),
            Token::Mark(mark @ (b')' | b']')) => {
                group.alternative();
                let finite = group.found || mark == b']';
                group = outer.pop().unwrap_or_else(Group::new);
                group.atom(finite);
            }
            // `{,n}` begins with no bound.
            Token::Mark(b',') => group.last |= std::mem::take(&mut counted),
            Token::Mark(_) => {}
        }
    }
    group.alternative();
    group.found
}

fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let (mut at, mut found) = (0, Vec::new());
    while let Some(&byte) = bytes.get(at) {
        let rest = bytes.get(at..).unwrap_or_default();
        let count = |wanted: fn(&u8) -> bool| rest.iter().take_while(|byte| wanted(byte)).count();
        let (token, length) = match byte {
            b'#' => (None, count(|byte| *byte != b'\n')),
            b'/' if rest.starts_with(b"//") => (None, count(|byte| *byte != b'\n')),
            b'"' | b'/' => {
                let text = quoted(rest);
                let flags = rest.get(text..).unwrap_or_default().iter().take_while(|byte| byte.is_ascii_lowercase()).count();
                (Some(Token::Atom), text + flags)
            }
            b'<' => (Some(Token::Atom), count(|byte| !matches!(byte, b'>' | b'\n')) + 1),
            b'@' => (Some(Token::Atom), 1 + rest.iter().skip(1).take_while(|byte| is_word(byte)).count()),
            b'0'..=b'9' => {
                let length = count(u8::is_ascii_digit);
                (Some(Token::Number(rest.iter().take(length).all(|digit| *digit == b'0'))), length)
            }
            _ if is_word(&byte) => {
                let length = count(is_word);
                (text.get(at..at + length).map(Token::Name), length)
            }
            b' ' | b'\t' | b'\r' | b'-' => (None, 1),
            _ => (Some(Token::Mark(byte)), 1),
        };
        found.extend(token);
        at += length.max(1);
    }
    found
}

fn is_word(byte: &u8) -> bool {
    byte.is_ascii_alphanumeric() || *byte == b'_'
}

/// Bytes of what stands between two of the first byte.
fn quoted(bytes: &[u8]) -> usize {
    let mut escaped = false;
    for (index, byte) in bytes.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            byte if bytes.first() == Some(byte) => return index + 1,
            _ => {}
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_grammar_without_finite_output_is_told() {
        for endless in [
            "start: start",
            "start: \"a\" start",
            "start: a\na: b\nb: a\n",
            "start: (a | \"x\" b)+\na: \"(\" b\n// c: \"d\"\nb: a \")\" {1,2}\n",
            "start: a{1,3}\na: a \"|\"\n",
            "%ignore /[ ]/\n?start: a -> b\na: start\nb: \"x\"\n",
        ] {
            assert!(check_finite(endless).expect_err(endless).contains("no finite output"), "{endless}");
        }
        for finite in [
            "start: \"a\" start | \"b\"",
            "start: \"(\" list \")\"\nlist: NUMBER (\",\" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n",
            "start: start? \"a\"",
            "start: \"a\" [start]",
            "start: a{0,3} \"b\"\na: a\n",
            "start: a\n  | \"x\"i\na: start\n",
            "start: <|x|> | \"a\" start",
            "start: a::0x1\na::_: \"x\"\n",
            "start: \"a\" |",
            "start: missing",
            "",
        ] {
            assert_eq!(check_finite(finite), Ok(()), "{finite}");
        }
    }
}
