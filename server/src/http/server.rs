//! Life cycle: bind, load, answer, drain, end.
//!
//! ```text
//!  bind ─▶ Loading ─▶ Ready ──SIGTERM──▶ Draining ──live streams done, or cut at the limit──▶ end, Ok
//!             │          │                   └──second SIGTERM──▶ end at once, Err
//!             │          └──engine failed──▶ Failed ──open requests got their error──▶ end, Err
//!             └──loader failed──▶ end, Err
//! ```
//!
//! Connections are accepted in every phase, so that a refusal is always an answer.

use super::layer::{Contained, Panicked};
use super::options::ServeOptions;
use super::router::router;
use super::served::ServedModel;
use super::state::{Phase, State};
use crate::faults::Place;
use crate::journal::{Journal, JournalOptions};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use oxide_runtime::engine::EngineHealth;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

/// How often the engine's health is looked at; requests in flight hear of a failure at once anyway.
const HEALTH_PERIOD: Duration = Duration::from_millis(20);
/// Pause after the system refused a connection (no file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time for answers to reach their clients once the engine failed.
const FAREWELL: Duration = Duration::from_secs(2);
/// Time kept of the drain limit for cutting the streams that are still live.
const CUT: Duration = Duration::from_secs(1);

/// Why the server ended, if not in order.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's words.
        source: std::io::Error,
    },
    /// The system takes no signal handler.
    #[error("cannot listen for signals: {0}")]
    Signals(std::io::Error),
    /// The port file cannot be written.
    #[error("cannot write the port file {}: {source}", path.display())]
    PortFile {
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// The journal cannot be opened.
    #[error("cannot open the journal in {}: {source}", folder.display())]
    Journal {
        /// The folder.
        folder: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// The model did not load.
    #[error("{0:#}")]
    Load(anyhow::Error),
    /// The engine failed while serving.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// A second signal came while live requests finished.
    #[error("stopped by a second signal; {live} live requests were cut")]
    Forced {
        /// Requests that were live.
        live: usize,
    },
}

/// A bound server.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<State>,
}

/// Binds, loads with `loader` on a thread of its own, answers until SIGTERM or SIGINT, drains.
///
/// # Errors
/// If the address is taken, the model does not load, the engine fails, or a second signal forces the end.
pub async fn serve<L, M>(options: ServeOptions, loader: L) -> Result<(), ServeError>
where
    L: FnOnce() -> anyhow::Result<M> + Send + 'static,
    M: Into<ServedModel> + Send + 'static,
{
    let server = Server::bind(options).await?;
    tracing::info!(address = %server.address(), "listening");
    server.run(loader, signals()?).await
}

/// One message for each SIGTERM or SIGINT.
fn signals() -> Result<mpsc::UnboundedReceiver<()>, ServeError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if sender.send(()).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

