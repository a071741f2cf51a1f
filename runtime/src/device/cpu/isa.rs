//! Instruction sets that the kernels are compiled for.

use std::fmt;

/// An instruction set with its own build of every kernel, from plain to best.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the compiler targets by default.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F.
    Avx512,
    /// AVX-512 F, and projections on the AMX unit.
    AmxBf16,
}

impl Isa {
    /// Every instruction set, from plain to best.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::AmxBf16];

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Self::Avx2.is_available() && is_x86_feature_detected!("avx512f"),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::AmxBf16 => Self::Avx512.is_available() && super::kernels::amx::is_available(),
            #[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
            Self::AmxBf16 => false,
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::AmxBf16 => false,
        }
    }

    /// Its name in reports and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::AmxBf16 => "amx_bf16",
        }
    }

    /// The best one of this processor.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The processor's own name.
pub(crate) fn processor_name() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
            let registers = (0x8000_0002..=0x8000_0004).map(__cpuid).flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
            let bytes: Vec<u8> = registers.flat_map(u32::to_le_bytes).take_while(|byte| *byte != 0).collect();
            return String::from_utf8_lossy(&bytes).trim().to_owned();
        }
    }
    std::env::consts::ARCH.to_owned()
}
