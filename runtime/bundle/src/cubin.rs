//! Reads what a cubin says of itself: architecture, kernels, registers, parameter layout.
//!
//! A cubin is an ELF64 file for machine 190. Only what admission needs is read; all offsets are checked,
//! so any bytes are safe. Layout of the `.nv.info` attributes as written by ptxas 13.0.

use crate::artifact::ArtifactManifest;
use crate::digest::Digest;

/// ELF machine number of CUDA.
const MACHINE_CUDA: u16 = 190;
/// Sections of a cubin at most.
const SECTIONS_MAX: usize = 4096;
/// Attribute: one kernel parameter.
const ATTRIBUTE_PARAM: u8 = 0x17;
/// Attribute: registers of a kernel.
const ATTRIBUTE_REGISTERS: u8 = 0x2f;
/// Attribute format whose value is a sized block.
const FORMAT_SIZED: u8 = 0x04;

/// A cubin that cannot be read, or that is not what its manifest says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CubinError {
    /// Not an ELF64 file for CUDA.
    #[error("not a cubin: {0}")]
    NotCubin(&'static str),
    /// An offset leaves the file.
    #[error("cubin is damaged: {0} lies outside its {1} bytes")]
    Damaged(&'static str, usize),
    /// It is not what its manifest says. All differences.
    #[error("cubin {name} differs from its manifest: {}", .differences.join("; "))]
    Differs {
        /// Name in the manifest.
        name: String,
        /// What differs.
        differences: Vec<String>,
    },
}

/// What a cubin says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// Compute capability times ten: 90.
    pub sm: u32,
    /// Its kernels, in symbol order.
    pub kernels: Vec<CubinKernel>,
}

/// A kernel of a cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CubinKernel {
    /// Symbol.
    pub symbol: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Offset and size of each parameter, in order.
    pub params: Vec<(u32, u32)>,
}

/// Reads a cubin.
///
/// # Errors
/// If it is none, or is damaged.
pub fn inspect(bytes: &[u8]) -> Result<Cubin, CubinError> {
    let file = File(bytes);
    if bytes.get(..5) != Some(b"\x7fELF\x02") {
        return Err(CubinError::NotCubin("no ELF64 header"));
    }
    if file.u16(18, "machine")? != MACHINE_CUDA {
        return Err(CubinError::NotCubin("ELF machine is not CUDA"));
    }
    let flags = file.u32(48, "flags")?;
    // ABI version 8 (CUDA 13) keeps the architecture in the second byte; older ones in the first.
    let sm = if bytes.get(8).is_some_and(|&abi| abi >= 8) { (flags >> 8) & 0xff } else { flags & 0xff };
    let sections = file.sections()?;
    let names = file.function_names(&sections)?;
    let info = sections.iter().find(|section| section.name == ".nv.info");
    let registers = info.map_or(Ok(Vec::new()), |section| file.registers(section))?;
    let mut kernels = Vec::new();
    for section in &sections {
        if let Some(symbol) = section.name.strip_prefix(".nv.info.") {
            let index = names.iter().find(|(_, name)| name == symbol).map(|(index, _)| *index);
            let count = registers.iter().find(|(at, _)| Some(*at) == index).map_or(0, |(_, count)| *count);
            kernels.push(CubinKernel { symbol: symbol.to_owned(), registers: count, params: file.params(section)? });
        }
    }
    kernels.sort_by(|a, b| a.symbol.cmp(&b.symbol));
    Ok(Cubin { sm, kernels })
}

/// Compares a cubin with its manifest: hash, size, architecture, symbol, registers, parameter layout.
///
/// # Errors
/// If it cannot be read, or differs; all differences are listed.
pub fn check(manifest: &ArtifactManifest, bytes: &[u8]) -> Result<(), CubinError> {
    let cubin = inspect(bytes)?;
    let mut differences = Vec::new();
    let mut compare = |what: &str, found: String, wanted: String| {
        if found != wanted {
            differences.push(format!("{what} is {found}, the manifest says {wanted}"));
        }
    };
    compare("size", bytes.len().to_string(), manifest.size_bytes.to_string());
    compare("SHA-256", Digest::of(&[bytes]).to_string(), manifest.sha256.clone());
    compare("architecture", format!("sm_{}a", cubin.sm), manifest.target.clone());
    match cubin.kernels.iter().find(|kernel| kernel.symbol == manifest.symbol) {
        None => compare("symbol", format!("{:?}", cubin.kernels.iter().map(|k| &k.symbol).collect::<Vec<_>>()), manifest.symbol.clone()),
        Some(kernel) => {
            compare("register count", kernel.registers.to_string(), manifest.registers.to_string());
            let wanted: Vec<_> = manifest.params.iter().map(|param| (param.offset, param.size)).collect();
            compare("parameter layout", format!("{:?}", kernel.params), format!("{wanted:?}"));
        }
    }
    if differences.is_empty() { Ok(()) } else { Err(CubinError::Differs { name: manifest.name.clone(), differences }) }
}

struct File<'a>(&'a [u8]);

