//! Progress on the terminal: a bar where there is one, a line a phase elsewhere.

use crate::hub::PullProgress;
use crate::progress::{Phase, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

/// Bars on standard error; lines if it is no terminal; nothing with `--json`.
pub(super) struct Bars {
    bar: ProgressBar,
    output: Output,
}

#[derive(Copy, Clone, PartialEq, Eq)]
enum Output {
    Bars,
    Lines,
    Nothing,
}

impl Bars {
    pub(super) fn new(json: bool) -> Self {
        let output = match (json, std::io::stderr().is_terminal()) {
            (true, _) => Output::Nothing,
            (false, true) => Output::Bars,
            (false, false) => Output::Lines,
        };
        let bar = ProgressBar::hidden();
        if output == Output::Bars {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        Self { bar, output }
    }

    pub(super) fn clear(&mut self) {
        self.bar.finish_and_clear();
    }

    fn begin(&mut self, label: &str, done: u64, total: u64, unit: Unit) {
        if self.output == Output::Lines {
            // A closed standard error costs the line, not the compile.
            let _ = writeln!(std::io::stderr(), "{label}{}", line_tail(done, total, unit));
        }
        let template = match (total, unit) {
            (0, _) => "{spinner} {msg}",
            (_, Unit::Bytes) => "{msg:24} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            (_, Unit::Tokens) => "{msg:24} {wide_bar} {pos}/{len} tokens",
        };
        self.bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.set_message(label.to_owned());
        if self.output == Output::Bars && total == 0 {
            self.bar.enable_steady_tick(Duration::from_millis(100));
        }
    }
}

#[derive(Copy, Clone)]
enum Unit {
    Bytes,
    Tokens,
}

fn line_tail(done: u64, total: u64, unit: Unit) -> String {
    match (total, unit) {
        (0, _) => String::new(),
        (_, Unit::Tokens) => format!(" ({total} tokens)"),
        (_, Unit::Bytes) if done == total => format!(" ({}, already there)", super::report::bytes(total)),
        (_, Unit::Bytes) => format!(" ({})", super::report::bytes(total)),
    }
}

impl Progress for Bars {
    fn start(&mut self, phase: Phase, total: u64) {
        let unit = if phase == Phase::Golden { Unit::Tokens } else { Unit::Bytes };
        self.begin(phase.label(), 0, total, unit);
    }

    fn advance(&mut self, done: u64) {
        self.bar.inc(done);
    }

    fn finish(&mut self) {
        self.bar.disable_steady_tick();
    }
}

impl PullProgress for Bars {
    fn file(&mut self, name: &str, have: u64, total: u64) {
        self.begin(name, have, total, Unit::Bytes);
    }

    fn advance(&mut self, bytes: u64) {
        self.bar.inc(bytes);
    }
}
