//! Parity vectors of tokenizer and chat template.

use super::GoldenError;
use super::reference::{Prompt, template};
use crate::checkpoint::Checkpoint;
use crate::profile::Profile;
use oxide_bundle::manifest::{GoldenTemplate, GoldenText, ToolDialect};
use oxide_text::{ChatInput, Tokenizer};
use serde_json::{Value, json};

/// Texts that tokenizers get wrong: spaces, digits, scripts, emoji, line ends, markup that is not control.
const TEXTS: [&str; 6] = [
    "Hello, world! It's 12,345.67 o'clock.",
    "  leading, trailing  \t\n\r\n\n and   inner spaces ",
    "naïve façade – “quotes” … ﬁ e\u{301}",
    "日本語と中文 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 𝔘𝔫𝔦",
    "def f(x):\n    return x**2  # <|not_a_token|> <b>bold</b>\n",
];

/// The checkpoint's tokenizer.
pub(super) fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer, GoldenError> {
    let made = Tokenizer::from_json(&checkpoint.text.tokenizer_json);
    made.map_err(|error| GoldenError::Text { what: "tokenizer".to_owned(), problem: error.to_string() })
}

/// Reference prompts (which must encode to the reference's ids) and our own texts.
pub(super) fn tokenizer_vectors(checkpoint: &Checkpoint, prompts: &[Prompt]) -> Result<Vec<GoldenText>, GoldenError> {
    let tokenizer = tokenizer(checkpoint)?;
    let encode = |text: &str| {
        let ids = tokenizer.encode_with_control(text);
        ids.map_err(|error| GoldenError::Text { what: format!("text {text:?}"), problem: error.to_string() })
    };
    let mut vectors = Vec::new();
    for prompt in prompts {
        let Some(reference) = &prompt.reference else { continue };
        let ids = encode(&reference.text)?;
        if ids != prompt.ids {
            let at = ids.iter().zip(&prompt.ids).position(|(a, b)| a != b).unwrap_or_else(|| ids.len().min(prompt.ids.len()));
            let problem = format!("id {at} is {:?}, the reference implementation says {:?}", ids.get(at), prompt.ids.get(at));
            return Err(GoldenError::Text { what: format!("tokenizer, prompt `{}`", prompt.name), problem });
        }
        vectors.push(GoldenText { text: reference.text.clone(), ids });
    }
    for text in TEXTS {
        vectors.push(GoldenText { text: text.to_owned(), ids: encode(text)? });
    }
    Ok(vectors)
}

/// Reference conversations (which must render to the reference's prompts) and our own.
pub(super) fn template_vectors(checkpoint: &Checkpoint, profile: &Profile, prompts: &[Prompt]) -> Result<Vec<GoldenTemplate>, GoldenError> {
    let tokenizer = tokenizer(checkpoint)?;
    let Some(template) = template(checkpoint, &tokenizer)? else { return Ok(Vec::new()) };
    let render = |input: &Value| {
        let mut chat = ChatInput::new(input.get("messages").cloned().unwrap_or_default());
        chat.tools = input.get("tools").cloned();
        let rendered = template.render(&chat).map(|rendered| rendered.text());
        rendered.map_err(|error| GoldenError::Text { what: format!("chat template, {input}"), problem: error.to_string() })
    };
    let mut vectors = Vec::new();
    for prompt in prompts {
        let Some(reference) = &prompt.reference else { continue };
        let Some(input) = &reference.input else { continue };
        let rendered = render(input)?;
        if rendered != reference.text {
            let problem = format!("renders {rendered:?}, the reference implementation {:?}", reference.text);
            return Err(GoldenError::Text { what: format!("chat template, prompt `{}`", prompt.name), problem });
        }
        vectors.push(GoldenTemplate { input: input.to_string(), rendered });
    }
    for input in conversations(profile.tokenizer.tool_dialect) {
        let rendered = render(&input)?;
        vectors.push(GoldenTemplate { input: input.to_string(), rendered });
    }
    Ok(vectors)
}

fn conversations(dialect: ToolDialect) -> Vec<Value> {
    let question = json!({ "role": "user", "content": "Hi <b>&</b> \"you\"\n" });
    let history = json!([
        { "role": "system", "content": "Be brief." }, question.clone(),
        { "role": "assistant", "content": "Hello." }, { "role": "user", "content": "Go on." },
    ]);
    let mut found = vec![json!({ "messages": [question.clone()] }), json!({ "messages": history })];
    if dialect != ToolDialect::None {
        let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
        let function = json!({ "name": "weather", "description": "Tells the weather.", "parameters": parameters });
        found.push(json!({ "messages": [question], "tools": [{ "type": "function", "function": function }] }));
    }
    found
}
