//! The tokenizer's vocabulary in the form that the grammar library walks.

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv, TrieNode};
use oxide_text::Tokenizer;
use std::sync::Arc;

/// Bytes that may begin something with a shortest completion of its own in JSON: a string, an object, an
/// array, a further member, a value.
const STRUCTURE: &[u8] = b"\"{[,:";
/// Bounds of the classes of tokens by how many such bytes they have.
const CLASSES: [u32; 8] = [0, 1, 2, 3, 4, 6, 8, 16];

/// Vocabulary and what is known of its tokens.
pub(super) struct Vocabulary {
    trie: TokTrie,
    eos: Vec<u32>,
    bytes: [Option<TokenId>; 256],
    classes: Vec<TokenClass>,
    structure_max: u32,
}

/// The tokens with at most so many bytes of structure.
pub(super) struct TokenClass {
    /// How many.
    pub(super) structure_max: u32,
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
        let structure: Vec<u32> = words.iter().map(|word| structure(word)).collect();
        let classes = CLASSES.iter().map(|&max| TokenClass::new(max, &structure)).collect();
        let structure_max = structure.iter().copied().max().unwrap_or(0);
        Self { trie, eos, bytes, classes, structure_max }
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

    /// Where the tree of tokens begins.
    pub(super) fn root(&self) -> &TrieNode {
        self.trie.root()
    }

    /// The tree of the tokens that go on with a byte.
    pub(super) fn child<'a>(&'a self, node: &'a TrieNode, byte: u8) -> Option<&'a TrieNode> {
        self.trie.child_at_byte(node, byte)
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

    /// Bytes of structure in a token.
    pub(super) fn structure(&self, id: TokenId) -> u32 {
        structure(self.token(id))
    }

    /// Most bytes of structure in any token.
    pub(super) fn structure_max(&self) -> u32 {
        self.structure_max
    }

    /// The widest class of tokens with at most `structure` bytes of structure; `None` for no limit at all.
    pub(super) fn class(&self, structure: u32) -> Option<&TokenClass> {
        if structure >= self.structure_max {
            return None;
        }
        self.classes.iter().rev().find(|class| class.structure_max <= structure)
    }

    /// The fewest tokens that spell `bytes`, and how many any end of `bytes` takes at most; `None` if a byte has
    /// no token.
    pub(super) fn spell(&self, bytes: &[u8]) -> Option<(Vec<TokenId>, u32)> {
        let best = self.best(bytes);
        let worst = best.iter().flatten().map(|(count, _)| *count).max();
        Some((self.walk(&best)?, worst.unwrap_or(0)))
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
            let mut node = self.trie.root();
            for (offset, &byte) in bytes.iter().skip(start).enumerate() {
                let Some(child) = self.trie.child_at_byte(node, byte) else { break };
                node = child;
                let rest = best.get(start + offset + 1).copied().flatten();
                if let (Some(id), Some((count, _))) = (node.token_id(), rest)
                    && best[start].is_none_or(|(known, _)| count + 1 < known)
                {
                    best[start] = Some((count + 1, id));
                }
            }
        }
        best
    }

    fn walk(&self, best: &[Option<(u32, TokenId)>]) -> Option<Vec<TokenId>> {
        let (mut at, mut ids) = (0, Vec::new());
        while at + 1 < best.len() {
            let (_, id) = best.get(at).copied().flatten()?;
            at += self.trie.token(id).len().max(1);
            ids.push(id);
        }
        Some(ids)
    }
}

impl TokenClass {
    fn new(structure_max: u32, structure: &[u32]) -> Self {
        let mut words = vec![0_u32; structure.len().div_ceil(32)];
        for (id, _) in structure.iter().enumerate().filter(|(_, count)| **count <= structure_max) {
            words[id / 32] |= 1 << (id % 32);
        }
        Self { structure_max, words }
    }
}

fn structure(word: &[u8]) -> u32 {
    word.iter().filter(|byte| STRUCTURE.contains(byte)).count() as u32
}

fn spelling(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.id_to_bytes(id);
    if tokenizer.is_control(id) { [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat() } else { bytes.to_vec() }
}