impl Server {
    /// Binds the address of `options`. Nothing is answered before [`Server::run`].
    ///
    /// # Errors
    /// If the address cannot be bound, or the journal not opened.
    pub async fn bind(options: ServeOptions) -> Result<Self, ServeError> {
        let address = SocketAddr::new(options.host, options.port);
        let failed = |source| ServeError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let journal = options.journal.clone().map(open_journal).transpose()?;
        Ok(Self { listener, address, state: Arc::new(State::new(options, journal)) })
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until the first message of `stops`, then drains; the second one forces the end.
    ///
    /// # Errors
    /// As [`serve`], binding aside.
    pub async fn run<L, M>(self, loader: L, mut stops: mpsc::UnboundedReceiver<()>) -> Result<(), ServeError>
    where
        L: FnOnce() -> anyhow::Result<M> + Send + 'static,
        M: Into<ServedModel> + Send + 'static,
    {
        let Self { listener, address, state } = self;
        let front = Front::open(listener, Arc::clone(&state));
        let loaded = tokio::select! {
            loaded = load(loader) => loaded,
            () = stopped(&mut stops) => return Ok(()),
        };
        let model = loaded.map_err(ServeError::Load)?;
        let engine = model.engine.clone();
        let (name, device, seal) = (model.manifest.name.clone(), model.device.clone(), model.seal.clone());
        state.install(model);
        // Said only now: whoever reads it may ask at once.
        tracing::info!(model = name, device, seal, "ready");
        write_port(&state, address)?;
        let ended = tokio::select! {
            message = engine_failure(&engine) => fail(&state, message).await,
            () = stopped(&mut stops) => drain(&state, &engine, &mut stops).await,
        };
        if !matches!(ended, Err(ServeError::Forced { .. })) {
            front.close(FAREWELL.min(state.options.drain / 4)).await;
            end_engine(engine).await;
        }
        state.journal.iter().for_each(Journal::flush);
        ended
    }
}

fn open_journal(options: JournalOptions) -> Result<Journal, ServeError> {
    let folder = options.folder.clone();
    Journal::open(options).map_err(|source| ServeError::Journal { folder, source })
}

/// Runs the loader on a thread that nobody waits for if the server is stopped meanwhile.
async fn load<L, M>(loader: L) -> anyhow::Result<ServedModel>
where
    L: FnOnce() -> anyhow::Result<M> + Send + 'static,
    M: Into<ServedModel> + Send + 'static,
{
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new().name("oxide-load".to_owned()).spawn(move || {
        let _ = sender.send(loader().map(Into::into));
    })?;
    receiver.await.unwrap_or_else(|_| Err(anyhow::anyhow!("the loader panicked; see the message above")))
}

/// Tells whoever waits for it where the server answers. Written whole or not at all.
fn write_port(state: &State, address: SocketAddr) -> Result<(), ServeError> {
    let Some(path) = &state.options.port_file else { return Ok(()) };
    let failed = |source| ServeError::PortFile { path: path.clone(), source };
    let partial = path.with_extension("partial");
    std::fs::write(&partial, format!("{}\n", address.port())).map_err(failed)?;
    std::fs::rename(&partial, path).map_err(failed)
}

/// A stop; never if nobody can send one any more.
async fn stopped(stops: &mut mpsc::UnboundedReceiver<()>) {
    if stops.recv().await.is_none() {
        std::future::pending::<()>().await;
    }
}

async fn engine_failure(engine: &oxide_runtime::engine::EngineHandle) -> String {
    let mut ticks = tokio::time::interval(HEALTH_PERIOD);
    loop {
        ticks.tick().await;
        match engine.health() {
            EngineHealth::Failed(message) => return message,
            EngineHealth::Running | EngineHealth::Draining | EngineHealth::Stopped => {}
        }
    }
}

async fn fail(state: &State, message: String) -> Result<(), ServeError> {
    state.set_phase(Phase::Failed);
    tracing::error!(%message, live = state.live(), "the engine failed; the server ends");
    let _ = tokio::time::timeout(FAREWELL, state.idle()).await;
    Err(ServeError::Engine(message))
}

async fn drain(
    state: &State,
    engine: &oxide_runtime::engine::EngineHandle,
    stops: &mut mpsc::UnboundedReceiver<()>,
) -> Result<(), ServeError> {
    state.set_phase(Phase::Draining);
    let limit = state.options.drain;
    tracing::info!(live = state.live(), limit_s = limit.as_secs_f64(), "draining");
    // A quarter each at most for cutting streams and for closing connections.
    let patience = limit.saturating_sub(CUT.min(limit / 4) + FAREWELL.min(limit / 4));
    tokio::select! {
        () = state.idle() => {}
        () = stopped(stops) => return Err(ServeError::Forced { live: state.live() }),
        () = tokio::time::sleep(patience) => {
            tracing::warn!(live = state.live(), "the drain limit is near; live requests are cut");
            engine.stop();
            let _ = tokio::time::timeout(CUT.min(limit / 4), state.idle()).await;
        }
    }
    Ok(())
}

/// Ends the engine thread, without waiting for it for ever.
async fn end_engine(engine: oxide_runtime::engine::EngineHandle) {
    engine.stop();
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        engine.join();
        let _ = sender.send(());
    });
    let _ = tokio::time::timeout(CUT, receiver).await;
}

/// The accept loop and its connections.
struct Front {
    closing: watch::Sender<bool>,
    /// Closed once the loop and every connection ended.
    gone: mpsc::Receiver<()>,
}

impl Front {
    fn open(listener: TcpListener, state: Arc<State>) -> Self {
        let closing = watch::Sender::new(false);
        let (alive, gone) = mpsc::channel(1);
        tokio::spawn(accept(listener, state, closing.subscribe(), alive));
        Self { closing, gone }
    }

    /// Ends idle connections, lets the others write what they have.
    async fn close(mut self, patience: Duration) {
        let started = Instant::now();
        self.closing.send_replace(true);
        if tokio::time::timeout(patience, self.gone.recv()).await.is_err() {
            tracing::warn!(waited_ms = started.elapsed().as_millis() as u64, "connections were cut");
        }
    }
}

async fn accept(listener: TcpListener, state: Arc<State>, mut closing: watch::Receiver<bool>, alive: mpsc::Sender<()>) {
    let places = Arc::new(Semaphore::new(state.options.connections_max));
    let routes = router(Arc::clone(&state));
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            () = closed(&mut closing) => return,
        };
        match accepted {
            Ok((socket, _)) => {
                let (state, routes, closing, alive) = (Arc::clone(&state), routes.clone(), closing.clone(), alive.clone());
                tokio::spawn(async move {
                    let served = state.options.faults.connection(connection(socket, &state, routes, closing));
                    // Handlers contain their own panics; this is what remains, and nobody is left to be told.
                    if let Err(Panicked) = Contained(Box::pin(served)).await {
                        state.count_panic();
                    }
                    drop((place, alive));
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Returns once the server closes; the sender outlives every receiver until then.
async fn closed(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

async fn connection(socket: TcpStream, state: &State, routes: Router, mut closing: watch::Receiver<bool>) {
    let _ = socket.set_nodelay(true);
    let _counted = Counted::new(&state.metrics.connections);
    let options = &state.options;
    options.faults.pass(Place::Accepted).await;
    // The protocol's own limits are twice ours, so that a head that is a little too large gets an answer with a body.
    let mut connection = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(options.head_timeout)
            .max_headers(2 * options.headers_max)
            .max_buf_size((2 * options.head_bytes_max).max(16 << 10))
            .serve_connection(TokioIo::new(socket), TowerToHyperService::new(routes))
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = closed(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

/// One more in a gauge, until it is dropped.
struct Counted<'a>(&'a AtomicI64);

impl<'a> Counted<'a> {
    fn new(gauge: &'a AtomicI64) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
