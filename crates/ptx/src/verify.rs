//! What is checked of every kernel before it is printed or run. Each item has a failing test.
//!
//! - registers exist and have the class that the instruction needs there;
//! - packed 16-bit arithmetic and conversions of narrow floats take no constants;
//! - a register is written somewhere above its first use in the text;
//! - every branch target exists, once, and every kernel ends;
//! - parameters exist, have the class they are read with, and fit the parameter block;
//! - vector accesses have 1, 2 or 4 elements and at most 16 bytes; constant shared addresses are aligned; `ldmatrix` loads
//!   1, 2 or 4 matrices;
//! - ordering semantics fit the access (no acquire store, no release load, no cached ordered load, no weak atomic);
//! - multicast stores have one element of 4 or 8 bytes, or pairs of BF16;
//! - atomics exist for their operation and type, and `exch` and `cas` return the old value;
//! - the shared layout and the thread count fit the target;
//! - clusters have 1 to 16 CTAs; cluster instructions are in a kernel of clusters, constant ranks below their size,
//!   waits at the scope of the CTA or the cluster; asynchronous stores have elements of 4 or 8 bytes;
//! - named barriers use ids below 16 and multiples of 32 threads; mbarriers count 1 to 2^20 - 1 arrivals and
//!   expect fewer than 2^20 bytes; constant parities are 0 or 1;
//! - constant bounds of a bit field are at most 255;
//! - warpgroup MMAs have n = 8..=256 in steps of 8, n / 2 accumulators, at least one warpgroup, and `sm_90a`;
//! - `setmaxnreg` counts are multiples of 8 in 24..=256;
//! - tensor copies have 1 to 5 coordinates; constant bulk sizes are positive multiples of 16;
//! - dependent launches are allowed only in a kernel that waits for its own dependencies on the way.
//!
//! Not checked here (the simulator's work): bounds, races, divergence, uninitialised reads along some path.

use std::panic::Location;

use crate::args::{PARAM_BYTES_MAX, PARAMS_MAX, ParamKind};
use crate::kernel::{KernelIr, Target};
use crate::op::{Atomic, Cvt, Op, Operand, RegId, Scope, Sem, Space, Special};
use crate::slots::Role;
use crate::ty::{Class, Ty};

/// Most CTAs of a cluster.
pub const CLUSTER_MAX: u32 = 16;

/// A rule that a kernel breaks, and the Rust line that emitted the instruction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {kernel}: {rule}{}", .at.as_ref().map_or(String::new(), |at| format!(" ({at})")))]
pub struct VerifyError {
    /// Kernel name.
    pub kernel: String,
    /// The violated rule, with numbers.
    pub rule: String,
    /// `file:line:column`, if one instruction is at fault.
    pub at: Option<String>,
}

/// Checks every rule of the module's list.
///
/// # Errors
/// The first violation in text order.
pub fn verify(ir: &KernelIr) -> Result<(), VerifyError> {
    let v = Verifier { ir };
    v.kernel()?;
    let mut defined: [Vec<bool>; 4] = std::array::from_fn(|i| vec![false; ir.registers[i] as usize]);
    let mut labels = vec![0u32; ir.labels as usize];
    for inst in &ir.insts {
        if let Op::Label { label } = inst.op {
            match labels.get_mut(label.0 as usize) {
                Some(n) => *n += 1,
                None => return v.fail(inst.loc, format!("label {} does not exist", label.0)),
            }
        }
    }
    for inst in &ir.insts {
        v.registers(inst.loc, &inst.op, &mut defined)?;
        v.rules(inst.loc, &inst.op, &labels)?;
    }
    v.launch_order()
}

struct Verifier<'a> {
    ir: &'a KernelIr,
}

type Check = Result<(), VerifyError>;

