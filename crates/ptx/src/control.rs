//! Structured control flow. Plain Rust `if` and `for` specialise and unroll; these decide at run time, per lane.

use crate::builder::{emit, new_label};
use crate::op::{LabelId, Op};
use crate::ty::{Int, Num};
use crate::value::{Pred, Reg, Var};

/// Runs `body` in the lanes where `p` holds.
#[track_caller]
pub fn when(p: Pred, body: impl FnOnce()) {
    let end = new_label();
    emit(Op::Bra { target: end, cond: Some((p.reg(), false)) });
    body();
    emit(Op::Label { label: end });
}

/// Runs `then` in the lanes where `p` holds and `otherwise` in the rest.
#[track_caller]
pub fn when_else(p: Pred, then: impl FnOnce(), otherwise: impl FnOnce()) {
    let (other, end) = (new_label(), new_label());
    emit(Op::Bra { target: other, cond: Some((p.reg(), false)) });
    then();
    emit(Op::Bra { target: end, cond: None });
    emit(Op::Label { label: other });
    otherwise();
    emit(Op::Label { label: end });
}

/// The loop whose body is being emitted.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    head: LabelId,
    end: LabelId,
}

impl Loop {
    /// Leaves the loop in the lanes where `p` holds.
    #[track_caller]
    pub fn break_if(self, p: Pred) {
        emit(Op::Bra { target: self.end, cond: Some((p.reg(), true)) });
    }

    /// Starts the next round in the lanes where `p` holds.
    #[track_caller]
    pub fn continue_if(self, p: Pred) {
        emit(Op::Bra { target: self.head, cond: Some((p.reg(), true)) });
    }
}

/// Repeats `body` until [`Loop::break_if`].
#[track_caller]
pub fn repeat(body: impl FnOnce(Loop)) {
    let l = Loop { head: new_label(), end: new_label() };
    emit(Op::NoUnroll);
    emit(Op::Label { label: l.head });
    body(l);
    emit(Op::Bra { target: l.head, cond: None });
    emit(Op::Label { label: l.end });
}

/// Repeats `body` while `condition` yields true; the condition's instructions run again each round.
#[track_caller]
pub fn while_(condition: impl FnOnce() -> Pred, body: impl FnOnce()) {
    let (head, end) = (new_label(), new_label());
    emit(Op::NoUnroll);
    emit(Op::Label { label: head });
    let p = condition();
    emit(Op::Bra { target: end, cond: Some((p.reg(), false)) });
    body();
    emit(Op::Bra { target: head, cond: None });
    emit(Op::Label { label: end });
}

/// `for i in (start..end).step_by(step)`, decided at run time.
#[track_caller]
pub fn for_range<T: Int + Num>(
    start: impl Into<Reg<T>>,
    end: impl Into<Reg<T>>,
    step: impl Into<Reg<T>>,
    body: impl FnOnce(Reg<T>),
) {
    let (end, step) = (end.into(), step.into());
    let i = Var::new(start);
    while_(
        || i.get().lt(end),
        || {
            body(i.get());
            i.add(step);
        },
    );
}

/// Ends the lanes where `p` holds.
#[track_caller]
pub fn exit_if(p: Pred) {
    when(p, || emit(Op::Exit));
}

/// Ends the lane.
#[track_caller]
pub fn exit() {
    emit(Op::Exit);
}

/// Stops the launch with a fault in the lanes that reach it.
#[track_caller]
pub fn trap() {
    emit(Op::Trap);
}
