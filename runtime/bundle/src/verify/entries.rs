//! Checks of entries and their steps: order, references, roles, operand types and sizes, grids, copies.

use super::roles::{self, Axis, Need};
use super::tables::dimension_fault;
use super::{Place, PlanErrorKind, Report, bindings};
use crate::contract::{Contract, Op, Phase, Role};
use crate::dtype::DType;
use crate::ids::{BufferId, EntryId, KernelId, StepId, WeightId};
use crate::manifest::{Manifest, Target};
use crate::plan::{BatchClass, Bindings, BufferDecl, BufferKind, EntryDecl, Extent, Operand, RawPlan, Step, Sym, Value, WeightDecl};

/// Largest grid of an sm90 device.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Checks every entry.
pub(super) fn check(raw: &RawPlan, manifest: &Manifest, report: &mut Report) {
    check_order(raw, report);
    for (index, entry) in (0..).zip(&raw.entries) {
        let entry_id = EntryId(index);
        check_class(raw, entry_id, entry, report);
        for (step_index, step) in (0..).zip(&entry.steps) {
            let place = Place::Step(entry_id, StepId(step_index));
            let bindings = bindings(entry.class, manifest.ledger.kv_pages_default);
            let mut checker = StepChecker { raw, manifest, class: entry.class, bindings, place, report };
            checker.step(step);
        }
    }
}

/// Decode classes by rising bound, then mixed classes by rising bound.
fn check_order(raw: &RawPlan, report: &mut Report) {
    let key = |class: BatchClass| (matches!(class, BatchClass::Mixed { .. }), class.tokens_max(), class.seqs_max());
    for (index, pair) in (1..).zip(raw.entries.windows(2)) {
        let [before, entry] = pair else { continue };
        report.require(
            key(before.class) < key(entry.class),
            || Place::Entry(EntryId(index)),
            PlanErrorKind::BadEntry,
            || format!("{:?} follows {:?}; decode classes come first, each by rising bound", entry.class, before.class),
        );
    }
}

fn check_class(raw: &RawPlan, id: EntryId, entry: &EntryDecl, report: &mut Report) {
    let (tokens, seqs) = (entry.class.tokens_max(), entry.class.seqs_max());
    let bounds = &raw.bounds;
    let fits = seqs >= 1 && seqs <= tokens && tokens <= bounds.tokens_max && seqs <= bounds.seqs_max && seqs <= bounds.rows_max;
    report.require(
        fits,
        || Place::Entry(id),
        PlanErrorKind::BadEntry,
        || {
            let allowed = format!("{} tokens, {} sequences, {} rows", bounds.tokens_max, bounds.seqs_max, bounds.rows_max);
            format!("{:?} is beyond the plan's bounds of {allowed}", entry.class)
        },
    );
}

struct StepChecker<'a> {
    raw: &'a RawPlan,
    manifest: &'a Manifest,
    class: BatchClass,
    bindings: Bindings,
    place: Place,
    report: &'a mut Report,
}

impl<'a> StepChecker<'a> {
    fn step(&mut self, step: &Step) {
        match step {
            Step::Launch { kernel, grid, operands } => self.launch(*kernel, grid, operands),
            Step::Copy { from, to, bytes } => self.copy(*from, *to, *bytes),
        }
    }

    fn fail(&mut self, kind: PlanErrorKind, message: String) {
        self.report.add(self.place.clone(), kind, message);
    }

    fn launch(&mut self, kernel: KernelId, grid: &[Extent; 3], operands: &[Operand]) {
        self.grid(grid);
        let Some(decl) = self.raw.kernels.get(kernel.index()) else {
            let count = self.raw.kernels.len();
            return self.fail(PlanErrorKind::MissingKernel, format!("launches {kernel}, the plan has {count} kernels"));
        };
        if dimension_fault(&decl.contract, self.raw).is_some() {
            return;
        }
        self.phase(&decl.contract);
        self.roles(&decl.contract, operands);
        self.operands(&decl.contract, operands);
        self.aliases(&decl.contract.op, operands);
    }

    fn grid(&mut self, grid: &[Extent; 3]) {
        let max = match self.manifest.target {
            Target::Cpu => [1; 3],
            Target::Sm90 => GRID_MAX,
        };
        for ((axis, extent), max) in ["x", "y", "z"].into_iter().zip(grid).zip(max) {
            let found = extent.eval(self.bindings).unwrap_or(0);
            if found == 0 || found > max {
                self.fail(PlanErrorKind::BadGrid, format!("grid.{axis} is {found}, the {} device allows 1 to {max}", self.manifest.target));
            }
        }
    }

