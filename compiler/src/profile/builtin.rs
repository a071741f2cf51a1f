//! The profiles that ship with the compiler, and the tiny model inside it.

/// A profile shipped in the binary.
#[derive(Debug)]
pub struct Builtin {
    /// Its name.
    pub name: &'static str,
    /// Its TOML text.
    pub toml: &'static str,
    /// Its checkpoint, if that is shipped too.
    pub checkpoint: &'static [EmbeddedFile],
    /// Greedy ids of the reference implementation, if known.
    pub reference: Option<&'static str>,
}

/// A file of an embedded checkpoint.
#[derive(Debug)]
pub struct EmbeddedFile {
    /// Its name in the checkpoint folder.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: &'static [u8],
}

macro_rules! tiny {
    ($($name:literal),* $(,)?) => {
        &[$(EmbeddedFile { name: $name, bytes: include_bytes!(concat!("../../../profiles/oxide-tiny/", $name)) }),*]
    };
}

/// Every shipped profile.
pub static BUILTIN: &[Builtin] = &[
    Builtin {
        name: "oxide-tiny",
        toml: include_str!("../../../profiles/oxide-tiny.toml"),
        checkpoint: tiny!(
            "LICENSE",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ),
        reference: Some(include_str!("../../../profiles/oxide-tiny/reference.json")),
    },
    Builtin {
        name: "smollm2-135m",
        toml: include_str!("../../../profiles/smollm2-135m.toml"),
        checkpoint: &[],
        reference: Some(include_str!("../../../profiles/smollm2-135m/reference.json")),
    },
    Builtin { name: "qwen2.5-0.5b", toml: include_str!("../../../profiles/qwen2.5-0.5b.toml"), checkpoint: &[], reference: None },
    Builtin { name: "qwen2.5-1.5b", toml: include_str!("../../../profiles/qwen2.5-1.5b.toml"), checkpoint: &[], reference: None },
];

/// The shipped profile of that name.
pub fn builtin(name: &str) -> Option<&'static Builtin> {
    BUILTIN.iter().find(|builtin| builtin.name == name)
}
