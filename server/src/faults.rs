//! Places at which tests make the server fail: panics, pauses, refused memory, connections cut after any poll.
//!
//! Only this package's own tests switch the feature `fault-injection` on. Without it [`Faults`] has no
//! size, nothing can be injected, and every call is empty.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};

#[cfg(not(feature = "fault-injection"))]
const _: () = assert!(size_of::<Faults>() == 0, "builds without the feature carry no faults");

/// A place on the path of a request, in the order in which one passes them.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A connection was accepted; nothing was read from it.
    Accepted,
    /// The head was read.
    Head,
    /// The next part of the body is waited for.
    Body,
    /// A part of the body is about to be kept in memory.
    BodyMemory,
    /// A text is about to be tokenized.
    Tokenize,
    /// On the thread that tokenizes it.
    TokenizeThread,
    /// A constraint is about to be compiled.
    Compile,
    /// On the thread that compiles it.
    CompileThread,
    /// On a thread that computes a mask.
    MaskThread,
    /// The prefix cache is about to be asked.
    Probe,
    /// The request is about to be submitted.
    Submit,
    /// The request is submitted, its first event waited for; or its last one, if it is not streamed.
    Wait,
    /// A prefix is computed and about to be pinned.
    Pin,
    /// It is pinned and about to get its name.
    Pinned,
    /// Events are about to be turned into a part of a stream.
    Produce,
    /// The connection asks for the next part of a stream.
    Stream,
    /// The connection asks for the last part of a stream.
    Flush,
}

/// What goes wrong at a place.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// A panic.
    Panic,
    /// The task waits for one more poll, so that it can be dropped here.
    Yield,
    /// The allocator gives nothing.
    NoMemory,
}

/// What a test injects.
#[cfg(feature = "fault-injection")]
pub trait Inject: Send + Sync {
    /// Called whenever a request passes a place; may block where the place is on a thread of its own.
    fn at(&self, place: Place) -> Fault;

    /// Called for each connection: the polls after which it is dropped, `None` for never.
    fn polls(&self) -> Option<u64> {
        None
    }

    /// Called after each poll of such a connection: whether it is dropped now.
    fn leaves(&self) -> bool {
        false
    }

    /// Called when a connection is dropped by one or the other.
    fn cut(&self) {}
}

/// The faults of a server.
#[derive(Clone, Default)]
pub struct Faults {
    #[cfg(feature = "fault-injection")]
    injected: Option<std::sync::Arc<dyn Inject>>,
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faults").finish_non_exhaustive()
    }
}

#[cfg(feature = "fault-injection")]
impl Faults {
    /// Faults as `injected` says.
    pub fn new(injected: std::sync::Arc<dyn Inject>) -> Self {
        Self { injected: Some(injected) }
    }

    fn at(&self, place: Place) -> Fault {
        self.injected.as_ref().map_or(Fault::None, |injected| injected.at(place))
    }

    fn polls(&self) -> Option<u64> {
        self.injected.as_ref().and_then(|injected| injected.polls())
    }

    fn leaves(&self) -> bool {
        self.injected.as_ref().is_some_and(|injected| injected.leaves())
    }

    fn cut(&self) {
        self.injected.iter().for_each(|injected| injected.cut());
    }
}

#[cfg(not(feature = "fault-injection"))]
impl Faults {
    fn at(&self, _: Place) -> Fault {
        Fault::None
    }

    fn polls(&self) -> Option<u64> {
        None
    }

    fn leaves(&self) -> bool {
        false
    }

    fn cut(&self) {}
}

impl Faults {
    /// Passes a place where nothing can be waited for.
    ///
    /// # Panics
    /// If a test says so.
    pub(crate) fn hit(&self, place: Place) {
        assert!(self.at(place) != Fault::Panic, "injected at {place:?}");
    }

    /// Whether the allocator is to give nothing at a place.
    pub(crate) fn refuses_memory(&self, place: Place) -> bool {
        self.at(place) == Fault::NoMemory
    }

    /// Passes a place where a request may be dropped.
    pub(crate) async fn pass(&self, place: Place) {
        let mut turn = Turn::default();
        std::future::poll_fn(|context| turn.poll(self, place, context)).await;
    }

    /// Serves a connection to its end, or for as many polls as a test says.
    pub(crate) async fn connection(&self, connection: impl Future<Output = ()>) {
        let (mut left, mut connection) = (self.polls(), pin!(connection));
        let served = std::future::poll_fn(|context| {
            let Some(left) = &mut left else { return connection.as_mut().poll(context) };
            if *left > 0 {
                *left -= 1;
                if connection.as_mut().poll(context).is_ready() {
                    return Poll::Ready(());
                }
            }
            if *left > 0 && !self.leaves() {
                return Poll::Pending;
            }
            self.cut();
            Poll::Ready(())
        });
        served.await;
    }
}

/// The way past one place: a test may make it take two polls.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    waited: bool,
}

impl Turn {
    /// Ready once the place may be passed; starts over then.
    pub(crate) fn poll(&mut self, faults: &Faults, place: Place, context: &mut Context<'_>) -> Poll<()> {
        if std::mem::take(&mut self.waited) {
            return Poll::Ready(());
        }
        match faults.at(place) {
            Fault::None | Fault::NoMemory => Poll::Ready(()),
            Fault::Panic => panic!("injected at {place:?}"),
            Fault::Yield => {
                self.waited = true;
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}
