//! The server under load: one that is started for the purpose, or any that is running.

use super::wire::{Connection, request};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait until a started server takes requests.
const READY_WITHIN: Duration = Duration::from_secs(120);
/// Longest wait for its end after SIGTERM.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// Body limit of a server that is started here.
pub(super) const BODY_BYTES_MAX: usize = 1 << 20;
/// Prefix of the keys of a server that is started here.
const KEY: &str = "soak-key";
/// Clients are spread over this many keys.
const CLIENT_KEYS: usize = 3;

/// A server.
pub(super) struct Target {
    /// `host:port`.
    pub(super) address: String,
    /// Keys of the load; empty if none is needed.
    pub(super) keys: Vec<String>,
    /// Key of the probes, whose requests so get their turn beside the load.
    pub(super) probe_key: Option<String>,
    pub(super) card: Card,
    child: Option<Child>,
}

/// What `/v1/models` says.
#[derive(Clone, Debug)]
pub(super) struct Card {
    pub(super) model: String,
    pub(super) seal: String,
    pub(super) device: String,
    /// Whether answers do not depend on the batch, bit for bit.
    pub(super) invariant: bool,
    pub(super) context_max: u32,
    pub(super) seqs_max: u32,
}

impl Target {
    /// Uses a running server.
    ///
    /// # Errors
    /// If it does not answer as Oxide does.
    pub(super) fn running(url: &str, keys: Vec<String>) -> anyhow::Result<Self> {
        let rest = url.strip_prefix("http://").with_context(|| format!("{url} is not an http:// address"))?;
        let address = rest.split('/').next().unwrap_or_default();
        let address = if address.contains(':') { address.to_owned() } else { format!("{address}:80") };
        let card = card(&address, keys.first())?;
        let probe_key = keys.last().cloned();
        Ok(Self { address, keys, probe_key, card, child: None })
    }

    /// Starts `oxide-run BUNDLE serve` from the folder of this program, with limits that twice its capacity overflows.
    ///
    /// # Errors
    /// If it does not get ready.
    pub(super) fn start(bundle: &Path, args: &[String]) -> anyhow::Result<Self> {
        let seqs_max = seqs_max_of(bundle)?;
        let keys: Vec<String> = (0..=CLIENT_KEYS).map(|index| format!("{KEY}-{index}")).collect();
        let port_file = std::env::temp_dir().join(format!("oxide-soak-{}.port", std::process::id()));
        let _ = std::fs::remove_file(&port_file);
        let clients = 2 * seqs_max as usize;
        let mut command = Command::new(program()?);
        command.arg(bundle).args(["serve", "--host", "127.0.0.1", "--port", "0", "--port-file"]).arg(&port_file);
        command.args(keys.iter().flat_map(|key| ["--api-key", key]));
        command.args(["--max-queue", &(seqs_max as usize * 3 / 4).max(1).to_string()]);
        command.args(["--requests-per-key", &(clients / CLIENT_KEYS + clients / 12).max(4).to_string()]);
        command.args(["--body-limit", &BODY_BYTES_MAX.to_string(), "--keep-alive-seconds", "1"]).args(args);
        // Every refusal is a warning, and there are many.
        command.env("RUST_LOG", "error").stdout(Stdio::null());
        let mut child = Ended(Some(command.spawn().context("oxide-run does not start")?));
        let port = wait_for_port(&mut child, &port_file)?;
        let _ = std::fs::remove_file(&port_file);
        let address = format!("127.0.0.1:{port}");
        let card = card(&address, keys.first())?;
        Ok(Self { address, probe_key: keys.last().cloned(), keys: keys[..CLIENT_KEYS].to_vec(), card, child: child.0.take() })
    }

    /// Whether the server was started here, with the limits of [`Target::start`].
    pub(super) fn started(&self) -> bool {
        self.child.is_some()
    }

    /// Ends a started server by SIGTERM; its exit code.
    ///
    /// # Errors
    /// If it does not end.
    pub(super) fn end(&mut self) -> anyhow::Result<Option<i32>> {
        let Some(child) = &mut self.child else { return Ok(None) };
        let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
        ensure!(sent.success(), "SIGTERM cannot be sent");
        let started = Instant::now();
        while started.elapsed() < ENDS_WITHIN {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(Some(status.code().unwrap_or(-1)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the server did not end within {ENDS_WITHIN:?} of SIGTERM")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        drop(Ended(self.child.take()));
    }
}

/// A process that ends with its owner.
struct Ended(Option<Child>);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Sequences that a bundle serves at a time.
fn seqs_max_of(bundle: &Path) -> anyhow::Result<u32> {
    let output = Command::new(program()?).arg(bundle).args(["check", "--json"]).output().context("oxide-run does not start")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let value: Value = serde_json::from_slice(&output.stdout)?;
    let seqs = value["limits"]["seqs_max"].as_u64().and_then(|seqs| u32::try_from(seqs).ok());
    seqs.context("`check` does not say how many sequences the bundle serves")
}

fn program() -> anyhow::Result<PathBuf> {
    let folder = std::env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    Ok(folder.join("oxide-run"))
}

fn wait_for_port(child: &mut Ended, port_file: &Path) -> anyhow::Result<u16> {
    let started = Instant::now();
    loop {
        if let Some(port) = std::fs::read_to_string(port_file).ok().and_then(|text| text.trim().parse().ok()) {
            return Ok(port);
        }
        let running = child.0.as_mut().context("the server was started")?;
        ensure!(running.try_wait()?.is_none(), "oxide-run ended before it was ready");
        ensure!(started.elapsed() < READY_WITHIN, "oxide-run is not ready after {READY_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn card(address: &str, key: Option<&String>) -> anyhow::Result<Card> {
    let mut connection = Connection::open(address).with_context(|| format!("no connection to {address}"))?;
    let bearer = key.map(|key| format!("Bearer {key}")).unwrap_or_default();
    connection.send(&request("GET", "/v1/models", &[("Authorization", &bearer)], b""))?;
    let (head, body) = connection.answer()?;
    ensure!(head.status == 200, "/v1/models answers {}: {}", head.status, String::from_utf8_lossy(&body));
    let value: Value = serde_json::from_slice(&body)?;
    let model = &value["data"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok()).context("not a card of Oxide");
    Ok(Card {
        model: text(&model["id"]),
        seal: text(&model["bundle"]["seal"]),
        device: text(&model["bundle"]["device"]),
        invariant: model["bundle"]["target"] == "cpu",
        context_max: number(&model["max_model_len"])?,
        seqs_max: number(&model["bundle"]["seqs_max"])?,
    })
}
