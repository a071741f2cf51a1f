//! Runs a case in every way and arrangement, and says what is wrong.

use super::case::{Case, Expect, Footprint};
use super::lower::{Arrangement, GUARD, Lowered, WeightCache, lower};
use super::problems;
use super::twin::Twin;
use super::values::element;
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::contract::{Linear, Op, Role};
use oxide_runtime::device::DeviceError;
use oxide_runtime::device::place::{Image, PaddingRows, Place, Way};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Faults listed of one case.
const FAULTS_MAX: usize = 8;
/// How far a kernel may be from the cpu device, of a value and of the values about it: far above any
/// rounding, far below a tile that was computed from something else. The reference is what results are held to.
const WITNESS_SHARE: f64 = 1.0 / 32.0;
/// Multiplications that the cpu device is asked for, at most: some seconds.
const WITNESS_MULTIPLICATIONS_MAX: u64 = 1 << 36;
/// Values about a value.
const WITNESS_SPAN: usize = 512;
/// Absolute: denormal numbers and what they are multiplied by.
const WITNESS_TINY: f64 = 1e-30;

/// What was found of one case.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CaseReport {
    /// Shape, sizes, style.
    pub(crate) case: String,
    /// Tokens of the step.
    pub(crate) tokens: u32,
    /// Sequences of the step.
    pub(crate) seqs: u32,
    /// Logit rows of the step.
    pub(crate) rows: u32,
    /// Largest error by operand.
    pub(crate) errors: BTreeMap<String, ErrorReport>,
    /// Ways and arrangements whose bytes were compared with the first run's.
    pub(crate) equal: Vec<String>,
    /// Everything wrong; empty for a pass.
    pub(crate) faults: Vec<String>,
}

/// The worst value of an operand.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ErrorReport {
    /// Largest absolute error.
    pub(crate) max: f64,
    /// Largest error as a share of its tolerance; at most 1 in a pass.
    pub(crate) of_tolerance: f64,
    /// What the tolerance is made of.
    pub(crate) tolerance: String,
    /// Values compared with the reference.
    pub(crate) values: usize,
}

impl CaseReport {
    fn new(case: &Case) -> Self {
        let sizes = case.sizes;
        Self { case: case.label(), tokens: sizes.tokens, seqs: sizes.seqs, rows: sizes.rows, ..Self::default() }
    }

    fn fault(&mut self, fault: String) {
        if self.faults.len() < FAULTS_MAX {
            self.faults.push(fault);
        }
    }

    /// Whether nothing is wrong.
    pub(crate) fn passed(&self) -> bool {
        self.faults.is_empty()
    }
}

/// Checks a case on a place, beside the reference also against a witness if there is one.
pub(crate) fn check(
    place: &mut dyn Place,
    witness: Option<&mut Twin>,
    case: &Case,
    manifest: Option<&ArtifactManifest>,
    cache: &mut WeightCache,
) -> CaseReport {
    let mut report = CaseReport::new(case);
    let mut checker = Checker { place, witness, case, report: &mut report };
    if let Err(error) = checker.all(manifest, cache) {
        report.fault(error.to_string());
    }
    report
}

struct Checker<'a> {
    place: &'a mut dyn Place,
    witness: Option<&'a mut Twin>,
    case: &'a Case,
    report: &'a mut CaseReport,
}

