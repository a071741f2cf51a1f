//! Tensor inventory of a checkpoint: single-file or sharded safetensors, headers only.
//!
//! **Invariant:** every [`Tensor`] lies inside its file and has exactly the bytes that its shape needs.

use super::{Blob, CheckpointError, Files};
use crate::graph::{Graph, Weight};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Largest safetensors header read (the format's own limit).
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest index read.
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Most shards believed.
const SHARDS_MAX: usize = 4096;

/// Element type of a checkpoint's tensor.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SourceType {
    /// Taken as it is.
    Bf16,
    /// Converted through f32.
    F16,
    /// Rounded to nearest, ties to even.
    F32,
}

impl SourceType {
    /// Size of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its file.
    pub file: Arc<Shard>,
    /// First byte in the file.
    pub offset: u64,
    /// Shape.
    pub shape: Vec<u64>,
    /// Element type; `None` for one that is not converted.
    pub dtype: Option<SourceType>,
    /// Element type's name.
    pub dtype_name: String,
}

/// An open safetensors file.
#[derive(Debug)]
pub struct Shard {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub blob: Blob,
}

/// Tensors of a checkpoint by name.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The tensors.
    pub tensors: BTreeMap<String, Tensor>,
    /// Names of the files that they are in.
    pub shards: Vec<String>,
    /// Tensors that the index promises and no shard has.
    absent: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Inventory {
    /// Reads the headers of `model.safetensors`, or of every shard of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// If there is neither, a shard is missing, or a header is malformed.
    pub fn read(files: &Files) -> Result<Self, CheckpointError> {
        const SINGLE: &str = "model.safetensors";
        const INDEX: &str = "model.safetensors.index.json";
        let mut inventory = Self::default();
        let Some(bytes) = files.read(INDEX, INDEX_BYTES_MAX)? else {
            let missing = || CheckpointError::MissingFile { place: files.place(), file: format!("{SINGLE} (or {INDEX})") };
            let blob = files.open(SINGLE)?.ok_or_else(missing)?;
            inventory.add(SINGLE.to_owned(), blob)?;
            return Ok(inventory);
        };
        let malformed = |problem: String| CheckpointError::Malformed { file: INDEX.to_owned(), problem };
        let index: Index = serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
        for (name, blob) in open_shards(files, &index, malformed)? {
            inventory.add(name, blob)?;
        }
        inventory.absent = index.weight_map.into_keys().filter(|name| !inventory.tensors.contains_key(name)).collect();
        Ok(inventory)
    }

    /// Missing, extra, mis-shaped and mistyped tensors, all of them.
    pub fn problems(&self, graph: &Graph, tied: bool) -> Vec<String> {
        let expected = expected(graph);
        let mut problems: Vec<String> = self.absent.iter().map(|name| format!("tensor {name} is in the index and in no shard")).collect();
        for (name, shape) in &expected {
            match self.tensors.get(name) {
                None => problems.push(format!("tensor {name} {shape:?} is missing")),
                Some(tensor) if tensor.shape != *shape => {
                    problems.push(format!("tensor {name} has shape {:?}, expected {shape:?}", tensor.shape));
                }
                Some(tensor) if tensor.dtype.is_none() => {
                    problems.push(format!("tensor {name} is {}, allowed are BF16, F16 and F32", tensor.dtype_name));
                }
                Some(_) => {}
            }
        }
        let extra = self.tensors.iter().filter(|(name, _)| !expected.contains_key(*name) && !is_derived(name, tied));
        problems.extend(extra.map(|(name, tensor)| format!("tensor {name} {:?} is not part of the model", tensor.shape)));
        problems
    }

    fn add(&mut self, name: String, blob: Blob) -> Result<(), CheckpointError> {
        let shard = Arc::new(Shard { name, blob });
        let malformed = |problem: String| CheckpointError::Malformed { file: shard.name.clone(), problem };
        let (data_start, metadata) = header(&shard.blob).map_err(&malformed)?;
        for (name, info) in metadata.tensors().into_iter().collect::<BTreeMap<_, _>>() {
            let tensor = tensor(&shard, data_start, info).map_err(|problem| malformed(format!("tensor {name}: {problem}")))?;
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(malformed(format!("tensor {name} is in another shard too")));
            }
        }
        self.shards.push(shard.name.clone());
        Ok(())
    }
}

