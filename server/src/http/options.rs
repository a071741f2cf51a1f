//! Everything that `serve` can be told. The command line fills it; nothing here reads the environment.

use crate::faults::Faults;
use crate::journal::JournalOptions;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Options of the HTTP server. [`ServeOptions::default`] is what `serve` does without flags.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Address to bind (`--host`).
    pub host: IpAddr,
    /// Port to bind; 0 takes a free one, which the log names (`--port`).
    pub port: u16,
    /// File that gets the port number, as text, once requests are taken (`--port-file`).
    pub port_file: Option<PathBuf>,
    /// Name that `/v1/models` shows and requests use; `None` is the bundle's (`--model-name`).
    pub model_name: Option<String>,
    /// Accepted keys; empty means no authentication (`--api-key`, repeatable, and the lines of `--api-key-file`).
    pub api_keys: Vec<String>,
    /// Requests that one key may have in flight; beyond it 429. `None` is unlimited (`--requests-per-key`).
    pub requests_per_key_max: Option<usize>,
    /// Origins that browsers may call from; `*` is any; empty sends no CORS header (`--cors-origin`, repeatable).
    pub cors_origins: Vec<String>,
    /// Refuses what OpenAI would refuse: unknown fields, a missing model, more than 4 stops (`--strict`).
    pub strict: bool,
    /// Uses temperature 1 and top_p 1 as defaults instead of the model's own (`--openai-defaults`).
    pub neutral_sampling: bool,
    /// Lowers a `max_tokens` that does not fit the context instead of refusing it (`--clamp-max-tokens`).
    pub clamp_max_tokens: bool,
    /// Largest request body (`--body-limit`).
    pub body_bytes_max: usize,
    /// Largest request head (request line and headers together).
    pub head_bytes_max: usize,
    /// Most headers of a request.
    pub headers_max: usize,
    /// Time within which a request's head must arrive.
    pub head_timeout: Duration,
    /// Time within which a request's body must arrive.
    pub body_timeout: Duration,
    /// Open connections; further ones wait in the listen queue (`--connections`).
    pub connections_max: usize,
    /// Silence after which a stream gets a comment line, from acceptance on (`--keep-alive-seconds`).
    pub keep_alive: Duration,
    /// How long live streams may take to finish after SIGTERM (`--drain-seconds`).
    pub drain: Duration,
    /// Largest `n` (`--max-choices`).
    pub choices_max: u32,
    /// Most prompts in one completion request (`--max-prompts`).
    pub prompts_max: usize,
    /// Most stop strings of a request outside strict mode (`--max-stops`).
    pub stops_max: usize,
    /// Deadline of requests that name none (`--deadline-seconds`).
    pub deadline_default: Option<Duration>,
    /// Longest wait for admission; zero refuses what finds no slots or pages at once (`--max-queue-seconds`).
    pub queue_time_max: Option<Duration>,
    /// Where requests are journaled; `None` does not (`--journal`, `--journal-file-size`, `--journal-files`).
    pub journal: Option<JournalOptions>,
    /// What tests make go wrong.
    pub faults: Faults,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8080,
            port_file: None,
            model_name: None,
            api_keys: Vec::new(),
            requests_per_key_max: None,
            cors_origins: vec!["*".to_owned()],
            strict: false,
            neutral_sampling: false,
            clamp_max_tokens: false,
            body_bytes_max: 8 << 20,
            head_bytes_max: 32 << 10,
            headers_max: 64,
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            connections_max: 4096,
            keep_alive: Duration::from_secs(15),
            drain: Duration::from_secs(30),
            choices_max: 128,
            prompts_max: 256,
            stops_max: 64,
            deadline_default: None,
            queue_time_max: None,
            journal: None,
            faults: Faults::default(),
        }
    }
}
