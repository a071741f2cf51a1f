//! What an answer must be: exactly one terminal word, of an allowed kind, and true to its request.
//!
//! Pure functions of bytes; the tests below show that each broken promise is found.

use serde::de::IgnoredAny;
use serde_json::Value;

/// What a request may be answered with.
#[derive(Clone, Debug, Default)]
pub(super) struct Promise {
    /// Choices that must come.
    pub(super) choices: usize,
    pub(super) chat: bool,
    pub(super) stream: bool,
    /// The text of a choice that ended by itself is JSON.
    pub(super) json: bool,
    /// A choice that ended by itself is a tool call.
    pub(super) call: bool,
    /// A deadline was set.
    pub(super) deadline: bool,
    /// A longest wait was set.
    pub(super) queue_time: bool,
    /// Somebody aborts the request.
    pub(super) aborted: bool,
}

/// How a request ended, as a label of the report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    /// Every choice ended by itself, at its limit or by a stop.
    Finished,
    /// Some choice was cut by the deadline.
    Deadline,
    /// Some choice was aborted.
    Aborted,
    /// Refused with a status, or by an error event in a stream.
    Refused { status: u16, code: String },
    /// The client left first.
    Left,
}

impl Outcome {
    pub(super) fn label(&self) -> String {
        match self {
            Self::Finished => "finished".to_owned(),
            Self::Deadline => "deadline".to_owned(),
            Self::Aborted => "aborted".to_owned(),
            Self::Refused { status, code } => format!("{status} {code}"),
            Self::Left => "client left".to_owned(),
        }
    }
}

/// Judges a refusal of a good request.
///
/// # Errors
/// If the request must not be refused like that, or the error has not the API's form.
pub(super) fn refusal(status: u16, retry_after: bool, body: &[u8], promise: &Promise) -> Result<Outcome, String> {
    let code = error_code(body)?;
    let temporary = match (status, code.as_str()) {
        (503, "server_is_overloaded") | (429, "rate_limit_exceeded") => true,
        (504, "deadline_exceeded") if promise.deadline => false,
        _ => return Err(format!("status {status} {code} for a good request: {}", String::from_utf8_lossy(body))),
    };
    if temporary && !retry_after {
        return Err(format!("status {status} without Retry-After"));
    }
    Ok(Outcome::Refused { status, code })
}

/// The code of an error in the API's form.
///
/// # Errors
/// If it has another form.
pub(super) fn error_code(body: &[u8]) -> Result<String, String> {
    let bad = || format!("not an error of the API: {}", String::from_utf8_lossy(body));
    let value: Value = serde_json::from_slice(body).map_err(|_| bad())?;
    let error = value["error"].as_object().ok_or_else(bad)?;
    let formed = error.get("message").is_some_and(Value::is_string) && error.get("type").is_some_and(Value::is_string);
    if !formed || !error.contains_key("param") {
        return Err(bad());
    }
    error.get("code").and_then(Value::as_str).map(str::to_owned).ok_or_else(bad)
}

/// What is known of a choice so far.
#[derive(Clone, Debug, Default)]
struct Choice {
    text: String,
    /// Arguments of each call.
    calls: Vec<String>,
    finish: Option<String>,
    stop_reason: Value,
}

/// Judges a whole answer.
///
/// # Errors
/// If a promise is broken.
pub(super) fn whole(body: &[u8], promise: &Promise) -> Result<Outcome, String> {
    let value: Value = serde_json::from_slice(body).map_err(|error| format!("the answer is no JSON: {error}"))?;
    let listed = value["choices"].as_array().ok_or("the answer has no choices")?;
    let mut choices = vec![Choice::default(); promise.choices];
    for entry in listed {
        let choice = place(&mut choices, entry)?;
        if choice.finish.is_some() {
            return Err("a choice comes twice".to_owned());
        }
        let text = if promise.chat { &entry["message"]["content"] } else { &entry["text"] };
        choice.text = text.as_str().unwrap_or_default().to_owned();
        for call in entry["message"]["tool_calls"].as_array().into_iter().flatten() {
            choice.calls.push(call["function"]["arguments"].as_str().unwrap_or_default().to_owned());
        }
        choice.finish = entry["finish_reason"].as_str().map(str::to_owned);
        choice.stop_reason = entry["stop_reason"].clone();
    }
    if !value["usage"]["completion_tokens"].is_u64() {
        return Err("the answer has no usage".to_owned());
    }
    ended(&choices, promise)
}

