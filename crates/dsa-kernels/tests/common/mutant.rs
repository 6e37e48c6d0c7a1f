//! Real kernels, broken in one place. Instructions are found by the source line that emitted them.

use gpu::{SimConfig, SimFault, SimTrap, SimTrapKind as Kind};
use ptx::op::{Cmp, LabelId, Op, Operand, RegId, Special};
use ptx::{Class, Inst, Kernel, KernelArgs, KernelIr, Ty};

/// A source file of kernel code.
#[derive(Clone, Copy)]
pub struct Source {
    /// How the file's path ends.
    pub path: &'static str,
    pub text: &'static str,
}

impl Source {
    /// Number of the first line that holds `snippet` in or after the one that holds `anchor`.
    #[track_caller]
    fn line(self, (anchor, snippet): (&str, &str)) -> u32 {
        let find = |from: usize, what: &str| {
            let line = self.text.lines().skip(from).position(|line| line.contains(what));
            from + line.unwrap_or_else(|| panic!("{what:?} is not in {} after line {from}", self.path))
        };
        find(find(0, anchor), snippet) as u32 + 1
    }
}

/// A kernel's instruction list under the knife.
pub struct Mutant(pub KernelIr);

impl Mutant {
    pub fn of<A>(kernel: &Kernel<A>) -> Mutant
    where
        A: KernelArgs,
    {
        Mutant((**kernel.ir()).clone())
    }

    /// Positions of the instructions that a line emitted.
    #[track_caller]
    fn emitted(&self, source: Source, place: (&str, &str)) -> Vec<usize> {
        let line = source.line(place);
        let here = |inst: &Inst| inst.loc.file().ends_with(source.path) && inst.loc.line() == line;
        let found: Vec<usize> = (0..self.0.insts.len()).filter(|i| here(&self.0.insts[*i])).collect();
        assert!(!found.is_empty(), "line {line} of {} emitted nothing", source.path);
        found
    }

    /// Removes the instructions of a line that `which` names.
    #[track_caller]
    pub fn drop(&mut self, source: Source, place: (&str, &str), which: impl Fn(&Op) -> bool) {
        let dropped = self.emitted(source, place).into_iter().filter(|i| which(&self.0.insts[*i].op));
        let dropped: Vec<usize> = dropped.collect();
        assert!(!dropped.is_empty(), "nothing dropped at {place:?}");
        for i in dropped.into_iter().rev() {
            self.0.insts.remove(i);
        }
    }

    /// Changes the instructions of a line that `edit` returns something for.
    #[track_caller]
    pub fn edit(&mut self, source: Source, place: (&str, &str), edit: impl Fn(&Op) -> Option<Op>) {
        let mut edited = 0;
        for i in self.emitted(source, place) {
            if let Some(op) = edit(&self.0.insts[i].op) {
                self.0.insts[i].op = op;
                edited += 1;
            }
        }
        assert_ne!(edited, 0, "nothing edited at {place:?}");
    }

    /// Puts `op` before the last instruction that a line emitted.
    #[track_caller]
    pub fn insert(&mut self, source: Source, place: (&str, &str), op: Op) {
        let at = *self.emitted(source, place).last().unwrap();
        let loc = self.0.insts[at].loc;
        self.0.insts.insert(at, Inst { op, loc });
    }

    /// Lets only the first lane execute the arrival of a line.
    #[track_caller]
    pub fn first_lane_only(&mut self, source: Source, place: (&str, &str)) {
        let arrival = |i: &usize| matches!(self.0.insts[*i].op, Op::MbarArrive { .. });
        let at = self.emitted(source, place).into_iter().find(arrival).expect("an arrival");
        let (loc, lane, end) = (self.0.insts[at].loc, self.lane(), LabelId(self.0.labels));
        let others = RegId { class: Class::Pred, index: self.0.register_count(Class::Pred) };
        self.0.labels += 1;
        self.0.registers[Class::ALL.iter().position(|class| *class == Class::Pred).unwrap()] += 1;
        let compare = Op::Setp { cmp: Cmp::Ne, ty: Ty::U32, dst: others, a: Operand::Reg(lane), b: Operand::Imm(0) };
        let skip = Op::Bra { target: end, cond: Some((others, true)) };
        self.0.insts.insert(at + 1, Inst { op: Op::Label { label: end }, loc });
        self.0.insts.insert(at, Inst { op: skip, loc });
        self.0.insts.insert(at, Inst { op: compare, loc });
    }

