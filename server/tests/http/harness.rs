//! A live server over the scripted device, with the shipped model's tokenizer and template.

use crate::client::{Connection, Events, Reply};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::manifest::{GenerationDefaults, GoldenStatus, Ledger, Limits, Manifest, ModelInfo, SpecialTokens, Target, ToolDialect};
use oxide_bundle::plan::BatchClass;
use oxide_run::http::{ServeError, ServeOptions, ServedModel, Server};
use oxide_run::model::TextEdge;
use oxide_runtime::engine::scripted::{Script, ScriptedDevice, greedy};
use oxide_runtime::engine::{Engine, EngineHandle, EngineOptions, EngineStats};
use oxide_text::{ChatTemplate, TemplateTokens, Tokenizer};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Name of the served model.
pub(crate) const MODEL: &str = "oxide-tiny";
/// Ids of the shipped tokenizer.
pub(crate) const VOCAB: u32 = 4096;
/// Longest sequence of the default script.
pub(crate) const CONTEXT: u32 = 512;
/// Tokens of a KV page of the default script.
pub(crate) const PAGE: u32 = 16;
/// `<|im_end|>`.
pub(crate) const EOS: u32 = 4093;

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a server is set up.
pub(crate) struct Setup {
    pub(crate) options: ServeOptions,
    pub(crate) script: Script,
    pub(crate) engine: EngineOptions,
    pub(crate) eos: Vec<u32>,
    /// Makes each step wait for a permit.
    pub(crate) gated: bool,
    /// Starts with an engine that runs no step.
    pub(crate) paused: bool,
    /// Makes loading wait.
    pub(crate) slow_load: bool,
    /// Source of another template than the shipped model's.
    pub(crate) template: Option<&'static str>,
    pub(crate) tool_dialect: ToolDialect,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            options: ServeOptions { port: 0, keep_alive: Duration::from_secs(15), ..ServeOptions::default() },
            script: Script {
                kv_pages: 512,
                page_tokens: PAGE,
                context_max: CONTEXT,
                vocab: VOCAB,
                classes: vec![
                    BatchClass::Decode { seqs: 1 },
                    BatchClass::Decode { seqs: 8 },
                    BatchClass::Mixed { tokens: 64, seqs: 8 },
                    BatchClass::Mixed { tokens: 256, seqs: 8 },
                ],
                bias_max: 4096,
                history_max: 8 * CONTEXT,
                ..Script::default()
            },
            engine: EngineOptions::default(),
            eos: vec![EOS, 4091],
            gated: false,
            paused: false,
            slow_load: false,
            template: None,
            tool_dialect: ToolDialect::Hermes,
        }
    }
}

impl Setup {
    pub(crate) fn options(mut self, change: impl FnOnce(&mut ServeOptions)) -> Self {
        change(&mut self.options);
        self
    }

    pub(crate) fn script(mut self, change: impl FnOnce(&mut Script)) -> Self {
        change(&mut self.script);
        self
    }

    pub(crate) fn engine(mut self, change: impl FnOnce(&mut EngineOptions)) -> Self {
        change(&mut self.engine);
        self
    }

    /// Makes each step wait for [`Live::steps`].
    pub(crate) fn gated(mut self) -> Self {
        self.gated = true;
        self
    }

    /// Runs no step until [`Live::resume`]; requests wait, deadlines and cancellations go on.
    pub(crate) fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Makes loading wait for [`Live::finish_loading`].
    pub(crate) fn slow_load(mut self) -> Self {
        self.slow_load = true;
        self
    }

    pub(crate) fn start(self) -> Live {
        let live = self.launch();
        if live.loading.is_none() {
            live.wait("ready", |live| live.get("/ready").status == 200);
        }
        live
    }

