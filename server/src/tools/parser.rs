//! Splits what a model writes into content and calls, as it comes.
//!
//! **Invariant:** markup of calls is never content. Text that may still turn out to be markup is held.

use super::scanner::{CallScanner, Part, Step};
use crate::openai::id::random_id;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";

/// How calls are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`.
    Hermes {
        /// Calls after the first count.
        parallel: bool,
        /// Calls are the whole answer, or what looks like one is text.
        alone: bool,
    },
    /// `{"name": …, "parameters": …}` as the whole answer, several separated by `;`.
    Llama3 {
        /// Functions that can be called; other objects are content.
        names: Vec<String>,
        /// Calls after the first count.
        parallel: bool,
    },
    /// `[{"name": …, "arguments": …}, …]`, written by a grammar.
    List,
    /// The arguments of this function alone, written by a grammar.
    Arguments(String),
    /// Calls are not wanted: their markup is left out.
    Forbidden,
}

impl CallForm {
    /// Whether a grammar writes the calls and nothing else.
    pub fn is_forced(&self) -> bool {
        matches!(self, CallForm::List | CallForm::Arguments(_))
    }
}

/// News of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call of the answer.
    pub index: usize,
    /// Id and name, once, first.
    pub head: Option<(String, String)>,
    /// Further text of the arguments.
    pub arguments: String,
}

#[derive(Clone, Debug)]
enum Place {
    /// In content.
    Content,
    /// In a call; its text so far, in case it is none.
    Call(CallScanner, String),
    /// After a call, before its end mark.
    AfterCall,
    /// Where no further call is wanted: everything is dropped until the end.
    Finished,
}

/// Splits one answer.
#[derive(Clone, Debug)]
pub struct CallParser {
    form: CallForm,
    place: Place,
    /// Content that may be the beginning of markup, or whitespace before it.
    held: String,
    calls: usize,
    content_began: bool,
    /// The call in the making was announced.
    announced: bool,
}

impl CallParser {
    /// A parser of answers in a form.
    pub fn new(form: CallForm) -> Self {
        let place = match form {
            CallForm::Arguments(_) | CallForm::List => Place::AfterCall,
            _ => Place::Content,
        };
        Self { form, place, held: String::new(), calls: 0, content_began: false, announced: false }
    }

    /// Texts of control tokens that this parser must see.
    pub fn is_mark(text: &str) -> bool {
        matches!(text, OPEN | CLOSE | PYTHON_TAG)
    }

    /// Whether there is a call.
    pub fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Whether calls make the answer end with `tool_calls`: a function that the client named does not.
    pub fn ends_with_calls(&self) -> bool {
        self.has_calls() && !matches!(self.form, CallForm::Arguments(_))
    }

    /// Takes text; adds content and news of calls.
    pub fn push(&mut self, text: &str, content: &mut String, calls: &mut Vec<CallDelta>) {
        if let CallForm::Arguments(name) = &self.form {
            if self.calls == 0 && !text.is_empty() {
                let head = Some((random_id("call_"), name.clone()));
                calls.push(CallDelta { index: 0, head, arguments: String::new() });
                self.calls = 1;
            }
            add_arguments(calls, 0, text);
            return;
        }
        for char in text.chars() {
            self.push_char(char, content, calls);
        }
    }

    /// Ends the answer: releases what was held.
    pub fn finish(&mut self, content: &mut String) {
        match std::mem::replace(&mut self.place, Place::Finished) {
            // What began as markup and broke off is no content either.
            Place::Content => {
                let held = std::mem::take(&mut self.held);
                let partial = [OPEN, CLOSE, PYTHON_TAG].iter().map(|mark| overlap(&held, mark)).max().unwrap_or(0);
                let text = held.get(..held.len() - if partial > 2 { partial } else { 0 }).unwrap_or_default();
                content.push_str(if self.calls > 0 { text.trim_end() } else { text });
            }
            Place::Call(scanner, raw) if !scanner.is_named() && !self.announced => {
                // An unfinished object at the start of a Llama answer may be an answer in JSON.
                if matches!(self.form, CallForm::Llama3 { .. }) {
                    content.push_str(&raw);
                }
            }
            Place::Call(..) | Place::AfterCall | Place::Finished => {}
        }
    }

