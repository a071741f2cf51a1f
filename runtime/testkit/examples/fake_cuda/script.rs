//! What the device is, and which calls fail or wait. One instruction a line:
//!
//! ```text
//! driver 13000            driver API version        capability 9 0     compute capability
//! devices 1               number of devices         name WORDS         name of the device
//! total BYTES             device memory             free BYTES         of it free at start
//! registers N             what every kernel says    foreign kernel|memset   a stray node in every graph
//! fail NAME WHEN CODE     a call fails              sticky NAME WHEN CODE   and so does every later call
//! hold NAME NTH FLAG      calls from the NTH on wait as long as the flag is up
//! ```
//!
//! Calls are counted from 1 by name; a call that a capture records counts as `NAME@capture`. WHEN is the number of
//! the call, or a flag that must be up. A flag is up as long as a file of its name is in the folder.

use std::path::Path;

#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) driver: i32,
    pub(crate) capability: (i32, i32),
    pub(crate) devices: i32,
    pub(crate) name: String,
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) registers: Option<u32>,
    pub(crate) foreign: Option<String>,
    failures: Vec<Failure>,
    holds: Vec<(String, u64, String)>,
}

#[derive(Clone, Debug)]
enum When {
    Call(u64),
    Flag(String),
}

/// A call that fails.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    name: String,
    when: When,
    pub(crate) code: u32,
    pub(crate) sticky: bool,
}

impl Script {
    /// An H200 with a gibibyte free, and what the file says differently.
    pub(crate) fn read(path: &Path) -> Self {
        let mut script = Self {
            driver: 13000,
            capability: (9, 0),
            devices: 1,
            name: "Fake H200".into(),
            total_bytes: 141 << 30,
            free_bytes: 1 << 30,
            registers: None,
            foreign: None,
            failures: Vec::new(),
            holds: Vec::new(),
        };
        let text = std::fs::read_to_string(path).unwrap_or_default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            assert!(script.take(line).is_some(), "the fake driver does not understand `{line}`");
        }
        script
    }

    fn take(&mut self, line: &str) -> Option<()> {
        let mut words = line.split_whitespace();
        match words.next()? {
            "driver" => self.driver = words.next()?.parse().ok()?,
            "capability" => self.capability = (words.next()?.parse().ok()?, words.next()?.parse().ok()?),
            "devices" => self.devices = words.next()?.parse().ok()?,
            "name" => self.name = words.by_ref().collect::<Vec<_>>().join(" "),
            "total" => self.total_bytes = words.next()?.parse().ok()?,
            "free" => self.free_bytes = words.next()?.parse().ok()?,
            "registers" => self.registers = Some(words.next()?.parse().ok()?),
            "foreign" => self.foreign = Some(words.next()?.to_owned()),
            kind @ ("fail" | "sticky") => {
                let (name, when) = (words.next()?.to_owned(), words.next()?);
                let when = when.parse().map_or_else(|_| When::Flag(when.to_owned()), When::Call);
                self.failures.push(Failure { name, when, code: words.next()?.parse().ok()?, sticky: kind == "sticky" });
            }
            "hold" => self.holds.push((words.next()?.to_owned(), words.next()?.parse().ok()?, words.next()?.to_owned())),
            _ => return None,
        }
        words.next().is_none().then_some(())
    }

    /// How the `count`-th call of `name` fails, if it does; `is_up` tells whether a flag is up.
    pub(crate) fn failure(&self, name: &str, count: u64, is_up: impl Fn(&str) -> bool) -> Option<Failure> {
        let due = |failure: &&Failure| match &failure.when {
            When::Call(nth) => *nth == count,
            When::Flag(flag) => is_up(flag),
        };
        self.failures.iter().filter(|failure| failure.name == name).find(due).cloned()
    }

    /// The flag that holds the `count`-th call of `name`, if one may.
    pub(crate) fn hold(&self, name: &str, count: u64) -> Option<&str> {
        self.holds.iter().find(|(held, nth, _)| held == name && count >= *nth).map(|(_, _, flag)| flag.as_str())
    }
}
