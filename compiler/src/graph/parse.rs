//! Parser of the text form of graphs. Safe on any text: no recursion, no indexing, one error with its line.

use super::{Graph, Node, Op, Type, Value, Weight, WeightRef};
use crate::graph::op::Axis;
use oxide_bundle::contract::Activation;
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::plan::{RowOrder, WeightLayout};
use std::collections::BTreeMap;

/// Text that is not a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// What was expected and found.
    pub message: String,
}

/// Parses what [`print`](super::print()) prints; `//` starts a comment. The result is not verified.
///
/// # Errors
/// The first line that is not understood.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut parser = Parser::default();
    for (index, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim();
        if !code.is_empty() {
            parser.line(code).map_err(|message| ParseError { line: index + 1, message })?;
        }
    }
    match parser.state {
        State::After(graph) => Ok(graph),
        State::Before | State::Inside(_) => {
            Err(ParseError { line: text.lines().count(), message: "the graph is not closed by `}`".into() })
        }
    }
}

#[derive(Default)]
enum State {
    #[default]
    Before,
    Inside(Graph),
    After(Graph),
}

#[derive(Default)]
struct Parser {
    state: State,
    values: BTreeMap<String, Value>,
    weights: BTreeMap<String, WeightRef>,
}

impl Parser {
    fn line(&mut self, code: &str) -> Result<(), String> {
        let mut words = Words::new(code)?;
        match std::mem::take(&mut self.state) {
            State::Before => {
                words.expect("graph")?;
                let name = words.string()?;
                words.expect("{")?;
                self.state = State::Inside(Graph::new(name));
            }
            State::Inside(graph) if code == "}" => {
                words.next();
                self.state = State::After(graph);
            }
            State::Inside(mut graph) => {
                if words.peek() == Some("weight") { self.weight(&mut graph, &mut words) } else { self.node(&mut graph, &mut words) }?;
                self.state = State::Inside(graph);
            }
            State::After(_) => return Err("text after the closing `}`".into()),
        }
        words.end()
    }

    fn weight(&mut self, graph: &mut Graph, words: &mut Words<'_>) -> Result<(), String> {
        words.expect("weight")?;
        let name = words.prefixed('@')?;
        words.expect(":")?;
        let dtype = dtype(words.next_word()?)?;
        let shape = shape(words)?;
        let layout = layout(words.next_word()?)?;
        let rows = row_order(words)?;
        let mut sources = Vec::new();
        if words.take("=") {
            sources.push(words.string()?);
            while words.take(",") {
                sources.push(words.string()?);
            }
        }
        let weight = graph.add_weight(Weight { name: name.clone(), sources, dtype, shape, layout, rows });
        match self.weights.insert(name.clone(), weight) {
            None => Ok(()),
            Some(_) => Err(format!("weight @{name} is declared twice")),
        }
    }

    fn node(&mut self, graph: &mut Graph, words: &mut Words<'_>) -> Result<(), String> {
        let mut names = Vec::new();
        let mut results = Vec::new();
        loop {
            names.push(words.prefixed('%')?);
            words.expect(":")?;
            results.push(ty(words)?);
            if !words.take(",") {
                break;
            }
        }
        words.expect("=")?;
        let op_name = words.next_word()?.to_owned();
        let operands = self.operands(words)?;
        let weights = self.weight_refs(words)?;
        let attributes = Attributes::read(words)?;
        let op = attributes.op(&op_name, operands.len())?;
        let node = graph.add_typed(Node { op, weights, results }, &operands);
        for (name, result) in names.into_iter().zip(0..) {
            if self.values.insert(name.clone(), Value { node, result }).is_some() {
                return Err(format!("value %{name} is defined twice"));
            }
        }
        Ok(())
    }

    fn operands(&self, words: &mut Words<'_>) -> Result<Vec<Value>, String> {
        let mut operands = Vec::new();
        while words.peek().is_some_and(|word| word.starts_with('%')) {
            let name = words.prefixed('%')?;
            operands.push(*self.values.get(&name).ok_or_else(|| format!("value %{name} is not defined above"))?);
        }
        Ok(operands)
    }

