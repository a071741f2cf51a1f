//! `demo`: what a newcomer sees first. Compiles the shipped model, serves it, asks it a question over HTTP.

use crate::client::Endpoint;
use anyhow::{Context, ensure};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Longest wait for the server.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// Options of `demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Question
    #[arg(default_value = "What is the capital of France?")]
    question: String,
    /// Where the bundle goes
    #[arg(short, long, default_value = "oxide-tiny.oxb")]
    output: PathBuf,
}

/// A server that is stopped when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the demo.
///
/// # Errors
/// If a binary is missing beside this one, or a stage fails.
pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let folder = std::env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    println!("$ oxide-compile oxide-tiny --target cpu -o {}", args.output.display());
    let status = Command::new(folder.join("oxide-compile"))
        .args(["oxide-tiny", "--target", "cpu", "-o"])
        .arg(&args.output)
        .status()
        .with_context(|| format!("oxide-compile is not in {} (cargo build --release)", folder.display()))?;
    ensure!(status.success(), "oxide-compile failed");
    println!("\n$ oxide-run {} serve", args.output.display());
    let started = Instant::now();
    let (server, port) = serve(&folder, &args.output)?;
    println!("ready after {:.0} ms on http://127.0.0.1:{port}/v1", started.elapsed().as_secs_f64() * 1e3);
    println!("\n> {}", args.question);
    ask(port, &args.question)?;
    drop(server);
    println!("\nTalk to it:  {} {} chat", folder.join("oxide-run").display(), args.output.display());
    Ok(())
}

fn serve(folder: &Path, bundle: &Path) -> anyhow::Result<(Server, u16)> {
    let port_file = std::env::temp_dir().join(format!("oxide-demo-{}.port", std::process::id()));
    let _ = std::fs::remove_file(&port_file);
    let child = Command::new(folder.join("oxide-run"))
        .arg(bundle)
        .args(["serve", "--port", "0", "--port-file"])
        .arg(&port_file)
        .env("RUST_LOG", "warn")
        .spawn()
        .context("oxide-run does not start")?;
    let mut server = Server(child);
    let started = Instant::now();
    let port = loop {
        if let Some(port) = std::fs::read_to_string(&port_file).ok().and_then(|text| text.trim().parse().ok()) {
            break port;
        }
        ensure!(server.0.try_wait()?.is_none(), "oxide-run ended before it was ready");
        ensure!(started.elapsed() < READY_WITHIN, "oxide-run is not ready after {READY_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(2));
    };
    let _ = std::fs::remove_file(&port_file);
    Ok((server, port))
}

fn ask(port: u16, question: &str) -> anyhow::Result<()> {
    let endpoint = Endpoint::parse(&format!("http://127.0.0.1:{port}/v1"), None)?;
    let body = json!({
        "messages": [{ "role": "user", "content": question }],
        "temperature": 0,
        "max_tokens": 128,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let (start, mut first, mut tokens) = (Instant::now(), None, 0);
    endpoint.post_stream("/chat/completions", &body.to_string(), |data| {
        if data == "[DONE]" {
            return Ok(());
        }
        let value: Value = serde_json::from_str(data)?;
        if let Some(text) = value["choices"][0]["delta"]["content"].as_str().filter(|text| !text.is_empty()) {
            first.get_or_insert_with(|| start.elapsed());
            print!("{text}");
            std::io::stdout().flush()?;
        }
        tokens = value["usage"]["completion_tokens"].as_u64().unwrap_or(tokens);
        Ok(())
    })?;
    let (total, first) = (start.elapsed(), first.unwrap_or_default());
    let rate = tokens as f64 / total.as_secs_f64().max(1e-9);
    println!(
        "\n\n{tokens} tokens in {:.1} ms, the first after {:.1} ms: {rate:.0} tokens/s",
        total.as_secs_f64() * 1e3,
        first.as_secs_f64() * 1e3
    );
    Ok(())
}
