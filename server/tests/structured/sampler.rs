//! A model that draws at random among what a mask allows.

use oxide_run::grammar::{Compiled, Constraint, ConstraintKind, Grammars};
use oxide_runtime::engine::MaskVerdict;
use oxide_testkit::repo;
use oxide_text::Tokenizer;
use std::sync::{Arc, OnceLock};

/// Ids of the shipped tokenizer that end a text.
pub(crate) const EOS: [u32; 2] = [4093, 4091];
/// Words of a mask.
const WORDS: usize = 4096 / 32;

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load = || {
        let path = repo().join("profiles/oxide-tiny/tokenizer.json");
        Arc::new(Tokenizer::from_json(&std::fs::read(path).expect("the shipped tokenizer")).expect("loads"))
    };
    Arc::clone(TOKENIZER.get_or_init(load))
}

pub(crate) fn grammars() -> &'static Arc<Grammars> {
    static GRAMMARS: OnceLock<Arc<Grammars>> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(tokenizer(), &EOS))
}

pub(crate) fn compile(kind: ConstraintKind) -> Result<Compiled, String> {
    grammars().compile(&Constraint { param: "it".to_owned(), kind }).map_err(|error| error.to_string())
}

/// How a drawn output ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The grammar is complete.
    Complete(String),
    /// The budget is used up.
    Cut(String),
}

/// A small generator of its own, so that a seed means the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound.max(1)
    }
}

/// What the drawing model prefers.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Taste {
    /// Anything allowed, evenly.
    Even,
    /// The longest token of a few: writes much and closes late.
    Long,
    /// Never the end where something else is allowed.
    Endless,
}

/// Draws an output of at most `budget` tokens.
pub(crate) fn draw(compiled: &Compiled, budget: u32, seed: u64, taste: Taste) -> Outcome {
    let (mut random, tokenizer) = (Random::new(seed), tokenizer());
    let mut mask = compiled.clone().masks(budget)();
    let (mut ids, mut words): (Vec<u32>, _) = (Vec::new(), vec![0; WORDS]);
    for left in (1..=budget).rev() {
        mask.begin(left);
        match mask.fill(&mut words) {
            MaskVerdict::Continue => {}
            MaskVerdict::Complete => return Outcome::Complete(tokenizer.decode(&ids, false)),
            MaskVerdict::Failed => panic!("the mask failed after {:?}", tokenizer.decode(&ids, false)),
        }
        let allowed: Vec<u32> = (0..4096).filter(|id| words[(id / 32) as usize] >> (id % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty(), "nothing is allowed after {:?}", tokenizer.decode(&ids, false));
        let id = pick(&allowed, &mut random, taste, &tokenizer);
        if EOS.contains(&id) {
            return Outcome::Complete(tokenizer.decode(&ids, false));
        }
        ids.push(id);
        match mask.accept(id) {
            MaskVerdict::Continue => {}
            MaskVerdict::Complete => return Outcome::Complete(tokenizer.decode(&ids, false)),
            MaskVerdict::Failed => panic!("a token that the mask allowed was refused: {:?}", tokenizer.decode(&ids, false)),
        }
    }
    Outcome::Cut(tokenizer.decode(&ids, false))
}

fn pick(allowed: &[u32], random: &mut Random, taste: Taste, tokenizer: &Tokenizer) -> u32 {
    let any = |random: &mut Random| allowed[random.below(allowed.len())];
    match taste {
        Taste::Even => any(random),
        Taste::Long => (0..4).map(|_| any(random)).max_by_key(|id| tokenizer.id_to_bytes(*id).len()).expect("four"),
        Taste::Endless => {
            let rest: Vec<u32> = allowed.iter().copied().filter(|id| !EOS.contains(id)).collect();
            if rest.is_empty() { any(random) } else { rest[random.below(rest.len())] }
        }
    }
}