    fn weight_refs(&self, words: &mut Words<'_>) -> Result<Vec<WeightRef>, String> {
        let mut weights = Vec::new();
        while words.peek().is_some_and(|word| word.starts_with('@')) {
            let name = words.prefixed('@')?;
            weights.push(*self.weights.get(&name).ok_or_else(|| format!("weight @{name} is not declared"))?);
        }
        Ok(weights)
    }
}

/// Words of one line: names, numbers, quoted strings (with their quotes) and single punctuation marks.
struct Words<'a> {
    words: std::iter::Peekable<std::vec::IntoIter<&'a str>>,
}

impl<'a> Words<'a> {
    fn new(code: &'a str) -> Result<Self, String> {
        let mut words = Vec::new();
        let mut rest = code.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '"' => rest.get(1..).and_then(|r| r.find('"')).map(|end| end + 2).ok_or("a string is not closed")?,
                ':' | ',' | '=' | '[' | ']' | '{' | '}' | '(' | ')' => 1,
                _ => rest.find([':', ',', '=', '[', ']', '{', '}', '(', ')', '"', ' ', '\t']).unwrap_or(rest.len()),
            };
            let (word, tail) = rest.split_at(length);
            words.push(word);
            rest = tail.trim_start();
        }
        Ok(Self { words: words.into_iter().peekable() })
    }

    fn next(&mut self) -> Option<&'a str> {
        self.words.next()
    }

    fn peek(&mut self) -> Option<&'a str> {
        self.words.peek().copied()
    }

    fn next_word(&mut self) -> Result<&'a str, String> {
        self.next().ok_or_else(|| "the line ends too early".to_owned())
    }

    fn take(&mut self, word: &str) -> bool {
        self.words.next_if(|&found| found == word).is_some()
    }

    fn expect(&mut self, word: &str) -> Result<(), String> {
        match self.next() {
            Some(found) if found == word => Ok(()),
            found => Err(format!("expected `{word}`, found `{}`", found.unwrap_or("end of line"))),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let word = self.next_word()?;
        let inner = word.strip_prefix('"').and_then(|w| w.strip_suffix('"'));
        inner.map(str::to_owned).ok_or_else(|| format!("expected a string, found `{word}`"))
    }

    fn prefixed(&mut self, prefix: char) -> Result<String, String> {
        let word = self.next_word()?;
        match word.strip_prefix(prefix) {
            Some(name) if !name.is_empty() => Ok(name.to_owned()),
            _ => Err(format!("expected `{prefix}name`, found `{word}`")),
        }
    }

    fn number(&mut self) -> Result<u32, String> {
        let word = self.next_word()?;
        word.parse().map_err(|_| format!("expected a number, found `{word}`"))
    }

    fn end(&mut self) -> Result<(), String> {
        self.next().map_or(Ok(()), |word| Err(format!("`{word}` is too much")))
    }
}

struct Attributes(BTreeMap<String, String>);

impl Attributes {
    fn read(words: &mut Words<'_>) -> Result<Self, String> {
        let mut found = BTreeMap::new();
        if words.take("{") {
            loop {
                let key = words.next_word()?.to_owned();
                words.expect("=")?;
                let value = words.next_word()?.to_owned();
                if found.insert(key.clone(), value).is_some() {
                    return Err(format!("attribute `{key}` is given twice"));
                }
                if !words.take(",") {
                    break;
                }
            }
            words.expect("}")?;
        }
        Ok(Self(found))
    }

    fn text(&mut self, key: &str) -> Result<String, String> {
        self.0.remove(key).ok_or_else(|| format!("attribute `{key}` is missing"))
    }

    fn number(&mut self, key: &str) -> Result<u32, String> {
        let text = self.text(key)?;
        text.parse().map_err(|_| format!("attribute `{key}` is `{text}`, expected a number"))
    }

