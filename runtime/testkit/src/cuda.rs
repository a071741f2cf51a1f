//! A CUDA driver without a GPU, for the child processes of one test.
//!
//! The driver is `examples/fake_cuda`; this is its folder: the library under the names that are looked for, the
//! script, the log. Every test has a folder of its own, so tests run beside each other.

use crate::bundle::fake_cuda;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Names that a program looks for, the first and the last of them.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// A fake driver.
#[derive(Debug)]
pub struct FakeCuda {
    folder: TempDir,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverCall {
    /// Function, with `@capture` behind it if it was recorded and not run; `node` for a node of a captured graph.
    pub name: String,
    /// `key=value` words.
    pub words: Vec<String>,
    /// Answer; 0 is success.
    pub code: u32,
}

impl DriverCall {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

impl FakeCuda {
    /// A driver with a script; see `examples/fake_cuda/script.rs`.
    ///
    /// # Panics
    /// If it cannot be set up.
    pub fn new(script: &str) -> Self {
        let library = fake_cuda();
        Self::with(script, |path| std::os::unix::fs::symlink(&library, path).expect("a link"))
    }

    /// A driver that lacks a function.
    ///
    /// # Panics
    /// If it has no such function.
    pub fn without(symbol: &str) -> Self {
        let mut library = std::fs::read(fake_cuda()).expect("the library reads");
        let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let found: Vec<usize> = (0..library.len() - name.len()).filter(|at| library[*at..].starts_with(&name)).collect();
        assert!(!found.is_empty(), "the fake driver has no {symbol}");
        // Whoever looks for the name finds another one.
        found.into_iter().for_each(|at| library[at + 1] = b'X');
        Self::with("", |path| std::fs::write(path, &library).expect("writable"))
    }

    /// No driver at all, whatever the machine has: files of its names that nobody can load.
    ///
    /// # Panics
    /// If it cannot be set up.
    pub fn absent() -> Self {
        Self::with("", |path| std::fs::write(path, b"no library").expect("writable"))
    }

    fn with(script: &str, library: impl Fn(&Path)) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        NAMES.iter().for_each(|name| library(&folder.path().join(name)));
        std::fs::write(folder.path().join("script"), script).expect("writable");
        Self { folder }
    }

    /// Makes a program find this driver.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("OXIDE_FAKE_CUDA", self.folder.path());
        command
    }

    /// Puts a flag of the script up.
    ///
    /// # Panics
    /// If its file cannot be written.
    pub fn raise(&self, flag: &str) {
        std::fs::write(self.folder.path().join(flag), b"").expect("writable");
    }

    /// Takes a flag down.
    ///
    /// # Panics
    /// If it was not up.
    pub fn lower(&self, flag: &str) {
        std::fs::remove_file(self.folder.path().join(flag)).expect("the flag is up");
    }

    /// The calls so far; none if the driver was never called.
    ///
    /// # Panics
    /// If the log is not what the driver writes.
    pub fn calls(&self) -> Vec<DriverCall> {
        let text = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let parse = |line: &str| {
            let (call, code) = line.rsplit_once("-> ")?;
            let mut words = call.split_whitespace().map(str::to_owned);
            Some(DriverCall { name: words.next()?, words: words.collect(), code: code.parse().ok()? })
        };
        text.lines().map(|line| parse(line).unwrap_or_else(|| panic!("not a line of the log: {line}"))).collect()
    }
}
