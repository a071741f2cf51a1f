//! Standard output of commands. A reader that goes away ends the command quietly, without a panic or a signal.

use super::error::CliError;
use serde_json::Value;
use std::io::{IsTerminal, Write};

/// Writes text and flushes it.
pub(super) fn text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a line and flushes it.
pub(super) fn line(line: &str) -> Result<(), CliError> {
    text(&format!("{line}\n"))
}

/// Writes a JSON value on one line.
pub(super) fn json(value: &Value) -> Result<(), CliError> {
    line(&value.to_string())
}

/// Writes a report for people or for scripts.
pub(super) fn report(as_json: bool, value: &Value, people: impl FnOnce() -> String) -> Result<(), CliError> {
    if as_json { json(value) } else { text(&people()) }
}

/// Writes a note for people to standard error; nobody depends on it, so failures are ignored.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Whether a person types the input.
pub(super) fn input_is_terminal() -> bool {
    std::io::stdin().is_terminal()
}