impl Checker<'_> {
    fn all(&mut self, manifest: Option<&ArtifactManifest>, cache: &mut WeightCache) -> Result<(), DeviceError> {
        let padded = lower(self.case, manifest, Arrangement::Padded, cache);
        let first = self.place.run(&padded.step(), Way::Eager)?;
        self.inspect(&padded, &first);
        for expect in problems::expect(self.case) {
            self.accuracy(&padded, &first, &expect);
        }
        self.agreement(&padded, &first)?;
        let declared = declared(self.case, &padded, &first);
        for (name, way) in self.ways() {
            let again = self.place.run(&padded.step(), way)?;
            self.inspect(&padded, &again);
            self.same(name, &declared, &padded, &again);
        }
        let mut arrangements = vec![("exact_class", Arrangement::Exact)];
        if takes_residual_in_place(self.case) {
            arrangements.push(("in_place", Arrangement::InPlace));
        }
        for (name, arrangement) in arrangements {
            let other = lower(self.case, manifest, arrangement, cache);
            let found = self.place.run(&other.step(), Way::Eager)?;
            self.inspect(&other, &found);
            self.same(name, &declared, &other, &found);
        }
        Ok(())
    }

    fn ways(&self) -> Vec<(&'static str, Way)> {
        let more = self.place.ways().into_iter().map(|way| (way.name(), way));
        [("repeated", Way::Eager)].into_iter().chain(more).collect()
    }

    /// Guards, constants, counters, and everything outside the declared outputs.
    fn inspect(&mut self, lowered: &Lowered, found: &[Option<Image>]) {
        for (index, buffer) in lowered.buffers.iter().enumerate() {
            let Some(image) = &found[index] else { continue };
            let role = role_of(lowered, index);
            if !buffer.is_written {
                self.report.fault(format!("{role:?} is only read by contract and was changed"));
                continue;
            }
            let allowed = self.allowed(role, lowered);
            if let Some(at) = changed_outside(&buffer.image, image, &allowed) {
                self.report.fault(outside(role, at, buffer.len));
            }
        }
    }

    /// Elements of the buffer, guards counted, that a kernel may change.
    fn allowed(&self, role: Role, lowered: &Lowered) -> Vec<Range<usize>> {
        let scratch = match role {
            Role::Workspace(_) => Some(0..usize::MAX - GUARD),
            // Counters are left as they were: zero.
            Role::Counters(_) => Some(0..0),
            _ => None,
        };
        let Footprint { mut declared, free } = self.footprint(role, lowered);
        let is_activation = matches!(role, Role::Out | Role::Residual);
        if self.place.padding_rows() == PaddingRows::Free || !is_activation {
            declared.extend(free);
        }
        if let Some(scratch) = scratch {
            declared = vec![scratch];
        }
        let len = lowered.operands.iter().find(|(found, _)| *found == role).map_or(0, |(_, index)| lowered.buffers[*index].len);
        declared.into_iter().map(|range| GUARD + range.start.min(len)..GUARD + range.end.min(len)).collect()
    }

    fn footprint(&self, role: Role, lowered: &Lowered) -> Footprint {
        Case { bound: lowered.bound, ..self.case.clone() }.footprint(role)
    }

    fn accuracy(&mut self, lowered: &Lowered, found: &[Option<Image>], expect: &Expect) {
        let Some(image) = operand(lowered, expect.role).and_then(|index| found[index].as_ref()) else {
            return self.report.fault(format!("{:?} was not returned", expect.role));
        };
        let mut errors = ErrorReport { tolerance: expect.rule.to_owned(), values: expect.at.len(), ..ErrorReport::default() };
        let mut worst: Option<String> = None;
        for ((at, want), tolerance) in expect.at.iter().zip(&expect.want).zip(&expect.tolerance) {
            let got = element(image, GUARD + at);
            let error = if got == *want { 0.0 } else { (got - want).abs() };
            let share = share(error, *tolerance);
            errors.max = errors.max.max(error);
            if share > errors.of_tolerance {
                errors.of_tolerance = share;
                worst = Some(format!("{:?} element {at} is {got:e}, the reference has {want:e} within {tolerance:e}", expect.role));
            }
        }
        if errors.of_tolerance > 1.0 {
            self.report.fault(worst.unwrap_or_default());
        }
        self.report.errors.insert(format!("{:?}", expect.role), finite(errors));
        self.unwritten(image, expect.role, lowered);
    }

    /// Every declared element against the cpu device's: the reference computes only some rows of a large step.
    fn agreement(&mut self, lowered: &Lowered, found: &[Option<Image>]) -> Result<(), DeviceError> {
        let is_heavy = multiplications(self.case) > WITNESS_MULTIPLICATIONS_MAX;
        let Some(witness) = self.witness.as_deref_mut().filter(|_| !is_heavy) else { return Ok(()) };
        let wanted = witness.run(&lowered.step(), Way::Eager)?;
        for (index, buffer) in lowered.buffers.iter().enumerate().filter(|(_, buffer)| buffer.is_written) {
            let (Some(found), Some(wanted)) = (&found[index], &wanted[index]) else { continue };
            let role = role_of(lowered, index);
            if matches!(role, Role::Workspace(_) | Role::Counters(_) | Role::X) {
                continue;
            }
            if let Some(at) =
                self.case.footprint(role).declared.into_iter().find_map(|range| disagreement(found, wanted, buffer.start, range))
            {
                let (got, want) = (element(found, buffer.start + at), element(wanted, buffer.start + at));
                self.report.fault(format!("{role:?} element {at} is {got:e}, the cpu device has {want:e}"));
            }
        }
        self.report.equal.push("cpu_device".to_owned());
        Ok(())
    }

    /// Every declared element of a float output is a number: the poison was replaced, and no NaN came in.
    fn unwritten(&mut self, image: &Image, role: Role, lowered: &Lowered) {
        let is_scored = matches!(role, Role::Output(_));
        for range in self.footprint(role, lowered).declared {
            if let Some(at) = range.into_iter().find(|at| element(image, GUARD + at).is_nan()).filter(|_| !is_scored) {
                return self.report.fault(format!("{role:?} element {at} is NaN: not written, or computed from what must not be read"));
            }
        }
    }

    fn same(&mut self, name: &str, first: &[(Role, Vec<u8>)], lowered: &Lowered, found: &[Option<Image>]) {
        let again = declared(self.case, lowered, found);
        let differs = first.iter().find(|(role, bytes)| again.iter().any(|(other, found)| other == role && found != bytes));
        match differs {
            Some((role, _)) => self.report.fault(format!("{role:?} of the run `{name}` differs from the first run's")),
            None => self.report.equal.push(name.to_owned()),
        }
    }
}

