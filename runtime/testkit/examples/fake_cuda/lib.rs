//! A CUDA driver for tests on machines without a GPU: `libcuda.so.1` in a folder of its own.
//!
//! It keeps books instead of computing: memory is host memory, copies copy, launches are checked and
//! logged and write nothing. A script (`script` in the folder that `OXIDE_FAKE_CUDA` names) says what the
//! device is and which calls fail; the `log` beside it gets one line a call. It refuses what a driver
//! refuses: dead handles, addresses outside allocations, calls without a current context, images of
//! another architecture, calls that a capture does not allow.
//! **Limits:** it knows nothing of what kernels compute, of time, of order between streams, or of data
//! races; a call that it accepts may still be wrong on a GPU.

mod books;
mod calls;
mod launch;
mod raw;
mod script;

use books::Books;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A driver's answer: 0 or an error.
type Code = u32;

/// Codes of the driver that the fake gives of itself.
mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const INVALID_IMAGE: u32 = 200;
    pub(crate) const INVALID_CONTEXT: u32 = 201;
    pub(crate) const NO_BINARY_FOR_GPU: u32 = 209;
    pub(crate) const INVALID_HANDLE: u32 = 400;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
}

/// Everything between two calls.
struct Driver {
    folder: PathBuf,
    script: script::Script,
    log: Option<File>,
    /// Calls so far, by name.
    counts: BTreeMap<&'static str, u64>,
    /// After an error that a context does not survive: its code.
    broken: Option<Code>,
    books: Books,
}

thread_local! {
    /// Whether the primary context is current on this thread.
    static CURRENT: Cell<bool> = const { Cell::new(false) };
}

fn driver() -> MutexGuard<'static, Driver> {
    static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| {
        let folder = PathBuf::from(std::env::var_os("OXIDE_FAKE_CUDA").unwrap_or_default());
        let script = script::Script::read(&folder.join("script"));
        let log = OpenOptions::new().create(true).append(true).open(folder.join("log")).ok();
        Mutex::new(Driver { folder, script, log, counts: BTreeMap::new(), broken: None, books: Books::default() })
    });
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call needs before it may run.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Needs {
    /// Nothing.
    Nothing,
    /// A current context, and no capture under way.
    Context,
    /// A current context; what it does is recorded while a stream captures.
    Queue,
}

/// Runs one call: counts it, waits while it is held, lets the script fail it, checks what it needs, logs it.
fn call(name: &'static str, captured: &'static str, needs: Needs, body: impl FnOnce(&mut Driver) -> Result<String, Code>) -> Code {
    let mut driver = driver();
    let capturing = driver.books.is_capturing();
    let name = if capturing && needs == Needs::Queue { captured } else { name };
    let count = driver.counts.entry(name).or_default();
    *count += 1;
    let count = *count;
    if let Some(file) = driver.script.hold(name, count).map(|file| driver.folder.join(file)).filter(|file| file.exists()) {
        driver.write_log(&format!("held name={name} -> 0\n"));
        drop(driver);
        while file.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        driver = self::driver();
    }
    let scripted = driver.script.failure(name, count, |flag| driver.folder.join(flag).exists());
    if let Some(failure) = scripted.as_ref().filter(|failure| failure.sticky) {
        driver.broken = Some(failure.code);
    }
    let answer = if let Some(broken) = driver.broken.filter(|_| needs != Needs::Nothing) {
        Err(broken)
    } else if let Some(failure) = scripted {
        Err(failure.code)
    } else if needs != Needs::Nothing && !CURRENT.get() {
        Err(code::INVALID_CONTEXT)
    } else if needs == Needs::Context && capturing && name != "cuStreamEndCapture" {
        Err(code::STREAM_CAPTURE_UNSUPPORTED)
    } else {
        body(&mut driver)
    };
    let (words, code) = match answer {
        Ok(words) => (words, 0),
        Err(code) => (String::new(), code),
    };
    let mut line = format!("{name} {words}");
    let _ = writeln!(line, "{}-> {code}", if words.is_empty() { "" } else { " " });
    driver.write_log(&line);
    code
}

impl Driver {
    /// One `write` a line, so that lines of several threads never mix.
    fn write_log(&mut self, line: &str) {
        if let Some(log) = &mut self.log {
            let _ = log.write_all(line.as_bytes());
        }
    }
}
