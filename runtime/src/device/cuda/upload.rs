//! Moves the weight section to the device: each chunk is hashed, copied to a pinned ring and sent.
//!
//! Several threads hash and copy; the calling thread, which owns the context, issues the transfers in
//! whatever order chunks become ready. **Invariant:** no byte is sent before the hash of its chunk has matched.

use super::driver::{Context, CudaError, DevicePtr, Event, PinnedMemory, Stream};
use crate::open::Weights;
use oxide_bundle::{Bundle, BundleError};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};

/// Ring slots per hashing thread: one being filled, one being sent.
const SLOTS_PER_THREAD: usize = 2;
/// More threads than this saturate the link.
const THREADS_MAX: usize = 16;

/// Failure of an upload.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// A chunk is damaged.
    #[error(transparent)]
    Damaged(#[from] BundleError),
    /// A transfer failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// A slot that a hashing thread gives back: pinned memory is freed on the context's thread, whatever happened.
struct Filled {
    chunk: usize,
    slot: PinnedMemory,
    /// Bytes to send, or why none.
    bytes: Result<usize, BundleError>,
}

/// Uploads the weights to `to`, and returns once they are there.
///
/// # Errors
/// On the first damaged chunk, or if a transfer fails.
pub(super) fn upload_weights(
    context: &Context,
    stream: &Stream,
    bundle: &Bundle,
    weights: &Weights,
    to: DevicePtr,
    chunk_bytes: usize,
) -> Result<(), UploadError> {
    context.make_current()?;
    let total = bundle.weight_chunk_count();
    let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(1, THREADS_MAX).min(total.max(1));
    let (free_sender, free_receiver) = mpsc::channel::<PinnedMemory>();
    for _ in 0..threads * SLOTS_PER_THREAD {
        free_sender.send(PinnedMemory::alloc(chunk_bytes)?).expect("the receiver lives in this function");
    }
    let free = Mutex::new(free_receiver);
    let next = AtomicUsize::new(0);
    let (filled_sender, filled) = mpsc::channel::<Filled>();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let filled = filled_sender.clone();
            let (free, next) = (&free, &next);
            scope.spawn(move || fill_slots(bundle, weights, chunk_bytes, total, next, free, &filled));
        }
        drop(filled_sender);
        let sent = send_slots(stream, to, chunk_bytes, &filled, free_sender);
        // After a failure nothing more is hashed.
        next.store(total, Ordering::Relaxed);
        sent
    })
}

/// A hashing thread: takes the next chunk and a free slot until there are no more chunks or nobody receives.
fn fill_slots(
    bundle: &Bundle,
    weights: &Weights,
    chunk_bytes: usize,
    total: usize,
    next: &AtomicUsize,
    free: &Mutex<mpsc::Receiver<PinnedMemory>>,
    filled: &mpsc::Sender<Filled>,
) {
    loop {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        if chunk >= total {
            return;
        }
        let Some(mut slot) = free.lock().ok().and_then(|slots| slots.recv().ok()) else { return };
        let source = weights.bytes().get(chunk * chunk_bytes..).unwrap_or_default();
        let bytes = source.len().min(chunk_bytes);
        let bytes = bundle.verify_weight_chunk(chunk).map(|_| {
            slot.bytes_mut()[..bytes].copy_from_slice(&source[..bytes]);
            bytes
        });
        let failed = bytes.is_err();
        if filled.send(Filled { chunk, slot, bytes }).is_err() || failed {
            return;
        }
    }
}

fn send_slots(
    stream: &Stream,
    to: DevicePtr,
    chunk_bytes: usize,
    filled: &mpsc::Receiver<Filled>,
    free: mpsc::Sender<PinnedMemory>,
) -> Result<(), UploadError> {
    let mut in_flight = std::collections::VecDeque::new();
    for Filled { chunk, slot, bytes } in filled {
        let bytes = bytes?;
        stream.upload(to.offset((chunk * chunk_bytes) as u64), &slot, 0, bytes)?;
        let sent = Event::new()?;
        stream.record(&sent)?;
        in_flight.push_back((sent, slot));
        while in_flight.len() > 2 {
            release(&mut in_flight, &free)?;
        }
    }
    while !in_flight.is_empty() {
        release(&mut in_flight, &free)?;
    }
    Ok(())
}

fn release(in_flight: &mut std::collections::VecDeque<(Event, PinnedMemory)>, free: &mpsc::Sender<PinnedMemory>) -> Result<(), CudaError> {
    if let Some((sent, slot)) = in_flight.pop_front() {
        sent.wait()?;
        // Nobody waits for slots once the last chunk is taken.
        let _ = free.send(slot);
    }
    Ok(())
}