/// Shapes that the graph's weights take from the checkpoint.
fn expected(graph: &Graph) -> BTreeMap<String, Vec<u64>> {
    let mut expected = BTreeMap::new();
    for weight in graph.weights_used() {
        let weight: &Weight = graph.weight(weight);
        if let [source] = weight.sources.as_slice() {
            expected.insert(source.clone(), weight.shape.iter().map(|&dim| u64::from(dim)).collect());
        }
    }
    expected
}

/// Tensors that some checkpoints carry and transformers does not read: a tied head's copy, rotary frequencies.
fn is_derived(name: &str, tied: bool) -> bool {
    (tied && name == "lm_head.weight") || name.ends_with(".rotary_emb.inv_freq")
}

fn open_shards(
    files: &Files,
    index: &Index,
    malformed: impl Fn(String) -> CheckpointError,
) -> Result<Vec<(String, Blob)>, CheckpointError> {
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    if names.len() > SHARDS_MAX {
        return Err(malformed(format!("names {} shards, allowed {SHARDS_MAX}", names.len())));
    }
    if let Some(name) = names.iter().find(|name| name.contains(['/', '\\']) || name.starts_with('.')) {
        return Err(malformed(format!("shard `{name}` is not in the checkpoint's folder")));
    }
    let mut found = Vec::new();
    let mut missing = Vec::new();
    for name in &names {
        match files.open(name)? {
            Some(blob) => found.push(((*name).clone(), blob)),
            None => missing.push((*name).clone()),
        }
    }
    if missing.is_empty() { Ok(found) } else { Err(CheckpointError::MissingShard { place: files.place(), missing, total: names.len() }) }
}

/// Reads a header; gives where the data starts.
fn header(blob: &Blob) -> Result<(u64, Metadata), String> {
    let mut length = [0; 8];
    blob.read_at(&mut length, 0).map_err(|_| format!("is {} bytes, too short for a safetensors header", blob.bytes()))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(format!("its header claims {length} bytes, allowed {HEADER_BYTES_MAX}: not a safetensors file"));
    }
    if length.saturating_add(8) > blob.bytes() {
        return Err(format!("its header ends at byte {}, the file at {}: truncated", length + 8, blob.bytes()));
    }
    let mut text = vec![0; length as usize];
    blob.read_at(&mut text, 8).map_err(|error| error.to_string())?;
    let metadata: Metadata = serde_json::from_slice(&text).map_err(|error| format!("its header is malformed: {error}"))?;
    let end = metadata.tensors().values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    if end.saturating_add(length + 8) != blob.bytes() {
        return Err(format!(
            "its tensors end at byte {}, the file at {}: truncated or damaged",
            end.saturating_add(length + 8),
            blob.bytes()
        ));
    }
    Ok((length + 8, metadata))
}

fn tensor(shard: &Arc<Shard>, data_start: u64, info: &TensorInfo) -> Result<Tensor, String> {
    let shape: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
    let dtype = match info.dtype {
        Dtype::BF16 => Some(SourceType::Bf16),
        Dtype::F16 => Some(SourceType::F16),
        Dtype::F32 => Some(SourceType::F32),
        _ => None,
    };
    let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    let held = end.checked_sub(start).ok_or_else(|| format!("ends at {end} before its start {start}"))?;
    if let Some(dtype) = dtype {
        let elements = shape.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim)).and_then(|n| n.checked_mul(dtype.bytes()));
        if elements != Some(held) {
            return Err(format!("has {held} bytes, its shape {shape:?} does not"));
        }
    }
    let offset = data_start.checked_add(start).ok_or("lies beyond the file")?;
    Ok(Tensor { file: Arc::clone(shard), offset, shape, dtype, dtype_name: format!("{:?}", info.dtype) })
}
