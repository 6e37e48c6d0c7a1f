//! Executes one warp: the choice of the group of lanes that runs, control flow, and the dispatch of instructions to the
//! file of their family.

mod alu;
mod async_ops;
mod cluster;
mod convert;
mod memory;
mod mma;
mod multicast;
mod sync;
mod thread_copies;
mod warp_ops;

pub(crate) use async_ops::{check_exit, complete_copy, complete_stores};

use ptx::Class;
use ptx::Scope;
use ptx::Special;
use ptx::op::{Op, Operand, RegId};

use crate::block::{Cta, Issuer};
use crate::cluster::{Cluster, Peers};
use crate::program::Program;
use crate::race::Clock;
use crate::random::Random;
use crate::registers::{LANES, Lanes};
use crate::trap::{Stop, TrapKind};
use crate::warp::{Group, Wait, Warp};
use crate::world::{BlockRef, LaunchInfo, World};

/// Address window of by-value kernel parameters (tensor maps): below every device's.
pub(crate) const PARAM_BASE: u64 = 1 << 32;
/// Backward branches that a group takes before groups of its warp that wait for it get a turn.
const SPINS_MAX: u32 = 1024;

/// Result of most instructions.
type Step = Result<(), Box<Stop>>;

/// How control leaves an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// To the next one.
    Next,
    /// To the next one; the instruction can be observed by, or observe, other threads.
    Visible,
    /// Nowhere: it goes on after others have run.
    Again,
    /// Nowhere: it is tried again once the wait is over.
    Retry(Wait),
    /// To the next one once the wait is over.
    Then(Wait),
    /// The lanes end.
    Exit,
}

/// Why a warp's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TurnEnd {
    /// It could go on.
    Quantum,
    /// It looks for something that has not happened.
    Poll,
    /// No group can run.
    Blocked,
    /// Every lane has ended.
    Finished,
}

/// One warp about to execute.
pub(crate) struct Exec<'a> {
    pub(crate) program: &'a Program,
    pub(crate) launch: &'a LaunchInfo,
    pub(crate) cta: &'a mut Cta,
    /// The other CTAs of its cluster, and what they share.
    pub(crate) peers: Peers<'a>,
    pub(crate) cluster: &'a mut Cluster,
    pub(crate) warp: &'a mut Warp,
    pub(crate) clock: &'a mut Clock,
    pub(crate) world: &'a mut World,
    pub(crate) here: BlockRef,
    /// Choices of a random schedule; `None` for a fixed order.
    pub(crate) random: Option<&'a mut Random>,
    /// Instructions executed.
    pub(crate) executed: u32,
    /// Program counter and active lanes of the instruction.
    pub(crate) pc: u32,
    pub(crate) mask: u32,
}

