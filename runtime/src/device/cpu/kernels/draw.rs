//! Filters and draws: temperature, top-k, top-p, min-p and the random number.
//!
//! The kept ids always are a prefix of one order (falling logit, rising id), and weights are integers.
//! So a row is drawn without sorting it: weights are summed in buckets that the order respects, and
//! only the buckets where a filter or the draw falls are sorted.

use super::simd::LANES;
use super::table::Kernels;
use oxide_bundle::step::{NONE, SamplingRow};
use std::cmp::Ordering;

/// `log2 e · 2²⁰`.
const SCALE_BITS: u32 = 0x49B8_AA3B;
/// Fraction bits of a scaled distance from the largest logit.
const FRACTION_BITS: u32 = 20;
/// Distances from here on weigh nothing.
const DISTANCE_END: u32 = 40 << FRACTION_BITS;
/// Distances of one bucket: an eighth of a power of two.
const BUCKET_BITS: u32 = FRACTION_BITS - 3;
/// The last bucket holds what weighs nothing.
const BUCKETS: usize = (DISTANCE_END >> BUCKET_BITS) as usize + 1;
/// `2^-f` by rising powers of `f`.
const POLYNOMIAL: [u32; 6] = [0x3F80_0000, 0xBF31_71DE, 0x3E75_F1C8, 0xBD62_7F7B, 0x3C16_D3E8, 0xBA77_B359];

/// Memory that draws reuse.
pub(crate) struct DrawScratch {
    /// Scaled distance of each id from the largest logit.
    distances: Vec<u32>,
    /// Members of one bucket.
    bucket: Vec<Candidate>,
}

#[derive(Copy, Clone, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
    weight: u64,
}

impl DrawScratch {
    /// Memory for rows of `vocab` logits.
    pub(crate) fn new(vocab: usize) -> Self {
        Self { distances: vec![0; vocab], bucket: Vec::with_capacity(vocab) }
    }
}

/// Draws an id from penalised logits, none of which is a NaN and one of which is above −∞.
pub(crate) fn draw(kernels: &Kernels, params: &SamplingRow, logits: &[f32], scratch: &mut DrawScratch) -> u32 {
    // SAFETY: the table was chosen for this processor.
    let max = unsafe { (kernels.scan_row)(logits) }.max;
    if params.temperature == 0.0 || params.top_k == 1 || params.top_p == 0.0 {
        return logits.iter().position(|logit| *logit == max).map_or(NONE, |id| id as u32);
    }
    let distances = &mut scratch.distances[..logits.len()];
    let mut histogram = Histogram { counts: [0; BUCKETS], weights: [0; BUCKETS] };
    let scale = f32::from_bits(SCALE_BITS) / params.temperature;
    // SAFETY: as above.
    unsafe { (kernels.weigh_row)(logits, max, scale, distances, &mut histogram) };
    let mut order = Order { logits, distances, histogram, bucket: &mut scratch.bucket, sorted: None };
    let kept = filter(params, &mut order);
    let word = u64::from(philox4x32(params.counter, params.seed)[0]);
    let threshold = (u128::from(kept.weight) * u128::from(2 * word + 1)) >> 33;
    order.first_beyond(threshold as u64)
}

/// Applies top-k, top-p and min-p.
fn filter(params: &SamplingRow, order: &mut Order<'_>) -> Prefix {
    let mut kept = order.all();
    if params.top_k > 0 {
        kept = order.of_count(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let share = (f64::from(params.top_p) * 4_294_967_296.0) as u64;
        let target = (u128::from(kept.weight) * u128::from(share)) >> 32;
        kept = order.of_weight((target as u64).max(1));
    }
    if params.min_p > 0.0 {
        let least = (f64::from(params.min_p) * (1_u64 << 40) as f64) as u64;
        let heavy = order.of_least(least);
        if (heavy.bucket, heavy.within) < (kept.bucket, kept.within) {
            kept = heavy;
        }
    }
    kept
}

/// Counts and weights of ids by their distance from the largest logit.
pub(crate) struct Histogram {
    counts: [u32; BUCKETS],
    weights: [u64; BUCKETS],
}

/// The first ids of the order: all of the buckets before `bucket`, and `within` ids of it.
#[derive(Copy, Clone, Debug)]
struct Prefix {
    bucket: usize,
    within: usize,
    weight: u64,
}

/// The ids of a row by falling logit, sorted where looked at.
struct Order<'a> {
    logits: &'a [f32],
    distances: &'a [u32],
    histogram: Histogram,
    bucket: &'a mut Vec<Candidate>,
    /// Which bucket lies sorted in `bucket`.
    sorted: Option<usize>,
}