fn place<'a>(choices: &'a mut [Choice], entry: &Value) -> Result<&'a mut Choice, String> {
    let index = entry["index"].as_u64().and_then(|index| usize::try_from(index).ok()).ok_or("a choice without index")?;
    let count = choices.len();
    choices.get_mut(index).ok_or_else(|| format!("choice {index} of {count}"))
}

/// Judges choices that all must have ended.
fn ended(choices: &[Choice], promise: &Promise) -> Result<Outcome, String> {
    let mut outcome = Outcome::Finished;
    for choice in choices {
        let finish = choice.finish.as_deref().ok_or("a choice has no finish_reason")?;
        let by_itself = match (finish, choice.stop_reason.as_str()) {
            ("length", Some("deadline")) if promise.deadline => {
                outcome = outcome.max(Outcome::Deadline);
                false
            }
            ("length", Some("aborted")) if promise.aborted => {
                outcome = outcome.max(Outcome::Aborted);
                false
            }
            ("length", None) if promise.call => false,
            ("length", None) if promise.json => return Err(format!("JSON that does not close: {}", choice.text)),
            ("stop" | "tool_calls", _) | ("length", None) => true,
            (other, reason) => return Err(format!("finish_reason {other:?} with stop_reason {reason:?}")),
        };
        if by_itself {
            keeps_its_form(choice, promise)?;
        }
    }
    Ok(outcome)
}

fn keeps_its_form(choice: &Choice, promise: &Promise) -> Result<(), String> {
    // JSON numbers may be larger than any that a program holds, so they are read and not kept.
    let json = |text: &str| serde_json::from_str::<IgnoredAny>(text).map_err(|error| format!("no JSON ({error}): {text}"));
    if promise.json {
        json(&choice.text)?;
    }
    if promise.call && choice.calls.is_empty() {
        return Err("a required call did not come".to_owned());
    }
    // What a model writes of its own accord need not be JSON; a forced call must.
    if promise.call {
        choice.calls.iter().try_for_each(|arguments| json(arguments).map(drop))?;
    }
    Ok(())
}

/// Judges the events of a stream one by one.
pub(super) struct StreamJudge<'a> {
    promise: &'a Promise,
    choices: Vec<Choice>,
    /// Code of the error event.
    error: Option<String>,
    done: bool,
}

impl<'a> StreamJudge<'a> {
    pub(super) fn new(promise: &'a Promise) -> Self {
        Self { promise, choices: vec![Choice::default(); promise.choices], error: None, done: false }
    }

