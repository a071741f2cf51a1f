//! A place whose kernel is broken on purpose, to show that a check would see it.

use clap::ValueEnum;
use oxide_bundle::contract::Role;
use oxide_runtime::device::place::{Image, KernelStep, PaddingRows, Place, Way};
use oxide_runtime::device::{DeviceError, DeviceInfo};

/// How the kernel is broken.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// The last value of the output is somewhat off
    Wrong,
    /// The last value of the output is not written
    Unwritten,
    /// One value behind the output is written
    Overrun,
    /// One value before the output is written
    Underrun,
    /// A padding row of the output is written
    Padding,
    /// The last value of the output is NaN
    Nan,
    /// Every run gives other bytes
    Unstable,
    /// The first operand that is only read is written
    Scribble,
    /// The kernel never ends
    Hang,
    /// The kernel ends the process
    Abort,
}

/// A place behind which a fault was put.
pub(crate) struct Broken {
    place: Box<dyn Place>,
    fault: Fault,
    runs: u32,
}

impl Broken {
    /// Breaks every kernel that `place` runs.
    pub(crate) fn new(place: Box<dyn Place>, fault: Fault) -> Self {
        Self { place, fault, runs: 0 }
    }
}

impl Place for Broken {
    fn info(&self) -> DeviceInfo {
        self.place.info()
    }

    fn ways(&self) -> Vec<Way> {
        self.place.ways()
    }

    fn padding_rows(&self) -> PaddingRows {
        self.place.padding_rows()
    }

    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError> {
        self.runs += 1;
        match self.fault {
            Fault::Hang => loop {
                std::thread::park();
            },
            Fault::Abort => std::process::abort(),
            _ => {}
        }
        let mut images = self.place.run(step, way)?;
        if self.fault == Fault::Scribble {
            let constant = step.buffers.iter().position(|buffer| !buffer.is_written && buffer.len > 0);
            if let Some(index) = constant {
                let mut image = (*step.buffers[index].image).clone();
                flip(&mut image, step.buffers[index].start);
                images[index] = Some(image);
            }
            return Ok(images);
        }
        let sampled = Role::Output(oxide_bundle::step::OutputSlot::SampledIds);
        let Some(index) = step.operand(Role::Out).or_else(|| step.operand(sampled)) else { return Ok(images) };
        let buffer = &step.buffers[index];
        let width = buffer.len / step.rows_max.max(1) as usize;
        let end = buffer.start + step.rows as usize * width;
        let (Some(image), true) = (&mut images[index], end > buffer.start) else { return Ok(images) };
        match self.fault {
            Fault::Wrong => flip(image, end - 1),
            Fault::Unwritten => copy(image, &buffer.image, end - 1),
            Fault::Overrun => flip(image, buffer.start + buffer.len),
            Fault::Underrun => flip(image, buffer.start - 1),
            Fault::Padding if step.rows < step.rows_max => flip(image, end),
            Fault::Padding => {}
            Fault::Nan => nan(image, end - 1),
            Fault::Unstable => nudge(image, end - 1, self.runs),
            Fault::Scribble | Fault::Hang | Fault::Abort => {}
        }
        Ok(images)
    }
}

/// Changes the sign or the upper bits.
fn flip(image: &mut Image, at: usize) {
    match image {
        Image::Bf16(values) => values[at] ^= 0x8040,
        Image::F32(values) => values[at] = f32::from_bits(values[at].to_bits() ^ 0x8040_0000),
        Image::U32(values) => values[at] ^= 1,
    }
}

/// Changes the lowest bit in every other run.
fn nudge(image: &mut Image, at: usize, run: u32) {
    let bit = run & 1;
    match image {
        Image::Bf16(values) => values[at] ^= bit as u16,
        Image::F32(values) => values[at] = f32::from_bits(values[at].to_bits() ^ bit),
        Image::U32(values) => values[at] ^= bit,
    }
}

fn nan(image: &mut Image, at: usize) {
    match image {
        Image::Bf16(values) => values[at] = 0x7FC0,
        Image::F32(values) => values[at] = f32::NAN,
        Image::U32(values) => values[at] = u32::MAX - 1,
    }
}

fn copy(image: &mut Image, from: &Image, at: usize) {
    match (image, from) {
        (Image::Bf16(values), Image::Bf16(from)) => values[at] = from[at],
        (Image::F32(values), Image::F32(from)) => values[at] = from[at],
        (Image::U32(values), Image::U32(from)) => values[at] = from[at],
        _ => {}
    }
}