    fn op(mut self, name: &str, operands: usize) -> Result<Op, String> {
        let op = match name {
            "embed" => Op::Embed { dtype: dtype(&self.text("dtype")?)? },
            "rms_norm" => Op::RmsNorm { eps: float(&self.text("eps")?)? },
            "linear" => Op::Linear { act: self.activation()?, residual: operands == 2 },
            "slice" => Op::Slice { offset: self.number("offset")?, width: self.number("width")? },
            "rope" => Op::Rope { head_dim: self.number("d")? },
            "kv_append" => Op::KvAppend { layer: self.number("layer")? },
            "rope_append" => {
                let (layer, q, kv) = (self.number("layer")?, self.number("q")?, self.number("kv")?);
                Op::RopeAppend { layer, q, kv, head_dim: self.number("d")? }
            }
            "attend" => Op::Attend { q: self.number("q")?, kv: self.number("kv")?, head_dim: self.number("d")? },
            "swiglu" => Op::SwiGlu,
            "add" => Op::Add,
            "take_rows" => Op::TakeRows,
            "logits" => Op::Logits,
            "sample" => Op::Sample { vocab_known: self.number("known")? },
            other => return Err(format!("no operator `{other}`")),
        };
        match self.0.keys().next() {
            None => Ok(op),
            Some(key) => Err(format!("{name} has no attribute `{key}`")),
        }
    }

    fn activation(&mut self) -> Result<Activation, String> {
        match self.0.remove("act").as_deref() {
            None => Ok(Activation::None),
            Some("swiglu") => Ok(Activation::SwiGlu),
            Some(other) => Err(format!("no activation `{other}`")),
        }
    }
}

fn ty(words: &mut Words<'_>) -> Result<Type, String> {
    match words.next_word()? {
        "ids" => Ok(Type::Ids),
        "cache" => {
            words.expect("(")?;
            let layer = words.number()?;
            words.expect(")").map(|()| Type::Cache { layer })
        }
        name => {
            let dtype = dtype(name)?;
            words.expect("[")?;
            let axis = match words.next_word()? {
                "tokens" => Axis::Tokens,
                "rows" => Axis::Rows,
                other => return Err(format!("no symbol `{other}`, expected tokens or rows")),
            };
            words.expect(",")?;
            let width = words.number()?;
            words.expect("]").map(|()| Type::Tensor { axis, width, dtype })
        }
    }
}

fn shape(words: &mut Words<'_>) -> Result<Vec<u32>, String> {
    words.expect("[")?;
    let mut shape = vec![words.number()?];
    while words.take(",") {
        shape.push(words.number()?);
    }
    words.expect("]").map(|()| shape)
}

fn dtype(name: &str) -> Result<DType, String> {
    let known = [DType::F32, DType::Bf16, DType::F16, DType::U32];
    known.into_iter().find(|dtype| dtype.to_string() == name).ok_or_else(|| format!("no element type `{name}`"))
}

fn layout(name: &str) -> Result<WeightLayout, String> {
    let known = [WeightLayout::RowMajor, WeightLayout::Panel16, WeightLayout::PanelK64];
    known.into_iter().find(|&layout| super::print::layout_name(layout) == name).ok_or_else(|| format!("no layout `{name}`"))
}

fn row_order(words: &mut Words<'_>) -> Result<RowOrder, String> {
    match words.next_word()? {
        "concat" => Ok(RowOrder::Concat),
        "rotary_pairs" => Ok(RowOrder::RotaryPairs),
        "interleave" => {
            words.expect("(")?;
            let group = words.number()?;
            words.expect(")").map(|()| RowOrder::Interleave(group))
        }
        other => Err(format!("no row order `{other}`")),
    }
}

fn float(text: &str) -> Result<F32Bits, String> {
    text.parse::<f32>().map(F32Bits::new).map_err(|_| format!("expected a number, found `{text}`"))
}