    /// A decode kernel takes one row a sequence, so it cannot serve a mixed class.
    fn phase(&mut self, contract: &Contract) {
        if let Op::Attend { phase: Phase::Decode, .. } = contract.op
            && matches!(self.class, BatchClass::Mixed { .. })
        {
            self.fail(PlanErrorKind::BadRole, format!("{} cannot serve {:?}", contract.op.name(), self.class));
        }
    }

    fn roles(&mut self, contract: &Contract, operands: &[Operand]) {
        let (needs, name) = (roles::needs(contract), contract.op.name());
        for (index, operand) in operands.iter().enumerate() {
            let role = operand.role;
            if operands.iter().take(index).any(|earlier| earlier.role == role) {
                self.fail(PlanErrorKind::BadRole, format!("{name} has {role:?} twice"));
            }
            let known = needs.iter().any(|(need, _)| *need == role) || roles::is_optional(&contract.op, role);
            if !known {
                self.fail(PlanErrorKind::BadRole, format!("{name} has no role {role:?}"));
            }
        }
        for (role, _) in needs.iter().filter(|(role, _)| operands.iter().all(|operand| operand.role != *role)) {
            self.fail(PlanErrorKind::BadRole, format!("{name} lacks {role:?}"));
        }
    }

    fn operands(&mut self, contract: &Contract, operands: &[Operand]) {
        let needs = roles::needs(contract);
        let axis = self.out_axis(operands);
        for operand in operands {
            if !self.resolves(operand) {
                continue;
            }
            match needs.iter().find(|(role, _)| *role == operand.role) {
                Some((_, need)) => self.required(operand, need, axis),
                None => self.optional(operand),
            }
        }
        let plane = |wanted: Role| operands.iter().find(|operand| operand.role == wanted).map(|operand| operand.value);
        if let (Some(Value::KPlane(k)), Some(Value::VPlane(v))) = (plane(Role::KPlane), plane(Role::VPlane))
            && k != v
        {
            self.fail(PlanErrorKind::BadOperand, format!("key plane of layer {k} goes with value plane of layer {v}"));
        }
    }

    /// The leading dimension of the output, for contracts that take either.
    fn out_axis(&self, operands: &[Operand]) -> Axis {
        let out = operands.iter().find(|operand| operand.role == Role::Out).map(|operand| operand.value);
        let Some(Value::Buffer(id)) = out else { return Axis::Tokens };
        match self.raw.buffers.get(id.index()).and_then(|buffer| buffer.elements.sym) {
            Some(Sym::Rows | Sym::Seqs) => Axis::Rows,
            Some(Sym::Tokens | Sym::KvPages) | None => Axis::Tokens,
        }
    }

    fn resolves(&mut self, operand: &Operand) -> bool {
        let role = operand.role;
        let (kind, found, count) = match operand.value {
            Value::Buffer(id) if id.index() >= self.raw.buffers.len() => {
                (PlanErrorKind::MissingBuffer, id.to_string(), self.raw.buffers.len())
            }
            Value::Weight(id) if id.index() >= self.raw.weights.len() => {
                (PlanErrorKind::MissingWeight, id.to_string(), self.raw.weights.len())
            }
            Value::KPlane(layer) | Value::VPlane(layer) if layer >= self.raw.kv.layers => {
                (PlanErrorKind::MissingPlane, format!("the plane of layer {layer}"), self.raw.kv.layers as usize)
            }
            _ => return true,
        };
        self.fail(kind, format!("{role:?} is {found}, the plan has {count}"));
        false
    }

    fn required(&mut self, operand: &Operand, need: &Need, out_axis: Axis) {
        let role = operand.role;
        match (need, operand.value) {
            (Need::Activation { axis, width, dtypes }, Value::Buffer(id)) => {
                let axis = if *axis == Axis::Any { out_axis } else { *axis };
                if let Some(buffer) = self.raw.buffers.get(id.index()) {
                    self.activation(role, id, buffer, axis, *width, dtypes);
                }
            }
            (Need::Weight { shape, dtype }, Value::Weight(id)) => {
                self.weight(role, id, *dtype, |weight| weight.shape == *shape, || format!("{shape:?}"))
            }
            (Need::RopeTable { half }, Value::Weight(id)) => {
                let context = self.manifest.limits.context_max;
                let fits = |weight: &WeightDecl| matches!(weight.shape.as_slice(), [rows, found, 2] if *rows >= context && found == half);
                self.weight(role, id, DType::F32, fits, || format!("[{context} or more, {half}, 2]"));
            }
            (Need::KPlane, Value::KPlane(_)) | (Need::VPlane, Value::VPlane(_)) => {}
            (_, value) => self.fail(PlanErrorKind::BadOperand, format!("{role:?} cannot be {value:?}")),
        }
    }

