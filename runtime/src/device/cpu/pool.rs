//! Threads that run one job at a time together with their caller.
//!
//! A decode step is some 150 launches of tens of microseconds, so handing out work must cost well
//! under one: a job is published by one atomic store, tasks are claimed by compare-and-swap, and
//! workers spin for a moment between jobs before they park. A worker that the system has descheduled
//! delays nobody unless it holds a task.
//!
//! ```text
//! state:  epoch (40 bits) | tasks (12 bits) | next unclaimed task (12 bits)
//! ```
//!
//! **Invariant:** the job words change only while every task of the previous job is done. A claim
//! succeeds only if `state` still is what it was before the job words were read, so a claimed task
//! always belongs to the job that was read.
//!
//! Which thread runs a task is left to chance; results must not depend on it, and kernels see to that
//! by computing each output inside one task.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Tasks of one job.
pub(crate) const TASKS_MAX: usize = (1 << TASK_BITS) - 1;

const TASK_BITS: u32 = 12;
const EPOCH_SHIFT: u32 = 2 * TASK_BITS;
/// How long a worker looks for the next job before it parks: longer than the gap between two
/// launches or two steps, short enough to leave an idle machine idle.
const SPIN: Duration = Duration::from_micros(150);
/// Looks at the state between two looks at the clock.
const LOOKS_PER_CLOCK: u32 = 64;

/// A job: called with the number of each task.
type Job<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    state: AtomicU64,
    /// Points at the [`Job`] on the caller's stack while `epoch` is current.
    job: AtomicPtr<()>,
    done: AtomicUsize,
    parked: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

/// The threads of one device; the thread that calls [`Pool::run`] works too.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` workers.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn start(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            done: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            pool.workers.push(std::thread::Builder::new().name(format!("oxide-cpu-{index}")).spawn(move || shared.work())?);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(0), …, job(tasks - 1)`, in any order and on any thread, and returns when all are done.
    ///
    /// # Panics
    /// If a task panicked, or `tasks` is over [`TASKS_MAX`].
    pub(crate) fn run(&mut self, tasks: usize, job: Job<'_>) {
        assert!(tasks <= TASKS_MAX, "{tasks} tasks, at most {TASKS_MAX}");
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(job);
            return;
        }
        self.publish(tasks, &job);
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.run_tasks()));
        // A panic of this thread's task leaves that task counted, and the others must end before the
        // job's borrows do.
        if own.is_err() {
            let _ = catch_unwind(AssertUnwindSafe(|| self.shared.drain_tasks()));
        }
        self.shared.wait_done(tasks);
        if let Err(panic) = own {
            self.shared.panicked.store(false, Ordering::Relaxed);
            resume_unwind(panic);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a task of a cpu kernel panicked");
    }

    /// [`Pool::run`] for any number of tasks.
    pub(crate) fn run_all(&mut self, tasks: usize, job: Job<'_>) {
        let run = tasks.div_ceil(TASKS_MAX).max(1);
        self.run(tasks.div_ceil(run), &|group| (group * run..((group + 1) * run).min(tasks)).for_each(job));
    }

    fn publish(&self, tasks: usize, job: &Job<'_>) {
        let shared = &*self.shared;
        shared.done.store(0, Ordering::Relaxed);
        shared.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        let epoch = (shared.state.load(Ordering::Relaxed) >> EPOCH_SHIFT).wrapping_add(1);
        // Sequentially consistent against `parked`: either this thread sees the worker parked, or the
        // worker sees the new state before it parks.
        shared.state.store((epoch << EPOCH_SHIFT) | ((tasks as u64) << TASK_BITS), Ordering::SeqCst);
        if shared.parked.load(Ordering::SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            if catch_unwind(AssertUnwindSafe(|| self.run_tasks())).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
                self.done.fetch_add(1, Ordering::Release);
                continue;
            }
            if !self.spin() {
                self.park();
            }
        }
    }

    /// Claims and runs tasks until none is left.
    fn run_tasks(&self) {
        while let Some((job, task)) = self.claim() {
            // SAFETY: the claim proves that `job` was published for the current epoch, and `Pool::run`
            // keeps what it points at alive until `done` counts this task.
            let job = unsafe { *job.cast::<Job<'_>>() };
            job(task);
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// After a panic of the caller's own task: counts it, then runs what is left.
    fn drain_tasks(&self) {
        self.done.fetch_add(1, Ordering::Release);
        while let Some((job, task)) = self.claim() {
            // SAFETY: as in `run_tasks`.
            let job = unsafe { *job.cast::<Job<'_>>() };
            let _ = catch_unwind(AssertUnwindSafe(|| job(task)));
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    fn claim(&self) -> Option<(*mut (), usize)> {
        let mut state = self.state.load(Ordering::Acquire);
        while has_tasks(state) {
            let job = self.job.load(Ordering::Relaxed);
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((job, next_task(state))),
                Err(now) => state = now,
            }
        }
        None
    }

    /// Waits a moment for a job; false if none came.
    fn spin(&self) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if has_tasks(self.state.load(Ordering::Relaxed)) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN || self.stop.load(Ordering::Relaxed) {
                return false;
            }
            // Where others want this processor, let them have it.
            std::thread::yield_now();
        }
    }

    fn park(&self) {
        self.parked.fetch_add(1, Ordering::SeqCst);
        while !has_tasks(self.state.load(Ordering::SeqCst)) && !self.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }

    fn wait_done(&self, tasks: usize) {
        let mut looks = 0_u32;
        while self.done.load(Ordering::Acquire) < tasks {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS_PER_CLOCK * 16) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

fn next_task(state: u64) -> usize {
    (state & TASKS_MAX as u64) as usize
}

fn has_tasks(state: u64) -> bool {
    next_task(state) < ((state >> TASK_BITS) & TASKS_MAX as u64) as usize
}

/// A slice that tasks of one job write at places that do not meet.
#[derive(Copy, Clone)]
pub(crate) struct Scatter<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: a `Scatter` gives out mutable slices only through `slice_mut`, whose contract makes them disjoint.
unsafe impl<T: Send> Send for Scatter<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Scatter<'_, T> {}

impl<'a, T> Scatter<'a, T> {
    /// Borrows `slice` for the job.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: std::marker::PhantomData }
    }

    /// `slice[start..start + len]`.
    ///
    /// # Safety
    /// No other slice that overlaps this one may be alive.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's proof")]
    pub(crate) unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "range out of bounds");
        // SAFETY: in bounds by the assertion, disjoint by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::start(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for round in 0..2000_usize {
                let tasks = round % 40;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn parked_workers_wake() {
        let mut pool = Pool::start(2).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while pool.shared.parked.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < deadline, "an idle worker keeps spinning");
            std::thread::yield_now();
        }
        // Each task waits for the other, so both threads must take part.
        let barrier = std::sync::Barrier::new(2);
        pool.run(2, &|_| {
            barrier.wait();
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::start(2).unwrap();
        for bad in 0..8 {
            let run = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|task| assert_ne!(task, bad))));
            assert!(run.is_err(), "task {bad}");
            let sum = AtomicUsize::new(0);
            pool.run(8, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 28);
        }
    }
}
