//! A kernel that rotates, appends and attends: every case passes as the cpu device computes it, and one
//! that touches, forgets or misplaces anything is found out.

use super::case::Case;
use super::check::check;
use super::lower::WeightCache;
use super::problems::Weights;
use super::subject::{Kind, Subject, artifact_subjects};
use super::twin::Twin;
use oxide_bundle::artifact::{Access, ArtifactManifest, Param, ParamKind};
use oxide_bundle::contract::{Op, Phase, Role};
use oxide_bundle::step::{InputSlot, NONE};
use oxide_runtime::device::cpu::{CpuPlace, Isa};
use oxide_runtime::device::place::{Buffer, Image, KernelStep, PaddingRows, Place, Way};
use oxide_runtime::device::{DeviceError, DeviceInfo};
use std::path::Path;
use std::sync::Arc;

/// A shipped kernel that attends, with the contract and operands of one that rotates and appends as well.
fn subject() -> Subject {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90");
    let shipped = artifact_subjects(&folder).expect("the shipped artifacts are readable");
    let mut subject = shipped.into_iter().find(|subject| subject.name == "attend_decode_wide_q4_kv2_d64_p16").expect("it is shipped");
    let Kind::Artifact { manifest, .. } = &mut subject.kind else { panic!("an artifact") };
    let Op::Attend { heads, phase: Phase::Decode } = manifest.contract.op else { panic!("{}", manifest.contract) };
    manifest.contract.op = Op::RopeAttend { heads };
    for param in manifest.params.iter_mut().filter(|param| matches!(param.role, Role::KPlane | Role::VPlane)) {
        param.access = Access::ReadWrite;
    }
    let more = [Role::RopeTable, Role::Input(InputSlot::Positions), Role::Input(InputSlot::KvSlots)];
    manifest.params.extend(more.map(pointer));
    Subject { name: "rope_attend_test".to_owned(), family: "rope_attend", ..subject }
}

fn pointer(role: Role) -> Param {
    Param {
        name: format!("{role:?}"),
        kind: ParamKind::Pointer,
        dtype: "int32".to_owned(),
        role,
        access: Access::Read,
        align: 16,
        offset: 0,
        size: 8,
        value: None,
        tensor_map: None,
    }
}