    fn push_char(&mut self, char: char, content: &mut String, calls: &mut Vec<CallDelta>) {
        match &mut self.place {
            Place::Content => self.content_char(char, content),
            Place::Call(..) => self.call_char(char, content, calls),
            Place::AfterCall => self.after_char(char),
            Place::Finished => {}
        }
    }

    fn content_char(&mut self, char: char, content: &mut String) {
        self.held.push(char);
        if matches!(self.form, CallForm::Llama3 { .. }) && !self.content_began && char == '{' && self.held.trim() == "{" {
            self.held.clear();
            return self.begin_call(Some('{'));
        }
        let marks: &[&str] = match self.form {
            CallForm::Llama3 { .. } => &[PYTHON_TAG],
            CallForm::Hermes { alone: true, .. } if self.content_began => &[],
            _ => &[OPEN, CLOSE],
        };
        if let Some(mark) = marks.iter().find(|mark| self.held.ends_with(*mark)) {
            self.held.truncate(self.held.len() - mark.len());
            let before = self.held.trim_end().to_owned();
            self.held.clear();
            self.show(&before, content);
            if *mark != CLOSE && self.form != CallForm::Forbidden {
                self.begin_call(None);
            }
            return;
        }
        self.release(marks, content);
    }

    /// Shows held text but for what may belong to markup.
    fn release(&mut self, marks: &[&str], content: &mut String) {
        let partial = marks.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
        let body = self.held.len() - partial;
        let keep = self.held.get(..body).map_or(0, |text| text.trim_end().len());
        let tail = self.held.split_off(keep);
        let text = std::mem::replace(&mut self.held, tail);
        self.show(&text, content);
    }

    fn show(&mut self, text: &str, content: &mut String) {
        if !text.is_empty() {
            self.content_began = true;
            content.push_str(text);
        }
    }

    fn begin_call(&mut self, first: Option<char>) {
        let mut scanner = CallScanner::new();
        let mut raw = String::new();
        if let Some(char) = first {
            scanner.push(char, &mut Vec::new());
            raw.push(char);
        }
        self.announced = false;
        self.place = Place::Call(scanner, raw);
    }

    fn call_char(&mut self, char: char, content: &mut String, calls: &mut Vec<CallDelta>) {
        let Place::Call(scanner, raw) = &mut self.place else { return };
        raw.push(char);
        let closed = matches!(self.form, CallForm::Hermes { .. }) && raw.ends_with(CLOSE);
        let mut parts = Vec::new();
        let step = scanner.push(char, &mut parts);
        for part in parts {
            match part {
                Part::Name(name) if self.callable(&name) => {
                    let head = Some((random_id("call_"), name));
                    calls.push(CallDelta { index: self.calls, head, arguments: String::new() });
                    self.calls += 1;
                    self.announced = true;
                }
                Part::Name(_) => return self.no_call(content),
                Part::Arguments(text) => add_arguments(calls, self.calls.saturating_sub(1), &text),
            }
        }
        match step {
            Step::Done => self.place = self.next_place(),
            Step::Broken if !self.announced && matches!(self.form, CallForm::Llama3 { .. }) => self.no_call(content),
            // Inside markup that holds no call, the text up to the end mark is dropped with the markup.
            Step::Broken if closed => self.place = Place::Content,
            Step::More | Step::Broken => {}
        }
    }

    fn next_place(&self) -> Place {
        match self.form {
            CallForm::Hermes { parallel: false, .. } | CallForm::Llama3 { parallel: false, .. } => Place::Finished,
            _ => Place::AfterCall,
        }
    }

    fn callable(&self, name: &str) -> bool {
        match &self.form {
            CallForm::Llama3 { names, .. } => names.iter().any(|known| known == name),
            _ => true,
        }
    }

    /// What looked like a call of a Llama answer is its content.
    fn no_call(&mut self, content: &mut String) {
        if let Place::Call(_, raw) = std::mem::replace(&mut self.place, Place::Content) {
            self.content_began = true;
            content.push_str(&raw);
        }
    }