    fn launch(mut self) -> Live {
        let gate = self.gated.then(|| {
            let (permit, gate) = channel();
            self.script.gate = Some(gate);
            permit
        });
        let (loading, loaded) = channel::<()>();
        let loading = self.slow_load.then_some(loading);
        let device = ScriptedDevice::new(self.script);
        let limits = device.limits();
        let manifest = manifest(limits.context_max, limits.seqs_max, self.eos);
        let engine = Engine::start(Box::new(device), limits, self.engine);
        if self.paused {
            engine.pause();
        }
        let text = TextEdge { tokenizer: tokenizer(), template: Some(self.template.map_or_else(template, compile_template)) };
        let model = ServedModel {
            tool_dialect: self.tool_dialect,
            manifest,
            seal: Some("ab".repeat(32)),
            device: "scripted".to_owned(),
            text,
            engine: engine.clone(),
        };
        let (stops, stopped) = tokio::sync::mpsc::unbounded_channel();
        let (bound, address) = channel();
        let options = self.options;
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let server = Server::bind(options).await?;
                bound.send(server.address()).expect("the test waits");
                let load = move || {
                    let _ = loaded.recv();
                    Ok(model)
                };
                server.run(load, stopped).await
            })
        });
        let address = address.recv_timeout(PATIENCE).expect("the server binds");
        Live { address, engine, gate, loading, stops, thread: Some(thread), key: None }
    }
}

/// A running server.
pub(crate) struct Live {
    pub(crate) address: SocketAddr,
    pub(crate) engine: EngineHandle,
    gate: Option<Sender<()>>,
    loading: Option<Sender<()>>,
    stops: UnboundedSender<()>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
    pub(crate) key: Option<&'static str>,
}

impl Live {
    /// A server with default settings.
    pub(crate) fn start() -> Self {
        Setup::default().start()
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut connection = self.connect();
        self.send(&mut connection, method, path, headers, body);
        connection.reply()
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.address)
    }

    fn send(&self, connection: &mut Connection, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let key = self.key.map(|key| format!("Bearer {key}"));
        let mut all: Vec<(&str, &str)> = headers.to_vec();
        if let Some(key) = &key {
            all.push(("authorization", key));
        }
        connection.send(method, path, &all, body);
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_raw(path, body.to_string().as_bytes())
    }

    pub(crate) fn post_raw(&self, path: &str, body: &[u8]) -> Reply {
        self.request("POST", path, &[("content-type", "application/json")], body)
    }

    /// A completion; greedy and deaf to the end id unless `body` says otherwise.
    pub(crate) fn complete(&self, body: Value) -> Reply {
        self.post("/v1/completions", &greedy_body(body))
    }

    /// A chat completion of one user message, otherwise as [`Live::complete`].
    pub(crate) fn chat(&self, body: Value) -> Reply {
        self.post("/v1/chat/completions", &chat_body(body))
    }

    /// Opens a stream.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Events {
        Events::begin(self.post_unanswered(path, body))
    }

    /// Sends a request and leaves the answer on the wire.
    pub(crate) fn post_unanswered(&self, path: &str, body: &Value) -> Connection {
        let mut connection = self.connect();
        self.send(&mut connection, "POST", path, &[("content-type", "application/json")], body.to_string().as_bytes());
        connection
    }

    pub(crate) fn stream_complete(&self, body: Value) -> Events {
        self.stream("/v1/completions", &streamed(greedy_body(body)))
    }

    pub(crate) fn stream_chat(&self, body: Value) -> Events {
        self.stream("/v1/chat/completions", &streamed(chat_body(body)))
    }

    /// Lets `count` steps pass.
    pub(crate) fn steps(&self, count: usize) {
        let gate = self.gate.as_ref().expect("the setup is gated");
        (0..count).for_each(|_| gate.send(()).expect("the device lives"));
    }

    /// Lets all steps pass from now on.
    pub(crate) fn open_gate(&mut self) {
        self.gate = None;
    }

    pub(crate) fn resume(&self) {
        self.engine.resume();
    }

    /// Waits until `count` requests wait in the engine.
    pub(crate) fn wait_queued(&self, count: u32) {
        self.wait("queued", |live| live.stats().waiting == count);
    }

    pub(crate) fn finish_loading(&mut self) {
        self.loading = None;
    }

    /// Sends what SIGTERM sends.
    pub(crate) fn terminate(&self) {
        let _ = self.stops.send(());
    }

    /// Waits for the server to end.
    pub(crate) fn join(&mut self) -> Result<(), ServeError> {
        self.thread.take().expect("not joined yet").join().expect("the server does not panic")
    }

    pub(crate) fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// Waits until `happened`.
    pub(crate) fn wait(&self, what: &str, happened: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !happened(self) {
            assert!(start.elapsed() < PATIENCE, "{what} did not happen; {:?}", self.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the engine has nothing left, and checks its accounts.
    pub(crate) fn wait_idle(&self) {
        self.wait("idle", |live| {
            let stats = live.stats();
            stats.running == 0 && stats.waiting == 0 && stats.pages_in_use == 0
        });
        let stats = self.stats();
        assert_eq!(stats.pages_free + stats.pages_cached + stats.pages_in_use, stats.pages_total);
    }

    /// Value of a metric without labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no metric {name}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.gate = None;
        self.loading = None;
        self.resume();
        self.terminate();
        self.terminate();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn with(mut defaults: Value, body: Value) -> Value {
    let (Some(all), Value::Object(body)) = (defaults.as_object_mut(), body) else { panic!("bodies are objects") };
    all.extend(body);
    defaults
}

/// `body` over the defaults of a deterministic completion.
pub(crate) fn greedy_body(body: Value) -> Value {
    with(json!({"model": MODEL, "temperature": 0, "ignore_eos": true}), body)
}

/// `body` over the defaults of a deterministic chat.
pub(crate) fn chat_body(body: Value) -> Value {
    greedy_body(with(json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}), body))
}

pub(crate) fn streamed(body: Value) -> Value {
    with(json!({"stream": true}), body)
}

/// The ids that the scripted device draws after `prompt`.
pub(crate) fn drawn(prompt: &[u32], count: usize) -> Vec<u32> {
    greedy(prompt, count, VOCAB)
}

fn profile(file: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../profiles/oxide-tiny").join(file);
    std::fs::read(path).expect("the tiny model is in the repository")
}

/// The shipped model's tokenizer.
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| Arc::new(Tokenizer::from_json(&profile("tokenizer.json")).expect("it loads")));
    Arc::clone(tokenizer)
}

