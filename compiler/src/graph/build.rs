//! Builds the graph of a model family from a profile: the plain transformer, nothing fused.

use super::{Graph, Op, Value, Weight, WeightRef};
use crate::profile::Profile;
use oxide_bundle::contract::Activation;
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{RowOrder, WeightLayout};

/// Name of the embedding weight (and of the head, if tied).
const EMBED: &str = "embed";
/// Name of the rotary table.
const ROPE_TABLE: &str = "rope.cos_sin";

/// Element types that the target chooses.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Activations.
    pub act: DType,
}

/// Builds the graph of `profile` with a rotary table of `context` positions.
///
/// # Errors
/// If the dimensions do not fit together; a verified profile gives none.
pub fn build(profile: &Profile, precision: Precision, context: u32) -> Result<Graph, String> {
    let mut builder = Builder { graph: Graph::new(&profile.name), profile, rope: None };
    builder.rope = Some(builder.rope_table(context));
    let dims = profile.dims;
    let embed = builder.matrix(EMBED, "model.embed_tokens.weight", dims.vocab, dims.hidden);
    let mut residual = builder.add(Op::Embed { dtype: precision.act }, &[], &[embed])?;
    for layer in 0..dims.layers {
        residual = builder.layer(layer, residual)?;
    }
    let rows = builder.add(Op::TakeRows, &[residual], &[])?;
    let normed = builder.norm("norm", "model.norm.weight", rows)?;
    let head = if dims.tied { embed } else { builder.matrix("head", "lm_head.weight", dims.vocab, dims.hidden) };
    let logits = builder.add(Op::Logits, &[normed], &[head])?;
    builder.add(Op::Sample { vocab_known: profile.tokenizer.vocab_known }, &[logits], &[])?;
    Ok(builder.graph)
}

struct Builder<'a> {
    graph: Graph,
    profile: &'a Profile,
    rope: Option<WeightRef>,
}

impl Builder<'_> {
    fn weight(&mut self, name: &str, source: &str, shape: Vec<u32>) -> WeightRef {
        self.graph.add_weight(Weight {
            name: name.to_owned(),
            sources: vec![source.to_owned()],
            dtype: self.profile.dtype,
            shape,
            layout: WeightLayout::RowMajor,
            rows: RowOrder::Concat,
        })
    }

    fn matrix(&mut self, name: &str, source: &str, n: u32, k: u32) -> WeightRef {
        self.weight(name, source, vec![n, k])
    }

    fn rope_table(&mut self, context: u32) -> WeightRef {
        self.graph.add_weight(Weight {
            name: ROPE_TABLE.to_owned(),
            sources: Vec::new(),
            dtype: DType::F32,
            shape: vec![context, self.profile.dims.head_dim / 2, 2],
            layout: WeightLayout::RowMajor,
            rows: RowOrder::Concat,
        })
    }

    fn add(&mut self, op: Op, operands: &[Value], weights: &[WeightRef]) -> Result<Value, String> {
        self.graph.add(op, operands, weights).map(Graph::result)
    }

    fn norm(&mut self, name: &str, source: &str, x: Value) -> Result<Value, String> {
        let weight = self.weight(name, source, vec![self.profile.dims.hidden]);
        self.add(Op::RmsNorm { eps: self.profile.numerics.eps() }, &[x], &[weight])
    }

    fn linear(&mut self, name: &str, source: &str, x: Value, shape: (u32, u32), bias: bool) -> Result<Value, String> {
        let mut weights = vec![self.matrix(name, &format!("{source}.weight"), shape.0, shape.1)];
        if bias {
            weights.push(self.weight(&format!("{name}.bias"), &format!("{source}.bias"), vec![shape.0]));
        }
        self.add(Op::Linear { act: Activation::None, residual: false }, &[x], &weights)
    }

    fn layer(&mut self, layer: u32, residual: Value) -> Result<Value, String> {
        let (name, source) = (format!("layers.{layer}"), format!("model.layers.{layer}"));
        let normed = self.norm(&format!("{name}.attn_norm"), &format!("{source}.input_layernorm.weight"), residual)?;
        let attended = self.attention(layer, normed)?;
        let residual = self.add(Op::Add, &[residual, attended], &[])?;
        let normed = self.norm(&format!("{name}.mlp_norm"), &format!("{source}.post_attention_layernorm.weight"), residual)?;
        let mlp = self.mlp(layer, normed)?;
        self.add(Op::Add, &[residual, mlp], &[])
    }

    fn attention(&mut self, layer: u32, x: Value) -> Result<Value, String> {
        let dims = self.profile.dims;
        let bias = self.profile.family.qkv_bias();
        let (name, source) = (format!("layers.{layer}"), format!("model.layers.{layer}.self_attn"));
        let mut project =
            |part: &str, n: u32| self.linear(&format!("{name}.{part}"), &format!("{source}.{part}_proj"), x, (n, dims.hidden), bias);
        let (q, k, v) = (project("q", dims.q_width())?, project("k", dims.kv_width())?, project("v", dims.kv_width())?);
        let table = [self.rope.expect("made before any layer")];
        let rope = Op::Rope { head_dim: dims.head_dim };
        let q = self.add(rope, &[q], &table)?;
        let k = self.add(rope, &[k], &table)?;
        let cache = self.add(Op::KvAppend { layer }, &[k, v], &[])?;
        let attend = Op::Attend { q: dims.heads, kv: dims.kv_heads, head_dim: dims.head_dim };
        let attended = self.add(attend, &[q, cache], &[])?;
        self.linear(&format!("{name}.o"), &format!("{source}.o_proj"), attended, (dims.hidden, dims.q_width()), false)
    }

    fn mlp(&mut self, layer: u32, x: Value) -> Result<Value, String> {
        let dims = self.profile.dims;
        let (name, source) = (format!("layers.{layer}"), format!("model.layers.{layer}.mlp"));
        let up_shape = (dims.intermediate, dims.hidden);
        let gate = self.linear(&format!("{name}.gate"), &format!("{source}.gate_proj"), x, up_shape, false)?;
        let up = self.linear(&format!("{name}.up"), &format!("{source}.up_proj"), x, up_shape, false)?;
        let product = self.add(Op::SwiGlu, &[gate, up], &[])?;
        let down_shape = (dims.hidden, dims.intermediate);
        self.linear(&format!("{name}.down"), &format!("{source}.down_proj"), product, down_shape, false)
    }
}
