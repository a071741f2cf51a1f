//! The tokenizer's vocabulary in the form that the grammar library walks.

use super::tree::Tree;
use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use oxide_text::Tokenizer;
use std::sync::Arc;

/// Bytes that may begin something with a shortest completion of its own in JSON: a string, an object, an
/// array, a further member, a value.
const STRUCTURE: &[u8] = b"\"{[,:";
/// Bounds of the classes of tokens by how many such bytes, or bytes at all, they have.
const CLASSES: [u32; 8] = [0, 1, 2, 3, 4, 6, 8, 16];

/// Vocabulary and what is known of its tokens.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tree: Tree,
    eos: Vec<u32>,
    bytes: [Option<TokenId>; 256],
    by_structure: Classes,
    by_length: Classes,
}

/// Which bytes of a token can begin something that has to be completed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// Those of JSON's structure.
    Structure,
    /// All.
    Bytes,
}

/// Tokens by how many bytes of them are counted.
struct Classes {
    rising: Vec<TokenClass>,
    most: u32,
}

/// The tokens with at most so many counted bytes.
pub(super) struct TokenClass {
    /// How many.
    pub(super) most: u32,
    /// The tokens as bits.
    pub(super) words: Vec<u32>,
}

struct Env(Arc<Vocabulary>);

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.0.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.trie.greedy_tokenize(bytes)
    }

    /// The model may spell what it writes in its own way; nothing is forced token by token.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Vocabulary {
    /// Collects the tokens. Control tokens never match text of a grammar.
    pub(super) fn new(tokenizer: &Tokenizer, eos: &[u32]) -> Self {
        let words: Vec<Vec<u8>> = (0..tokenizer.vocab_known()).map(|id| spelling(tokenizer, id)).collect();
        let eos: Vec<u32> = eos.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
        let info = TokRxInfo::new(words.len() as u32, eos.first().copied().unwrap_or(INVALID_TOKEN));
        let trie = TokTrie::from(&info, &words);
        let trie = if eos.is_empty() { trie } else { trie.with_eos_tokens(&eos) };
        let mut bytes = [None; 256];
        for (id, word) in words.iter().enumerate() {
            if let [byte] = word[..] {
                bytes[usize::from(byte)].get_or_insert(id as u32);
            }
        }
        let by_structure = Classes::new(words.iter().map(|word| Counted::Structure.of(word)).collect());
        let by_length = Classes::new(words.iter().map(|word| Counted::Bytes.of(word)).collect());
        let is_text = |(word, _): &(&[u8], u32)| !word.is_empty() && word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        let tree = Tree::new(words.iter().map(Vec::as_slice).zip(0..).filter(is_text).collect());
        Self { trie, tree, eos, bytes, by_structure, by_length }
    }

    /// As the library wants it.
    pub(super) fn env(self: &Arc<Self>) -> TokEnv {
        Arc::new(Env(Arc::clone(self)))
    }

    /// Ids that end a text.
    pub(super) fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Ids that are known.
    pub(super) fn count(&self) -> u32 {
        self.trie.vocab_size() as u32
    }

    /// The tokens that are text.
    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The token of a single byte.
    pub(super) fn byte(&self, byte: u8) -> Option<TokenId> {
        self.bytes[usize::from(byte)]
    }

    /// The bytes of a token; empty for control tokens.
    pub(super) fn token(&self, id: TokenId) -> &[u8] {
        let known = (id as usize) < self.trie.vocab_size() && !self.trie.is_special_token(id);
        if known { self.trie.token(id) } else { &[] }
    }

    /// Allows every token.
    pub(super) fn fill_known(&self, words: &mut [u32]) {
        let known = self.trie.vocab_size();
        for (index, word) in words.iter_mut().enumerate() {
            let count = known.saturating_sub(index * 32).min(32);
            *word = u32::MAX.checked_shr(32 - count as u32).unwrap_or(0);
        }
    }

    /// Counted bytes of a token.
    pub(super) fn counted(&self, id: TokenId, counted: Counted) -> u32 {
        counted.of(self.token(id))
    }

    /// Most counted bytes of any token.
    pub(super) fn counted_max(&self, counted: Counted) -> u32 {
        self.classes(counted).most
    }

    /// The widest class of tokens with at most `count` counted bytes; `None` for no limit at all.
    pub(super) fn class(&self, count: u32, counted: Counted) -> Option<&TokenClass> {
        let classes = self.classes(counted);
        if count >= classes.most {
            return None;
        }
        classes.rising.iter().rev().find(|class| class.most <= count)
    }

    fn classes(&self, counted: Counted) -> &Classes {
        match counted {
            Counted::Structure => &self.by_structure,
            Counted::Bytes => &self.by_length,
        }
    }

    /// The fewest tokens that spell `bytes`, and with each how many any end of it and what follows takes at most;
    /// `None` if a byte has no token.
    pub(super) fn spell(&self, bytes: &[u8]) -> Option<Vec<(TokenId, u32)>> {
        let best = self.best(bytes);
        let mut worst = 0;
        let worsts: Vec<u32> = best
            .iter()
            .rev()
            .map(|best| {
                worst = worst.max(best.map_or(0, |best| best.0));
                worst
            })
            .collect();
        let (mut at, mut ids) = (0, Vec::new());
        while at + 1 < best.len() {
            let (_, id) = best.get(at).copied().flatten()?;
            ids.push((id, worsts.get(best.len() - 1 - at).copied().unwrap_or(0)));
            at += self.trie.token(id).len().max(1);
        }
        Some(ids)
    }

    /// The fewest tokens of each end of `bytes`.
    pub(super) fn counts(&self, bytes: &[u8]) -> Vec<Option<u32>> {
        self.best(bytes).iter().map(|best| best.map(|(count, _)| count)).collect()
    }

    /// Of each end of `bytes` the fewest tokens, and the one that begins it.
    fn best(&self, bytes: &[u8]) -> Vec<Option<(u32, TokenId)>> {
        let mut best: Vec<Option<(u32, TokenId)>> = vec![None; bytes.len() + 1];
        if let Some(end) = best.last_mut() {
            *end = Some((0, INVALID_TOKEN));
        }
        for start in (0..bytes.len()).rev() {
            let mut node = Tree::ROOT;
            for (offset, &byte) in bytes.iter().skip(start).enumerate() {
                let Some(child) = self.tree.child(node, byte) else { break };
                node = child;
                let rest = best.get(start + offset + 1).copied().flatten();
                if let (Some(id), Some((count, _))) = (self.tree.id(node), rest)
                    && best[start].is_none_or(|(known, _)| count + 1 < known)
                {
                    best[start] = Some((count + 1, id));
                }
            }
        }
        best
    }
}

impl Counted {
    fn of(self, word: &[u8]) -> u32 {
        match self {
            Self::Structure => word.iter().filter(|byte| STRUCTURE.contains(byte)).count() as u32,
            Self::Bytes => word.len() as u32,
        }
    }
}

impl Classes {
    fn new(counts: Vec<u32>) -> Self {
        let rising = CLASSES.iter().map(|&most| TokenClass::new(most, &counts)).collect();
        Self { rising, most: counts.into_iter().max().unwrap_or(0) }
    }
}

impl TokenClass {
    fn new(most: u32, counts: &[u32]) -> Self {
        let mut words = vec![0_u32; counts.len().div_ceil(32)];
        for (id, _) in counts.iter().enumerate().filter(|(_, count)| **count <= most) {
            words[id / 32] |= 1 << (id % 32);
        }
        Self { most, words }
    }
}

fn spelling(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.id_to_bytes(id);
    if tokenizer.is_control(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat() } else { bytes.to_vec() }
}
