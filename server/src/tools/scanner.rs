//! Reads one call, `{"name": …, "arguments": …}`, character by character.
//!
//! Arguments come out as the very text that the model wrote, as soon as the name is known.

/// What a call's text gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The function's name.
    Name(String),
    /// A further piece of the arguments.
    Arguments(String),
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum State {
    /// Before the opening brace.
    Start,
    /// Before a key, or the closing brace.
    Key,
    /// Inside a key.
    InKey,
    /// Before the colon.
    Colon,
    /// Before the first character of a value.
    Value,
    /// Inside a value.
    InValue,
    /// After the closing brace.
    Done,
    /// This is no call.
    Broken,
}

/// Reads one call.
#[derive(Clone, Debug)]
pub(super) struct CallScanner {
    state: State,
    key: String,
    value: String,
    depth: usize,
    in_string: bool,
    escaped: bool,
    named: bool,
    /// Arguments that came before the name.
    early: String,
}

/// What became of a character.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It belongs to the call.
    More,
    /// It ended the call.
    Done,
    /// It cannot be part of a call.
    Broken,
}

impl CallScanner {
    pub(super) fn new() -> Self {
        Self {
            state: State::Start,
            key: String::new(),
            value: String::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            named: false,
            early: String::new(),
        }
    }

    /// Whether the name is known.
    pub(super) fn is_named(&self) -> bool {
        self.named
    }

    /// Reads a character, adding what is new to `parts`.
    pub(super) fn push(&mut self, char: char, parts: &mut Vec<Part>) -> Step {
        let space = char.is_ascii_whitespace();
        match self.state {
            State::Start | State::Key | State::Colon | State::Value if space => {}
            State::Start => self.state = if char == '{' { State::Key } else { State::Broken },
            State::Key => match char {
                '"' => {
                    self.key.clear();
                    self.state = State::InKey;
                }
                ',' => {}
                '}' => self.state = if self.named { State::Done } else { State::Broken },
                _ => self.state = State::Broken,
            },
            State::InKey => match char {
                '"' => self.state = State::Colon,
                other => self.key.push(other),
            },
            State::Colon => self.state = if char == ':' { State::Value } else { State::Broken },
            State::Value => {
                self.value.clear();
                self.state = State::InValue;
                self.value_char(char, parts);
            }
            State::InValue => self.value_char(char, parts),
            State::Done | State::Broken => {}
        }
        match self.state {
            State::Done => Step::Done,
            State::Broken => Step::Broken,
            _ => Step::More,
        }
    }

    fn value_char(&mut self, char: char, parts: &mut Vec<Part>) {
        let outside = !self.in_string && self.depth == 0;
        if outside && matches!(char, ',' | '}') {
            self.end_value(parts);
            self.state = if char == ',' { State::Key } else { State::Done };
            if self.state == State::Done && !self.named {
                self.state = State::Broken;
            }
            return;
        }
        if outside && char.is_ascii_whitespace() {
            return;
        }
        match char {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => self.in_string = !self.in_string,
            '{' | '[' if !self.in_string => self.depth += 1,
            '}' | ']' if !self.in_string => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        match self.key.as_str() {
            "arguments" | "parameters" if self.named => parts.push(Part::Arguments(char.to_string())),
            "arguments" | "parameters" => self.early.push(char),
            _ => self.value.push(char),
        }
        if self.key == "name" && !self.in_string && self.depth == 0 && char == '"' && self.value.len() > 1 {
            self.end_value(parts);
        }
    }

    /// A name is known with its closing quote, so that arguments can follow at once.
    fn end_value(&mut self, parts: &mut Vec<Part>) {
        if self.key == "name" && !self.named {
            let Ok(name) = serde_json::from_str::<String>(&self.value) else {
                return;
            };
            self.named = true;
            parts.push(Part::Name(name));
            if !self.early.is_empty() {
                parts.push(Part::Arguments(std::mem::take(&mut self.early)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (String, String, Option<Step>) {
        let (mut scanner, mut parts, mut last) = (CallScanner::new(), Vec::new(), None);
        for char in text.chars() {
            last = Some(scanner.push(char, &mut parts));
        }
        let (mut name, mut arguments) = (String::new(), String::new());
        for part in parts {
            match part {
                Part::Name(text) => name.push_str(&text),
                Part::Arguments(text) => arguments.push_str(&text),
            }
        }
        (name, arguments, last)
    }

    #[test]
    fn arguments_keep_their_text() {
        let check = |text: &str, name: &str, arguments: &str| {
            assert_eq!(scan(text), (name.to_owned(), arguments.to_owned(), Some(Step::Done)), "{text}");
        };
        check(r#"{"name": "f", "arguments": {"a": "}\"{", "b":[1, 2]}}"#, "f", r#"{"a": "}\"{", "b":[1, 2]}"#);
        check(r#" {"parameters":{"x":1.50},"name":"g"}"#, "g", r#"{"x":1.50}"#);
        check(r#"{"name":"h"}"#, "h", "");
        check(r#"{"name":"h","arguments":null}"#, "h", "null");
    }

    #[test]
    fn what_is_no_call_is_told() {
        assert_eq!(scan("hello").2, Some(Step::Broken));
        assert_eq!(scan(r#"{"arguments":{}}"#).2, Some(Step::Broken));
        assert_eq!(scan(r#"{"name":"#).2, Some(Step::More));
    }
}
