//! The tokenizer: text to ids, and the bytes of every id.
//!
//! The learned part (normaliser, pre-tokeniser, model) is the `tokenizers` crate's; added tokens are
//! split here, so that one loaded tokenizer serves trusted text (control tokens parsed) and message
//! text (never). Safe to share between threads.

use crate::control::{AddedToken, ControlTokens};
use crate::error::TokenizerError;
use crate::vocabulary::{Spelling, Vocabulary, entry_bytes};
use serde_json::Value;
use std::collections::BTreeMap;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{Encoding, Model, PostProcessor};

/// Holes in the id space that are searched for further entries.
const HOLES_MAX: u32 = 1 << 20;

/// The parts of `tokenizer.json` that matter.
#[derive(serde::Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Option<Value>,
    #[serde(default)]
    post_processor: Option<PostProcessorWrapper>,
    #[serde(default)]
    decoder: Option<Value>,
    model: ModelWrapper,
}

/// A loaded tokenizer.
pub struct Tokenizer {
    /// Without added tokens and without post-processor.
    learned: tokenizers::Tokenizer,
    /// Added tokens that only trusted text may produce.
    control: ControlTokens,
    /// Added tokens that are ordinary text.
    ordinary: ControlTokens,
    /// All of both.
    all: ControlTokens,
    /// Control tokens by id.
    by_id: BTreeMap<u32, AddedToken>,
    vocabulary: Vocabulary,
    /// Ids of the single bytes, where the vocabulary has them.
    byte_ids: Box<[Option<u32>; 256]>,
    bos: Option<u32>,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// If it does not parse, or uses something unsupported.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let file: File = serde_json::from_slice(json)?;
        let spelling = if mentions_byte_level(&file.decoder) || mentions_byte_level(&file.pre_tokenizer) {
            Spelling::ByteLevel
        } else {
            Spelling::ByteFallback
        };
        let entries = collect_entries(&file, spelling)?;
        let vocabulary = Vocabulary::new(entries.iter().map(|e| e.as_deref()));
        let pre_tokenizer: Option<PreTokenizerWrapper> = file.pre_tokenizer.map(serde_json::from_value).transpose()?;
        let bos = file.post_processor.as_ref().and_then(leading_id);
        let mut learned = tokenizers::Tokenizer::new(file.model);
        learned.with_normalizer(file.normalizer).map_err(|e| TokenizerError::Unsupported(e.to_string()))?;
        learned.with_pre_tokenizer(pre_tokenizer);
        let (control, ordinary): (Vec<_>, Vec<_>) = file.added_tokens.iter().cloned().partition(AddedToken::is_control);
        let by_id: BTreeMap<u32, AddedToken> = control.iter().map(|t| (t.id, t.clone())).collect();
        let byte_ids = single_bytes(&entries, &by_id);
        Ok(Self {
            learned,
            control: ControlTokens::new(control),
            ordinary: ControlTokens::new(ordinary),
            all: ControlTokens::new(file.added_tokens),
            by_id,
            vocabulary,
            byte_ids,
            bos,
        })
    }

    /// Replaces the id that [`Tokenizer::encode_prompt`] prepends; by default what `tokenizer.json` says.
    #[must_use]
    pub fn with_bos(mut self, bos: Option<u32>) -> Self {
        self.bos = bos;
        self
    }

    /// The id that [`Tokenizer::encode_prompt`] prepends.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Ids of untrusted text: no control token ever comes out, whatever the text spells.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_split(text, &self.ordinary, &mut ids)?;
        Ok(ids)
    }

    /// Ids of trusted text: control tokens are parsed. Nothing is prepended. Equal to the reference
    /// tokenizer's ids without special tokens added.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode_with_control(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_split(text, &self.all, &mut ids)?;
        Ok(ids)
    }

    /// Ids of a raw prompt: control tokens parsed and the BOS id prepended where the tokenizer does so.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        self.encode_split(text, &self.all, &mut ids)?;
        Ok(ids)
    }

    /// Bytes of an id from the vocabulary, special tokens' text included; empty for an unknown id.
    pub fn id_to_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.get(id)
    }

    /// Whether an id is marked special: hidden from text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.by_id.get(&id).is_some_and(|t| t.special)
    }

    /// Whether an id is a control token: message text never encodes to it.
    pub fn is_control(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }

    /// The control tokens.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    /// Ids that the tokenizer knows: one more than the largest.
    pub fn vocab_known(&self) -> u32 {
        self.vocabulary.len()
    }

    /// Id of a token by its text in the vocabulary (`<|im_end|>`; learned entries in their own spelling).
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.all.by_text(text).map(|t| t.id).or_else(|| self.learned.get_model().token_to_id(text))
    }

    /// Text of a whole list of ids, by the rules of [`crate::stream`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> =
            ids.iter().filter(|&&id| !(skip_special && self.is_special(id))).flat_map(|&id| self.id_to_bytes(id)).copied().collect();
        let complete = bytes.len() - crate::stream::incomplete_tail(&bytes);
        String::from_utf8_lossy(&bytes[..complete]).into_owned()
    }

    fn encode_split(&self, text: &str, added: &ControlTokens, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut from = 0;
        for found in added.find(text) {
            self.encode_learned(&text[from..found.range.start], ids)?;
            ids.push(found.id);
            from = found.range.end;
        }
        self.encode_learned(&text[from..], ids)
    }

    fn encode_learned(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let encoding = self.learned.encode_fast(text, false).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        for &id in encoding.get_ids() {
            match self.by_id.contains_key(&id) {
                false => ids.push(id),
                true => self.spell_out(id, ids),
            }
        }
        Ok(())
    }

    /// A learned vocabulary may list a control token's text as an entry that merges could reach: write its bytes instead.
    fn spell_out(&self, id: u32, ids: &mut Vec<u32>) {
        ids.extend(self.id_to_bytes(id).iter().filter_map(|&byte| self.byte_ids[usize::from(byte)]));
    }
}

