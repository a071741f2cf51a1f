//! Errors of tokenizer and template.

/// Failure of the tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// `tokenizer.json` does not parse.
    #[error("tokenizer.json is not usable: {0}")]
    Json(#[from] serde_json::Error),
    /// The tokenizer uses something that is not supported.
    #[error("tokenizer.json is not supported: {0}")]
    Unsupported(String),
    /// The tokenizer refused a text.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
}

/// Failure of a chat template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template does not compile.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The template refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
    /// Rendering failed.
    #[error("the chat template failed on this conversation: {0}")]
    Render(String),
    /// Rendering took more steps than allowed.
    #[error("the chat template ran out of its {limit} steps on this conversation")]
    Fuel {
        /// Steps allowed.
        limit: u64,
    },
    /// `messages` has another shape than a list of objects.
    #[error("{path}: {reason}")]
    Input {
        /// Where, for example `messages[2].tool_calls[0].function.arguments`.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A rendered text could not be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
