//! The lines in which two short texts differ.

use serde_json::{Value, json};

/// The part that differs, after the common start and before the common end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hunk {
    /// Number of its first line, from 1.
    pub(super) line: usize,
    /// Lines of the left text.
    pub(super) left: Vec<String>,
    /// Lines of the right text.
    pub(super) right: Vec<String>,
}

/// The smallest range of lines that holds every difference; `None` if the texts are equal.
pub(super) fn hunk(left: &str, right: &str) -> Option<Hunk> {
    if left == right {
        return None;
    }
    let (left, right): (Vec<&str>, Vec<&str>) = (left.split('\n').collect(), right.split('\n').collect());
    let start = left.iter().zip(&right).take_while(|(a, b)| a == b).count();
    let rest = (left.get(start..).unwrap_or_default(), right.get(start..).unwrap_or_default());
    let end = rest.0.iter().rev().zip(rest.1.iter().rev()).take_while(|(a, b)| a == b).count();
    let lines = |rest: &[&str]| rest.iter().take(rest.len() - end).map(|line| (*line).to_owned()).collect();
    Some(Hunk { line: start + 1, left: lines(rest.0), right: lines(rest.1) })
}

impl Hunk {
    /// For scripts.
    pub(super) fn to_json(&self) -> Value {
        json!({ "line": self.line, "left": self.left, "right": self.right })
    }

    /// For people, long lines and long hunks cut.
    pub(super) fn people(&self) -> String {
        let mut text = format!("  from line {}\n", self.line);
        text += &signed('-', &self.left);
        text + &signed('+', &self.right)
    }
}

fn signed(sign: char, lines: &[String]) -> String {
    const LINES: usize = 12;
    const CHARS: usize = 160;
    let cut = |line: &String| match line.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line.clone(),
    };
    let mut text: String = lines.iter().take(LINES).map(|line| format!("  {sign} {}\n", cut(line))).collect();
    if lines.len() > LINES {
        text += &format!("  {sign} … {} more lines\n", lines.len() - LINES);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_lines_that_differ_are_shown() {
        let hunk = hunk("a\nb\nc\nd", "a\nx\ny\nd").expect("they differ");
        assert_eq!((hunk.line, hunk.left, hunk.right), (2, vec!["b".into(), "c".into()], vec!["x".into(), "y".into()]));
    }

    #[test]
    fn a_line_added_between_equal_ones_is_alone() {
        let hunk = hunk("a\na", "a\na\na").expect("they differ");
        assert_eq!((hunk.left.len(), hunk.right.len()), (0, 1));
        assert_eq!(super::hunk("same", "same"), None);
    }
}