struct Section {
    name: String,
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

/// ELF section type of a symbol table.
const SYMBOL_TABLE: u32 = 2;
/// Size of an ELF64 symbol.
const SYMBOL_BYTES: usize = 24;
/// Low four bits of a function symbol's info.
const SYMBOL_FUNCTION: u8 = 2;

impl File<'_> {
    fn array<const N: usize>(&self, at: usize, what: &'static str) -> Result<[u8; N], CubinError> {
        let found = at.checked_add(N).and_then(|end| self.0.get(at..end)).and_then(|bytes| bytes.try_into().ok());
        found.ok_or(CubinError::Damaged(what, self.0.len()))
    }

    fn u16(&self, at: usize, what: &'static str) -> Result<u16, CubinError> {
        self.array(at, what).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize, what: &'static str) -> Result<u32, CubinError> {
        self.array(at, what).map(u32::from_le_bytes)
    }

    fn offset(&self, at: usize, what: &'static str) -> Result<usize, CubinError> {
        let value = u64::from_le_bytes(self.array(at, what)?);
        usize::try_from(value).ok().filter(|&value| value <= self.0.len()).ok_or(CubinError::Damaged(what, self.0.len()))
    }

    fn string(&self, at: usize) -> Result<String, CubinError> {
        let tail = self.0.get(at..).ok_or(CubinError::Damaged("a name", self.0.len()))?;
        let name = tail.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    fn sections(&self) -> Result<Vec<Section>, CubinError> {
        let table = self.offset(40, "section table")?;
        let entry_bytes = usize::from(self.u16(58, "section size")?);
        let count = usize::from(self.u16(60, "section count")?).min(SECTIONS_MAX);
        let names_index = usize::from(self.u16(62, "section names")?);
        let header = |index: usize| table.saturating_add(index.saturating_mul(entry_bytes));
        let names = self.offset(header(names_index).saturating_add(24), "section names")?;
        (0..count).map(|index| self.section(header(index), names)).collect()
    }

    fn section(&self, header: usize, names: usize) -> Result<Section, CubinError> {
        let at = |field: usize| header.saturating_add(field);
        let kind = self.u32(at(4), "section type")?;
        Ok(Section {
            name: self.string(names.saturating_add(self.u32(header, "section name")? as usize))?,
            kind,
            offset: self.offset(at(24), "section offset")?,
            size: u64::from_le_bytes(self.array(at(32), "section size")?) as usize,
            link: self.u32(at(40), "section link")? as usize,
        })
    }

    fn body(&self, section: &Section) -> Result<&[u8], CubinError> {
        let end = section.offset.checked_add(section.size);
        end.and_then(|end| self.0.get(section.offset..end)).ok_or(CubinError::Damaged("a section", self.0.len()))
    }

    /// Symbol index and name of every function.
    fn function_names(&self, sections: &[Section]) -> Result<Vec<(u32, String)>, CubinError> {
        let mut found = Vec::new();
        for table in sections.iter().filter(|section| section.kind == SYMBOL_TABLE) {
            let strings = sections.get(table.link).ok_or(CubinError::Damaged("symbol names", self.0.len()))?.offset;
            for (index, symbol) in self.body(table)?.chunks_exact(SYMBOL_BYTES).enumerate() {
                let (name, rest) = symbol.split_first_chunk::<4>().unwrap_or((&[0; 4], &[]));
                if rest.first().is_some_and(|info| info & 0xf == SYMBOL_FUNCTION) {
                    let at = strings.saturating_add(u32::from_le_bytes(*name) as usize);
                    found.push((index as u32, self.string(at)?));
                }
            }
        }
        Ok(found)
    }

    /// Symbol index and register count of every kernel.
    fn registers(&self, section: &Section) -> Result<Vec<(u32, u32)>, CubinError> {
        let blocks = attributes(self.body(section)?, ATTRIBUTE_REGISTERS);
        Ok(blocks.iter().filter_map(|block| Some((word(block, 0)?, word(block, 4)?))).collect())
    }

    fn params(&self, section: &Section) -> Result<Vec<(u32, u32)>, CubinError> {
        let blocks = attributes(self.body(section)?, ATTRIBUTE_PARAM);
        let param = |block: &&[u8]| {
            let place = word(block, 4)?;
            Some((place & 0xffff, place >> 16, word(block, 8)? >> 18))
        };
        let mut found: Vec<_> = blocks.iter().filter_map(param).collect();
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, offset, size)| (offset, size)).collect())
    }
}

fn word(block: &[u8], at: usize) -> Option<u32> {
    block.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

/// Values of every attribute of one kind: `format u8, kind u8, value u16`, and a block of `value` bytes if the format says so.
fn attributes(mut body: &[u8], wanted: u8) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some((&[format, kind, low, high], rest)) = body.split_first_chunk::<4>() {
        let size = if format == FORMAT_SIZED { usize::from(u16::from_le_bytes([low, high])) } else { 0 };
        let Some((block, rest)) = rest.split_at_checked(size) else { break };
        if kind == wanted {
            found.push(block);
        }
        body = rest;
    }
    found
}