    /// Takes the data of an event.
    ///
    /// # Errors
    /// If it may not come here.
    pub(super) fn event(&mut self, data: &str) -> Result<(), String> {
        if self.done {
            return Err(format!("an event after [DONE]: {data}"));
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        if self.error.is_some() {
            return Err(format!("an event after an error: {data}"));
        }
        let value: Value = serde_json::from_str(data).map_err(|error| format!("an event is no JSON ({error}): {data}"))?;
        if value.get("error").is_some() {
            self.error = Some(error_code(data.as_bytes())?);
            return Ok(());
        }
        let entries = value["choices"].as_array().ok_or_else(|| format!("an event without choices: {data}"))?;
        entries.iter().try_for_each(|entry| self.delta(entry))
    }

    /// Judges the stream as a whole, once it ended.
    ///
    /// # Errors
    /// If a promise is broken.
    pub(super) fn end(&self) -> Result<Outcome, String> {
        if !self.done {
            return Err("the stream ended without [DONE]".to_owned());
        }
        let Some(code) = &self.error else { return ended(&self.choices, self.promise) };
        if self.choices.iter().all(|choice| choice.finish.is_some()) {
            return Err(format!("an error ({code}) after every choice ended"));
        }
        match code.as_str() {
            "deadline_exceeded" if self.promise.deadline => Ok(Outcome::Refused { status: 200, code: code.clone() }),
            "server_is_overloaded" if self.promise.queue_time => Ok(Outcome::Refused { status: 200, code: code.clone() }),
            _ => Err(format!("error {code} in the stream of a good request")),
        }
    }

    /// Text of the first choice.
    pub(super) fn text(&self) -> &str {
        self.choices.first().map_or("", |choice| choice.text.as_str())
    }

    fn delta(&mut self, entry: &Value) -> Result<(), String> {
        let choice = place(&mut self.choices, entry)?;
        if let Some(finish) = &choice.finish {
            return Err(format!("a choice goes on after it ended with {finish}"));
        }
        let text = if self.promise.chat { &entry["delta"]["content"] } else { &entry["text"] };
        choice.text += text.as_str().unwrap_or_default();
        for call in entry["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().ok_or("a call without index")? as usize;
            if index > choice.calls.len() {
                return Err(format!("call {index} after {} calls", choice.calls.len()));
            }
            if index == choice.calls.len() {
                choice.calls.push(String::new());
            }
            choice.calls[index] += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        choice.finish = entry["finish_reason"].as_str().map(str::to_owned);
        choice.stop_reason = entry["stop_reason"].clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat() -> Promise {
        Promise { choices: 1, chat: true, stream: true, ..Promise::default() }
    }

    fn judge(promise: &Promise, events: &[&str]) -> Result<Outcome, String> {
        let mut judge = StreamJudge::new(promise);
        events.iter().try_for_each(|event| judge.event(event))?;
        judge.end()
    }

    const TEXT: &str = r#"{"choices":[{"index":0,"delta":{"content":"{"},"finish_reason":null}]}"#;
    const END: &str = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null}]}"#;
    const LATE: &str = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"length","stop_reason":"deadline"}]}"#;
    const ERROR: &str = r#"{"error":{"message":"m","type":"server_error","param":null,"code":"deadline_exceeded"}}"#;
    const DONE: &str = "[DONE]";

    #[test]
    fn a_stream_has_exactly_one_end() {
        assert_eq!(judge(&chat(), &[TEXT, END, DONE]), Ok(Outcome::Finished));
        for events in [
            &[TEXT, END][..],
            &[TEXT, DONE],
            &[DONE],
            &[TEXT, END, END, DONE],
            &[TEXT, END, TEXT, DONE],
            &[TEXT, END, DONE, DONE],
            &[TEXT, END, DONE, TEXT],
            &[TEXT, END, ERROR, DONE],
            &[ERROR, END, DONE],
            &[ERROR, DONE],
            &[TEXT, LATE, DONE],
        ] {
            assert!(judge(&chat(), events).is_err(), "{events:?}");
        }
    }

    #[test]
    fn a_deadline_may_cut_only_who_set_one() {
        let promise = Promise { deadline: true, ..chat() };
        assert_eq!(judge(&promise, &[TEXT, LATE, DONE]), Ok(Outcome::Deadline));
        assert!(matches!(judge(&promise, &[ERROR, DONE]), Ok(Outcome::Refused { status: 200, .. })));
        let late = br#"{"error":{"message":"m","type":"server_error","param":null,"code":"deadline_exceeded"}}"#;
        assert!(refusal(504, false, late, &promise).is_ok() && refusal(504, false, late, &chat()).is_err());
    }

    #[test]
    fn refusals_of_good_requests_are_temporary_and_say_when_to_come_back() {
        let full = br#"{"error":{"message":"m","type":"server_error","param":null,"code":"server_is_overloaded"}}"#;
        assert!(refusal(503, true, full, &chat()).is_ok());
        assert!(refusal(503, false, full, &chat()).is_err());
        assert!(refusal(500, true, full, &chat()).is_err());
        assert!(refusal(503, true, b"overloaded", &chat()).is_err());
    }

    #[test]
    fn constrained_text_is_json_and_closes() {
        let promise = Promise { json: true, ..chat() };
        assert!(judge(&promise, &[TEXT, END, DONE]).is_err(), "an open brace is no JSON");
        let number = TEXT.replace("\"{\"", "\"40e91180\"");
        assert_eq!(judge(&promise, &[&number, END, DONE]), Ok(Outcome::Finished));
        let length = END.replace("stop\"", "length\"");
        assert!(judge(&promise, &[&length, DONE]).is_err());
    }

    #[test]
    fn whole_answers_have_every_choice_once() {
        let promise = Promise { choices: 2, ..Promise::default() };
        let answer = |indices: &[u64]| {
            let choices: Vec<Value> = indices
                .iter()
                .map(|index| serde_json::json!({"index": index, "text": "a", "finish_reason": "length", "stop_reason": null}))
                .collect();
            whole(serde_json::json!({"choices": choices, "usage": {"completion_tokens": 2}}).to_string().as_bytes(), &promise)
        };
        assert_eq!(answer(&[1, 0]), Ok(Outcome::Finished));
        for indices in [&[0][..], &[0, 0], &[0, 1, 1], &[0, 2]] {
            assert!(answer(indices).is_err(), "{indices:?}");
        }
    }
}