/// What a spoiled kernel is given, and what it leaves.
type Before = fn(&KernelStep<'_>, &mut [Buffer]);
type After = fn(&KernelStep<'_>, &mut [Option<Image>]);

/// The cpu device in the place of a kernel that does something wrong.
struct Spoiled {
    twin: Twin,
    before: Before,
    after: After,
}

impl Place for Spoiled {
    fn info(&self) -> DeviceInfo {
        self.twin.info()
    }

    fn ways(&self) -> Vec<Way> {
        Vec::new()
    }

    fn padding_rows(&self) -> PaddingRows {
        self.twin.padding_rows()
    }

    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError> {
        let mut buffers = step.buffers.to_vec();
        (self.before)(step, &mut buffers);
        let mut images = self.twin.run(&KernelStep { buffers: &buffers, ..*step }, way)?;
        (self.after)(step, &mut images);
        Ok(images)
    }
}

fn faults(case: &Case, manifest: &ArtifactManifest, before: Before, after: After) -> Vec<String> {
    let twin = Twin::new(CpuPlace::new(Isa::best(), 1).expect("the cpu device opens"), manifest);
    let mut place = Spoiled { twin, before, after };
    check(&mut place, None, case, Some(manifest), &mut WeightCache::default()).faults
}

fn words(step: &KernelStep<'_>, slot: InputSlot) -> Vec<u32> {
    let buffer = &step.buffers[step.operand(Role::Input(slot)).expect("the step has it")];
    let Image::U32(words) = &*buffer.image else { panic!("integers") };
    words[buffer.start..buffer.start + step.rows as usize].to_vec()
}

/// Changes the words of a step input.
fn change(step: &KernelStep<'_>, buffers: &mut [Buffer], slot: InputSlot, change: fn(u32) -> u32) {
    let buffer = &mut buffers[step.operand(Role::Input(slot)).expect("the step has it")];
    let Image::U32(words) = Arc::make_mut(&mut buffer.image) else { panic!("integers") };
    words[buffer.start..buffer.start + step.rows as usize].iter_mut().for_each(|word| *word = change(*word));
}

/// Lets `spoil` change the row of a slot in a plane; it is given what was there before the kernel.
fn spoil_row(step: &KernelStep<'_>, images: &mut [Option<Image>], role: Role, slot: u32, spoil: fn(&mut u16, u16)) {
    let Op::RopeAttend { heads } = step.contract.op else { panic!("{}", step.contract) };
    let index = step.operand(role).expect("the step has it");
    let (start, width) = (step.buffers[index].start, (heads.kv * heads.dim) as usize);
    let (Some(Image::Bf16(after)), Image::Bf16(before)) = (&mut images[index], &*step.buffers[index].image) else { panic!("bf16") };
    for at in start + slot as usize * width..start + (slot as usize + 1) * width {
        spoil(&mut after[at], before[at]);
    }
}

/// The first token that is appended.
fn kept(step: &KernelStep<'_>) -> u32 {
    let (lens, slots) = (words(step, InputSlot::KvLens), words(step, InputSlot::KvSlots));
    lens.into_iter().zip(slots).find(|(len, slot)| *len > 0 && *slot != NONE).expect("some are").1
}

/// The slot that padding has.
fn of_padding(step: &KernelStep<'_>) -> u32 {
    let (lens, slots) = (words(step, InputSlot::KvLens), words(step, InputSlot::KvSlots));
    lens.into_iter().zip(slots).find(|(len, _)| *len == 0).expect("some are").1
}

fn as_given(_: &KernelStep<'_>, _: &mut [Buffer]) {}

fn as_left(_: &KernelStep<'_>, _: &mut [Option<Image>]) {}

/// What is wrong, what a fault must name, and how.
const SPOILED: [(&str, &str, Before, After); 8] = [
    ("K is not appended", "KPlane", as_given, |step, images| {
        spoil_row(step, images, Role::KPlane, kept(step), |after, before| *after = before)
    }),
    ("V is not appended", "VPlane", as_given, |step, images| {
        spoil_row(step, images, Role::VPlane, kept(step), |after, before| *after = before)
    }),
    ("V is another number", "VPlane", as_given, |step, images| {
        spoil_row(step, images, Role::VPlane, kept(step), |after, _| *after ^= 0x40)
    }),
    ("padding is appended", "KPlane", as_given, |step, images| {
        spoil_row(step, images, Role::KPlane, of_padding(step), |after, _| *after = 0x3F80);
    }),
    ("a page that nobody owns is written", "VPlane", as_given, |step, images| {
        spoil_row(step, images, Role::VPlane, (step.sizes.kv_pages - 1) * 16 + 15, |after, _| *after = 0);
    }),
    (
        "a token without a slot is stored",
        "KPlane",
        |step, buffers| change(step, buffers, InputSlot::KvSlots, |slot| if slot == NONE { 0 } else { slot }),
        as_left,
    ),
    (
        "it rotates by the position before",
        "KPlane",
        |step, buffers| change(step, buffers, InputSlot::Positions, |at| at.saturating_sub(1)),
        as_left,
    ),
    (
        "it forgets the newest token",
        "Out",
        |step, buffers| change(step, buffers, InputSlot::KvLens, |len| if len > 1 { len - 1 } else { len }),
        as_left,
    ),
];

#[test]
fn rotation_append_and_attention_in_one_kernel_are_checked() {
    let subject = subject();
    let manifest = subject.manifest().expect("an artifact has one");
    let cases: Vec<Case> = (0..24).map(|index| subject.case(index, 1, &mut Weights::default())).collect();
    for case in &cases {
        let found = faults(case, manifest, as_given, as_left);
        assert!(found.is_empty(), "{}: {found:?}", case.label());
    }
    let has_all = |case: &&Case| {
        let (lens, slots) = (&case.inputs.kv_lens, &case.inputs.kv_slots);
        lens.contains(&0) && slots.contains(&NONE) && case.rows() < 40
    };
    let case = cases.iter().find(has_all).expect("some case has padding and tokens without a slot");
    for (what, named, before, after) in SPOILED {
        let found = faults(case, manifest, before, after);
        assert!(found.iter().any(|fault| fault.starts_with(named)), "{what}: {found:?}");
    }
}

#[test]
fn cases_of_the_decode_step_meet_every_edge_of_pages_and_lengths() {
    let subject = subject();
    let cases = (0..24).map(|index| subject.case(index, 1, &mut Weights::default()));
    let mut seen = [false; 8];
    for case in cases {
        let lens = &case.inputs.kv_lens;
        for (len, slot) in lens.iter().zip(&case.inputs.kv_slots) {
            let edges =
                [*len == 0, *len == 1, *len > 16 && len % 16 == 1, *len >= 16 && len % 16 == 0, *len >= 2000, *len > 0 && *slot == NONE];
            seen.iter_mut().zip(edges).for_each(|(seen, edge)| *seen |= edge);
        }
        seen[6] |= lens.iter().any(|len| *len >= 2000) && lens.iter().any(|len| (1..=16).contains(len));
        seen[7] |= case.tensor(Role::X).all().iter().any(|value| value.is_nan());
    }
    assert_eq!(seen, [true; 8]);
}