    fn after_char(&mut self, char: char) {
        match self.form {
            CallForm::List | CallForm::Llama3 { .. } => {
                if char == '{' {
                    self.begin_call(Some('{'));
                }
            }
            _ => {
                self.held.push(char);
                if self.held.ends_with(CLOSE) {
                    self.held.clear();
                    self.place = Place::Content;
                } else if self.held.ends_with(OPEN) {
                    self.held.clear();
                    self.begin_call(None);
                }
            }
        }
    }
}

fn add_arguments(calls: &mut Vec<CallDelta>, index: usize, text: &str) {
    match calls.last_mut() {
        Some(last) if last.index == index => last.arguments.push_str(text),
        _ => calls.push(CallDelta { index, head: None, arguments: text.to_owned() }),
    }
}

/// Bytes at the end of `text` that `mark` may begin with.
fn overlap(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|len| mark.get(..*len).is_some_and(|start| text.ends_with(start))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a text in pieces of `size` characters.
    fn parse(form: &CallForm, text: &str, size: usize) -> (String, Vec<(String, String)>) {
        let mut parser = CallParser::new(form.clone());
        let (mut content, mut deltas) = (String::new(), Vec::new());
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            parser.push(&piece.iter().collect::<String>(), &mut content, &mut deltas);
        }
        parser.finish(&mut content);
        let mut calls: Vec<(String, String)> = Vec::new();
        for delta in deltas {
            if let Some((_, name)) = delta.head {
                assert_eq!(delta.index, calls.len(), "an index a call");
                calls.push((name, String::new()));
            }
            calls[delta.index].1.push_str(&delta.arguments);
        }
        (content, calls)
    }

    fn check(form: &CallForm, text: &str, content: &str, calls: &[(&str, &str)]) {
        let calls: Vec<(String, String)> = calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect();
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(parse(form, text, size), (content.to_owned(), calls.clone()), "{text} in pieces of {size}");
        }
    }

    #[test]
    fn hermes_calls_are_split_from_content() {
        let form = CallForm::Hermes { parallel: true, alone: false };
        check(&form, "Just text with < and <tool.", "Just text with < and <tool.", &[]);
        check(&form, "ends with space  ", "ends with space  ", &[]);
        check(&form, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", "", &[("f", "{\"a\": 1}")]);
        let two = "Sure.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>\n<tool_call>\n{\"name\":\"g\",\"arguments\":{\"b\":\"</x>\"}}\n</tool_call>";
        check(&form, two, "Sure.", &[("f", "{}"), ("g", "{\"b\":\"</x>\"}")]);
        check(&CallForm::Hermes { parallel: false, alone: false }, two, "Sure.", &[("f", "{}")]);
        check(&form, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"unfin", "", &[("f", "{\"a\": \"unfin")]);
        check(&form, "<tool_call>not a call</tool_call> after", " after", &[]);
        check(&form, "a <tool_ca", "a ", &[]);
        let alone = CallForm::Hermes { parallel: true, alone: true };
        let text = "{\"a\": \"<tool_call>{\\\"name\\\": \\\"f\\\"}</tool_call>\"}";
        check(&alone, text, text, &[]);
        check(&alone, "\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "", &[("f", "{}")]);
    }

    #[test]
    fn llama_calls_are_whole_answers() {
        let form = CallForm::Llama3 { names: vec!["f".into(), "g".into()], parallel: true };
        check(&form, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]);
        check(
            &form,
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
            "",
            &[("f", "{}"), ("g", "{}")],
        );
        check(&form, "{\"name\": \"h\", \"parameters\": {}}", "{\"name\": \"h\", \"parameters\": {}}", &[]);
        check(&form, "{\"answer\": 42}", "{\"answer\": 42}", &[]);
        check(&form, "Text {\"name\": \"f\"}", "Text {\"name\": \"f\"}", &[]);
    }

    #[test]
    fn forced_calls_are_plain_json() {
        check(
            &CallForm::List,
            "[{\"name\":\"f\",\"arguments\":{\"a\":[1]}} , {\"name\":\"f\",\"arguments\":{}}]",
            "",
            &[("f", "{\"a\":[1]}"), ("f", "{}")],
        );
        check(&CallForm::Arguments("f".into()), "{\"a\":1}", "", &[("f", "{\"a\":1}")]);
    }

    #[test]
    fn forbidden_calls_lose_their_markup() {
        check(&CallForm::Forbidden, "a<tool_call>b</tool_call>c", "abc", &[]);
    }
}
