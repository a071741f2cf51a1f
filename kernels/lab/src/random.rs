//! Random token ids of a fixed seed, so that two runs measure the same work.

/// splitmix64.
pub(crate) struct Random {
    state: u64,
}

impl Random {
    /// A source; equal seeds give equal numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if that is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Whether an event of this many percent happens.
    pub(crate) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// `count` ids below `known`.
    pub(crate) fn ids(&mut self, count: u32, known: u32) -> Vec<u32> {
        (0..count).map(|_| (self.next() % u64::from(known.max(1))) as u32).collect()
    }
}
