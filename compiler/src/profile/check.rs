//! What a profile's values must be like, one problem a line.

use super::{Dims, Numerics, Profile, TargetSettings};
use oxide_bundle::dtype::DType;

/// Largest number of layers, heads or batch classes believed.
const COUNT_MAX: u32 = 4096;
/// Largest width, vocabulary, context or step size believed.
const WIDTH_MAX: u32 = 1 << 22;

impl Profile {
    /// Everything that does not go together.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = self.dims.problems();
        let mut check = |ok: bool, problem: String| {
            if !ok {
                problems.push(problem);
            }
        };
        check(is_name(&self.name), format!("name `{}` must be of letters, digits, `.`, `_` and `-`", self.name));
        check(self.dtype == DType::Bf16, format!("dtype is {}, only bf16 is implemented", self.dtype));
        check((1..=WIDTH_MAX).contains(&self.context_max), format!("context_max is {}, allowed 1..={WIDTH_MAX}", self.context_max));
        let known = self.tokenizer.vocab_known;
        check(known <= self.dims.vocab, format!("vocab_known is {known}, more than vocab {}", self.dims.vocab));
        let Numerics { norm_eps, rope_theta, rope_scaling: _ } = self.numerics;
        check(norm_eps > 0.0 && norm_eps < 1.0, format!("norm_eps is {norm_eps}, must be in (0, 1)"));
        check(rope_theta > 1.0 && rope_theta.is_finite(), format!("rope_theta is {rope_theta}, must be above 1"));
        for (target, settings) in [("cpu", &self.target.cpu), ("sm90", &self.target.sm90)] {
            problems.extend(settings.iter().flat_map(|s| s.problems()).map(|p| format!("target.{target}: {p}")));
        }
        problems
    }
}

impl Dims {
    fn problems(&self) -> Vec<String> {
        let Self { layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied: _ } = *self;
        let mut problems = Vec::new();
        for (name, value, max) in [
            ("layers", layers, COUNT_MAX),
            ("hidden", hidden, WIDTH_MAX),
            ("intermediate", intermediate, WIDTH_MAX),
            ("heads", heads, COUNT_MAX),
            ("kv_heads", kv_heads, COUNT_MAX),
            ("head_dim", head_dim, COUNT_MAX),
            ("vocab", vocab, WIDTH_MAX),
        ] {
            if value == 0 || value > max {
                problems.push(format!("dims.{name} is {value}, allowed 1..={max}"));
            }
        }
        if kv_heads != 0 && heads % kv_heads != 0 {
            problems.push(format!("dims.heads {heads} is not a multiple of dims.kv_heads {kv_heads}"));
        }
        for (name, value, multiple) in [("head_dim", head_dim, 2), ("hidden", hidden, 2), ("intermediate", intermediate, 16)] {
            if value % multiple != 0 {
                problems.push(format!("dims.{name} {value} is not a multiple of {multiple}"));
            }
        }
        problems
    }
}

impl TargetSettings {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !self.page_tokens.is_power_of_two() || self.page_tokens > 1024 {
            problems.push(format!("page_tokens is {}, must be a power of two up to 1024", self.page_tokens));
        }
        if !matches!(self.kv_dtype, DType::F32 | DType::Bf16) {
            problems.push(format!("kv_dtype is {}, must be f32 or bf16", self.kv_dtype));
        }
        if self.decode.is_empty() || self.mixed.is_empty() {
            problems.push("decode and mixed need at least one class each".to_owned());
        }
        let rising = self.decode.windows(2).all(|w| w[0] < w[1]) && self.mixed.windows(2).all(|w| w[0] < w[1]);
        if !rising {
            problems.push("batch classes must rise".to_owned());
        }
        let bounds = self.decode.iter().chain(self.mixed.iter().flat_map(|(tokens, seqs)| [tokens, seqs]));
        if bounds.clone().any(|&n| n == 0 || n > WIDTH_MAX) || self.decode.len() + self.mixed.len() > COUNT_MAX as usize {
            problems.push(format!("bounds of batch classes must be 1..={WIDTH_MAX}"));
        }
        problems
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
}
