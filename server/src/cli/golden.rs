//! Runs the golden vectors that were sealed with the bundle, through the same tokenizer, template and engine that serve.

use super::error::CliError;
use crate::model::{LoadedModel, TextEdge};
use oxide_bundle::manifest::{Golden, GoldenGreedy, GoldenStatus, GoldenTemplate, GoldenText};
use oxide_runtime::engine::{EngineEvent, EngineRequest, EventStream};
use oxide_text::ChatInput;
use serde_json::{Value, json};

/// What the vectors said.
#[derive(Clone, Debug, Default)]
pub struct GoldenReport {
    /// Vectors run.
    pub checked: usize,
    /// One message for each that is not reproduced.
    pub failures: Vec<String>,
    /// Whether the bundle was sealed without proof.
    pub unproven: bool,
}

impl GoldenReport {
    /// An error if a vector is not reproduced.
    ///
    /// # Errors
    /// [`CliError::Golden`] with every difference.
    pub fn into_result(self) -> Result<(), CliError> {
        match self.failures.is_empty() {
            true => Ok(()),
            false => Err(CliError::Golden(format!(
                "{} of {} golden vectors are not reproduced: {}",
                self.failures.len(),
                self.checked,
                self.failures.join("; ")
            ))),
        }
    }

    pub(super) fn to_json(&self) -> Value {
        json!({ "checked": self.checked, "failures": self.failures, "unproven": self.unproven })
    }
}

/// Runs every vector, the greedy ones batched together.
///
/// # Errors
/// If the engine refuses or fails; differences are in the report.
pub fn run_golden(model: &LoadedModel) -> Result<GoldenReport, CliError> {
    let Golden { greedy, tokenizer, template } = model.bundle.golden();
    let mut report = GoldenReport { unproven: model.manifest().golden == GoldenStatus::Unproven, ..GoldenReport::default() };
    report.checked = greedy.len() + tokenizer.len() + template.len();
    report.failures.extend(tokenizer.iter().enumerate().filter_map(|(index, vector)| check_text(&model.text, index, vector)));
    report.failures.extend(template.iter().enumerate().filter_map(|(index, vector)| check_template(&model.text, index, vector)));
    let binding = greedy.iter().filter(|vector| !vector.ids.is_empty());
    let streams = binding.map(|vector| Ok((vector, model.engine.submit(greedy_request(vector))?))).collect::<Result<Vec<_>, CliError>>()?;
    for (vector, stream) in streams {
        report.failures.extend(check_greedy(vector, stream)?);
    }
    Ok(report)
}

fn check_text(text: &TextEdge, index: usize, vector: &GoldenText) -> Option<String> {
    match text.tokenizer.encode_with_control(&vector.text) {
        Ok(ids) if ids == vector.ids => None,
        Ok(ids) => {
            let at = ids.iter().zip(&vector.ids).take_while(|(a, b)| a == b).count();
            Some(format!("tokenizer vector {index}: id {at} is {:?}, sealed {:?}", ids.get(at), vector.ids.get(at)))
        }
        Err(error) => Some(format!("tokenizer vector {index}: {error}")),
    }
}

fn check_template(text: &TextEdge, index: usize, vector: &GoldenTemplate) -> Option<String> {
    let failed = |reason: String| Some(format!("template vector {index}: {reason}"));
    let Some(template) = &text.template else { return failed("the bundle has no template".into()) };
    let mut input: Value = match serde_json::from_str(&vector.input) {
        Ok(input) => input,
        Err(error) => return failed(format!("input is not JSON: {error}")),
    };
    let tools = input.get_mut("tools").map(Value::take).filter(|tools| !tools.is_null());
    let messages = input.get_mut("messages").map(Value::take).unwrap_or_default();
    match template.render(&ChatInput { tools, ..ChatInput::new(messages) }) {
        Ok(rendered) if rendered.text() == vector.rendered => None,
        Ok(_) => failed("the rendered prompt differs from the sealed one".into()),
        Err(error) => failed(error.to_string()),
    }
}

fn greedy_request(vector: &GoldenGreedy) -> EngineRequest {
    EngineRequest::greedy(format!("golden-{}", vector.name), vector.prompt.clone(), vector.ids.len() as u32)
}

fn check_greedy(vector: &GoldenGreedy, mut stream: EventStream) -> Result<Option<String>, CliError> {
    let mut ids = Vec::new();
    while let Some(event) = stream.blocking_recv() {
        match event {
            EngineEvent::Token { id, .. } => ids.push(id),
            EngineEvent::Failed { message, .. } => return Err(CliError::Engine(message)),
            EngineEvent::Rejected(reason) => return Err(reason.into()),
            EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. } | EngineEvent::Finished { .. } => {}
        }
    }
    let binding = vector.ids.len().min(vector.binding as usize);
    let agree = ids.iter().zip(&vector.ids).take_while(|(a, b)| a == b).count();
    Ok((agree < binding)
        .then(|| format!("greedy vector `{}`: token {agree} is {:?}, sealed {:?}", vector.name, ids.get(agree), vector.ids.get(agree))))
}
