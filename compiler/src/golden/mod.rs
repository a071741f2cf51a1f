//! The golden step: runs the freshly lowered model on the cpu device. The only user of the runtime here.
//!
//! Makes greedy vectors (which must agree with the profile's reference ids, where it ships some) and
//! parity vectors of tokenizer and chat template.

mod reference;
mod run;
mod text;

use crate::checkpoint::Checkpoint;
use crate::compile::Request;
use crate::progress::Progress;
use crate::seal::Hashes;
use oxide_bundle::manifest::Golden;
use std::path::Path;

/// Why the golden step failed.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The sealed file does not open: a bug of the compiler.
    #[error("golden: {0}")]
    Open(#[from] oxide_runtime::open::OpenError),
    /// The device does not run the plan: a bug of compiler or runtime.
    #[error("golden: {0}")]
    Device(#[from] oxide_runtime::device::DeviceError),
    /// The model does not say what its reference says.
    #[error(
        "golden: prompt `{prompt}`: id {position} is {found}, the reference implementation says {expected} (top logits differ by {gap}): the bundle would be wrong"
    )]
    Differs {
        /// The prompt.
        prompt: String,
        /// Position in the completion.
        position: usize,
        /// Id of the lowered model.
        found: u32,
        /// Id of the reference.
        expected: u32,
        /// Distance of the reference's two largest logits.
        gap: f32,
    },
    /// The model gave no id.
    #[error("golden: prompt `{prompt}`: the logits of id {position} are not numbers: the checkpoint is damaged")]
    NotANumber {
        /// The prompt.
        prompt: String,
        /// Position in the completion.
        position: usize,
    },
    /// The tokenizer or the template does not say what the reference says.
    #[error("golden: {what}: {problem}")]
    Text {
        /// Which vector.
        what: String,
        /// What differs.
        problem: String,
    },
    /// The reference file is malformed.
    #[error("golden: the profile's reference is malformed: {0}")]
    Reference(String),
    /// No class of the plan takes the step.
    #[error("golden: no batch class takes {tokens} tokens")]
    NoClass {
        /// Tokens of the step.
        tokens: u32,
    },
}

/// Golden vectors, and what they rest on.
#[derive(Clone, Debug)]
pub struct Proof {
    /// The vectors.
    pub golden: Golden,
    /// Whether they agree with ids of a reference implementation.
    pub reference: bool,
}

/// Makes golden vectors by running the sealed cpu bundle at `path`. `inputs` are the checkpoint's hashes.
///
/// # Errors
/// If the model does not run, or differs from the profile's reference.
pub fn prove(
    path: &Path,
    request: &Request,
    checkpoint: &Checkpoint,
    inputs: &Hashes,
    progress: &mut dyn Progress,
) -> Result<Proof, GoldenError> {
    let prompts = reference::prompts(request, checkpoint, inputs)?;
    let greedy = run::greedy(path, &prompts, request.target, progress)?;
    let tokenizer = text::tokenizer_vectors(checkpoint, &prompts)?;
    let template = text::template_vectors(checkpoint, &request.profile, &prompts)?;
    let reference = prompts.iter().any(|prompt| prompt.reference.is_some());
    Ok(Proof { golden: Golden { greedy, tokenizer, template }, reference })
}
