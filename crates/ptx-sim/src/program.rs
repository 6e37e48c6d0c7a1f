//! A kernel in executable form: branch targets are instruction positions, registers are slots of a register file that
//! values share when they are never live together.
//!
//! Sharing is exact per thread (liveness over the control-flow graph), so reading a register that nothing wrote is
//! still found: along the path that leaves it unwritten the register is live from the start, hence shares with nobody.

mod liveness;
mod rewrite;

use std::collections::BTreeMap;
use std::sync::Arc;

use ptx::op::{LabelId, Op, Operand, RegId};
use ptx::{Class, KernelIr};

/// An executable kernel.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) ir: Arc<KernelIr>,
    /// The kernel's instructions; labels are positions in `ops`, register numbers are slots.
    pub(crate) ops: Vec<Op>,
    /// Slots per class.
    pub(crate) slots: [u32; 4],
}

impl Program {
    /// Decodes `ir`, which its builder has verified.
    pub(crate) fn new(ir: &Arc<KernelIr>) -> Program {
        let at = ir.label_positions();
        let resolve = |label: LabelId| LabelId(at[label.0 as usize] as u32);
        let intervals = liveness::intervals(ir, &at);
        let (assignment, slots) = assign(&intervals);
        let ops = ir
            .insts
            .iter()
            .map(|inst| {
                rewrite::rewrite(
                    &inst.op,
                    |reg| RegId { class: reg.class, index: assignment[reg.class as usize][reg.index as usize] },
                    resolve,
                )
            })
            .collect();
        Program { ir: ir.clone(), ops, slots }
    }

    /// Rust line of the instruction at `pc`. Instructions that the builder's own helpers emit (the test of a wait loop,
    /// the end of the kernel) go by the line before them.
    pub(crate) fn location(&self, pc: u32) -> String {
        let at = (pc as usize).min(self.ir.insts.len() - 1);
        let of_kernel = |i: &usize| !is_builder_file(self.ir.insts[*i].loc.file());
        let at = (0..=at).rev().find(of_kernel).unwrap_or(at);
        self.ir.insts[at].loc.to_string()
    }

    /// The register of the kernel that slot `slot` stands for at `pc`, for messages.
    pub(crate) fn register_name(&self, pc: u32, slot: RegId) -> String {
        let mut mapped = Vec::new();
        self.ops[pc as usize].slots(|_, _, operand| mapped.push(operand));
        let mut named = Vec::new();
        self.ir.insts[pc as usize].op.slots(|_, _, operand| named.push(operand));
        let found = mapped.iter().zip(&named).find(|(m, _)| **m == Operand::Reg(slot)).map(|(_, n)| *n);
        match found {
            Some(Operand::Reg(reg)) => format!("%{}{}", reg.class.spelling().1, reg.index),
            _ => format!("%{}?", slot.class.spelling().1),
        }
    }
}

/// Whether a source file belongs to the builder crate.
fn is_builder_file(file: &str) -> bool {
    let parts: Vec<&str> = file.split(['/', '\\']).collect();
    parts.windows(2).any(|w| w == ["ptx", "src"])
}

/// Linear scan: each register gets the lowest slot of its class that is free over its whole interval.
fn assign(intervals: &[Vec<Option<liveness::Interval>>; 4]) -> ([Vec<u32>; 4], [u32; 4]) {
    let mut slots = [0u32; 4];
    let assignment = std::array::from_fn(|class| {
        let mut order: Vec<(liveness::Interval, usize)> =
            intervals[class].iter().enumerate().filter_map(|(reg, i)| i.map(|i| (i, reg))).collect();
        order.sort_unstable_by_key(|(i, reg)| (i.start, i.end, *reg));
        let mut assigned = vec![0u32; intervals[class].len()];
        let mut busy: BTreeMap<(u32, u32), ()> = BTreeMap::new(); // (end, slot)
        let mut free: Vec<u32> = Vec::new();
        for (interval, reg) in order {
            while let Some((&(end, slot), ())) = busy.first_key_value() {
                if end >= interval.start {
                    break;
                }
                busy.pop_first();
                free.push(slot);
            }
            let slot = free.pop().unwrap_or_else(|| {
                slots[class] += 1;
                slots[class] - 1
            });
            busy.insert((interval.end, slot), ());
            assigned[reg] = slot;
        }
        assigned
    });
    debug_assert_eq!(Class::ALL.len(), slots.len());
    (assignment, slots)
}
