//! The engine's view of a constraint: masks computed by a few worker threads while the step runs.

use super::closing::Closing;
use super::compile::Limits;
use super::vocabulary::Vocabulary;
use crate::faults::{Faults, Place};
use llguidance::TokenParser;
use llguidance::api::StopReason;
use oxide_runtime::engine::{LogitsMask, MaskVerdict};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Most threads that compute masks.
const THREADS_MAX: usize = 8;
/// Stack of such a thread: the search for a witness recurses by bytes.
const STACK_BYTES: usize = 32 << 20;

/// Threads that compute masks, started with the first constrained request.
pub(super) struct Workers {
    jobs: OnceLock<Mutex<Sender<Job>>>,
    panics: AtomicU64,
    faults: Faults,
}

struct Job {
    body: Box<Body>,
    budget: u32,
    reply: SyncSender<Box<Body>>,
    workers: Arc<Workers>,
}

impl Workers {
    pub(super) fn new(faults: Faults) -> Self {
        Self { jobs: OnceLock::new(), panics: AtomicU64::new(0), faults }
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Panics contained so far.
    pub(super) fn panics(&self) -> u64 {
        self.panics.load(Ordering::Relaxed)
    }

    /// Calls into the library; a panic is counted, and fails this mask alone.
    fn contained(&self, call: impl FnOnce() -> MaskVerdict) -> MaskVerdict {
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
            self.panics.fetch_add(1, Ordering::Relaxed);
            MaskVerdict::Failed
        })
    }

    /// Hands a job over; gives it back if no thread takes it.
    fn submit(&self, job: Job) -> Result<(), Box<Job>> {
        let sender = self.jobs.get_or_init(|| Mutex::new(start_threads()));
        sender.lock().unwrap_or_else(PoisonError::into_inner).send(job).map_err(|refused| Box::new(refused.0))
    }
}

fn start_threads() -> Sender<Job> {
    let (sender, receiver) = channel::<Job>();
    let receiver = Arc::new(Mutex::new(receiver));
    let count = std::thread::available_parallelism().map_or(2, |count| count.get()).clamp(1, THREADS_MAX);
    for index in 0..count {
        let receiver = Arc::clone(&receiver);
        let thread = std::thread::Builder::new().name(format!("grammar-mask-{index}")).stack_size(STACK_BYTES);
        // With fewer threads masks take longer; with none they are computed where they are waited for.
        let _ = thread.spawn(move || {
            while let Some(Job { mut body, budget, reply, workers }) = next(&receiver) {
                body.prepare(budget, &workers);
                let _ = reply.send(body);
            }
        });
    }
    sender
}

fn next(receiver: &Mutex<Receiver<Job>>) -> Option<Job> {
    receiver.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// The constraint of one choice.
pub struct GrammarMask {
    /// Here unless a worker has it.
    body: Option<Box<Body>>,
    workers: Arc<Workers>,
    reply: SyncSender<Box<Body>>,
    answer: Receiver<Box<Body>>,
}

/// What a worker needs to compute a mask.
struct Body {
    parser: TokenParser,
    closing: Option<Closing>,
    limits: Limits,
    vocabulary: Arc<Vocabulary>,
    words: Vec<u32>,
    verdict: MaskVerdict,
    prepared: bool,
    budget: u32,
}

impl GrammarMask {
    pub(super) fn new(
        parser: TokenParser,
        closing: Option<Closing>,
        limits: Limits,
        vocabulary: Arc<Vocabulary>,
        workers: Arc<Workers>,
    ) -> Self {
        let (reply, answer) = sync_channel(1);
        let verdict = MaskVerdict::Continue;
        let body = Body { parser, closing, limits, vocabulary, words: Vec::new(), verdict, prepared: false, budget: u32::MAX };
        Self { body: Some(Box::new(body)), workers, reply, answer }
    }

    /// The body, waited for if a worker has it.
    fn take(&mut self) -> Option<Box<Body>> {
        self.body.take().or_else(|| self.answer.recv().ok())
    }
}

impl LogitsMask for GrammarMask {
    fn begin(&mut self, budget: u32) {
        let Some(mut body) = self.take() else { return };
        body.prepared = false;
        body.budget = budget;
        if let Err(job) = self.workers.submit(Job { body, budget, reply: self.reply.clone(), workers: Arc::clone(&self.workers) }) {
            self.body = Some(job.body);
        }
    }

    fn fill(&mut self, words: &mut [u32]) -> MaskVerdict {
        let Some(mut body) = self.take() else { return MaskVerdict::Failed };
        if !body.prepared {
            body.prepare(body.budget, &self.workers);
        }
        words.fill(0);
        words.iter_mut().zip(&body.words).for_each(|(word, allowed)| *word = *allowed);
        let verdict = body.verdict;
        self.body = Some(body);
        verdict
    }

    fn accept(&mut self, id: u32) -> MaskVerdict {
        let Some(mut body) = self.take() else { return MaskVerdict::Failed };
        let verdict = self.workers.contained(|| body.accept(id));
        self.body = Some(body);
        verdict
    }
}

impl Body {
    /// Computes the mask of the next position; `budget` tokens may still be drawn.
    fn prepare(&mut self, budget: u32, workers: &Workers) {
        self.verdict = workers.contained(|| {
            workers.faults.hit(Place::MaskThread);
            self.compute(budget)
        });
        self.prepared = true;
    }

    fn compute(&mut self, budget: u32) -> MaskVerdict {
        self.words.clear();
        match self.parser.compute_mask() {
            Ok(mask) => self.words.extend_from_slice(mask.as_slice()),
            Err(_) => return stopped(&self.parser),
        }
        if let Some(closing) = &mut self.closing {
            let left = u64::from(budget.saturating_sub(1));
            closing.restrict(&mut self.parser, &self.vocabulary, &self.limits, left, &mut self.words);
        }
        if self.words.iter().all(|word| *word == 0) { MaskVerdict::Failed } else { MaskVerdict::Continue }
    }

    fn accept(&mut self, id: u32) -> MaskVerdict {
        self.prepared = false;
        if self.vocabulary.eos().contains(&id) {
            return MaskVerdict::Complete;
        }
        if self.parser.consume_token(id).is_err() {
            return MaskVerdict::Failed;
        }
        if let Some(closing) = &mut self.closing {
            closing.advance(id, &self.vocabulary, &self.limits);
        }
        match self.parser.check_stop() {
            Ok(true) => MaskVerdict::Complete,
            // Nothing more may be drawn, and nothing is missing.
            Ok(false) if self.budget <= 1 && self.parser.is_accepting() => MaskVerdict::Complete,
            Ok(false) => MaskVerdict::Continue,
            Err(_) => stopped(&self.parser),
        }
    }
}

/// What a parser that gives no further mask says.
fn stopped(parser: &TokenParser) -> MaskVerdict {
    match parser.stop_reason() {
        StopReason::NoExtension | StopReason::EndOfSentence => MaskVerdict::Complete,
        _ => MaskVerdict::Failed,
    }
}
