//! A histogram of durations that any thread records to and reads from, without locks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets, in seconds.
pub const BUCKETS_S: [f64; 16] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Counts of durations by bucket, their number and their sum.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS_S.len()],
    count: AtomicU64,
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Records `times` observations of `each`.
    pub fn observe(&self, each: Duration, times: u64) {
        let seconds = each.as_secs_f64();
        if let Some(bucket) = self.buckets.get(BUCKETS_S.partition_point(|bound| *bound < seconds)) {
            bucket.fetch_add(times, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add((each.as_nanos() as u64).saturating_mul(times), Ordering::Relaxed);
        self.count.fetch_add(times, Ordering::Relaxed);
    }

    /// Observations up to each of [`BUCKETS_S`].
    pub fn cumulative(&self) -> [u64; BUCKETS_S.len()] {
        let mut sum = 0;
        self.buckets.each_ref().map(|bucket| {
            sum += bucket.load(Ordering::Relaxed);
            sum
        })
    }

    /// Observations in all.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Sum of all observations, in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histogram = Histogram::default();
        histogram.observe(Duration::from_micros(500), 2);
        histogram.observe(Duration::from_millis(5), 1);
        histogram.observe(Duration::from_secs(1000), 1);
        let cumulative = histogram.cumulative();
        assert_eq!((cumulative[0], cumulative[1], cumulative[2], cumulative[15]), (2, 2, 3, 3));
        assert_eq!(histogram.count(), 4);
        assert!((histogram.sum_seconds() - 1000.006).abs() < 1e-9);
    }
}
