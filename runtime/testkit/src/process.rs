//! A server process that ends with its test.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;

/// A running `oxide-run BUNDLE serve`. Killed when dropped.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    address: SocketAddr,
}

impl ServerProcess {
    /// Starts `program bundle serve --port 0 --log-json` with more arguments, and waits until it listens.
    ///
    /// # Panics
    /// If it ends before.
    pub fn start(program: impl AsRef<OsStr>, bundle: &Path, args: &[&str]) -> Self {
        Self::start_as(Command::new(program), bundle, args)
    }

    /// As [`Self::start`], with a command that has its program and perhaps an environment.
    ///
    /// # Panics
    /// If it ends before it listens.
    pub fn start_as(mut command: Command, bundle: &Path, args: &[&str]) -> Self {
        command.arg(bundle).args(["serve", "--port", "0", "--log-json"]).args(args);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the server starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (sender, receiver) = mpsc::channel();
        // Reads on after the address came, so that the server never waits for its log.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                match address_of(&line) {
                    Some(address) => drop(sender.send(Ok(address))),
                    None => drop(sender.send(Err(line))),
                }
            }
        });
        let mut log = Vec::new();
        let address = receiver.iter().find_map(|line| line.map_err(|line| log.push(line)).ok());
        match address {
            Some(address) => Self { child, address },
            None => panic!("the server ended before it listened: {}", log.join("\n")),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name (`TERM`, `INT`).
    ///
    /// # Panics
    /// If the system has no `kill`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it cannot be waited for.
    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("the server can be waited for")
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn address_of(line: &str) -> Option<SocketAddr> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    let fields = value.get("fields")?;
    (fields.get("message")? == "listening").then(|| fields.get("address")?.as_str()?.parse().ok()).flatten()
}
