//! Live intervals of registers: backward dataflow over basic blocks.

use ptx::op::{Op, Operand, RegId};
use ptx::slots::Role;
use ptx::{Class, KernelIr};

/// Positions between which a register may hold a value that is read later: instruction `i` reads at `2i` and writes at
/// `2i + 1`. Inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interval {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Interval {
    fn include(slot: &mut Option<Interval>, at: u32) {
        match slot {
            Some(i) => {
                i.start = i.start.min(at);
                i.end = i.end.max(at);
            }
            None => *slot = Some(Interval { start: at, end: at }),
        }
    }
}

struct Block {
    first: usize,
    /// One past the last instruction.
    end: usize,
    successors: Vec<usize>,
    /// Read before any write in the block, and written in it.
    uses: Bits,
    defs: Bits,
    live_in: Bits,
    live_out: Bits,
}

#[derive(Clone, PartialEq, Eq)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(n: usize) -> Bits {
        Bits(vec![0; n.div_ceil(64)])
    }
    fn get(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }
    fn set(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }
    fn ones(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(w, bits)| {
            let mut bits = *bits;
            std::iter::from_fn(move || {
                (bits != 0).then(|| {
                    let b = bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    w * 64 + b
                })
            })
        })
    }
}

/// Interval of every register, indexed by class and number; `None` for registers that nothing mentions.
pub(super) fn intervals(ir: &KernelIr, labels: &[usize]) -> [Vec<Option<Interval>>; 4] {
    let mut base = [0usize; 4];
    let mut total = 0;
    for (class, n) in ir.registers.iter().enumerate() {
        base[class] = total;
        total += *n as usize;
    }
    let flat = |reg: RegId| base[reg.class as usize] + reg.index as usize;

    let mut blocks = basic_blocks(ir, labels, total);
    for block in &mut blocks {
        for inst in &ir.insts[block.first..block.end] {
            // Sources first: an instruction may read the register that it writes.
            inst.op.slots(|role, _, operand| {
                if let (Role::Use | Role::DefUse, Operand::Reg(reg)) = (role, operand)
                    && !block.defs.get(flat(reg))
                {
                    block.uses.set(flat(reg));
                }
            });
            inst.op.slots(|role, _, operand| {
                if let (Role::Def | Role::DefUse, Operand::Reg(reg)) = (role, operand) {
                    block.defs.set(flat(reg));
                }
            });
        }
    }
    solve(&mut blocks);

    let mut flat_intervals: Vec<Option<Interval>> = vec![None; total];
    for block in &blocks {
        for reg in block.live_in.ones() {
            Interval::include(&mut flat_intervals[reg], 2 * block.first as u32);
        }
        for reg in block.live_out.ones() {
            Interval::include(&mut flat_intervals[reg], 2 * block.end as u32 - 1);
        }
    }
    let last = 2 * ir.insts.len() as u32;
    for (i, inst) in ir.insts.iter().enumerate() {
        // Accumulators and fragments are used between the MMA and its wait, which the text does not show.
        let pinned = matches!(inst.op, Op::Wgmma { .. });
        inst.op.slots(|role, class, operand| {
            let Operand::Reg(reg) = operand else { return };
            let slot = &mut flat_intervals[flat(reg)];
            if role != Role::Def {
                Interval::include(slot, 2 * i as u32);
            }
            if role != Role::Use {
                Interval::include(slot, 2 * i as u32 + 1);
            }
            if pinned && class == Class::B32 {
                *slot = Some(Interval { start: 0, end: last });
            }
        });
    }
    std::array::from_fn(|class| flat_intervals[base[class]..base[class] + ir.registers[class] as usize].to_vec())
}

fn basic_blocks(ir: &KernelIr, labels: &[usize], registers: usize) -> Vec<Block> {
    let n = ir.insts.len();
    let mut starts = vec![false; n + 1];
    starts[0] = true;
    for (i, inst) in ir.insts.iter().enumerate() {
        match inst.op {
            Op::Label { .. } => starts[i] = true,
            Op::Bra { .. } | Op::Exit | Op::Trap => starts[i + 1] = true,
            _ => {}
        }
    }
    let firsts: Vec<usize> = (0..n).filter(|i| starts[*i]).collect();
    let mut block_at = vec![0usize; n];
    for (b, first) in firsts.iter().enumerate() {
        block_at[*first] = b;
    }
    firsts
        .iter()
        .enumerate()
        .map(|(b, &first)| {
            let end = firsts.get(b + 1).copied().unwrap_or(n);
            let next = (end < n).then_some(b + 1);
            let successors = match &ir.insts[end - 1].op {
                Op::Bra { target, cond } => {
                    let taken = block_at[labels[target.0 as usize]];
                    let mut s = vec![taken];
                    s.extend(cond.and(next));
                    s
                }
                Op::Exit | Op::Trap => Vec::new(),
                _ => next.into_iter().collect(),
            };
            Block {
                first,
                end,
                successors,
                uses: Bits::new(registers),
                defs: Bits::new(registers),
                live_in: Bits::new(registers),
                live_out: Bits::new(registers),
            }
        })
        .collect()
}

fn solve(blocks: &mut [Block]) {
    loop {
        let mut changed = false;
        for b in (0..blocks.len()).rev() {
            let mut out = blocks[b].live_out.clone();
            for s in blocks[b].successors.clone() {
                for (o, i) in out.0.iter_mut().zip(&blocks[s].live_in.0) {
                    *o |= i;
                }
            }
            let block = &mut blocks[b];
            let live_in = Bits((0..out.0.len()).map(|w| block.uses.0[w] | (out.0[w] & !block.defs.0[w])).collect());
            if live_in != block.live_in || out != block.live_out {
                block.live_in = live_in;
                block.live_out = out;
                changed = true;
            }
        }
        if !changed {
            return;
        }
    }
}