    /// Waits of a line on an mbarrier succeed at once.
    #[track_caller]
    pub fn never_wait(&mut self, source: Source, place: (&str, &str)) {
        self.edit(source, place, |op| match op {
            Op::MbarTryWait { dst, .. } => Some(Op::PredConst { dst: *dst, value: true }),
            _ => None,
        });
    }

    /// Comparisons of a line come out as `value`.
    #[track_caller]
    pub fn decide(&mut self, source: Source, place: (&str, &str), value: bool) {
        self.edit(source, place, |op| match op {
            Op::Setp { dst, .. } => Some(Op::PredConst { dst: *dst, value }),
            _ => None,
        });
    }

    /// Takes the dependency wait, and the permission that may only follow it, from the code after `anchor`.
    #[track_caller]
    pub fn drop_dependency_wait(&mut self, source: Source, anchor: &str) {
        self.drop(source, (anchor, "wait_for_dependencies();"), |op| *op == Op::GridDepWait);
        self.drop(source, (anchor, "launch_dependents();"), |op| *op == Op::GridDepLaunch);
    }

    /// Positions of the CTA barriers.
    pub fn barriers(&self) -> Vec<usize> {
        (0..self.0.insts.len()).filter(|i| matches!(self.0.insts[*i].op, Op::BarSync { .. })).collect()
    }

    /// The register that holds the lane's number.
    pub fn lane(&self) -> RegId {
        let lane = |inst: &Inst| match inst.op {
            Op::Special { dst, reg: Special::Laneid } => Some(dst),
            _ => None,
        };
        self.0.insts.iter().find_map(lane).unwrap()
    }

    pub fn kernel<A: KernelArgs>(self) -> Kernel<A> {
        Kernel::from_ir(self.0).unwrap()
    }
}

/// How a run of a mutant ended.
#[derive(Debug)]
pub enum End {
    Trap(Box<SimTrap>),
    /// It finished; whether with the right answer.
    Finished {
        right: bool,
    },
}

impl End {
    #[track_caller]
    pub fn of(result: Result<bool, gpu::Error>) -> End {
        match result {
            Ok(right) => End::Finished { right },
            Err(gpu::Error::Sim(fault)) => match *fault {
                SimFault::Trap(trap) => End::Trap(trap),
                SimFault::Sim(error) => panic!("the simulator's own fault: {error}"),
            },
            Err(other) => panic!("{other}"),
        }
    }
}

/// What a mutation must lead to.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    /// The kinds of fault that are right.
    pub kinds: &'a [Kind],
    /// The files that may be named.
    pub files: &'a [&'static str],
    /// Orders to run in.
    pub orders: Orders,
}

/// In which orders a mutation must be noticed.
#[derive(Clone, Copy, PartialEq)]
pub enum Orders {
    /// In all of them.
    Every,
    /// In all, and only two are run: a deadlock takes its time to be sure.
    Few,
    /// In at least one.
    Some,
}

/// Runs a mutant in several orders and compares how it ends.
#[track_caller]
pub fn check_mutant(expected: Expected<'_>, run: impl Fn(SimConfig) -> End) {
    let mut configs = super::orders(if expected.orders == Orders::Few { 0 } else { 4 });
    // One multiprocessor, so that rings wrap; fuel for several times the right run.
    configs.iter_mut().for_each(|config| (config.sms, config.fuel) = (1, 20_000_000));
    let mut noticed = 0;
    for config in &configs {
        match run(*config) {
            End::Trap(trap) => {
                noticed += 1;
                assert!(expected.kinds.contains(&trap.kind), "want {:?}: {trap}", expected.kinds);
                let text = trap.to_string();
                assert!(expected.files.iter().any(|file| text.contains(file)), "want {:?}: {text}", expected.files);
            }
            End::Finished { right } => {
                let SimConfig { schedule, timing, .. } = config;
                let missed = expected.orders == Orders::Some;
                assert!(missed, "not noticed under {schedule:?}, {timing:?}; answer right: {right}");
            }
        }
    }
    assert!(noticed > 0, "not noticed in any of {} orders", configs.len());
}