/// Bytes by id of learned and added entries; `None` in holes.
fn collect_entries(file: &File, spelling: Spelling) -> Result<Vec<Option<Vec<u8>>>, TokenizerError> {
    let learned = file.model.get_vocab_size();
    let mut entries = Vec::with_capacity(learned + file.added_tokens.len());
    let mut found = 0;
    while found < learned {
        let id = entries.len() as u32;
        if entries.len() as u64 > learned as u64 + u64::from(HOLES_MAX) {
            return Err(TokenizerError::Unsupported(format!("the vocabulary's ids have more than {HOLES_MAX} holes")));
        }
        let entry = file.model.id_to_token(id);
        found += usize::from(entry.is_some());
        entries.push(entry.map(|text| entry_bytes(spelling, &text)));
    }
    for token in &file.added_tokens {
        place(&mut entries, token)?;
    }
    Ok(entries)
}

fn place(entries: &mut Vec<Option<Vec<u8>>>, token: &AddedToken) -> Result<(), TokenizerError> {
    let id = token.id as usize;
    if id > entries.len() + HOLES_MAX as usize {
        return Err(TokenizerError::Unsupported(format!("added token `{}` has id {id}, far above the vocabulary", token.content)));
    }
    if entries.len() <= id {
        entries.resize(id + 1, None);
    }
    entries[id] = Some(token.content.clone().into_bytes());
    Ok(())
}

fn single_bytes(entries: &[Option<Vec<u8>>], control: &BTreeMap<u32, AddedToken>) -> Box<[Option<u32>; 256]> {
    let mut ids = Box::new([None; 256]);
    for (id, entry) in entries.iter().enumerate() {
        if let Some([byte]) = entry.as_deref()
            && !control.contains_key(&(id as u32))
        {
            ids[usize::from(*byte)].get_or_insert(id as u32);
        }
    }
    ids
}

/// Whether a part of `tokenizer.json` is of type `ByteLevel`, or contains one that is.
fn mentions_byte_level(part: &Option<Value>) -> bool {
    fn inside(value: &Value) -> bool {
        match value {
            Value::Object(map) => map.get("type").is_some_and(|t| t == "ByteLevel") || map.values().any(inside),
            Value::Array(items) => items.iter().any(inside),
            _ => false,
        }
    }
    part.as_ref().is_some_and(inside)
}

/// The id that a post-processor puts before a text, if it puts one.
fn leading_id(processor: &PostProcessorWrapper) -> Option<u32> {
    let empty = processor.process(Encoding::default(), None, true).ok()?;
    empty.get_ids().first().copied()
}