fn template() -> Arc<ChatTemplate> {
    let config: Value = serde_json::from_slice(&profile("tokenizer_config.json")).expect("JSON");
    compile_template(config["chat_template"].as_str().expect("a template"))
}

fn compile_template(source: &str) -> Arc<ChatTemplate> {
    let tokens = TemplateTokens { bos: None, eos: Some("<|im_end|>".to_owned()) };
    Arc::new(ChatTemplate::new(source, tokens, &tokenizer()).expect("it compiles"))
}

fn manifest(context_max: u32, seqs_max: u32, eos: Vec<u32>) -> Manifest {
    Manifest {
        name: MODEL.to_owned(),
        profile: "oxide-tiny".to_owned(),
        target: Target::Cpu,
        model: ModelInfo {
            family: "qwen2".to_owned(),
            parameters: 1,
            layers: 1,
            hidden: 1,
            intermediate: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            vocab: VOCAB,
            vocab_known: VOCAB,
            tied: true,
            rope_theta: F32Bits::new(1e4),
            weight_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        },
        limits: Limits {
            context_max,
            context_origin: "profile".to_owned(),
            seqs_max,
            seqs_origin: "profile".to_owned(),
            step_tokens_max: 256,
            page_tokens: PAGE,
        },
        ledger: Ledger {
            weight_bytes: 0,
            arena_bytes: 0,
            input_bytes: 0,
            output_bytes: 0,
            kv_bytes_per_token: 1,
            kv_pages_default: 1,
            kv_bytes_default: 1,
        },
        tokens: SpecialTokens { bos: None, eos, pad: None, add_bos: false, control: [("<|im_end|>".to_owned(), EOS)].into() },
        generation: GenerationDefaults {
            temperature: F32Bits::new(0.7),
            top_p: F32Bits::new(0.8),
            top_k: 20,
            min_p: F32Bits::new(0.0),
            repetition_penalty: F32Bits::new(1.0),
        },
        golden: GoldenStatus::Unproven,
    }
}
