//! One line of the journal: everything that decides the tokens of a request, and the tokens.

use crate::grammar::Constraint;
use oxide_runtime::engine::{EngineRequest, SamplingParams};
use serde::{Deserialize, Serialize};

/// Version of the format; an entry of another one is refused.
pub const VERSION: u32 = 1;

/// One prompt of a request, and its choices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// [`VERSION`].
    pub v: u32,
    /// Seal of the bundle that answered.
    pub seal: String,
    /// Id of the answer.
    pub id: String,
    /// Id of the HTTP request.
    pub request_id: String,
    /// When it was submitted, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Prompt ids.
    pub prompt: Vec<u32>,
    /// Choices asked for.
    pub n: u32,
    /// Completion tokens at most.
    pub max_tokens: u32,
    /// Completion tokens before which `stop_ids` are not drawn.
    pub min_tokens: u32,
    /// Ids that end a choice.
    pub stop_ids: Vec<u32>,
    /// Sampling, every default filled in.
    pub sampling: SamplingEntry,
    /// Alternatives reported for each prompt token.
    pub prompt_logprobs: Option<u32>,
    /// What constrained the tokens: a grammar, a schema, a forced tool call.
    pub constraint: Option<Constraint>,
    /// What was drawn.
    pub choices: Vec<ChoiceEntry>,
}

/// Sampling parameters as they were in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingEntry {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Smallest probability relative to the best.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Ids and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random stream.
    pub seed: u64,
    /// Alternatives reported for each token.
    pub logprobs: Option<u32>,
}

/// What one choice drew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChoiceEntry {
    /// Token ids, a final stop id included.
    pub ids: Vec<u32>,
    /// How it ended.
    pub finish: Finish,
}

/// How a choice ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// At a stop id. Determined by the entry.
    Stop,
    /// At `max_tokens`. Determined by the entry.
    Length,
    /// At a stop string, or at another end that only the text knows.
    Text,
    /// The deadline passed.
    Deadline,
    /// Aborted by id.
    Aborted,
    /// The client went away, or the server failed.
    Cut,
}

impl Finish {
    /// Whether the entry alone decides this end: a replay must then end alike, not only begin alike.
    pub fn is_determined(self) -> bool {
        matches!(self, Self::Stop | Self::Length)
    }
}

impl Entry {
    /// An entry of a request about to be submitted; nothing is drawn yet.
    pub fn new(request: &EngineRequest, constraint: Option<&Constraint>, seal: &str, request_id: &str, unix_ms: u64) -> Self {
        let choice = ChoiceEntry { ids: Vec::new(), finish: Finish::Cut };
        Self {
            v: VERSION,
            seal: seal.to_owned(),
            id: request.id.clone(),
            request_id: request_id.to_owned(),
            unix_ms,
            prompt: request.prompt.clone(),
            n: request.n,
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_ids: request.stop_ids.clone(),
            sampling: SamplingEntry::from(&request.sampling),
            prompt_logprobs: request.prompt_logprobs,
            constraint: constraint.cloned(),
            choices: vec![choice; request.n as usize],
        }
    }

    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &str) -> Result<Self, String> {
        let entry: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        match entry.v == VERSION {
            true if entry.choices.len() == entry.n as usize => Ok(entry),
            true => Err(format!("has {} choices, but `n` is {}", entry.choices.len(), entry.n)),
            false => Err(format!("has version {}, this program reads version {VERSION}", entry.v)),
        }
    }

    /// The request that draws the same tokens; the mask of the constraint is the caller's to add.
    pub fn request(&self) -> EngineRequest {
        EngineRequest {
            n: self.n,
            min_tokens: self.min_tokens,
            stop_ids: self.stop_ids.clone(),
            sampling: SamplingParams::from(&self.sampling),
            prompt_logprobs: self.prompt_logprobs,
            ..EngineRequest::greedy(self.id.clone(), self.prompt.clone(), self.max_tokens)
        }
    }
}

impl From<&SamplingParams> for SamplingEntry {
    fn from(params: &SamplingParams) -> Self {
        Self {
            temperature: params.temperature,
            top_p: params.top_p,
            top_k: params.top_k,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            logit_bias: params.logit_bias.clone(),
            seed: params.seed,
            logprobs: params.logprobs,
        }
    }
}

impl From<&SamplingEntry> for SamplingParams {
    fn from(entry: &SamplingEntry) -> Self {
        Self {
            temperature: entry.temperature,
            top_p: entry.top_p,
            top_k: entry.top_k,
            min_p: entry.min_p,
            repetition_penalty: entry.repetition_penalty,
            presence_penalty: entry.presence_penalty,
            frequency_penalty: entry.frequency_penalty,
            logit_bias: entry.logit_bias.clone(),
            seed: entry.seed,
            logprobs: entry.logprobs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(sampling: SamplingParams) -> Entry {
        let request = EngineRequest {
            n: 2,
            min_tokens: 1,
            stop_ids: vec![7],
            sampling,
            cache_salt: b"salt".to_vec(),
            fair_key: 9,
            ..EngineRequest::greedy("a", vec![1, 2], 3)
        };
        Entry::new(&request, None, "seal", "req", 5)
    }

    proptest! {
        #[test]
        fn numbers_survive_the_file_bit_for_bit(temperature in 0.0f32..2.0, top_p in 0.0f32..=1.0, bias in -100.0f32..100.0, seed: u64) {
            let sampling = SamplingParams { temperature, top_p, logit_bias: vec![(3, bias)], seed, ..SamplingParams::default() };
            let line = serde_json::to_string(&entry(sampling.clone())).expect("serializes");
            prop_assert_eq!(Entry::parse(&line).expect("parses").request().sampling, sampling);
        }
    }

    #[test]
    fn entries_of_another_version_or_with_missing_choices_are_refused() {
        let mut other = entry(SamplingParams::default());
        other.v = 2;
        assert!(Entry::parse(&serde_json::to_string(&other).expect("serializes")).expect_err("version").contains("version 2"));
        other.v = VERSION;
        other.choices.pop();
        assert!(Entry::parse(&serde_json::to_string(&other).expect("serializes")).expect_err("choices").contains("`n` is 2"));
        assert!(Entry::parse("{").is_err());
    }
}