    fn optional(&mut self, operand: &Operand) {
        let fits = match (operand.role, operand.value) {
            (Role::Input(slot), Value::Input(found)) => slot == found,
            (Role::Output(slot), Value::Output(found)) => slot == found,
            (Role::Scalar(_), Value::Scalar(extent)) => extent.div != 0,
            (Role::Workspace(_), Value::Buffer(id)) => return self.fits_entry(id, None),
            (Role::Counters(_), Value::Buffer(id)) => return self.fits_entry(id, Some(BufferKind::State)),
            // The in-place output of Q/K norm; its alias is checked with the others.
            (Role::Out, Value::Buffer(_)) => true,
            _ => false,
        };
        if !fits {
            self.fail(PlanErrorKind::BadOperand, format!("{:?} cannot be {:?}", operand.role, operand.value));
        }
    }

    /// Whether a buffer is large enough for its own elements in this entry.
    fn fits_entry(&mut self, id: BufferId, kind: Option<BufferKind>) {
        let Some(buffer) = self.raw.buffers.get(id.index()) else { return };
        let bytes =
            buffer.elements.eval(self.bindings).map_or(u64::MAX, |elements| u64::from(elements).saturating_mul(buffer.dtype.bytes()));
        if bytes > buffer.size_bytes {
            let message = format!("{id} {} has {} bytes, {:?} needs {bytes}", buffer.label, buffer.size_bytes, self.class);
            self.fail(PlanErrorKind::BadBuffer, message);
        }
        if kind.is_some_and(|kind| kind != buffer.kind) {
            self.fail(PlanErrorKind::BadOperand, format!("{id} {} is {:?}, counters must be {kind:?}", buffer.label, buffer.kind));
        }
    }

    fn activation(&mut self, role: Role, id: BufferId, buffer: &BufferDecl, axis: Axis, width: u64, dtypes: &[DType]) {
        self.fits_entry(id, None);
        if !dtypes.contains(&buffer.dtype) {
            let allowed = dtypes.iter().map(DType::to_string).collect::<Vec<_>>().join(" or ");
            self.fail(PlanErrorKind::BadOperand, format!("{role:?} {id} {} is {}, allowed is {allowed}", buffer.label, buffer.dtype));
        }
        let rows = match axis {
            Axis::Tokens | Axis::Any => self.bindings.tokens,
            Axis::Rows => self.bindings.rows,
        };
        let needed = u64::from(rows).saturating_mul(width);
        let found = buffer.elements.eval(self.bindings).map_or(0, u64::from);
        if found < needed {
            self.fail(
                PlanErrorKind::BadOperand,
                format!("{role:?} {id} {} has {found} elements, {rows} rows of {width} need {needed}", buffer.label),
            );
        }
    }

    fn weight(&mut self, role: Role, id: WeightId, dtype: DType, fits: impl Fn(&WeightDecl) -> bool, allowed: impl Fn() -> String) {
        let Some(weight) = self.raw.weights.get(id.index()) else { return };
        if weight.dtype != dtype || !fits(weight) {
            let found = format!("{}{:?}", weight.dtype, weight.shape);
            self.fail(PlanErrorKind::BadOperand, format!("{role:?} {id} {} is {found}, allowed is {dtype}{}", weight.name, allowed()));
        }
    }

    /// A buffer that a step writes is not another operand of it, but where the contract says so.
    fn aliases(&mut self, op: &Op, operands: &[Operand]) {
        let buffers = || {
            operands.iter().filter_map(|operand| match operand.value {
                Value::Buffer(id) => Some((operand.role, id)),
                _ => None,
            })
        };
        for (index, (role, id)) in buffers().enumerate() {
            for (other, _) in buffers().skip(index + 1).filter(|(_, other)| *other == id) {
                let allowed = match (role, other) {
                    (Role::Out, other) => roles::may_alias_out(op, other),
                    (role, Role::Out) => roles::may_alias_out(op, role),
                    _ => false,
                };
                if !allowed {
                    self.fail(PlanErrorKind::BadOperand, format!("{} has {role:?} and {other:?} in one buffer {id}", op.name()));
                }
            }
        }
    }

    fn copy(&mut self, from: BufferId, to: BufferId, bytes: Extent) {
        if from == to {
            self.fail(PlanErrorKind::BadCopy, format!("copies {from} onto itself"));
        }
        let bytes = bytes.eval(self.bindings).map_or(u64::MAX, u64::from);
        for id in [from, to] {
            match self.raw.buffers.get(id.index()) {
                None => {
                    let count = self.raw.buffers.len();
                    self.fail(PlanErrorKind::MissingBuffer, format!("copies {id}, the plan has {count} buffers"));
                }
                Some(buffer) if bytes > buffer.size_bytes => {
                    self.fail(PlanErrorKind::BadCopy, format!("copies {bytes} bytes, {id} {} has {}", buffer.label, buffer.size_bytes));
                }
                Some(_) => {}
            }
        }
    }
}
