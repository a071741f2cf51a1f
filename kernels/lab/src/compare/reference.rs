//! The reference file: what transformers found for each prompt.

use super::ways::Answer;
use anyhow::{Context, bail};
use serde::Deserialize;
use std::path::Path;

/// A reference file; further fields are for people.
#[derive(Debug, Deserialize)]
pub(super) struct Reference {
    pub(super) prompts: Vec<Prompt>,
}

/// One prompt and its greedy continuation in float32.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Prompt {
    pub(super) name: String,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) greedy_f32: Vec<u32>,
    /// Largest logit less the second of each step.
    pub(super) gap_f32: Vec<f32>,
    /// Log-probability of each id of `greedy_f32`.
    #[serde(default)]
    logprob_f32: Vec<f32>,
    /// Ids and logits of the first step, falling.
    #[serde(default)]
    first_top5_f32: Vec<(u32, f32)>,
    #[serde(default)]
    first_logits_f32_stats: Option<LogitStats>,
}

#[derive(Clone, Debug, Deserialize)]
struct LogitStats {
    logsumexp: f32,
}

impl Reference {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// If it cannot be read, or its lists do not belong together.
    pub(super) fn load(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let reference: Self = serde_json::from_slice(&text).with_context(|| format!("{} is no reference file", path.display()))?;
        for prompt in &reference.prompts {
            let Prompt { name, prompt_ids, greedy_f32, gap_f32, .. } = prompt;
            if prompt_ids.is_empty() || greedy_f32.is_empty() || greedy_f32.len() != gap_f32.len() {
                bail!("prompt `{name}` has {} ids, {} steps and {} gaps", prompt_ids.len(), greedy_f32.len(), gap_f32.len());
            }
        }
        Ok(reference)
    }
}

impl Prompt {
    /// The prompt with as many steps as fit a context; `None` if none do.
    pub(super) fn fitted(mut self, context_max: u32) -> Option<Self> {
        let room = (context_max as usize).checked_sub(self.prompt_ids.len()).filter(|room| *room > 0)?;
        self.greedy_f32.truncate(room);
        self.gap_f32.truncate(room);
        Some(self)
    }

    /// Ids that an answer must have: those before the first step that is nearly a tie.
    pub(super) fn demanded(&self, gap: f32) -> usize {
        self.gap_f32.iter().position(|found| *found < gap).unwrap_or(self.gap_f32.len())
    }

    /// The first demanded id that an answer does not have.
    pub(super) fn difference(&self, ids: &[u32], gap: f32) -> Option<String> {
        let demanded = self.demanded(gap);
        let at = (0..demanded).find(|at| ids.get(*at) != self.greedy_f32.get(*at))?;
        let found = ids.get(at).map_or_else(|| "missing".to_owned(), u32::to_string);
        Some(format!("id {at} is {found}, transformers has {} with a gap of {}", self.greedy_f32[at], self.gap_f32[at]))
    }

    /// Log-probabilities that both have, of steps that see the same ids: what, the answer's, transformers'.
    pub(super) fn logprobs(&self, answer: &Answer, gap: f32) -> Vec<(String, f32, f32)> {
        // The step after the last demanded one sees the same ids, and may draw another.
        let steps = self.logprob_f32.iter().zip(&answer.logprobs).zip(&self.greedy_f32).take(self.demanded(gap)).enumerate();
        let mut both: Vec<_> =
            steps.map(|(at, ((wanted, found), id))| (format!("log-probability of id {id} at step {at}"), found.logprob, *wanted)).collect();
        if let (Some(stats), Some(first)) = (&self.first_logits_f32_stats, answer.logprobs.first()) {
            for (id, logit) in &self.first_top5_f32 {
                if let Some((_, found)) = first.top.iter().find(|(other, _)| other == id) {
                    both.push((format!("log-probability of id {id} at step 0"), *found, logit - stats.logsumexp));
                }
            }
        }
        both
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxide_runtime::engine::TokenLogprobs;

    fn prompt() -> Prompt {
        serde_json::from_value(serde_json::json!({
            "name": "p", "prompt_ids": [1, 2], "greedy_f32": [5, 6, 7, 8], "gap_f32": [3.0, 0.3, 0.1, 4.0],
            "logprob_f32": [-0.5, -1.0, -2.0, -0.1], "first_top5_f32": [[5, 2.0], [9, 1.0]], "first_logits_f32_stats": {"logsumexp": 2.5}
        }))
        .expect("a prompt")
    }

    #[test]
    fn ids_are_demanded_up_to_the_first_near_tie() {
        let prompt = prompt();
        assert_eq!([0.05, 0.25, 0.5, 9.0].map(|gap| prompt.demanded(gap)), [4, 2, 1, 0]);
        assert_eq!(prompt.difference(&[5, 6, 99, 99], 0.25), None);
        assert!(prompt.difference(&[5, 6, 99, 99], 0.05).is_some_and(|fault| fault.contains("id 2 is 99, transformers has 7")));
        assert!(prompt.difference(&[5], 0.25).is_some_and(|fault| fault.contains("id 1 is missing")));
    }

    #[test]
    fn log_probabilities_are_compared_where_both_have_them() {
        let token = |logprob, top| TokenLogprobs { logprob, top };
        let answer = Answer { ids: vec![5, 6], logprobs: vec![token(-0.4, vec![(5, -0.4)]), token(-1.5, vec![])], cached_tokens: 0 };
        let found: Vec<(f32, f32)> = prompt().logprobs(&answer, 0.25).into_iter().map(|(_, found, wanted)| (found, wanted)).collect();
        assert_eq!(found, [(-0.4, -0.5), (-1.5, -1.0), (-0.4, -0.5)]);
    }

    #[test]
    fn steps_beyond_the_context_are_left_out() {
        assert_eq!(prompt().fitted(5).map(|prompt| prompt.greedy_f32.len()), Some(3));
        assert!(prompt().fitted(2).is_none());
    }
}