impl Verifier<'_> {
    fn fail(&self, loc: &Location<'_>, rule: String) -> Check {
        Err(VerifyError { kernel: self.ir.name.clone(), rule, at: Some(loc.to_string()) })
    }

    fn fail_kernel(&self, rule: String) -> Check {
        Err(VerifyError { kernel: self.ir.name.clone(), rule, at: None })
    }

    fn kernel(&self) -> Check {
        let ir = self.ir;
        if ir.name.is_empty() || !ir.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return self.fail_kernel(format!("entry name {:?} is not an identifier", ir.name));
        }
        if ir.param_bytes() as usize > PARAM_BYTES_MAX || ir.params.len() > PARAMS_MAX {
            return self.fail_kernel(format!(
                "{} parameters of {} bytes, at most {PARAMS_MAX} of {PARAM_BYTES_MAX}",
                ir.params.len(),
                ir.param_bytes()
            ));
        }
        let max = ir.target.shared_bytes_max();
        if ir.shared_bytes > max {
            return self.fail_kernel(format!("shared layout of {} bytes, {} allows {max}", ir.shared_bytes, ir.target));
        }
        let threads = ir.bounds.threads;
        if threads == 0 || threads > 1024 || !threads.is_multiple_of(32) {
            return self.fail_kernel(format!("{threads} threads per CTA, a multiple of 32 up to 1024 is needed"));
        }
        if ir.bounds.min_ctas == 0 {
            return self.fail_kernel("at least one CTA must fit a multiprocessor".into());
        }
        if let Some(n) = ir.bounds.cluster
            && !(1..=CLUSTER_MAX).contains(&n)
        {
            return self.fail_kernel(format!("clusters of {n} CTAs, 1..={CLUSTER_MAX} are possible"));
        }
        if !matches!(ir.insts.last().map(|i| &i.op), Some(Op::Exit | Op::Trap)) {
            return self.fail_kernel("the kernel runs past its last instruction".into());
        }
        Ok(())
    }

    fn registers(&self, loc: &Location<'_>, op: &Op, defined: &mut [Vec<bool>; 4]) -> Check {
        let mut problem = None;
        let mut written: Vec<RegId> = Vec::new();
        op.slots(|role, class, operand| {
            let Operand::Reg(reg) = operand else {
                return;
            };
            if problem.is_some() {
                return;
            }
            if reg.class != class {
                problem = Some(format!("{op:?} needs a {class:?} register, got {reg:?}"));
                return;
            }
            match (role, defined[reg.class as usize].get(reg.index as usize)) {
                (_, None) => problem = Some(format!("{reg:?} belongs to another kernel")),
                (Role::Use | Role::DefUse, Some(false)) => {
                    problem = Some(format!("{op:?} reads {reg:?} before anything writes it"));
                }
                (Role::Def | Role::DefUse, _) => written.push(reg),
                (Role::Use, _) => {}
            }
        });
        for reg in written {
            defined[reg.class as usize][reg.index as usize] = true;
        }
        problem.map_or(Ok(()), |rule| self.fail(loc, rule))
    }

    fn rules(&self, loc: &Location<'_>, op: &Op, labels: &[u32]) -> Check {
        match op {
            Op::Bra { target, .. } if labels.get(target.0 as usize) != Some(&1) => self.fail(
                loc,
                format!("branch target {} is placed {} times", target.0, labels.get(target.0 as usize).unwrap_or(&0)),
            ),
            Op::Label { label } if labels[label.0 as usize] != 1 => {
                self.fail(loc, format!("label {} is placed {} times", label.0, labels[label.0 as usize]))
            }
            Op::LdParam { dst, param } => match self.ir.params.get(*param as usize).map(|p| p.kind) {
                Some(ParamKind::B32) if dst.class == Class::B32 => Ok(()),
                Some(ParamKind::B64) if dst.class == Class::B64 => Ok(()),
                kind => self.fail(loc, format!("parameter {param} ({kind:?}) is read as {:?}", dst.class)),
            },
            Op::ParamAddress { param, .. } => match self.ir.params.get(*param as usize).map(|p| p.kind) {
                Some(ParamKind::TensorMap) => Ok(()),
                kind => self.fail(loc, format!("parameter {param} ({kind:?}) is used as a tensor map")),
            },
            Op::Ld { space, ty, sem, cache, dsts, addr } => {
                if *space == Space::Cluster {
                    self.in_clusters(loc)?;
                }
                if matches!(sem, Sem::Release(_) | Sem::AcqRel(_)) {
                    return self.fail(loc, format!("a load cannot be {sem:?}"));
                }
                if *sem != Sem::Weak && (cache.nc || cache.no_allocate || cache.policy.is_some()) {
                    return self.fail(loc, format!("a {sem:?} load cannot have cache hints"));
                }
                if *space != Space::Global && (cache.nc || cache.no_allocate || cache.policy.is_some()) {
                    return self.fail(loc, "a shared load cannot have cache hints".into());
                }
                self.vector(loc, dsts.len(), ty.bytes(), addr, *space)
            }
            Op::St { space, ty, sem, policy, srcs, addr } => {
                if *space == Space::Cluster {
                    self.in_clusters(loc)?;
                }
                if matches!(sem, Sem::Acquire(_) | Sem::AcqRel(_)) {
                    return self.fail(loc, format!("a store cannot be {sem:?}"));
                }
                if policy.is_some() && (*sem != Sem::Weak || *space != Space::Global) {
                    return self.fail(loc, "only a weak global store can have a cache policy".into());
                }
                self.vector(loc, srcs.len(), ty.bytes(), addr, *space)
            }
            Op::MultimemSt { ty, srcs, addr } => {
                if ty.bytes() < 4 || (srcs.len() > 1 && *ty != Ty::Bf16x2) {
                    return self.fail(loc, format!("a multicast store of {} x {ty:?} does not exist", srcs.len()));
                }
                self.vector(loc, srcs.len(), ty.bytes(), addr, Space::Global)
            }
            Op::Atom { space: Space::Cluster, .. } => {
                self.fail(loc, "atomics on shared memory of the cluster are not offered".into())
            }
            Op::Atom { ty, sem, op, dst, b, .. } => {
                if matches!(sem, Sem::Weak | Sem::Volatile) {
                    return self.fail(loc, format!("an atomic cannot be {sem:?}"));
                }
                if (*op == Atomic::Cas) != b.is_some() {
                    let count = if b.is_some() { "too many" } else { "too few" };
                    return self.fail(loc, format!("{op:?} has {count} operands"));
                }
                if matches!(op, Atomic::Exch | Atomic::Cas) && dst.is_none() {
                    return self.fail(loc, format!("{op:?} without its old value does not exist"));
                }
                let exists = match op {
                    Atomic::Add => ty.is_integer() || *ty == Ty::F32,
                    Atomic::Min | Atomic::Max => ty.is_integer(),
                    // On the bits, whatever they mean.
                    Atomic::And | Atomic::Or | Atomic::Xor | Atomic::Exch | Atomic::Cas => true,
                };
                if ty.bytes() < 4 || !exists {
                    return self.fail(loc, format!("atomic {op:?} on {ty:?} does not exist"));
                }
                Ok(())
            }
            Op::Bf16Bin { .. }
            | Op::Bf16Fma { .. }
            | Op::F16x2Mul { .. }
            | Op::Bin { ty: Ty::U16x2, .. }
            | Op::Cvt { op: Cvt::Bf16ToF32 | Cvt::E4m3x2ToF16x2 | Cvt::F16x2ToE4m3x2, .. } => {
                let mut constant = false;
                op.slots(|_, _, operand| constant |= operand.reg().is_none());
                if constant { self.fail(loc, format!("{op:?} takes no constants")) } else { Ok(()) }
            }
            Op::Special { reg: Special::ClusterCtarank | Special::ClusterNctarank, .. }
            | Op::ClusterArrive { .. }
            | Op::ClusterWait => self.in_clusters(loc).map(drop),
            Op::CpAsync { dst, .. } => self.shared_alignment(loc, 16, dst),
            Op::LdMatrix { dsts, addr, .. } => match dsts.len() {
                1 | 2 | 4 => self.shared_alignment(loc, 16, addr),
                n => self.fail(loc, format!("ldmatrix of {n} matrices, 1, 2 or 4 are possible")),
            },
            Op::Mapa { rank, .. } => {
                let size = self.in_clusters(loc)?;
                match rank {
                    Operand::Imm(rank) if *rank >= size.into() => {
                        self.fail(loc, format!("rank {rank} in clusters of {size} CTAs"))
                    }
                    _ => Ok(()),
                }
            }
            Op::StAsync { ty, srcs, addr, .. } => {
                self.in_clusters(loc)?;
                if ty.bytes() < 4 {
                    return self.fail(loc, format!("an asynchronous store of {ty:?}, elements have 4 or 8 bytes"));
                }
                self.vector(loc, srcs.len(), ty.bytes(), addr, Space::Cluster)
            }
            Op::MbarTryWait { scope, .. } if *scope > Scope::Cluster => {
                self.fail(loc, format!("an mbarrier wait at scope {scope:?}, which is more than a cluster"))
            }
            Op::MbarTryWait { scope: Scope::Cluster, .. } if self.ir.bounds.cluster.is_none() => {
                self.in_clusters(loc).map(drop)
            }
            Op::BarSync { id, threads } => self.named_barrier(loc, *id, *threads),
            Op::BarArrive { id, threads } => self.named_barrier(loc, *id, Some(*threads)),
            Op::TensorG2s { coords, .. } if coords.is_empty() || coords.len() > 5 => {
                self.fail(loc, format!("a tensor copy with {} coordinates", coords.len()))
            }
            Op::BulkG2s { bytes: Operand::Imm(n), .. }
            | Op::BulkS2g { bytes: Operand::Imm(n), .. }
            | Op::PrefetchL2 { bytes: Operand::Imm(n), .. }
                if *n == 0 || !n.is_multiple_of(16) =>
            {
                self.fail(loc, format!("a bulk copy of {n} bytes, a positive multiple of 16 is needed"))
            }
            Op::Wgmma { n, acc, .. } => {
                if self.ir.target != Target::Sm90a {
                    return self.fail(loc, format!("warpgroup MMA does not exist on {}", self.ir.target));
                }
                if *n == 0 || *n > 256 || !n.is_multiple_of(8) || acc.len() != *n as usize / 2 {
                    return self.fail(loc, format!("warpgroup MMA with n = {n} and {} accumulators", acc.len()));
                }
                self.whole_warpgroups(loc)
            }
            Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {
                if self.ir.target != Target::Sm90a {
                    return self.fail(loc, format!("warpgroup MMA does not exist on {}", self.ir.target));
                }
                self.whole_warpgroups(loc)
            }
            Op::SetMaxNReg { count, .. } => {
                if !count.is_multiple_of(8) || !(24..=256).contains(count) {
                    return self.fail(loc, format!("setmaxnreg {count}, a multiple of 8 in 24..=256 is needed"));
                }
                self.whole_warpgroups(loc)
            }
            Op::MbarInit { count, .. } | Op::MbarArrive { count, .. } if *count == 0 || *count >= 1 << 20 => {
                self.fail(loc, format!("mbarrier count {count} is not in 1..2^20"))
            }
            Op::MbarTryWait { parity: Operand::Imm(n), .. } | Op::MbarTestWait { parity: Operand::Imm(n), .. }
                if *n > 1 =>
            {
                self.fail(loc, format!("parity {n} is neither 0 nor 1"))
            }
            Op::Bfe { pos, len, .. } => {
                let far = |o: &Operand| matches!(o, Operand::Imm(n) if *n > 255);
                if far(pos) || far(len) {
                    return self
                        .fail(loc, format!("a bit field of {len:?} bits from {pos:?}, at most 255 are possible"));
                }
                Ok(())
            }
            Op::MbarArriveExpectTx { bytes: Operand::Imm(n), .. } | Op::MbarExpectTx { bytes: Operand::Imm(n), .. }
                if *n >= 1 << 20 =>
            {
                self.fail(loc, format!("an mbarrier expects {n} bytes, fewer than 2^20 are possible"))
            }
            _ => Ok(()),
        }
    }

    /// The cluster size of the kernel, which must have one.
    fn in_clusters(&self, loc: &Location<'_>) -> Result<u32, VerifyError> {
        match self.ir.bounds.cluster {
            Some(n) => Ok(n),
            None => Err(VerifyError {
                kernel: self.ir.name.clone(),
                rule: "a cluster instruction in a kernel without clusters".into(),
                at: Some(loc.to_string()),
            }),
        }
    }

    fn vector(&self, loc: &Location<'_>, n: usize, bytes: u32, addr: &crate::op::Address, space: Space) -> Check {
        let size = n as u32 * bytes;
        if !matches!(n, 1 | 2 | 4) || size > 16 {
            return self.fail(loc, format!("a vector access of {n} x {bytes} bytes"));
        }
        if space == Space::Shared { self.shared_alignment(loc, size, addr) } else { Ok(()) }
    }

    /// The shared base is 1024-byte aligned, so a constant offset from it must itself be aligned.
    fn shared_alignment(&self, loc: &Location<'_>, size: u32, addr: &crate::op::Address) -> Check {
        if self.is_shared_base(addr.base) && !(addr.offset as u32).is_multiple_of(size) {
            return self.fail(loc, format!("a {size}-byte access at shared offset {}", addr.offset));
        }
        Ok(())
    }

    fn is_shared_base(&self, base: Operand) -> bool {
        matches!((&self.ir.insts[0].op, base), (Op::SharedBase { dst }, Operand::Reg(r)) if *dst == r)
    }

    fn named_barrier(&self, loc: &Location<'_>, id: Operand, threads: Option<u32>) -> Check {
        if let Operand::Imm(id) = id
            && id >= 16
        {
            return self.fail(loc, format!("barrier {id}, ids are below 16"));
        }
        match threads {
            Some(n) if n == 0 || !n.is_multiple_of(32) || n > self.ir.bounds.threads => self.fail(
                loc,
                format!("a barrier of {n} threads in a CTA of {}, a multiple of 32 is needed", self.ir.bounds.threads),
            ),
            _ => Ok(()),
        }
    }

    fn whole_warpgroups(&self, loc: &Location<'_>) -> Check {
        if self.ir.bounds.threads >= 128 {
            Ok(())
        } else {
            self.fail(loc, format!("a CTA of {} threads has no warpgroup of 128", self.ir.bounds.threads))
        }
    }

    /// A kernel that lets its dependents start must itself wait, or they may overtake its own predecessors.
    fn launch_order(&self) -> Check {
        let launches = self.ir.insts.iter().find(|i| i.op == Op::GridDepLaunch);
        match launches {
            Some(inst) if !self.ir.waits_for_dependencies() => self
                .fail(inst.loc, "dependents are launched by a kernel that never waits for its own dependencies".into()),
            _ => Ok(()),
        }
    }
}