impl Order<'_> {
    fn all(&self) -> Prefix {
        Prefix { bucket: BUCKETS, within: 0, weight: self.histogram.weights.iter().sum() }
    }

    /// The first `count` ids.
    fn of_count(&mut self, count: usize) -> Prefix {
        let (mut before, mut weight) = (0, 0);
        // What weighs nothing need not be cut.
        for bucket in 0..BUCKETS - 1 {
            let members = self.histogram.counts[bucket] as usize;
            if before + members >= count {
                let within = count - before;
                weight += self.sorted_bucket(bucket)[..within].iter().map(|member| member.weight).sum::<u64>();
                return Prefix { bucket, within, weight };
            }
            before += members;
            weight += self.histogram.weights[bucket];
        }
        self.all()
    }

    /// The fewest ids that weigh at least `target`, which is not 0.
    fn of_weight(&mut self, target: u64) -> Prefix {
        let mut weight = 0;
        for bucket in 0..BUCKETS {
            if weight + self.histogram.weights[bucket] >= target {
                for (at, member) in self.sorted_bucket(bucket).iter().enumerate() {
                    weight += member.weight;
                    if weight >= target {
                        return Prefix { bucket, within: at + 1, weight };
                    }
                }
            }
            weight += self.histogram.weights[bucket];
        }
        self.all()
    }

    /// The ids that weigh at least `least`, and the first one.
    fn of_least(&mut self, least: u64) -> Prefix {
        let mut weight = 0;
        for bucket in 0..BUCKETS {
            let lightest = weight_of((((bucket + 1) << BUCKET_BITS) - 1) as u32);
            if lightest >= least {
                weight += self.histogram.weights[bucket];
                continue;
            }
            let members = self.sorted_bucket(bucket);
            let within = members.iter().take_while(|member| member.weight >= least).count();
            let within = if bucket == 0 { within.max(1) } else { within };
            weight += members[..within].iter().map(|member| member.weight).sum::<u64>();
            return Prefix { bucket, within, weight };
        }
        self.all()
    }

    /// The first id whose cumulative weight exceeds `threshold`.
    fn first_beyond(&mut self, threshold: u64) -> u32 {
        let mut weight = 0;
        for bucket in 0..BUCKETS {
            if weight + self.histogram.weights[bucket] > threshold {
                for member in self.sorted_bucket(bucket) {
                    weight += member.weight;
                    if weight > threshold {
                        return member.id;
                    }
                }
            }
            weight += self.histogram.weights[bucket];
        }
        unreachable!("the threshold is under the weight of what is kept")
    }

    fn sorted_bucket(&mut self, bucket: usize) -> &[Candidate] {
        if self.sorted != Some(bucket) {
            self.bucket.clear();
            for (id, (distance, logit)) in self.distances.iter().zip(self.logits).enumerate() {
                if (distance >> BUCKET_BITS) as usize == bucket {
                    self.bucket.push(Candidate { logit: *logit, id: id as u32, weight: weight_of(*distance) });
                }
            }
            let falling = |a: &Candidate, b: &Candidate| b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal);
            self.bucket.sort_unstable_by(|a, b| falling(a, b).then(a.id.cmp(&b.id)));
            self.sorted = Some(bucket);
        }
        self.bucket
    }
}

/// The weight at a scaled distance.
#[inline(always)]
fn weight_of(distance: u32) -> u64 {
    if distance >= DISTANCE_END {
        return 0;
    }
    let fraction = (distance & ((1 << FRACTION_BITS) - 1)) as f32 * (1.0 / (1 << FRACTION_BITS) as f32);
    let [p0, p1, p2, p3, p4, p5] = POLYNOMIAL.map(f32::from_bits);
    let p = p5.mul_add(fraction, p4).mul_add(fraction, p3).mul_add(fraction, p2).mul_add(fraction, p1).mul_add(fraction, p0);
    (u64::from((p * 16_777_216.0) as u32) << 16) >> (distance >> FRACTION_BITS)
}

/// Fills `distances` and `histogram`. Written for the compiler's own vectors.
///
/// # Safety
/// None beyond the instruction set that a wrapper compiles it for.
#[inline(always)]
pub(crate) unsafe fn weigh_row(logits: &[f32], max: f32, scale: f32, distances: &mut [u32], histogram: &mut Histogram) {
    for (logits, distances) in logits.chunks(LANES).zip(distances.chunks_mut(LANES)) {
        let mut weights = [0; LANES];
        for ((logit, distance), weight) in logits.iter().zip(&mut *distances).zip(&mut weights) {
            let d = if *logit == max { 0.0 } else { (max - *logit) * scale };
            *distance = if d >= DISTANCE_END as f32 { DISTANCE_END } else { d as u32 };
            *weight = weight_of(*distance);
        }
        for (distance, weight) in distances.iter().zip(weights) {
            let bucket = (distance >> BUCKET_BITS) as usize;
            histogram.counts[bucket] += 1;
            histogram.weights[bucket] += weight;
        }
    }
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
/// The counter's upper two words are zero.
pub(crate) fn philox4x32(counter: u64, key: u64) -> [u32; 4] {
    philox4x32_words([counter as u32, (counter >> 32) as u32, 0, 0], [key as u32, (key >> 32) as u32])
}

pub(crate) fn philox4x32_words(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product0 = u64::from(counter[0]) * 0xD251_1F53;
        let product1 = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (product1 >> 32) as u32 ^ counter[1] ^ key[0],
            product1 as u32,
            (product0 >> 32) as u32 ^ counter[3] ^ key[1],
            product0 as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}