impl Exec<'_> {
    /// Executes up to `quantum` instructions.
    pub(crate) fn turn(&mut self, quantum: u32) -> Result<TurnEnd, Box<Stop>> {
        if self.warp.current.mask == 0 && !self.choose()? {
            return self.blocked();
        }
        let program = self.program;
        while self.executed < quantum {
            self.pc = self.warp.current.pc;
            self.mask = self.warp.current.mask;
            let op = &program.ops[self.pc as usize];
            match op {
                Op::Label { .. } | Op::NoUnroll => {
                    self.advance();
                    continue;
                }
                Op::Bra { target, cond } => {
                    self.executed += 1;
                    if self.branch(target.0, *cond)? {
                        return Ok(TurnEnd::Poll);
                    }
                    continue;
                }
                _ => {}
            }
            self.executed += 1;
            match self.step(op)? {
                Flow::Next => self.advance(),
                Flow::Visible => {
                    self.advance();
                    if let Some(random) = &mut self.random
                        && random.one_in(2)
                    {
                        return Ok(TurnEnd::Quantum);
                    }
                }
                Flow::Again => return Ok(TurnEnd::Quantum),
                Flow::Retry(wait) => {
                    self.warp.park(wait);
                    if !self.choose()? {
                        return self.blocked();
                    }
                }
                Flow::Then(wait) => {
                    self.warp.current.pc += 1;
                    self.warp.park(wait);
                    if !self.choose()? {
                        return self.blocked();
                    }
                }
                Flow::Exit => {
                    self.warp.exited |= self.mask;
                    self.warp.current.mask = 0;
                    self.world.effects += 1;
                    self.check_abandoned()?;
                    if self.warp.finished() {
                        return Ok(TurnEnd::Finished);
                    }
                    if !self.choose()? {
                        return self.blocked();
                    }
                }
            }
        }
        Ok(TurnEnd::Quantum)
    }

    /// Moves the current group to the next instruction.
    #[inline(always)]
    fn advance(&mut self) {
        self.warp.current.pc += 1;
        if !self.warp.others.is_empty() {
            self.warp.merge();
        }
    }

    /// Takes a branch; whether the turn ends because the group polls.
    #[inline]
    fn branch(&mut self, target: u32, cond: Option<(RegId, bool)>) -> Result<bool, Box<Stop>> {
        let mask = self.mask;
        let taken = match cond {
            None => mask,
            Some((p, flag)) => {
                let p = self.r_pred(p)?;
                mask & if flag { p } else { !p }
            }
        };
        if taken == 0 {
            self.advance();
            return Ok(false);
        }
        let backward = target <= self.pc;
        if taken == mask {
            self.warp.current.pc = target;
        } else {
            // The lower path runs first, so that both meet at the end of the higher one.
            let (mut first, mut second) = ((target, taken), (self.pc + 1, mask & !taken));
            if second.0 < first.0 {
                std::mem::swap(&mut first, &mut second);
            }
            (self.warp.current.pc, self.warp.current.mask) = second;
            self.warp.park(Wait::None);
            (self.warp.current.pc, self.warp.current.mask) = first;
        }
        if !self.warp.others.is_empty() {
            self.warp.merge();
        }
        if !backward {
            // Groups that stand before the target catch up first.
            let behind = |g: &Group| g.pc < self.warp.current.pc && self.is_ready(g.wait);
            if self.warp.others.iter().any(behind) {
                self.warp.park(Wait::None);
                self.choose()?;
            }
            return Ok(false);
        }
        let polled = std::mem::take(&mut self.warp.polled);
        self.warp.spins += 1;
        if !polled && (self.warp.spins < SPINS_MAX || self.warp.others.is_empty()) {
            return Ok(false);
        }
        if self.warp.others.iter().any(|g| self.is_ready(g.wait)) {
            // Whoever waits for this group, or is waited for by it, gets a turn: first come, first served.
            self.warp.park(Wait::None);
            let next = (0..self.warp.others.len()).find(|i| self.is_ready(self.warp.others[*i].wait));
            self.resume(next.expect("one is ready"));
        }
        Ok(polled)
    }

    /// Whether a group that waits for this can run.
    fn is_ready(&self, wait: Wait) -> bool {
        match wait {
            Wait::None => true,
            Wait::Converge { .. } => false,
            Wait::Barrier { id, generation } => self.cta.barriers[id as usize].generation != generation,
            Wait::Cluster { generation } => self.cluster.generation != generation,
            Wait::Event { seen } => self.cta.events != seen || self.warp.timed_out,
            Wait::Dependencies => self.launch.dependencies_done,
            Wait::Sleep { until_ps } => self.world.clock_ps >= until_ps,
        }
    }

    /// Makes the ready group with the lowest program counter current; whether there is one.
    fn choose(&mut self) -> Result<bool, Box<Stop>> {
        let best = (0..self.warp.others.len())
            .filter(|i| self.is_ready(self.warp.others[*i].wait))
            .min_by_key(|i| self.warp.others[*i].pc);
        match best {
            Some(i) => {
                self.resume(i);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Makes `others[i]` current, which has ended its wait.
    fn resume(&mut self, i: usize) {
        match self.warp.others[i].wait {
            Wait::Barrier { id, .. } => self.clock.acquire(&self.cta.barriers[id as usize].completed),
            Wait::Cluster { .. } => self.pass_cluster_barrier(),
            Wait::Dependencies => self.launch.pass_wait(self.clock),
            Wait::None | Wait::Converge { .. } | Wait::Event { .. } | Wait::Sleep { .. } => {}
        }
        self.warp.choose(i);
    }

    /// The turn's end when no group is ready; a fault if none ever will be by what the warp itself does.
    fn blocked(&self) -> Result<TurnEnd, Box<Stop>> {
        let stuck = self.warp.others.iter().all(|g| matches!(g.wait, Wait::Converge { .. }));
        if !stuck || self.warp.others.is_empty() {
            return Ok(TurnEnd::Blocked);
        }
        let first = self.warp.others.iter().min_by_key(|g| g.pc).expect("not empty");
        Err(self.divergence(first.pc, first.mask, "the others wait elsewhere"))
    }

    /// After lanes have ended: nobody may wait for them.
    fn check_abandoned(&self) -> Step {
        for group in &self.warp.others {
            if let Wait::Converge { required } = group.wait
                && required & self.warp.exited != 0
            {
                return Err(self.divergence(group.pc, group.mask, "lanes that it needs have ended"));
            }
        }
        Ok(())
    }

    /// The fault of lanes `mask` that stand alone at `pc`.
    fn divergence(&self, pc: u32, mask: u32, why: &str) -> Box<Stop> {
        let op = &self.program.ops[pc as usize];
        let kind = if warp_ops::is_aligned(op) { TrapKind::Divergent } else { TrapKind::Collective };
        let mut message = format!("only {} (mask {mask:#010x}) execute {}: {why}", lanes_text(mask), name(op));
        for g in self.warp.others.iter().filter(|g| g.pc != pc) {
            message += &format!(
                "; lanes {:#010x} are at {} ({})",
                g.mask,
                name(&self.program.ops[g.pc as usize]),
                self.program.location(g.pc)
            );
        }
        if self.warp.exited != 0 {
            message += &format!("; lanes {:#010x} have ended", self.warp.exited);
        }
        Stop::new(kind, message).at(pc)
    }

    /// Executes one instruction.
    #[inline]
    fn step(&mut self, op: &Op) -> Result<Flow, Box<Stop>> {
        match *op {
            Op::Bin { op, ty, dst, a, b } => self.bin(op, ty, dst, a, b)?,
            Op::Un { op, ty, dst, a } => self.un(op, ty, dst, a)?,
            Op::MulWide { ty, dst, a, b } => self.mul_wide(ty, dst, a, b)?,
            Op::Mad { ty, dst, a, b, c } => self.mad(ty, dst, a, b, c)?,
            Op::MadWide { ty, dst, a, b, c } => self.mad_wide(ty, dst, a, b, c)?,
            Op::Fma { dst, a, b, c } => self.fma(dst, a, b, c)?,
            Op::Div { mode, dst, a, b } => self.div(mode, dst, a, b)?,
            Op::Math { op, dst, a } => self.math(op, dst, a)?,
            Op::Setp { cmp, ty, dst, a, b } => self.setp(cmp, ty, dst, a, b)?,
            Op::Mov { .. }
            | Op::Pack { .. }
            | Op::Unpack { .. }
            | Op::Prmt { .. }
            | Op::Lop3 { .. }
            | Op::Bfe { .. }
            | Op::ShfL { .. }
            | Op::ShfR { .. }
            | Op::Selp { .. }
            | Op::PredLogic { .. }
            | Op::PredNot { .. }
            | Op::PredConst { .. } => self.alu(op)?,
            Op::Special { dst, reg } => self.special(dst, reg)?,
            Op::LdParam { dst, param } => self.ld_param(dst, param)?,
            Op::ParamAddress { dst, param } => {
                let offset = self.program.ir.params[param as usize].offset;
                self.w64(dst, &[PARAM_BASE + u64::from(offset); LANES])?;
            }
            Op::SharedBase { dst } => self.w32(dst, &[crate::shared::BASE; LANES])?,
            Op::Cvt { op, dst, a } => self.cvt(op, dst, a)?,
            Op::CvtPack { op, dst, hi, lo } => self.cvt_pack(op, dst, hi, lo)?,
            Op::Bf16Bin { op, dst, a, b } => self.bf16_bin(op, dst, a, b)?,
            Op::Bf16Fma { dst, a, b, c, relu } => self.bf16_fma(dst, a, b, c, relu)?,
            Op::F16x2Mul { dst, a, b } => self.f16x2_mul(dst, a, b)?,
            Op::Label { .. } | Op::NoUnroll | Op::Bra { .. } => unreachable!("`turn` handles control flow"),
            Op::Exit => return Ok(Flow::Exit),
            Op::Trap => {
                return Err(Stop::new(TrapKind::TrapInstruction, "trap instruction").lane(self.mask.trailing_zeros()));
            }
            Op::Ld { space, ty, sem, ref dsts, addr, cache: _ } => {
                self.ld(space, ty, sem, dsts, addr)?;
                return Ok(Flow::Visible);
            }
            Op::MultimemSt { ty, ref srcs, addr } => {
                self.multimem_st(ty, srcs, addr)?;
                return Ok(Flow::Visible);
            }
            Op::St { space, ty, sem, ref srcs, addr, policy: _ } => {
                let done = self.st(space, ty, sem, srcs, addr)?;
                return Ok(if done { Flow::Visible } else { Flow::Again });
            }
            Op::Atom { space, op, ty, sem, dst, addr, a, b } => {
                self.atom(space, op, ty, sem, dst, addr, a, b)?;
                return Ok(Flow::Visible);
            }
            Op::Fence { scope } | Op::FenceSc { scope } => {
                if scope == Scope::Sys {
                    self.deliver_released();
                }
                self.clock.fence(scope, self.mask);
                return Ok(Flow::Visible);
            }
            Op::FenceProxyAsync => {
                self.clock.fence_proxy_async(self.mask);
                return Ok(Flow::Visible);
            }
            Op::FenceMbarrierInit => return self.fence_mbarrier_init(),
            // The policy only has to be one that `createpolicy` made.
            Op::CreatePolicy { dst, .. } => self.w64(dst, &[0x12F0_0000_0000_0000; LANES])?,
            Op::PrefetchL2 { addr, bytes } => self.prefetch_l2(addr, bytes)?,
            Op::Shfl { mode, dst, src, lane, mask } => return self.shfl(mode, dst, src, lane, mask),
            Op::Vote { op, dst, p, mask } => return self.vote(op, dst, p, mask),
            Op::Ballot { dst, p, mask } => return self.ballot(dst, p, mask),
            Op::Redux { op, dst, src, mask } => return self.redux(op, dst, src, mask),
            Op::MatchAny { dst, src, mask } => return self.match_any(dst, src, mask),
            Op::ActiveMask { dst } => {
                let mask = self.mask;
                self.w32(dst, &[mask; LANES])?;
            }
            Op::Elect { dst } => return self.elect(dst),
            Op::BarWarp { mask } => return self.bar_warp(mask),
            Op::BarSync { id, threads } => return self.bar_sync(id, threads),
            Op::BarArrive { id, threads } => return self.bar_arrive(id, threads),
            Op::Mapa { dst, addr, rank } => self.mapa(dst, addr, rank)?,
            Op::StAsync { ty, ref srcs, addr, mbar } => return self.st_async(ty, srcs, addr, mbar),
            Op::ClusterArrive { release } => return self.cluster_arrive(release),
            Op::ClusterWait => return self.cluster_wait(),
            Op::MbarInit { addr, count } => return self.mbar_init(addr, count),
            Op::MbarInval { addr } => return self.mbar_inval(addr),
            Op::MbarArrive { addr, count } => return self.mbar_arrive(addr, count),
            Op::MbarArriveExpectTx { addr, bytes } => return self.mbar_arrive_expect_tx(addr, bytes),
            Op::MbarExpectTx { addr, bytes } => return self.mbar_expect_tx(addr, bytes),
            Op::MbarTryWait { dst, addr, parity, scope } => return self.mbar_wait(dst, addr, parity, scope, true),
            Op::MbarTestWait { dst, addr, parity } => {
                return self.mbar_wait(dst, addr, parity, Scope::Cta, false);
            }
            Op::TensorG2s { dst, map, ref coords, mbar, policy: _ } => return self.tensor_g2s(dst, map, coords, mbar),
            Op::BulkG2s { dst, src, bytes, mbar, policy: _ } => return self.bulk_g2s(dst, src, bytes, mbar),
            Op::BulkS2g { dst, src, bytes } => return self.bulk_s2g(dst, src, bytes),
            Op::CpAsync { dst, src, policy: _ } => return self.cp_async(dst, src),
            Op::CpAsyncCommit => return self.cp_async_commit(),
            Op::CpAsyncWait { pending } => return self.cp_async_wait(pending),
            Op::BulkCommit => return self.bulk_commit(),
            Op::BulkWait { pending, read } => return self.bulk_wait(pending, read),
            Op::PrefetchTensormap { map } => {
                for lane in Lanes(self.mask) {
                    self.tensor_map(map, lane)?;
                }
            }
            Op::LdMatrix { ref dsts, addr, transposed } => return self.ld_matrix(dsts, addr, transposed),
            Op::MmaBf16 { acc, a, b } => return self.mma_bf16(acc, a, b),
            Op::WgmmaFence => return self.wgmma_fence(),
            Op::Wgmma { input, n, ref acc, a, b, scale_d } => return self.wgmma(input, n, acc, a, b, scale_d),
            Op::WgmmaCommit => return self.wgmma_commit(),
            Op::WgmmaWait { pending } => return self.wgmma_wait(pending),
            Op::GridDepWait => {
                if !self.launch.dependencies_done {
                    return Ok(Flow::Then(Wait::Dependencies));
                }
                self.launch.pass_wait(self.clock);
            }
            Op::GridDepLaunch => {
                if !self.cta.triggered {
                    self.cta.triggered = true;
                    self.world.effects += 1;
                    self.world.streams.trigger(self.launch.id, self.cta.linear, self.clock.visible());
                    self.world.streams_changed = true;
                }
                return Ok(Flow::Visible);
            }
            Op::SetMaxNReg { inc, count } => return self.set_max_nreg(inc, count),
            Op::Nanosleep { ns } => {
                let ns = self.r32(ns)?;
                let longest = Lanes(self.mask).map(|lane| ns[lane]).max().unwrap_or(0);
                let until_ps = self.world.clock_ps + 1000 * u64::from(longest.min(1_000_000));
                return Ok(Flow::Then(Wait::Sleep { until_ps }));
            }
        }
        Ok(Flow::Next)
    }

    /// Special registers.
    fn special(&mut self, dst: RegId, reg: Special) -> Step {
        let [x, y, z] = self.cta.index;
        let v = match reg {
            Special::TidX => {
                let first = self.warp.index * LANES as u32;
                return self.w32(dst, &std::array::from_fn(|lane| first + lane as u32));
            }
            Special::Laneid => return self.w32(dst, &std::array::from_fn(|lane| lane as u32)),
            Special::Globaltimer => {
                self.observe();
                // The clock ticks in 32 ns.
                let ns = self.world.clock_ps / 1000 / 32 * 32;
                return self.w64(dst, &[ns; LANES]);
            }
            Special::Clock64 => {
                self.observe();
                // As if at 2 GHz; each instruction of the turn counts.
                let cycles = self.world.clock_ps / 500 + u64::from(self.executed);
                return self.w64(dst, &[cycles; LANES]);
            }
            Special::NtidX => self.program.ir.bounds.threads,
            Special::CtaidX => x,
            Special::CtaidY => y,
            Special::CtaidZ => z,
            Special::NctaidX => self.launch.grid[0],
            Special::ClusterCtarank => self.cta.rank,
            Special::ClusterNctarank => self.launch.agents.cluster,
            Special::Smid => self.cta.sm,
        };
        self.w32(dst, &[v; LANES])
    }

    /// Value of a scalar parameter.
    fn ld_param(&mut self, dst: RegId, param: u32) -> Step {
        let decl = &self.program.ir.params[param as usize];
        let at = decl.offset as usize;
        let bytes = &self.launch.params[at..at + decl.bytes as usize];
        let value = crate::memory::load_le(bytes) as u64;
        match dst.class {
            Class::B64 => self.w64(dst, &[value; LANES]),
            Class::B32 => self.w32(dst, &[value as u32; LANES]),
            Class::B16 | Class::Pred => Err(Stop::unsupported("parameter of less than 32 bits")),
        }
    }

    /// The instruction looks for something that other threads, or time, may change.
    #[inline(always)]
    fn observe(&mut self) {
        self.warp.polled = true;
        self.world.polls += 1;
    }

    /// Who issues for `lane` now.
    fn issuer(&self, lane: usize) -> Issuer {
        Issuer { warp: self.warp.index, lane: lane as u32, pc: self.pc }
    }

    /// The values of a 32-bit operand.
    #[inline(always)]
    fn r32(&self, operand: Operand) -> Result<[u32; LANES], Box<Stop>> {
        match operand {
            Operand::Reg(r) => {
                let slot = r.index as usize;
                if self.warp.registers.defined[Class::B32 as usize][slot] & self.mask != self.mask {
                    return Err(self.undefined(r));
                }
                Ok(self.warp.registers.b32[slot])
            }
            Operand::Imm(v) => Ok([v as u32; LANES]),
        }
    }

    /// The values of a 64-bit operand.
    #[inline(always)]
    fn r64(&self, operand: Operand) -> Result<[u64; LANES], Box<Stop>> {
        match operand {
            Operand::Reg(r) => {
                let slot = r.index as usize;
                if self.warp.registers.defined[Class::B64 as usize][slot] & self.mask != self.mask {
                    return Err(self.undefined(r));
                }
                Ok(self.warp.registers.b64[slot])
            }
            Operand::Imm(v) => Ok([v; LANES]),
        }
    }

    /// The values of a 16-bit operand.
    #[inline(always)]
    fn r16(&self, operand: Operand) -> Result<[u16; LANES], Box<Stop>> {
        match operand {
            Operand::Reg(r) => {
                let slot = r.index as usize;
                if self.warp.registers.defined[Class::B16 as usize][slot] & self.mask != self.mask {
                    return Err(self.undefined(r));
                }
                Ok(self.warp.registers.b16[slot])
            }
            Operand::Imm(v) => Ok([v as u16; LANES]),
        }
    }

    /// The bits of a predicate.
    #[inline(always)]
    fn r_pred(&self, r: RegId) -> Result<u32, Box<Stop>> {
        let slot = r.index as usize;
        if self.warp.registers.defined[Class::Pred as usize][slot] & self.mask != self.mask {
            return Err(self.undefined(r));
        }
        Ok(self.warp.registers.pred[slot])
    }

    #[cold]
    fn undefined(&self, r: RegId) -> Box<Stop> {
        let lanes = self.mask & !self.warp.registers.defined[r.class as usize][r.index as usize];
        let name = self.program.register_name(self.pc, r);
        let lane = lanes.trailing_zeros();
        if r.class == Class::B32 && self.warp.pending.contains(r.index) {
            let message = format!("accumulator {name} is read before a wgmma.wait_group that covers its MMA");
            return Stop::new(TrapKind::ResultPending, message).lane(lane);
        }
        let message = format!("register {name} is read, but nothing wrote it in {}", lanes_text(lanes));
        Stop::new(TrapKind::Uninitialized, message).lane(lane)
    }

    #[inline(always)]
    fn w16(&mut self, r: RegId, value: &[u16; LANES]) -> Step {
        self.warp.registers.set16(r.index, value, self.mask);
        Ok(())
    }

    #[inline(always)]
    fn w32(&mut self, r: RegId, value: &[u32; LANES]) -> Step {
        if self.warp.pending.contains(r.index) {
            return Err(self.pending_write(r));
        }
        self.warp.registers.set32(r.index, value, self.mask);
        Ok(())
    }

    #[cold]
    fn pending_write(&self, r: RegId) -> Box<Stop> {
        let name = self.program.register_name(self.pc, r);
        let message = format!("register {name} is written while a warpgroup MMA uses it");
        Stop::new(TrapKind::OperandInUse, message).lane(self.mask.trailing_zeros())
    }

    #[inline(always)]
    fn w64(&mut self, r: RegId, value: &[u64; LANES]) -> Step {
        self.warp.registers.set64(r.index, value, self.mask);
        Ok(())
    }

    #[inline(always)]
    fn w_pred(&mut self, r: RegId, value: u32) -> Step {
        self.warp.registers.set_pred(r.index, value, self.mask);
        Ok(())
    }
}

/// "lane 3" or "16 lanes".
pub(crate) fn lanes_text(mask: u32) -> String {
    match mask.count_ones() {
        1 => format!("lane {}", mask.trailing_zeros()),
        n => format!("{n} lanes"),
    }
}

/// Name of an instruction, for messages.
pub(crate) fn name(op: &Op) -> String {
    let debug = format!("{op:?}");
    let end = debug.find([' ', '{', '(']).unwrap_or(debug.len());
    debug[..end].to_string()
}
