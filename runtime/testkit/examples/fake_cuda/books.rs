//! What exists: allocations, modules, functions, streams, events, graphs. A handle is a number that is never used twice.

use crate::raw::{self, Block};
use crate::{Code, code};
use oxide_bundle::cubin::CubinKernel;
use std::collections::{BTreeMap, BTreeSet};

/// Dynamic shared memory that a function may use without asking for more.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) sha256: String,
    pub(crate) kernels: Vec<CubinKernel>,
}

/// A kernel of a loaded image.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    module: u64,
    pub(crate) sha256: String,
    pub(crate) kernel: CubinKernel,
    pub(crate) shared_bytes_max: u32,
}

/// A node of a graph.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    Kernel { function: u64 },
    Copy { to: u64, from: u64, bytes: u64 },
    Fill { to: u64, word: u32, words: u64 },
}

/// Which memory a range must lie in.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Device,
    Pinned,
}

#[derive(Debug)]
struct Allocation {
    space: Space,
    block: Block,
    /// Nothing was written yet, so that it is known to be zero.
    fresh: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Books {
    handles: u64,
    pub(crate) contexts: u32,
    allocations: BTreeMap<u64, Allocation>,
    pub(crate) modules: BTreeMap<u64, Module>,
    pub(crate) functions: BTreeMap<u64, Function>,
    /// Streams, and the graph that each records into.
    pub(crate) streams: BTreeMap<u64, Option<Vec<Node>>>,
    pub(crate) events: BTreeSet<u64>,
    pub(crate) graphs: BTreeMap<u64, Vec<Node>>,
    pub(crate) execs: BTreeMap<u64, Vec<Node>>,
    /// Handles of nodes that were listed.
    pub(crate) nodes: BTreeMap<u64, Node>,
}

impl Books {
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 16;
        0x1000 + self.handles
    }

    pub(crate) fn allocate(&mut self, space: Space, bytes: usize) -> Result<u64, Code> {
        let block = Block::new(bytes)?;
        let address = block.address();
        self.allocations.insert(address, Allocation { space, block, fresh: true });
        Ok(address)
    }

    pub(crate) fn free(&mut self, space: Space, address: u64) -> Result<(), Code> {
        match self.allocations.get(&address) {
            Some(allocation) if allocation.space == space => {
                self.allocations.remove(&address);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Device memory in use.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.allocations.values().filter(|allocation| allocation.space == Space::Device).map(|allocation| allocation.block.bytes()).sum()
    }

    fn find(&mut self, space: Space, address: u64, bytes: u64) -> Result<&mut Allocation, Code> {
        let (base, allocation) = self.allocations.range_mut(..=address).next_back().ok_or(code::INVALID_VALUE)?;
        let inside = address.checked_add(bytes).is_some_and(|end| end <= base + allocation.block.bytes());
        if inside && allocation.space == space { Ok(allocation) } else { Err(code::INVALID_VALUE) }
    }

    /// Refuses a range that is not wholly inside one live allocation.
    pub(crate) fn check(&mut self, space: Space, address: u64, bytes: u64) -> Result<(), Code> {
        self.find(space, address, bytes).map(|_| ())
    }

    pub(crate) fn copy(&mut self, (to_space, to): (Space, u64), (from_space, from): (Space, u64), bytes: u64) -> Result<(), Code> {
        self.check(from_space, from, bytes)?;
        self.find(to_space, to, bytes)?.fresh = false;
        raw::copy(to, from, bytes as usize);
        Ok(())
    }

    pub(crate) fn fill(&mut self, to: u64, word: u32, words: u64) -> Result<(), Code> {
        let allocation = self.find(Space::Device, to, 4 * words)?;
        // Zeroing what is known to be zero would only make the system give pages that nobody needs.
        if !(allocation.fresh && word == 0) {
            allocation.fresh = false;
            raw::fill(to, word, words as usize);
        }
        Ok(())
    }

    /// A function of a module that is still loaded.
    pub(crate) fn function(&self, handle: u64) -> Result<&Function, Code> {
        let function = self.functions.get(&handle).filter(|function| self.modules.contains_key(&function.module));
        function.ok_or(code::INVALID_HANDLE)
    }

    /// Finds a kernel of a module, and gives it a handle at the first time.
    pub(crate) fn function_of(&mut self, module: u64, symbol: &str) -> Result<u64, Code> {
        let image = self.modules.get(&module).ok_or(code::INVALID_HANDLE)?;
        let known = self.functions.iter().find(|(_, function)| function.module == module && function.kernel.symbol == symbol);
        if let Some((handle, _)) = known {
            return Ok(*handle);
        }
        let kernel = image.kernels.iter().find(|kernel| kernel.symbol == symbol).ok_or(code::NOT_FOUND)?.clone();
        let function = Function { module, sha256: image.sha256.clone(), kernel, shared_bytes_max: SHARED_BYTES_DEFAULT };
        let handle = self.handle();
        self.functions.insert(handle, function);
        Ok(handle)
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.streams.values().any(Option::is_some)
    }

    /// Records `node` if the stream captures; whether it did.
    pub(crate) fn record(&mut self, stream: u64, node: &Node) -> Result<bool, Code> {
        match self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)? {
            Some(nodes) => {
                nodes.push(node.clone());
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Does what a node does; kernels do nothing.
    pub(crate) fn run(&mut self, node: &Node) -> Result<(), Code> {
        match *node {
            Node::Kernel { function } => self.function(function).map(|_| ()),
            Node::Copy { to, from, bytes } => self.copy((Space::Device, to), (Space::Device, from), bytes),
            Node::Fill { to, word, words } => self.fill(to, word, words),
        }
    }

    /// What was not given back, as `kind:count` pairs.
    pub(crate) fn live(&self) -> String {
        let allocations = |space| self.allocations.values().filter(|allocation| allocation.space == space).count();
        format!(
            "memory:{},pinned:{},modules:{},streams:{},events:{},graphs:{},execs:{}",
            allocations(Space::Device),
            allocations(Space::Pinned),
            self.modules.len(),
            self.streams.len(),
            self.events.len(),
            self.graphs.len(),
            self.execs.len()
        )
    }
}