/// Multiplications of a case's projection, or of its attention.
fn multiplications(case: &Case) -> u64 {
    match case.op() {
        Op::Linear(linear) | Op::QkvRopeAppend { linear, .. } => case.rows() as u64 * u64::from(linear.n) * u64::from(linear.k),
        Op::Attend { heads, .. } => {
            let visible: u64 = case.queries().iter().map(|query| u64::from(query.visible)).sum();
            visible * 2 * u64::from(heads.q * heads.dim)
        }
        Op::Embed { .. }
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::QkNorm { .. }
        | Op::RopeAppend { .. }
        | Op::TakeRows { .. }
        | Op::Sample { .. } => 0,
    }
}

/// First element of a range that two devices disagree about by far more than rounding. Integers must be equal.
fn disagreement(found: &Image, wanted: &Image, start: usize, range: Range<usize>) -> Option<usize> {
    let share = if matches!(found, Image::U32(_)) { 0.0 } else { WITNESS_SHARE };
    range.clone().step_by(WITNESS_SPAN).find_map(|from| {
        let span = from..(from + WITNESS_SPAN).min(range.end);
        let squares = span.clone().map(|at| element(wanted, start + at).powi(2)).filter(|square| square.is_finite());
        let rms = (squares.sum::<f64>() / span.len() as f64).sqrt();
        span.into_iter().find(|at| {
            let (got, want) = (element(found, start + at), element(wanted, start + at));
            let is_near = (got - want).abs() <= share * (want.abs() + rms) + WITNESS_TINY;
            got != want && !is_near
        })
    })
}

/// An error as a share of its tolerance; infinite for what is no number.
fn share(error: f64, tolerance: f64) -> f64 {
    match error {
        0.0 => 0.0,
        error if error.is_nan() => f64::INFINITY,
        error => error / tolerance,
    }
}

/// JSON has no infinity.
fn finite(errors: ErrorReport) -> ErrorReport {
    let clip = |value: f64| if value.is_finite() { value } else { f64::MAX };
    ErrorReport { max: clip(errors.max), of_tolerance: clip(errors.of_tolerance), ..errors }
}

fn operand(lowered: &Lowered, role: Role) -> Option<usize> {
    lowered.operands.iter().find(|(found, _)| *found == role).map(|(_, index)| *index)
}

/// The output's role if the buffer has one, else its only role.
fn role_of(lowered: &Lowered, index: usize) -> Role {
    let mut roles = lowered.operands.iter().filter(|(_, buffer)| *buffer == index).map(|(role, _)| *role);
    let first = roles.next().unwrap_or(Role::Out);
    roles.find(|role| *role == Role::Out).unwrap_or(first)
}

fn takes_residual_in_place(case: &Case) -> bool {
    matches!(case.op(), Op::Linear(Linear { residual: true, .. }))
}

/// Bytes of every declared output.
fn declared(case: &Case, lowered: &Lowered, found: &[Option<Image>]) -> Vec<(Role, Vec<u8>)> {
    let mut outputs = Vec::new();
    for (index, buffer) in lowered.buffers.iter().enumerate().filter(|(_, buffer)| buffer.is_written) {
        let role = role_of(lowered, index);
        let Some(image) = &found[index] else { continue };
        if matches!(role, Role::Workspace(_) | Role::Counters(_)) {
            continue;
        }
        let bytes = image.element_bytes();
        let mut declared = Vec::new();
        for range in case.footprint(role).declared {
            declared.extend_from_slice(&image.bytes()[(buffer.start + range.start) * bytes..(buffer.start + range.end) * bytes]);
        }
        outputs.push((role, declared));
    }
    outputs
}

/// First element that differs and lies in no allowed range.
fn changed_outside(before: &Image, after: &Image, allowed: &[Range<usize>]) -> Option<usize> {
    let bytes = before.element_bytes();
    let mut ranges: Vec<_> = allowed.iter().filter(|range| !range.is_empty()).collect();
    ranges.sort_by_key(|range| range.start);
    let mut from = 0;
    let gaps = ranges.into_iter().map(|range| {
        let gap = from..range.start.max(from);
        from = from.max(range.end);
        gap
    });
    let gaps: Vec<_> = gaps.collect();
    let tail = from..before.len();
    gaps.into_iter().chain([tail]).find_map(|gap| {
        let span = gap.start * bytes..gap.end * bytes;
        let (a, b) = (&before.bytes()[span.clone()], &after.bytes()[span]);
        if a == b {
            return None;
        }
        a.iter().zip(b).position(|(a, b)| a != b).map(|at| gap.start + at / bytes)
    })
}

fn outside(role: Role, at: usize, len: usize) -> String {
    match at {
        at if at < GUARD => format!("{role:?} was written {} elements before its start", GUARD - at),
        at if at >= GUARD + len => format!("{role:?} was written {} elements behind its end", at - GUARD - len),
        at => format!("{role:?} element {} was written and is no declared output of the step", at - GUARD),
    }
}
